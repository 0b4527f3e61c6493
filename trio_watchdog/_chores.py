"""What a process does for the whole table now and then, a little at a time.

Settled jobs that nobody wants any more are deleted, and jobs that no claim would find are looked
for. There are none of these; should there be one all the same, it is mended and reported, for
nothing else would ever tell.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import trio

from ._errors import StoreUnavailable, WatchdogError
from ._retention import Retention, prune
from ._runtime import Runtime
from ._wishes import ReadLost, RepairLost

LOST_INTERVAL = 60.0
"""Seconds between two rounds over all queues."""

LOST_PAUSE = 0.5
"""Seconds between two pages of such a round, of a thousand queues and a few milliseconds each."""

logger = logging.getLogger("trio_watchdog")


class Chores:
    """Runs beside the supervisor, until cancelled."""

    def __init__(self, runtime: Runtime, retention: Sequence[Retention]) -> None:
        self._runtime = runtime
        self._store = runtime.store
        self._retention = retention

    async def run(self) -> None:
        """Do each chore again and again."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._look_for_lost)
            for retention in self._retention:
                nursery.start_soon(self._keep_to, retention)

    async def _pause(self, seconds: float) -> None:
        # Processes that were started together must not all come at once.
        await trio.sleep(seconds * (0.5 + self._runtime.random.random() / 2))

    async def _keep_to(self, retention: Retention) -> None:
        while True:
            await self._pause(retention.every)
            if self._runtime.is_closing:
                return
            now = self._store.now()
            if now is None:
                now = time.time_ns() // 1_000_000
            try:
                count = await prune(self._store.ask, retention, now)
            except StoreUnavailable as error:
                # Next time. The outage itself is told by those who wait for its end.
                logger.debug("settled jobs could not be deleted: %s", error)
            except WatchdogError as error:
                # Perhaps this role may not delete; its lanes can work all the same.
                logger.error("settled jobs cannot be deleted: %s", error, exc_info=error)
            else:
                if count:
                    logger.info("deleted %d settled jobs (%s)", count, retention)

    async def _look_for_lost(self) -> None:
        while True:
            await self._pause(LOST_INTERVAL)
            after: str | None = ""
            while after is not None:
                if self._runtime.is_closing:
                    return
                if not self._runtime.lanes:
                    # Only who works here mends anything.
                    break
                try:
                    after = await self._repair(after)
                except WatchdogError as error:
                    logger.debug("lost jobs could not be looked for: %s", error)
                    break
                await self._pause(LOST_PAUSE)

    async def _repair(self, after: str) -> str | None:
        found = await self._store.ask(ReadLost(after))
        if found.jobs:
            for queue in sorted({queue for _, queue in found.jobs}):
                await self._store.ask(RepairLost(queue))
            ids = [id for id, _ in found.jobs]
            logger.error(
                "jobs %s went first in their queues and no claim would have found them; they can"
                " be claimed again. This must not happen: please report it",
                ids,
                extra={"jobs": ids},
            )
        return found.last
