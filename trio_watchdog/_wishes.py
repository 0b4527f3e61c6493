"""What can be asked of a store: one frozen value per operation of section 4.

A wish is data, so that many can be collected while one exchange with the database is under way
and go together in the next. What becomes of each is in `_operations`, keyed by its class.
Durations here are milliseconds, as the store keeps them; ``jitter`` is a random number from 0 to 1
that the wisher drew, so that operations stay free of randomness.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar

from attrs import frozen

from ._model import (
    Admission,
    CancellationResult,
    CompletingJob,
    Job,
    LaneFailure,
    QueueHead,
    RetryPolicy,
    RunningJob,
    SettledJob,
    SettledPage,
    StoredJob,
    WakeState,
)
from ._rules import Settle

R = TypeVar("R")

OTHERS_LIMIT = 256
"""Lanes that one process may name, and so exclude from its `OTHERS` slot."""


class Wish(Generic[R]):
    """Base of all wishes; ``R`` is what the store answers."""

    __slots__ = ()


# -- admission and cancellation -------------------------------------------------------------------


@frozen
class Enqueue(Wish[Admission]):
    """Admit a job. Raises `JobConflict` when its id belongs to a different one."""

    job: Job


@frozen
class EnqueueMany(Wish[list[Admission]]):
    """Admit all jobs or none."""

    jobs: Sequence[Job]


@frozen
class EnqueueSelect(Wish[list[Admission]]):
    """Admit the rows of the caller's SELECT, whose columns are named like `Job`'s fields."""

    sql: str
    parameters: Sequence[Any] | Mapping[str, Any]


@frozen
class Cancel(Wish[CancellationResult]):
    """Ask that a job stop, or never start."""

    id: str
    cancellation_id: str
    only_if_queued: bool = False


@frozen
class FailLane(Wish[LaneFailure]):
    """Settle up to 256 of the lane's queued and running jobs as failed, running ones first."""

    lane: str
    reason: str


@frozen
class PurgeQueue(Wish[int]):
    """Delete the queue's queued jobs; says how many."""

    queue: str


# -- reading --------------------------------------------------------------------------------------


@frozen
class Read(Wish[StoredJob | None]):
    """The job, or None."""

    id: str


@frozen
class ReadQueueHead(Wish[QueueHead]):
    """The job that goes first."""

    queue: str


@frozen
class ReadLatestSettled(Wish[SettledJob | None]):
    """The job of the queue that settled last."""

    queue: str


@frozen
class ReadSettled(Wish[SettledPage]):
    """A page of the settled feed; ``limit`` is 1 to 256."""

    limit: int = 256
    after: str | None = None
    lane: str | None = None


@frozen
class ReadJobs(Wish[list[StoredJob]]):
    """Jobs for listings, newest first: of one state, lane or queue, or all."""

    state: Literal["queued", "running", "completing", "settled"] | None = None
    lane: str | None = None
    queue: str | None = None
    limit: int = 100


@frozen
class ReadCounts(Wish[list[tuple[str, str, str | None, int]]]):
    """Rows of (lane, state, outcome, how many), for statistics. Scans the table."""


@frozen
class ReadWakeState(Wish[WakeState]):
    """Whether anything is due at ``now`` (ms; None: the database's clock), and what comes next."""

    now: int | None = None


# -- claims ---------------------------------------------------------------------------------------


@frozen
class Claimed:
    """The claimed job if any. ``more``: look again soon, for the window was full of others."""

    job: RunningJob | None
    more: bool = False


@frozen
class Claim(Wish[Claimed]):
    """Claim the first claimable job of the lane (None: of any lane not in ``without``).

    Asking again with the same token (``again=True``) after a lost answer gives the job that the
    first request claimed, if it did. ``counts``: the claim itself begins an attempt, which is so
    where there is no policy and hence no reservation.
    """

    lane: str | None
    token: str
    owner: str
    lease: int
    counts: bool = True
    without: tuple[str, ...] = ()
    again: bool = False


@frozen
class Renewal:
    """What became of a renewal.

    ``held``: the lease was extended. ``lost``: the claim is gone or expired. ``locked``:
    somebody's open transaction holds the row; nothing changed, ask again.
    """

    status: Literal["held", "lost", "locked"]
    cancellation_requested: bool = False
    settled_as_failed: bool = False
    """Lost because the lane was failed."""


@frozen
class Renew(Wish[Renewal]):
    """Extend the lease of a running or completing job that is still ours."""

    id: str
    token: str
    lease: int


@frozen
class Inspect(Wish[Renewal]):
    """As `Renew`, but only looks: is the claim held, is its cancellation requested?"""

    id: str
    token: str


@frozen
class Reserved:
    """Whether the attempt may begin.

    ``settled``: the policy's attempts were used up, so the job has failed without running.
    """

    status: Literal["reserved", "cancelled", "conflict", "settled"]
    attempt_count: int = 0
    reason: str | None = None


@frozen
class ReserveAttempt(Wish[Reserved]):
    """Count an attempt and write down when the next would be due, before the handler runs."""

    id: str
    token: str
    policy: RetryPolicy
    jitter: float = 0.0


@frozen
class Returned:
    """What became of a retry or hand-off.

    ``settled`` or ``completing``: that was the last attempt, and the job has failed with
    ``reason``. ``cancelled``: a cancellation is recorded and nothing changed.
    """

    status: Literal["queued", "settled", "completing", "cancelled", "conflict", "missing"]
    reason: str | None = None
    attempt_count: int = 0


@frozen
class RetryJob(Wish[Returned]):
    """Back to queued for another attempt, or failed after the last one.

    ``has_hook``: a failure stops at ``completing``, for the completion hook to run.
    """

    id: str
    token: str
    policy: RetryPolicy | None = None
    after: int | None = None
    reason: str | None = None
    jitter: float = 0.0
    has_hook: bool = False


@frozen
class HandOff(Wish[Returned]):
    """Back to queued without cost: a planned stop."""

    id: str
    token: str


@frozen
class Recorded:
    """What became of a decision; with the outcome that stands once ours was written."""

    status: Literal["recorded", "replayed", "conflict", "missing"]
    settle: Settle | None = None


@frozen
class Decide(Wish[Recorded]):
    """Make the handler's decision durable.

    ``has_hook``: stop at ``completing``; else go on to ``settled`` in the same statement.
    """

    id: str
    token: str
    settle: Settle
    has_hook: bool = False


@frozen
class FinishCompleting(Wish[Literal["settled", "replayed", "conflict", "missing"]]):
    """``completing -> settled``: the completion hook has finished."""

    id: str
    token: str


@frozen
class TakeCompleting(Wish[CompletingJob | None]):
    """Take over the completion that has waited longest for an owner, of the lanes named.

    ``lanes`` None means any lane; ``without`` names lanes to leave alone.
    """

    token: str
    owner: str
    lease: int
    lanes: tuple[str, ...] | None = None
    without: tuple[str, ...] = ()
    dead: tuple[str, ...] = ()


# -- the supervisor's -----------------------------------------------------------------------------


@frozen
class NextRunningClaim(Wish[RunningJob | None]):
    """The next disappeared claim: lease expired, or owner among ``dead``.

    Ordered by sequence, after ``after``, so that a claim whose liveness is unknown does not hide
    the others.
    """

    after: int = 0
    dead: tuple[str, ...] = ()


@frozen
class Reconciled:
    """What became of a disappeared claim; ``untouched`` if somebody was first or it lives."""

    status: Literal["queued", "settled", "untouched"]
    settle: Settle | None = None


@frozen
class Reconcile(Wish[Reconciled]):
    """Settle a disappeared claim or queue it again, once, whoever gets there first."""

    id: str
    token: str
    dead: tuple[str, ...] = ()


@frozen
class SettleCancelled(Wish[list[str]]):
    """Settle queued jobs whose cancellation is recorded, up to ``limit``; says which.

    ``lane`` None means every lane.
    """

    lane: str | None = None
    limit: int = 256


@frozen
class ReadOwners(Wish[list[str]]):
    """The owners named by running and completing rows."""


# -- maintenance ----------------------------------------------------------------------------------


@frozen
class Prune(Wish[int]):
    """Delete some of the oldest settled jobs; says how many, 0 when there is nothing more to do.

    Of the lane or queue, if one is named: those that settled before ``before`` (ms) and are beyond
    the newest ``keep``, as far as these are given. Never one that a protected reader of the
    feed has still to read. Looks at up to ``limit`` of them.
    """

    before: int | None = None
    keep: int | None = None
    lane: str | None = None
    queue: str | None = None
    limit: int = 1000


@frozen
class ProtectSettled(Wish[None]):
    """Keep settled jobs after ``after`` (None: all) from being pruned, for the reader ``name``."""

    name: str
    after: str | None


@frozen
class ReleaseSettled(Wish[bool]):
    """End a reader's protection; says whether there was one."""

    name: str


# -- moving to another database -------------------------------------------------------------------


@frozen
class Exported:
    """Unsettled jobs as rows of `_statements.MOVED_COLUMNS`, and the last one's sequence."""

    rows: list[tuple[Any, ...]]
    last: int


@frozen
class Export(Wish[Exported]):
    """Queued and completing jobs in order of admission, after ``after``."""

    after: int = 0
    limit: int = 500


@frozen
class Import(Wish[int]):
    """Admit exported jobs with all their counters; those that are there stay as they are."""

    rows: Sequence[tuple[Any, ...]]


@frozen
class Remove(Wish[int]):
    """Delete exported jobs from where they came; says how many."""

    ids: Sequence[str]


# -- looking for trouble --------------------------------------------------------------------------


@frozen
class Checked:
    """Ids and faults of rows that break the grammar, among ``count`` that matter.

    ``last`` is where to go on; None when there is no more.
    """

    faults: list[tuple[str, str]]
    count: int
    last: int | None


@frozen
class CheckRows(Wish[Checked]):
    """Walk up to ``limit`` rows after ``after``, for what is wrong with them."""

    after: int = 0
    limit: int = 2000


@frozen
class Trouble:
    """A job that stands in the way: for ``seconds`` already, or for so long still."""

    id: str
    queue: str
    lane: str
    state: str
    seconds: float
    waiting: int = 0
    """Jobs of its queue behind it."""


@frozen
class ReadExpired(Wish[list[Trouble]]):
    """Claims whose lease is over and that nobody has decided about."""

    limit: int = 20


@frozen
class ReadWaitingOnTime(Wish[list[Trouble]]):
    """Heads that are not due yet, and have others waiting behind them; the latest first."""

    limit: int = 20


@frozen
class ReadUnserved(Wish[list[tuple[str, int]]]):
    """Lanes with jobs that may be claimable and none that runs, and how many; the most first."""

    limit: int = 20


@frozen
class Place:
    """Where a job stands: seconds until it is due and its lease ends, and how many go before.

    ``running_in_lane``: jobs of its lane that have a claim, itself perhaps among them.
    """

    due_in: float
    lease_for: float | None
    ahead_in_queue: int
    ahead_in_lane: int
    running_in_lane: int


@frozen
class ReadPlace(Wish[Place | None]):
    """Where a job stands, or None if it is missing."""

    id: str


@frozen
class Lost:
    """Lost jobs (id, queue) in some queues, and the last of these; None: there are no more."""

    jobs: list[tuple[str, str]]
    last: str | None


@frozen
class ReadLost(Wish[Lost]):
    """Jobs that go first in their queue and that no claim would look at. There must be none.

    Looks at up to ``limit`` queues, by name, after ``after``.
    """

    after: str = ""
    limit: int = 1000


@frozen
class RepairLost(Wish[int]):
    """Make the first job of a queue claimable again, should it be lost; says how many."""

    queue: str
