"""Renewal from a thread of its own, which also watches the event loop.

A handler that blocks the event loop cannot starve this renewal. What comes of it has to reach the
loop before Trio looks at deadlines again, or a handler that blocked for longer than the lease,
while its lease was kept alive, would find its scope expired. So answers are applied by an
instrument right after the loop's wait for I/O, which is before it expires deadlines.

The same instrument stamps when the loop began its present task step. The thread reads the stamp:
a step of more than ``stall_warning`` seconds is logged with the job and the stack, and past
``stall_limit`` seconds the process counts as hung and its leases are left to end.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import trio

from ._errors import StoreUnavailable
from ._renewal import Held, Renewal, current_held, renew_wish
from ._store import Renewer
from ._wishes import Renewal as Answer

JOIN_LIMIT = 5.0
"""Seconds to wait for the thread at the end; a database that does not answer may keep it longer."""

STACK_LIMIT = 30
"""Innermost frames of a blocked loop that are logged."""

logger = logging.getLogger("trio_watchdog")


class Pulse(trio.abc.Instrument):
    """Renews the claims of a `Renewal` from a thread, every heartbeat."""

    def __init__(
        self,
        renewal: Renewal,
        open_renewer: Callable[[], AbstractContextManager[Renewer] | None],
        *,
        stall_warning: float,
        stall_limit: float,
    ) -> None:
        self._renewal = renewal
        renewal.catch_up = self.apply
        self._open_renewer = open_renewer
        self._stall_warning = stall_warning
        self._stall_limit = stall_limit
        self._answers: deque[tuple[Sequence[Held], Sequence[Answer], float]] = deque()
        self._step: tuple[trio.lowlevel.Task, float] | None = None
        self._stalled: tuple[trio.lowlevel.Task, float] | None = None
        self._next_warning = stall_warning
        self._sample = min(stall_warning / 2, 0.5)
        self._is_hung = False
        self._stop = threading.Event()
        self._scope = trio.CancelScope(shield=True)
        self._loop_thread = threading.get_ident()
        self._clock = trio.lowlevel.current_clock()
        self._token = trio.lowlevel.current_trio_token()

    # -- on the event loop ------------------------------------------------------------------------

    async def run(self) -> None:
        """Renew until `stop`. Raises what the renewer raises, unless trying again may help."""
        trio.lowlevel.add_instrument(self)
        try:
            with self._scope:
                # Abandoned only past the bound in `stop`; the thread owns its connection.
                await trio.to_thread.run_sync(
                    self._beat, abandon_on_cancel=True, limiter=trio.CapacityLimiter(1)
                )
        finally:
            self._stop.set()
            trio.lowlevel.remove_instrument(self)
        if self._scope.cancelled_caught:
            logger.warning("the renewal thread did not end within %g s", JOIN_LIMIT)

    def stop(self) -> None:
        """Let the thread end; nothing is held any more."""
        self._stop.set()
        self._scope.deadline = trio.current_time() + JOIN_LIMIT

    def apply(self) -> None:
        """Apply the answers that have arrived."""
        while self._answers:
            self._renewal.hear(*self._answers.popleft())

    def before_io_wait(self, timeout: float) -> None:
        """The loop has nothing to do, so it is not blocked."""
        self._step = None

    def after_io_wait(self, timeout: float) -> None:
        """The last chance before deadlines expire."""
        if self._answers:
            self.apply()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """The loop gives itself into the hands of a task."""
        self._step = (task, time.perf_counter())

    # -- in the thread ----------------------------------------------------------------------------

    def _beat(self) -> None:
        next_at = time.perf_counter() + self._renewal.lease.heartbeat
        while not self._stop.is_set():
            try:
                renewer = self._open_renewer()
                assert renewer is not None
                with renewer as renew:
                    while self._wait_until(next_at):
                        next_at = time.perf_counter() + self._renew(renew)
            except StoreUnavailable as error:
                self._tell_loop(self._renewal.outage.noticed, error)
                next_at = time.perf_counter() + self._renewal.soon()
                self._wait_until(next_at)

    def _wait_until(self, instant: float) -> bool:
        """Watch the loop until the instant; says whether to go on."""
        look_at = 0.0
        while (now := time.perf_counter()) < instant:
            if self._stop.wait(max(min(instant, look_at) - now, 0)):
                return False
            look_at = self._look()
        return not self._stop.is_set()

    def _renew(self, renew: Renewer) -> float:
        """Renew what is held; says after how many seconds to do it again."""
        claims = self._renewal.held()
        if claims and not self._is_hung:
            asked_at = self._clock.current_time()
            answers = renew([renew_wish(held) for held in claims])
            self._answers.append((claims, answers, asked_at))
            self._tell_loop(self.apply)
            if any(answer.status == "locked" for answer in answers):
                return self._renewal.soon()
        return self._renewal.lease.heartbeat

    def _tell_loop(self, function: Callable[..., None], *args: object) -> None:
        try:
            self._token.run_sync_soon(function, *args)
        except trio.RunFinishedError:
            # The program ended without us, as after an internal error of Trio.
            self._stop.set()

    def _look(self) -> float:
        """See whether the loop is blocked; says when to look again."""
        step = self._step
        now = time.perf_counter()
        if step is None:
            self._is_hung = False
            return now + self._sample
        if step is not self._stalled:
            self._stalled = step
            self._next_warning = self._stall_warning
        task, began_at = step
        blocked = now - began_at
        was_hung, self._is_hung = self._is_hung, blocked >= self._stall_limit
        if blocked >= self._next_warning or self._is_hung > was_hung:
            self._next_warning = 2 * blocked
            self._warn(task, blocked)
        # When the step will have been too long; one that begins meanwhile is seen soon enough.
        return min(max(began_at + self._next_warning, now + 0.01), now + self._sample)

    def _warn(self, task: trio.lowlevel.Task, blocked: float) -> None:
        held = task.context.get(current_held)
        if held is not None:
            culprit = f"job {held.id!r} of lane {held.lane!r}"
        else:
            culprit = f"task {task.name!r}"
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage] (documented)
        stack = traceback.format_stack(frames[self._loop_thread], limit=STACK_LIMIT)
        logger.warning(
            "%s has blocked the event loop for %.1f s%s:\n%s",
            culprit,
            blocked,
            "; leases are no longer renewed" if self._is_hung else "",
            "".join(stack).rstrip(),
            extra={
                "job": None if held is None else held.id,
                "lane": None if held is None else held.lane,
                "duration": blocked,
            },
        )
