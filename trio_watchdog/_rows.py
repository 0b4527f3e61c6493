"""Rows of the jobs table, read strictly: nonsense raises `StoreInvalid`, it is never guessed at."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, cast

from ._errors import InvalidJob, StoreInvalid
from ._model import (
    PRIORITY_LIMIT,
    CompletingJob,
    Outcome,
    QueuedJob,
    Recovery,
    RunningJob,
    SettledJob,
    StoredJob,
    check_integer,
    check_reason,
    check_text,
    to_instant,
)
from ._payload import decode_payload
from ._rules import ClaimFacts, State

Row = Sequence[Any]

ATTEMPT_LIMIT = PRIORITY_LIMIT - 1
"""The most attempts that a job can have had: one more still has to be counted."""

FACT_COLUMNS = (
    "id, queue, lane, state, token, lease_until, cancellation_id, outcome, reason,"
    " attempt_count, attempt_open, recovery_count, window_began_at,"
    " max_recoveries, recovery_window"
)
"""What `claim_facts` reads: no payload."""

JOB_COLUMNS = (
    "id, queue, lane, priority, payload, not_before, max_recoveries, recovery_window,"
    " state, sequence, token, lease_until, cancellation_id, recovery_count, attempt_count,"
    " outcome, reason, settled_at"
)
"""What `stored_job` reads."""

ENCODED = 4
"""Where `JOB_COLUMNS` has the payload's text."""

SEQUENCE = 9
"""Where it has the sequence."""


_GRAMMAR: dict[Any, set[tuple[bool, ...]]] = {
    "queued": {(False, False, False, False)},
    "running": {(True, True, False, False)},
    "completing": {(True, True, True, False)},
    # A settled job keeps its token, by which a late answer is known.
    "settled": {(False, False, True, True), (True, False, True, True)},
}
"""Which of token, lease, outcome and instant of settling each state has."""


def stored_job(row: Row) -> StoredJob:
    """The job in a row of `JOB_COLUMNS`."""
    try:
        return _stored_job(row)
    except (StoreInvalid, TypeError, ValueError) as error:
        raise StoreInvalid(f"the row of job {row[0]!r:.100} is invalid: {error}") from error


def _stored_job(row: Row) -> StoredJob:
    (
        id,
        queue,
        lane,
        priority,
        payload,
        not_before,
        max_recoveries,
        recovery_window,
        state,
        sequence,
        token,
        lease_until,
        cancellation_id,
        recovery_count,
        attempt_count,
        outcome,
        reason,
        settled_at,
    ) = row
    present = tuple(each is not None for each in (token, lease_until, outcome, settled_at))
    if present not in _GRAMMAR.get(state, ()):
        raise ValueError(
            f"state is {state!r} with token {token!r:.80}, lease until {lease_until!r:.80},"
            f" outcome {outcome!r:.80} and settled at {settled_at!r:.80}"
        )
    reason = _reason(outcome, reason)
    if token is not None:
        check_text(token, "token")
    if not isinstance(payload, str):
        raise TypeError(f"payload is of type {type(payload).__name__}, not text")
    common: dict[str, Any] = {
        "id": check_text(id, "id"),
        "queue": check_text(queue, "queue"),
        "lane": check_text(lane, "lane"),
        "priority": check_integer(priority, "priority", -PRIORITY_LIMIT, PRIORITY_LIMIT),
        "payload": decode_payload(payload),
        "not_before": _instant(not_before, "not_before") if not_before != 0 else None,
        "recovery": _recovery(max_recoveries, recovery_window),
        "sequence": check_integer(sequence, "sequence", 1, 2**63 - 1),
        "cancellation_id": (
            None if cancellation_id is None else check_text(cancellation_id, "cancellation_id")
        ),
        "recovery_count": check_integer(recovery_count, "recovery_count", 0, 2**63 - 1),
        "attempt_count": check_integer(attempt_count, "attempt_count", 0, ATTEMPT_LIMIT),
    }
    match state:
        case "queued":
            return QueuedJob(**common)
        case "running":
            return RunningJob(
                **common,
                token=cast("str", token),
                lease_until=_instant(lease_until, "lease_until"),
            )
        case "completing":
            return CompletingJob(
                **common,
                token=cast("str", token),
                lease_until=_instant(lease_until, "lease_until"),
                outcome=Outcome(outcome),
                reason=reason,
            )
        case "settled":
            return SettledJob(
                **common,
                outcome=Outcome(outcome),
                reason=reason,
                settled_at=_instant(settled_at, "settled_at"),
            )
        case _:
            raise ValueError(f"state is {state!r}")


def _instant(value: Any, name: str) -> datetime:
    return to_instant(check_integer(value, name, 0, 2**63 - 1))


def _reason(outcome: Any, reason: Any) -> str | None:
    if (reason is not None) != (outcome in (Outcome.FAILED, Outcome.INTERRUPTED)):
        raise ValueError(f"outcome {outcome!r} has the reason {reason!r:.80}")
    return None if reason is None else check_reason(reason)


def without_payload(row: Row) -> Row:
    """The row with null for its payload: for those who need the job and not its work."""
    return [*row[:ENCODED], "null", *row[ENCODED + 1 :]]


def settled_job(row: Row) -> SettledJob:
    """The settled job in a row of `JOB_COLUMNS`."""
    job = stored_job(row)
    if not isinstance(job, SettledJob):
        raise StoreInvalid(f"job {job.id!r} is {job.state}, where a settled one was expected")
    return job


def running_job(row: Row) -> RunningJob:
    """The running job in a row of `JOB_COLUMNS`."""
    job = stored_job(row)
    if not isinstance(job, RunningJob):
        raise StoreInvalid(f"job {job.id!r} is {job.state}, where a running one was expected")
    return job


def completing_job(row: Row) -> CompletingJob:
    """The completing job in a row of `JOB_COLUMNS`."""
    job = stored_job(row)
    if not isinstance(job, CompletingJob):
        raise StoreInvalid(f"job {job.id!r} is {job.state}, where a completing one was expected")
    return job


def claim_facts(row: Row) -> ClaimFacts:
    """What the rules need, from a row of `FACT_COLUMNS`."""
    try:
        return ClaimFacts(
            id=check_text(row[0], "id"),
            queue=row[1],
            lane=row[2],
            state=_state(row[3]),
            token=row[4],
            lease_until=_optional_integer(row[5], "lease_until"),
            cancellation_id=row[6],
            outcome=None if row[7] is None else Outcome(row[7]),
            reason=row[8],
            attempt_count=check_integer(row[9], "attempt_count", 0, ATTEMPT_LIMIT),
            attempt_open=bool(row[10]),
            recovery_count=check_integer(row[11], "recovery_count", 0, 2**63 - 1),
            window_began_at=_optional_integer(row[12], "window_began_at"),
            recovery=_recovery(row[13], row[14]),
        )
    except (InvalidJob, TypeError, ValueError) as error:
        raise StoreInvalid(f"the row of job {row[0]!r:.100} is invalid: {error}") from error


def standing(id: str, state: Any, outcome: Any) -> tuple[State | None, Outcome | None]:
    """State and outcome of a row if there is one, or `StoreInvalid`."""
    try:
        return None if state is None else _state(state), None if outcome is None else Outcome(
            outcome
        )
    except ValueError as error:
        raise StoreInvalid(f"the row of job {id!r:.100} is invalid: {error}") from error


def _optional_integer(value: Any, name: str) -> int | None:
    return None if value is None else check_integer(value, name, -(2**63), 2**63 - 1)


def _state(value: Any) -> State:
    if value not in ("queued", "running", "completing", "settled"):
        raise ValueError(f"state is {value!r}")
    return value


def _recovery(max_recoveries: int | None, window: int | None) -> Recovery | None:
    if max_recoveries is None:
        if window is not None:
            raise ValueError(f"recovery_window is {window!r:.80} without max_recoveries")
        return None
    return Recovery(max_recoveries, None if window is None else window / 1000)
