"""The values: frozen, validated when made, free of I/O.

Durations are seconds (float) and instants aware datetimes here; integer milliseconds are what the
store holds, and `to_milliseconds`, `to_instant` are the only crossings.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from attrs import Attribute, field, frozen

from ._errors import InvalidJob, shown
from ._identity import fresh_id
from ._payload import encode_payload, is_text

if TYPE_CHECKING:
    import trio

TEXT_LIMIT = 256
"""Characters of an id, queue, lane, cancellation id or claim token."""

REASON_LIMIT = 200
"""Characters of a failure reason."""

PRIORITY_LIMIT = 2**53 - 1
"""Magnitude of a priority: the integers that every JSON reader keeps exact."""

INSTANT_LIMIT = 253402300799999
"""The last millisecond that a datetime can hold; later instants saturate here."""

DURATION_LIMIT = INSTANT_LIMIT / 1000
"""The longest duration, in seconds."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def to_milliseconds(instant: datetime) -> int:
    """Milliseconds since the epoch, rounded up, so that nothing runs before its instant."""
    # The last microseconds of year 9999, and its last hours west of Greenwich, lie beyond.
    return min(-((_EPOCH - instant) // timedelta(milliseconds=1)), INSTANT_LIMIT)


def to_instant(milliseconds: int) -> datetime:
    """The aware datetime (UTC) of an instant in the store; saturates at year 9999."""
    return _EPOCH + timedelta(milliseconds=min(max(milliseconds, 0), INSTANT_LIMIT))


def seconds_to_milliseconds(seconds: float) -> int:
    """A duration for the store: rounded up, saturating, never negative."""
    if seconds >= DURATION_LIMIT:
        return INSTANT_LIMIT
    # As it is written: in binary, 2.007 * 1000 is a little more than 2007 and becomes 2008, so
    # that a duration that went through the store would not compare equal to itself.
    return max(0, math.ceil(Decimal(repr(float(seconds))) * 1000))


# -- checks ---------------------------------------------------------------------------------------


def check_text(value: Any, name: str) -> str:
    """A name of 1 to 256 characters that both databases can keep, or `InvalidJob`."""
    if not isinstance(value, str):
        raise InvalidJob(f"{name} is {shown(value)}, not a string")
    if not 1 <= len(value) <= TEXT_LIMIT:
        raise InvalidJob(f"{name} has {len(value)} characters; 1 to {TEXT_LIMIT} are allowed")
    if "\0" in value or not is_text(value):
        raise InvalidJob(f"{name} is {value!a:.80}: NUL and lone surrogates cannot be stored")
    return value


def check_reason(value: Any) -> str:
    """A reason of 1 to 200 characters, or `InvalidJob`."""
    if not isinstance(value, str):
        raise InvalidJob(f"reason is {shown(value)}, not a string")
    if not 1 <= len(value) <= REASON_LIMIT:
        raise InvalidJob(f"reason has {len(value)} characters; 1 to {REASON_LIMIT} are allowed")
    if "\0" in value or not is_text(value):
        raise InvalidJob(f"reason is {value!a:.80}: NUL and lone surrogates cannot be stored")
    return value


def check_integer(value: Any, name: str, low: int, high: int) -> int:
    """An integer (not a bool) between ``low`` and ``high``, or `InvalidJob`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidJob(f"{name} is {shown(value)}, not an integer")
    if not low <= value <= high:
        raise InvalidJob(f"{name} is {shown(value)}; {low} to {high} are allowed")
    return value


def check_seconds(value: Any, name: str, *, positive: bool = False) -> float:
    """A duration in seconds, finite and not negative (or above zero), or `InvalidJob`."""
    return _number(value, name, DURATION_LIMIT, positive=positive, unit=" seconds")


def _number(value: Any, name: str, high: float, *, positive: bool = False, unit: str = "") -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidJob(f"{name} is {shown(value)}, not a number{unit and f' of{unit}'}")
    # The comparison is false for NaN too.
    if not 0 <= value <= high or (positive and value == 0):
        least = "more than 0" if positive else "0"
        raise InvalidJob(f"{name} is {shown(value)}{unit}; {least} to {high} are allowed")
    return float(value)


def check_instant(value: Any, name: str) -> datetime:
    """An aware datetime at or after the epoch, or `InvalidJob`."""
    if not isinstance(value, datetime):
        raise InvalidJob(f"{name} is {shown(value)}, not a datetime")
    if value.tzinfo is None or value.utcoffset() is None:
        raise InvalidJob(f"{name} is {value!r}, a naive datetime; give it a time zone")
    if value < _EPOCH:
        raise InvalidJob(f"{name} is {value.isoformat()}; nothing before 1970 is allowed")
    return value


_Validator = Callable[[Any, "Attribute[Any]", Any], None]


def _text(_: Any, attribute: Attribute[Any], value: Any) -> None:
    check_text(value, attribute.name)


def _optional_reason(_: Any, __: Attribute[Any], value: Any) -> None:
    if value is not None:
        check_reason(value)


def _reason(_: Any, __: Attribute[Any], value: Any) -> None:
    check_reason(value)


def _priority(_: Any, attribute: Attribute[Any], value: Any) -> None:
    check_integer(value, attribute.name, -PRIORITY_LIMIT, PRIORITY_LIMIT)


def _optional_instant(_: Any, attribute: Attribute[Any], value: Any) -> None:
    if value is not None:
        check_instant(value, attribute.name)


def _integer(low: int, high: int = PRIORITY_LIMIT) -> _Validator:
    def validate(_: Any, attribute: Attribute[Any], value: Any) -> None:
        check_integer(value, attribute.name, low, high)

    return validate


# -- what callers write ---------------------------------------------------------------------------


@frozen
class Recovery:
    """How often a job may run again after its execution disappeared (crash, lost lease).

    Not a retry: a retry is the handler's own wish. Without a window the budget is for the job's
    life; with one, a disappearance later than ``window`` seconds after the first recovery of the
    window opens a new window with a fresh budget.
    """

    max_recoveries: int = field(validator=_integer(0))
    window: float | None = None

    def __attrs_post_init__(self) -> None:
        if self.window is not None:
            check_seconds(self.window, "window", positive=True)
            # Whole milliseconds, as the store keeps it, so that a duplicate compares equal.
            whole = seconds_to_milliseconds(self.window) / 1000
            object.__setattr__(self, "window", whole)


@frozen
class RetryPolicy:
    """When a failed attempt is followed by another, and how many attempts there are in all.

    The delay before attempt ``n + 1`` is ``delay * factor ** (n - 1)`` seconds, at most
    ``max_delay``, then shortened by a random part of up to ``jitter`` (0 to 1) of itself.
    """

    max_attempts: int = field(validator=_integer(1))
    delay: float = field(default=1.0, kw_only=True)
    factor: float = field(default=2.0, kw_only=True)
    max_delay: float = field(default=3600.0, kw_only=True)
    jitter: float = field(default=0.0, kw_only=True)

    def __attrs_post_init__(self) -> None:
        check_seconds(self.delay, "delay")
        _number(self.factor, "factor", DURATION_LIMIT, positive=True)
        check_seconds(self.max_delay, "max_delay")
        _number(self.jitter, "jitter", 1)


@frozen
class Attempt:
    """Which run of the handler this is: ``count`` starts at 1.

    Hand-offs (a planned stop) do not count; a run that disappeared does, since it may have been
    the handler that ended the process.
    """

    count: int = field(validator=_integer(0))
    max_attempts: int | None = None

    @property
    def is_last(self) -> bool:
        """Whether the retry policy allows no further attempt."""
        return self.max_attempts is not None and self.count >= self.max_attempts


@frozen
class Job:
    """One unit of work to be admitted.

    ``id`` defaults to a fresh, time-ordered one; ``queue`` to the id, so that the job waits for
    nobody. Higher ``priority`` goes first within the queue and the lane. ``not_before`` is an
    aware datetime; None means at once. Making one checks every limit and encodes the payload;
    both raise `InvalidJob`.
    """

    lane: str = field(validator=_text)
    payload: Any = field(default=None, eq=False)
    queue: str = field(default=None, kw_only=True)  # pyright: ignore[reportAssignmentType]
    id: str = field(default=None, kw_only=True)  # pyright: ignore[reportAssignmentType]
    priority: int = field(default=0, kw_only=True, validator=_priority)
    not_before: datetime | None = field(default=None, kw_only=True, validator=_optional_instant)
    recovery: Recovery | None = field(default=None, kw_only=True)
    # Stands for the payload in comparisons, as in the store: to Python 1, 1.0 and True are equal.
    encoded: str = field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        # Frozen: attrs' documented way to fill in a field that depends on others.
        id: Any = self.id
        queue: Any = self.queue
        object.__setattr__(self, "id", fresh_id() if id is None else check_text(id, "id"))
        object.__setattr__(self, "queue", self.id if queue is None else check_text(queue, "queue"))
        recovery: Any = self.recovery
        if recovery is not None and not isinstance(recovery, Recovery):
            raise InvalidJob(f"recovery is {shown(recovery)}, not a Recovery")
        object.__setattr__(self, "encoded", encode_payload(self.payload))


def check_job(job: Any) -> Job:
    """The job; `TypeError` for anything else."""
    if not isinstance(job, Job):
        raise TypeError(f"{shown(job)} is not a Job")
    return job


# -- how a handler says that it ended -------------------------------------------------------------


@frozen
class Complete:
    """The job is done. Returning None means the same."""


@frozen
class Fail:
    """The job failed for good; no retry. A longer reason than 200 characters is refused."""

    reason: str = field(validator=_reason)


@frozen
class Cancel:
    """The handler gives the job up as cancelled."""


@frozen
class OutcomeUnknown:
    """The handler cannot tell whether its effect happened; a person has to look."""


@frozen
class Retry:
    """Run the job again: after ``after`` seconds, or when the lane's policy says."""

    after: float | None = None
    reason: str | None = field(default=None, validator=_optional_reason)

    def __attrs_post_init__(self) -> None:
        if self.after is not None:
            check_seconds(self.after, "after")


Decision = Complete | Fail | Cancel | OutcomeUnknown
"""What `record decision` takes: how the job ended."""


class Outcome(StrEnum):
    """How a job ended. Compares equal to its text, such as ``"completed"``."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    OUTCOME_UNKNOWN = "outcome_unknown"
    INTERRUPTED = "interrupted"


CancelReason = Literal["cancellation", "lease_lost", "lane_failed", "timeout", "shutdown"]
"""Why a running job's scope was cancelled."""


# -- a job as the store has it --------------------------------------------------------------------


class Execution(Protocol):
    """The live side of a job that runs in this process."""

    @property
    def cancel_scope(self) -> trio.CancelScope: ...
    @property
    def cancel_reason(self) -> CancelReason | None: ...
    @property
    def attempt(self) -> Attempt: ...
    def checkpoint(self) -> None: ...
    def refresh(self) -> None: ...


@frozen(kw_only=True)
class _StoredJob:
    id: str
    queue: str
    lane: str
    priority: int
    payload: Any
    not_before: datetime | None
    """When it may (next) run; None means at once."""
    recovery: Recovery | None
    sequence: int
    """Admission order: later jobs have higher numbers."""
    cancellation_id: str | None
    """Set once somebody asked that the job stop."""
    recovery_count: int
    """Recoveries spent in the present window."""
    attempt_count: int
    """Attempts that began."""


@frozen(kw_only=True)
class QueuedJob(_StoredJob):
    """Waits for its turn, its time, or its next attempt."""

    state: ClassVar[Literal["queued"]] = "queued"


@frozen(kw_only=True)
class RunningJob(_StoredJob):
    """Claimed by a lane. A handler gets one whose live side is filled in.

    ``cancel_scope``, ``cancel_reason``, ``attempt`` and `checkpoint` belong to the live side: on a
    job that was merely read from the store, and may run anywhere, they raise `RuntimeError`.
    """

    state: ClassVar[Literal["running"]] = "running"

    token: str = field(repr=False)
    lease_until: datetime
    execution: Execution | None = field(default=None, repr=False, eq=False)

    @property
    def cancel_scope(self) -> trio.CancelScope:
        """The scope that the handler runs in; its deadline is the end of the lease."""
        live = self._live()
        live.refresh()
        return live.cancel_scope

    @property
    def cancel_reason(self) -> CancelReason | None:
        """Why the scope was cancelled, or None while it is not."""
        return self._live().cancel_reason

    @property
    def attempt(self) -> Attempt:
        """Which attempt this is."""
        return self._live().attempt

    def checkpoint(self) -> None:
        """For thread handlers: raises `trio.Cancelled` once the job's scope is cancelled."""
        self._live().checkpoint()

    def _live(self) -> Execution:
        if self.execution is None:
            raise RuntimeError(f"job {self.id!r} was read from the store; it may run elsewhere")
        return self.execution


@frozen(kw_only=True)
class CompletingJob(_StoredJob):
    """Its outcome is durable; the completion hook has not finished yet."""

    state: ClassVar[Literal["completing"]] = "completing"

    token: str = field(repr=False)
    lease_until: datetime
    outcome: Outcome
    reason: str | None


@frozen(kw_only=True)
class SettledJob(_StoredJob):
    """Ended. Only ``failed`` and ``interrupted`` carry a reason."""

    state: ClassVar[Literal["settled"]] = "settled"

    outcome: Outcome
    reason: str | None
    settled_at: datetime


StoredJob = QueuedJob | RunningJob | CompletingJob | SettledJob


# -- results --------------------------------------------------------------------------------------


@frozen
class Admission:
    """``queued``, or ``duplicate`` with the job that was there, whatever its state by now."""

    status: Literal["queued", "duplicate"]
    job: StoredJob


@frozen
class CancellationResult:
    """What became of a cancellation; ``outcome`` is set when the status is ``decided``."""

    status: Literal["recorded", "replayed", "conflict", "missing", "decided"]
    outcome: Outcome | None = None


@frozen
class QueueHead:
    """The job that goes first in a queue; a completing one counts as ``running``."""

    state: Literal["idle", "queued", "running"]
    job_id: str | None = None
    cancellation_requested: bool = False


@frozen
class QueueTransition:
    """What a projector is told: the queue, its head afterwards, and the job settled by it."""

    queue: str
    head: QueueHead
    settled: SettledJob | None = None


@frozen
class LaneFailure:
    """The jobs that `fail_lane` settled, and whether more remain."""

    jobs: tuple[SettledJob, ...]
    more: bool


@frozen
class WakeState:
    """Whether anything is due now, and the earliest future instant that needs a look.

    Due are a completing job (also one whose hook is at work somewhere), a requested cancellation,
    an ended lease, and a queue's head whose ``not_before`` has come. An instant is the end of a
    lease, or a head's ``not_before``.
    """

    pending: bool
    next_wake_at: datetime | None = None


@frozen
class TickResult:
    """What one `tick` did, to which job, and when to come again.

    ``idle`` although something is pending: somebody else is at it, until ``next_wake_at`` at most.
    """

    action: Literal["completed", "reconciled", "ran", "idle"]
    job_id: str | None
    wake: WakeState


@frozen
class SettledPage:
    """Settled jobs in feed order; give ``cursor`` as ``after`` to read on."""

    jobs: tuple[SettledJob, ...]
    cursor: str | None
