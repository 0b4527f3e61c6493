"""Riding out the times in which the store cannot be reached."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from random import Random
from typing import TypeVar

import trio

from ._errors import StoreUnavailable
from ._wake import Bell

T = TypeVar("T")

FIRST_DELAY = 0.1
"""Seconds before the first repetition; also what one asker leaves between two requests at least."""

LONGEST_DELAY = 5.0
"""Seconds between two repetitions in a long outage."""

LOG_INTERVAL = 10.0
"""Seconds between two log records about outages, should the store come and go."""

logger = logging.getLogger("trio_watchdog")


class Outage:
    """Whether the store is away, shared by all tasks of the process.

    The first one that is answered again wakes the others, so that nobody sleeps on after the end
    of a long outage, and the log tells of an outage once and not once for each task.
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self._began_at: float | None = None
        self._logged_at = -math.inf
        self._is_logged = False
        self._over = Bell()

    @property
    def is_on(self) -> bool:
        """Whether the store was away when it was asked last."""
        return self._began_at is not None

    async def riding_out(self, ask: Callable[[], Awaitable[T]], until: float = math.inf) -> T:
        """What ``ask`` returns, called again while it raises `StoreUnavailable`.

        Raises that error once the next repetition would come after ``until`` (Trio's clock).
        ``ask`` must bear being repeated after its effect, for an answer may have been lost.
        """
        failures = 0
        while True:
            try:
                answer = await ask()
            except StoreUnavailable as error:
                self.noticed(error)
                failures += 1
                if trio.current_time() + FIRST_DELAY >= until:
                    raise
                await self.pause(failures, until)
            else:
                self.answered()
                return answer

    async def pause(self, failures: int, until: float = math.inf) -> None:
        """Wait before asking again: longer with each failure, with jitter, not after ``until``."""
        delay = min(FIRST_DELAY * 2 ** min(failures - 1, 20), LONGEST_DELAY)
        delay *= 0.5 + self._random.random() / 2
        ticket = self._over.ticket
        with trio.move_on_at(until):
            await trio.sleep(min(delay, FIRST_DELAY))
            with trio.move_on_after(max(delay - FIRST_DELAY, 0)):
                await self._over.wait(ticket)

    def noticed(self, error: BaseException) -> None:
        """The store could not be reached."""
        now = trio.current_time()
        if self._began_at is not None:
            return
        self._began_at = now
        self._is_logged = now - self._logged_at >= LOG_INTERVAL
        if self._is_logged:
            self._logged_at = now
            logger.warning("the store is unavailable, trying again: %s", error)

    def answered(self) -> None:
        """The store has answered."""
        if self._began_at is None:
            return
        duration = trio.current_time() - self._began_at
        self._began_at = None
        self._over.ring_all()
        if self._is_logged:
            logger.info("the store answers again after %.1f s", duration)
