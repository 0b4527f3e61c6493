"""Every decision of the specification as a pure function: values in, a value out.

``now`` and ``jitter`` come in as arguments; nothing here reads a clock or a database. Statements
choose which rows are looked at, stores run them, and neither decides anything that stands here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Literal, cast

from attrs import frozen

from ._errors import InvalidJob, JobConflict, shown, type_name
from ._model import (
    INSTANT_LIMIT,
    REASON_LIMIT,
    Cancel,
    CancellationResult,
    Complete,
    Decision,
    Fail,
    Job,
    Outcome,
    OutcomeUnknown,
    Recovery,
    RetryPolicy,
    StoredJob,
    seconds_to_milliseconds,
)

State = Literal["queued", "running", "completing", "settled"]

TRANSITIONS: frozenset[tuple[State | None, State]] = frozenset(
    {
        (None, "queued"),  # admission
        ("queued", "running"),  # claim
        ("queued", "settled"),  # cancelled, lane failed
        ("running", "completing"),  # decision
        ("running", "queued"),  # retry, hand-off, recovery
        ("running", "settled"),  # interrupted, cancelled, lane failed
        ("completing", "settled"),  # the completion hook has finished
    }
)
"""Section 3 of the specification. A decision without a hook passes two of them in one statement."""

# -- time -----------------------------------------------------------------------------------------


def retry_delay(policy: RetryPolicy, attempt: int, jitter: float) -> int:
    """Milliseconds to wait before the attempt after ``attempt`` (1 is the first).

    ``jitter`` is a random number from 0 to 1. Never negative, never more than ``max_delay``, and
    safe at any attempt count: the exponent is compared by logarithm before anything is raised.
    """
    limit: float = seconds_to_milliseconds(policy.max_delay)
    delay: float = seconds_to_milliseconds(policy.delay)
    exponent = max(attempt - 1, 0)
    # ``delay`` is at least 1 here, so that a power below ``limit / delay`` cannot overflow.
    if delay > 0 and limit > 0 and exponent > 0:
        if math.log(delay) + exponent * math.log(policy.factor) >= math.log(limit):
            delay = limit
        else:
            delay *= policy.factor**exponent
    return math.ceil(min(delay, limit) * (1 - policy.jitter * jitter))


def instant_after(now: int, delay: int) -> int:
    """The instant ``delay`` milliseconds after ``now``, saturating at the last one there is."""
    return min(max(now, 0) + max(delay, 0), INSTANT_LIMIT)


def lease_margin(lease: float) -> float:
    """Seconds by which a worker stops before its lease ends: a tenth, at most five.

    Covers the handler's way to its next checkpoint and the drift between two monotonic clocks.
    """
    return min(lease / 10, 5.0)


# -- claims ---------------------------------------------------------------------------------------


@frozen
class ClaimFacts:
    """What the rules need to know about a row that an operation found and locked."""

    id: str
    queue: str
    lane: str
    state: State
    token: str | None
    lease_until: int | None
    cancellation_id: str | None
    outcome: Outcome | None
    reason: str | None
    attempt_count: int
    attempt_open: bool
    recovery_count: int
    window_began_at: int | None
    recovery: Recovery | None


def is_held(claim: ClaimFacts, token: str, lease_now: int) -> bool:
    """Whether ``token`` holds the running job at this instant of the database's clock."""
    return (
        claim.state == "running"
        and claim.token == token
        and claim.lease_until is not None
        and claim.lease_until > lease_now
    )


@frozen
class Requeue:
    """Back to queued, keeping its place."""

    delay: int
    attempt_count: int
    recovery_count: int
    window_began_at: int | None


@frozen
class Settle:
    """To the final state."""

    outcome: Outcome
    reason: str | None = None


Refusal = Literal["cancelled", "conflict"]


@frozen
class Reservation:
    """The attempt that may begin, and the delay until the one after it would be due."""

    attempt_count: int
    delay: int


def reservation(
    claim: ClaimFacts, token: str, policy: RetryPolicy, lease_now: int, jitter: float
) -> Reservation | Settle | Refusal:
    """Whether one more attempt may begin. See `reserve attempt` in section 4."""
    if not is_held(claim, token, lease_now):
        return "conflict"
    if claim.cancellation_id is not None:
        return "cancelled"
    if claim.attempt_open:
        # The answer to the first request was lost; the attempt is already counted.
        return Reservation(claim.attempt_count, retry_delay(policy, claim.attempt_count, jitter))
    if claim.attempt_count >= policy.max_attempts:
        return Settle(
            Outcome.FAILED,
            f"no attempt left: {claim.attempt_count} of {policy.max_attempts} attempts used,"
            " the last one disappeared",
        )
    count = claim.attempt_count + 1
    return Reservation(count, retry_delay(policy, count, jitter))


def retry(
    claim: ClaimFacts,
    token: str,
    policy: RetryPolicy | None,
    after: int | None,
    reason: str | None,
    lease_now: int,
    jitter: float,
) -> Requeue | Settle | Refusal:
    """What becomes of a job whose handler wants another attempt.

    ``after`` (milliseconds) goes before the policy's delay; without a policy the attempts are
    not limited and the next is due at once.
    """
    if not is_held(claim, token, lease_now):
        return "conflict"
    if claim.cancellation_id is not None:
        return "cancelled"
    count = claim.attempt_count if claim.attempt_open else claim.attempt_count + 1
    if policy is not None and count >= policy.max_attempts:
        attempts = f"attempt {count} of {policy.max_attempts}"
        return Settle(Outcome.FAILED, cut(f"{attempts}: {reason}" if reason else attempts))
    if after is not None:
        delay = after
    elif policy is not None:
        delay = retry_delay(policy, count, jitter)
    else:
        delay = 0
    return Requeue(delay, count, claim.recovery_count, claim.window_began_at)


def hand_off(claim: ClaimFacts, token: str, lease_now: int) -> Requeue | Refusal:
    """Back to queued, due at once, with the attempt given back: a planned stop costs nothing."""
    if not is_held(claim, token, lease_now):
        return "conflict"
    if claim.cancellation_id is not None:
        return "cancelled"
    count = claim.attempt_count - 1 if claim.attempt_open else claim.attempt_count
    return Requeue(0, count, claim.recovery_count, claim.window_began_at)


def disappearance(claim: ClaimFacts, lease_now: int) -> Requeue | Settle:
    """What becomes of a running job whose execution disappeared. Section 5 of the specification.

    The attempt that disappeared stays counted; its back-off was written when it was reserved, so
    the delay here is 0 and the store keeps the later of the two instants.
    """
    if claim.cancellation_id is not None:
        return Settle(Outcome.CANCELLED)
    recovery = claim.recovery
    if recovery is None:
        return Settle(Outcome.INTERRUPTED, "the execution disappeared; no recovery is allowed")
    count, began_at = claim.recovery_count, claim.window_began_at
    if recovery.window is not None and began_at is not None:
        is_over = lease_now - began_at >= seconds_to_milliseconds(recovery.window)
        if is_over:
            count, began_at = 0, None
    if count >= recovery.max_recoveries:
        within = f" within {recovery.window:g} s" if recovery.window is not None else ""
        return Settle(
            Outcome.INTERRUPTED,
            f"the execution disappeared; recovery budget exhausted:"
            f" {count} of {recovery.max_recoveries} recoveries used{within}",
        )
    return Requeue(0, claim.attempt_count, count + 1, lease_now if began_at is None else began_at)


# -- decisions ------------------------------------------------------------------------------------


def decided(decision: Decision) -> Settle:
    """The outcome and reason that a handler's decision asks for."""
    match decision:
        case Complete():
            return Settle(Outcome.COMPLETED)
        case Fail(reason):
            return Settle(Outcome.FAILED, reason)
        case Cancel():
            return Settle(Outcome.CANCELLED)
        case OutcomeUnknown():
            return Settle(Outcome.OUTCOME_UNKNOWN)


def late_decision(
    claim: ClaimFacts | None, token: str, wanted: Settle
) -> Literal["replayed", "conflict", "missing"]:
    """Why a decision changed nothing: the guarded write found no running row with this token."""
    if claim is None:
        return "missing"
    if claim.token != token or claim.state not in ("completing", "settled"):
        return "conflict"
    # A cancellation recorded before the decision turned it into `cancelled`.
    overruled = claim.cancellation_id is not None and claim.outcome == Outcome.CANCELLED
    same = claim.outcome == wanted.outcome and claim.reason == wanted.reason
    return "replayed" if same or overruled else "conflict"


def late_finish(claim: ClaimFacts | None, token: str) -> Literal["replayed", "conflict", "missing"]:
    """Why finishing a completion changed nothing."""
    if claim is None:
        return "missing"
    return "replayed" if claim.state == "settled" and claim.token == token else "conflict"


def cancellation(
    state: State | None,
    recorded: str | None,
    outcome: Outcome | None,
    cancellation_id: str,
    only_if_queued: bool,
    *,
    is_used_elsewhere: bool,
) -> CancellationResult:
    """What a request to cancel finds; ``recorded`` is the row's cancellation id so far."""
    if state is None:
        return CancellationResult("missing")
    if recorded == cancellation_id:
        return CancellationResult("replayed")
    if state in ("completing", "settled"):
        return CancellationResult("decided", outcome)
    if recorded is not None or is_used_elsewhere or (only_if_queued and state != "queued"):
        return CancellationResult("conflict")
    return CancellationResult("recorded")


def check_duplicate(present: StoredJob, present_encoded: str, job: Job) -> None:
    """Raise `JobConflict` unless the job that is there is the one being admitted."""
    for name in ("queue", "lane", "priority", "recovery"):
        there, wanted = getattr(present, name), getattr(job, name)
        if there != wanted:
            raise JobConflict(
                f"job {job.id!r} is already there with {name} {there!r:.100}, not {wanted!r:.100}"
            )
    if present_encoded != job.encoded:
        raise JobConflict(f"job {job.id!r} is already there with another payload")


# -- reasons --------------------------------------------------------------------------------------


def cut(text: str, limit: int = REASON_LIMIT) -> str:
    """A legal reason from any text: no NUL, no lone surrogate, 1 to 200 characters."""
    text = text.replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode("utf-8")
    if not text:
        return "no reason given"
    return text if len(text) <= limit else text[: limit - 1] + "…"


def failure_reason(error: BaseException, is_cancellation: type[BaseException]) -> str:
    """A legal reason that names the exception, or for a group each of its leaves.

    ``is_cancellation`` is the type whose leaves say nothing about the failure (`trio.Cancelled`).
    Works for exceptions whose ``str`` and ``repr`` raise.
    """
    leaves = [leaf for leaf in _leaves(error, 0) if not isinstance(leaf, is_cancellation)]
    described = [_described(leaf) for leaf in leaves[:10] or [error]]
    text = "; ".join(described)
    if len(text) > REASON_LIMIT:
        # Equal shares, so that one long text does not hide the other errors.
        share = (REASON_LIMIT + 2) // len(described) - 2
        text = "; ".join(cut(each, share) for each in described)
    return cut(text)


def _leaves(error: BaseException, depth: int) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup) and depth < 50:
        group = cast("BaseExceptionGroup[BaseException]", error)
        for child in group.exceptions:
            yield from _leaves(child, depth + 1)
    else:
        yield error


def _described(error: BaseException) -> str:
    name = type_name(error)
    try:
        text = str.__str__(str(error))  # `__str__` may return a subclass with methods of its own.
    except Exception as broken:  # An exception's own text must not keep its job from ending.
        text = f"(its text raised {type_name(broken)})"
    return f"{name}: {text}" if text else name


# -- the settled feed -----------------------------------------------------------------------------

_CURSOR = re.compile(r"([0-9]{1,19})\.([0-9]{1,19})")


def feed_position(after: str | None) -> tuple[int, int]:
    """Settle group and sequence behind a cursor of the settled feed; None: before the first."""
    if after is None:
        return (-1, 0)
    match = _CURSOR.fullmatch(after) if isinstance(cast("object", after), str) else None
    if match is None:
        raise InvalidJob(f"after is {shown(after)}, not a cursor that `read_settled` returned")
    group, sequence = int(match[1]), int(match[2])
    if group >= 2**63 or sequence >= 2**63:
        raise InvalidJob(f"after is {shown(after)}, beyond any cursor that `read_settled` returned")
    return group, sequence
