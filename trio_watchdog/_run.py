"""One run of a handler, and what is made of how it ended.

How a job ended is decided from two facts and never from `cancelled_caught`: what left the handler,
with cancellations split off, and the cause that was recorded before anybody cancelled. `conclude`
is the table of the two:

==================  =====================  =======================  ========================
cause               returned               raised                   only cancelled
==================  =====================  =======================  ========================
none                as it says             retry, or failed
cancellation        cancelled              cancelled                cancelled
timeout             retry, or failed       retry, or failed         retry, or failed
shutdown            handed off             handed off               handed off
lease_lost          nothing is recorded    nothing is recorded      nothing is recorded
lane_failed         nothing is recorded    nothing is recorded      nothing is recorded
==================  =====================  =======================  ========================

A handler that returns after its scope was cancelled may have been cut short anywhere, so what it
says does not count. One that blocked past its deadline and returned before the loop looked at the
clock was not cancelled: its word counts, as far as the database agrees.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar, cast

import trio
from attrs import evolve, frozen

from . import _rules as rules
from ._errors import ExecutionFailed, type_name
from ._model import (
    Attempt,
    Cancel,
    CancelReason,
    Complete,
    Fail,
    Outcome,
    OutcomeUnknown,
    Retry,
    RetryPolicy,
    RunningJob,
    seconds_to_milliseconds,
)
from ._renewal import Held, Lease, current_held
from ._rules import Settle

J = TypeVar("J")

# -- the fence ------------------------------------------------------------------------------------


@frozen(eq=False)
class Left:
    """What left a handler: a value, or an error, or (``is_cancelled``) only cancellations."""

    value: Any = None
    error: Exception | None = None
    is_cancelled: bool = False
    replaced: str | None = None
    """An error that a cancellation took the place of, as when an `__aexit__` awaits."""


async def fence(
    function: Callable[[J], Awaitable[Any]],
    job: J,
    outer: trio.CancelScope,
    inner: trio.CancelScope,
) -> Left:
    """Call a handler inside these scopes and turn whatever leaves it into data.

    What is not an `Exception`, such as KeyboardInterrupt, passes, as in any nursery; and so does
    a cancellation that comes from outside the scopes.
    """
    left = Left(is_cancelled=True)
    try:
        with outer, inner:
            try:
                return Left(await _unprotected(function, job))
            except BaseException as error:
                left = _cancelled(error)
                raise
    except Exception as error:
        return Left(error=error)
    except BaseException as error:
        if any(not isinstance(leaf, (Exception, trio.Cancelled)) for leaf in _leaves(error)):
            raise
        if trio.current_effective_deadline() > -math.inf:
            # Nobody outside has cancelled anything: it was kept, and raised where it does not
            # belong. Nothing must leave here as a cancellation that is none.
            return Left(error=ExecutionFailed("the handler raised the Cancelled of another scope"))
        raise
    # Nothing but cancellations, or the scopes would have let it pass.
    return left


@trio.lowlevel.disable_ki_protection
async def _unprotected(function: Callable[[J], Awaitable[Any]], job: J) -> Any:
    # The runtime's own code is protected against Ctrl-C, so that none is split in two.
    awaitable = cast("object", function(job))
    if not isinstance(awaitable, Awaitable):
        raise ExecutionFailed(
            f"the handler is not async: it returned {awaitable!r:.60}; give plain functions to"
            " thread_handler"
        )
    return await cast("Awaitable[Any]", awaitable)


def _cancelled(error: BaseException) -> Left:
    replaced: str | None = None
    for leaf in _leaves(error):
        if isinstance(leaf, trio.Cancelled):
            before = leaf.__context__
            # Bounded, for a chain of contexts may be long.
            for _ in range(20):
                if before is None or isinstance(before, Exception):
                    break
                before = before.__context__
            if isinstance(before, Exception) and replaced is None:
                replaced = rules.failure_reason(before, trio.Cancelled)
    return Left(is_cancelled=True, replaced=replaced)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for child in cast("BaseExceptionGroup[BaseException]", error).exceptions:
            yield from _leaves(child)
    else:
        yield error


# -- a run ----------------------------------------------------------------------------------------


class Run(Held):
    """One execution of a job here: the live side that its handler sees."""

    def __init__(self, job: RunningJob, lease: Lease, renewed_at: float) -> None:
        super().__init__(job, lease, renewed_at)
        self.cancel_scope = trio.CancelScope(deadline=self.lease_deadline)
        self.attempt = Attempt(max(job.attempt_count, 1))
        self.job = job
        self.began_at = renewed_at
        self.policy: RetryPolicy | None = None
        self.is_running = False
        self.is_by_program = False
        """The program cancelled the job's scope, which asks for the job's cancellation."""
        self._task: trio.lowlevel.Task | None = None
        self._shown = self.lease_deadline
        self._limit = math.inf

    @property
    def cancel_scope_of_work(self) -> trio.CancelScope:
        """The job's scope, so that its ``cancel_called`` tells the program."""
        return self.cancel_scope

    @property
    def cancel_reason(self) -> CancelReason | None:
        """Why the scope was cancelled, or None while it is not."""
        if self.cause is not None or trio.lowlevel.in_trio_task():
            return self.cause or self._supposed_cause()
        try:
            return trio.from_thread.run_sync(self._supposed_cause)
        except RuntimeError:
            # Not a thread of Trio's; what was recorded is all that can be told there.
            return None

    @property
    def time_limit(self) -> float:
        """The lane's limit, or the deadline that the program has set; not the lease's."""
        deadline = self.cancel_scope.deadline
        return self._limit if deadline == self._shown else deadline

    def checkpoint(self) -> None:
        """In a thread of Trio's: raise `trio.Cancelled` once the scope is cancelled."""
        if not trio.lowlevel.in_trio_task():
            trio.from_thread.check_cancelled()

    def refresh(self) -> None:
        """Apply renewals that arrived while the loop was blocked; ``cancel_called`` may cancel."""
        if trio.lowlevel.in_trio_task():
            self.catch_up()

    def requested(self) -> None:
        """Somebody asked for the job's cancellation."""
        self.cancel("cancellation")

    def renewed(self, asked_at: float) -> None:
        """Move the deadlines, but not a limit that is earlier than the lease."""
        limit = self.time_limit
        super().renewed(asked_at)
        self._limit_to(limit)

    def _limit_to(self, limit: float) -> None:
        self._limit = limit
        self._shown = min(limit, self.lease_deadline)
        self.cancel_scope.deadline = self._shown

    def begin(self, attempt_count: int, payload: Any) -> None:
        """The attempt is counted; the handler may run, on a job with a live side."""
        limit = None if self.policy is None else self.policy.max_attempts
        self.attempt = Attempt(attempt_count, limit)
        self.job = evolve(self.job, attempt_count=attempt_count, payload=payload, execution=self)

    async def execute(
        self, handler: Callable[[RunningJob], Awaitable[Any]], timeout: float | None
    ) -> Left:
        """Run the handler, and find the cause if its scope was cancelled."""
        self.began_at = trio.current_time()
        if timeout is not None:
            self._limit_to(self.began_at + timeout)
        current_held.set(self)
        self._task = trio.lowlevel.current_task()
        self.is_running = True
        try:
            left = await fence(handler, self.job, self.lease_scope, self.cancel_scope)
        finally:
            self.is_running = False
            self._task = None
        if self.cause is None or self.lease_scope.cancel_called:
            self.cause = self._supposed_cause()
            self.is_by_program = self.cause == "cancellation"
        self.over_at = trio.current_time()
        return left

    def notice(self) -> bool:
        """Record a cause that nobody recorded; says whether the program has cancelled the scope.

        For while the handler still runs: it may take long to end, and the process may not live
        to see it.
        """
        # Asked before it runs, Trio's scope would take a deadline for passed that may yet move.
        if not self.is_running or self.cause is not None:
            return False
        cause = self.cancel_reason
        if cause is None:
            return False
        self.is_by_program = cause == "cancellation"
        self.cancel(cause)
        return self.is_by_program

    def await_stack(self) -> traceback.StackSummary:
        """Where the handler waits."""
        if self._task is None:
            return traceback.StackSummary()
        return traceback.StackSummary.extract(self._task.iter_await_frames())

    def _supposed_cause(self) -> CancelReason | None:
        """Why the scope was cancelled, when no cause was recorded: a deadline, or the program."""
        # Trio's `cancel_called` reads the clock, and would take a deadline for passed that a
        # renewal has moved, if the loop was blocked since.
        self.catch_up()
        if self.lease_scope.cancel_called:
            return "lease_lost"
        if not self.cancel_scope.cancel_called:
            return None
        # Not public; what the handler raises tells less, for asyncio's cancellations look explicit.
        source = getattr(getattr(self.cancel_scope, "_cancel_reason", None), "source", None)
        if source != "explicit" and trio.current_time() >= self.time_limit:
            return "timeout"
        # A scope that the program keeps may be asked before a renewal was applied.
        return "lease_lost" if source == "deadline" else "cancellation"

    def limit_text(self) -> str:
        """The time limit, for a reason."""
        return f"timed out after {max(self.time_limit - self.began_at, 0):.6g} s"


# -- the table ------------------------------------------------------------------------------------


@frozen
class Again:
    """Another attempt, after ``after`` ms or when the policy says."""

    reason: str | None
    after: int | None = None


@frozen
class GiveBack:
    """Back to the queue, at no cost."""


Wanted = Settle | Again | GiveBack | None
"""What should be written down; None: nothing may be."""


def conclude(
    left: Left, cause: CancelReason | None, policy: RetryPolicy | None, limit_text: str
) -> Wanted:
    """What becomes of the job. See the table above."""
    match cause:
        case "lease_lost" | "lane_failed":
            return None
        case "cancellation":
            return Settle(Outcome.CANCELLED)
        case "shutdown":
            return GiveBack()
        case "timeout":
            reason = limit_text
            if left.error is not None:
                reason += "; " + rules.failure_reason(left.error, trio.Cancelled)
            return failed_attempt(reason, policy)
        case None:
            if left.error is not None:
                return failed_attempt(rules.failure_reason(left.error, trio.Cancelled), policy)
            return _said(left.value)


def failed_attempt(reason: str, policy: RetryPolicy | None) -> Wanted:
    """Another attempt while there is a policy to allow it, else failed."""
    reason = rules.cut(reason)
    return Settle(Outcome.FAILED, reason) if policy is None else Again(reason)


def _said(value: Any) -> Wanted:
    match value:
        case None:
            return Settle(Outcome.COMPLETED)
        case Complete() | Fail() | Cancel() | OutcomeUnknown():
            return rules.decided(value)
        case Retry():
            after = None if value.after is None else seconds_to_milliseconds(value.after)
            return Again(value.reason, after)
        case _:
            return Settle(
                Outcome.FAILED,
                rules.cut(
                    f"the handler returned a value of type {type_name(value)}; allowed are"
                    " None, Complete(), Fail(reason), Cancel(), OutcomeUnknown() and Retry()"
                ),
            )
