"""Group commit: many tasks, one exchange with the database at a time.

While one exchange is under way further wishes collect, and go together in the next. No timer:
an idle process has no added latency, a busy one shares its round trips and its commits. There is
no background task either: one of the tasks that wait leads, and when it has its own answers hands
the lead to another.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import outcome
import trio

from ._errors import WatchdogError
from ._wishes import Wish

EXCHANGE_LIMIT = 1024
"""Wishes in one exchange; a longer one would keep the rest waiting."""

Perform = Callable[[Sequence[Wish[Any]]], Awaitable[Sequence[Any]]]
"""Answers wishes, in order. Must not be left by a cancellation once it has begun."""


class Exchange:
    """Collects wishes and has them answered together.

    With ``share``, for databases that work outside of this process: of twice as many tasks or more
    only half go along, so that one half is answered while the other is worked on here.
    """

    def __init__(self, perform: Perform, *, share: int | None = None) -> None:
        self._perform = perform
        self._share = share
        self._pending: list[_Submission] = []
        self._is_led = False
        self._was_shared = False

    @trio.lowlevel.enable_ki_protection
    async def submit(self, asked: Sequence[Wish[Any]]) -> list[Any]:
        """Answers to the wishes.

        Cancelled before they were taken up, they are withdrawn; afterwards the answers arrive
        whatever happens, and the cancellation comes at the caller's next checkpoint.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        submission = _Submission(asked)
        self._pending.append(submission)
        is_first = not self._is_led
        if not is_first:
            await self._wait(submission)
        if submission.answers is None:
            await self._lead(submission, is_first=is_first)
        assert submission.answers is not None
        return submission.answers.unwrap()

    async def _wait(self, submission: _Submission) -> None:
        def abort(_: Any) -> trio.lowlevel.Abort:
            if submission not in self._pending:
                return trio.lowlevel.Abort.FAILED
            self._pending.remove(submission)
            return trio.lowlevel.Abort.SUCCEEDED

        submission.task = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(abort)
        submission.task = None

    async def _lead(self, submission: _Submission, *, is_first: bool) -> None:
        self._is_led = True
        try:
            if is_first:
                # A turn of the loop, in which tasks woken together with this one add their wishes.
                await trio.lowlevel.cancel_shielded_checkpoint()
                if self._was_shared:
                    # Those answered together with this one may run after it in their turn.
                    await trio.lowlevel.cancel_shielded_checkpoint()
            while submission.answers is None:
                await self._exchange()
            if self._share is not None and len(self._pending) >= self._share:
                # The other half, sent before those who have just been answered run.
                await self._exchange()
        finally:
            self._is_led = False
            for waiting in self._pending:
                if waiting.task is not None:
                    # It wakes without an answer, and so leads.
                    self._is_led = True
                    trio.lowlevel.reschedule(waiting.task)
                    waiting.task = None
                    break

    async def _exchange(self) -> None:
        batch: list[_Submission] = []
        size = 0
        most = len(self._pending)
        if self._share is not None and most >= 2 * self._share:
            most = (most + 1) // 2
        while len(batch) < most and size < EXCHANGE_LIMIT:
            batch.append(self._pending.pop(0))
            size += len(batch[-1].asked)
        self._was_shared = len(batch) > 1
        asked = [wish for submission in batch for wish in submission.asked]
        try:
            answers = await self._perform(asked)
        except BaseException as error:
            # Also for a bug in here: the others must not wait for ever.
            for submission in batch:
                submission.answered(outcome.Error(_copy(error)))
            return
        start = 0
        for submission in batch:
            end = start + len(submission.asked)
            submission.answered(outcome.Value(list(answers[start:end])))
            start = end


class _Submission:
    """Wishes that one task waits for."""

    __slots__ = ("answers", "asked", "task")

    def __init__(self, asked: Sequence[Wish[Any]]) -> None:
        self.asked = asked
        self.answers: outcome.Outcome[list[Any]] | None = None
        self.task: trio.lowlevel.Task | None = None

    def answered(self, answers: outcome.Outcome[list[Any]]) -> None:
        self.answers = answers
        if self.task is not None:
            trio.lowlevel.reschedule(self.task)
            self.task = None


def _copy(error: BaseException) -> BaseException:
    """The error for one more task to raise: tracebacks of several must not pile up on one."""
    if isinstance(error, WatchdogError):
        copy = type(error)(*error.args)
        copy.__cause__ = error.__cause__
        return copy
    return error
