"""Lanes under test: inline, on a database in memory, in virtual time."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from datetime import datetime
from random import Random
from typing import Any

import trio
from trio.testing import MockClock

from .._lane import Lanes
from .._model import Job, SettledJob
from .._open import open_store
from .._payload import PAYLOAD_LIMIT
from .._store import Project
from .._watchdog import Watchdog, open_watchdog
from ._clock import DEFAULT_START, DurableClock
from ._faulty import FaultyStore

JUMP_LIMIT = 10_000
"""Jumps in time after which jobs are taken to go on for ever."""


class InlineWatchdog(Watchdog):
    """A watchdog whose durable time is moved by the test. `open_test_watchdog` makes it."""

    clock: DurableClock
    """Judges due times and leases."""

    store: FaultyStore
    """What the watchdog asks; it can be told to fail."""

    @classmethod
    def over(cls, watchdog: Watchdog, clock: DurableClock, store: FaultyStore) -> InlineWatchdog:
        """The same watchdog, with what a test needs."""
        inline = cls(
            watchdog._runtime,
            watchdog._supervisor,
            retry_for=watchdog._retry_for,
            poll=watchdog._poll,
        )
        inline.clock = clock
        inline.store = store
        return inline

    async def run_due(self) -> None:
        """Run what is due now, and what becomes due by that; no time passes."""
        await self.wait_idle()

    async def advance(self, seconds: float) -> None:
        """Let time pass; what falls due meanwhile runs at its instant, one after another."""
        end = self.clock.instant(seconds)
        await self._follow_to(end)
        self.clock.advance_to(end)
        await self.wait_idle()

    async def run_until_idle(self) -> None:
        """Run everything: deferred jobs and retries, too, without waiting for their time.

        Returns when nothing is left that a lane here could ever run. Raises `RuntimeError` when
        there is no end to it, such as a handler that always asks for another attempt.
        """
        await self._follow_to(None)

    async def _follow_to(self, end: datetime | None) -> None:
        for _ in range(JUMP_LIMIT):
            await self.wait_idle()
            following = (await self.wake_state()).next_wake_at
            if following is None or (end is not None and following > end):
                return
            self.clock.advance_to(following)
        raise RuntimeError(f"jobs still become due after {JUMP_LIMIT} jumps in time")

    async def settled(self) -> list[SettledJob]:
        """Every job that has ended so far, in the order in which they ended."""
        jobs: list[SettledJob] = []
        cursor: str | None = None
        while (page := await self.read_settled(after=cursor)).jobs:
            jobs += page.jobs
            cursor = page.cursor
        return jobs


@asynccontextmanager
async def open_test_watchdog(
    lanes: Lanes | None = None,
    *,
    start: datetime = DEFAULT_START,
    project: Project | None = None,
    payload_limit: int = PAYLOAD_LIMIT,
    **options: Any,
) -> AsyncGenerator[InlineWatchdog]:
    """A `Watchdog` for tests of your lanes: nothing on disk, no threads, and time that jumps.

    ::

        lanes = Lanes()
        outbox = []


        @lanes.lane("mail", retry=RetryPolicy(3, delay=60))
        async def send_mail(job):
            if job.attempt.count == 1:
                raise ConnectionError("no route to host")
            outbox.append(job.payload["to"])


        async def test_mail_is_sent_again_after_a_failure():
            async with open_test_watchdog(lanes) as watchdog:
                await watchdog.enqueue(Job("mail", {"to": "ada"}, id="hello"))
                await watchdog.run_due()
                assert outbox == []
                await watchdog.advance(60)
                assert outbox == ["ada"]
                job = await watchdog.read("hello")
                assert (job.outcome, job.attempt_count) == ("completed", 2)

    ``run_due`` runs what is due, ``advance`` lets time pass, ``run_until_idle`` lets all of it
    pass. The whole runtime is at work, with its retries, hooks, queues and cancellation; only the
    store is inline, and its clock is ``watchdog.clock``, which begins at ``start``.

    In a run with a `trio.testing.MockClock`, as pytest-trio's fixture ``autojump_clock`` makes
    it, the two clocks are one: a handler that sleeps for an hour takes no time either. Without
    one, Trio's time is real, and only durable time jumps. (Under an autojumping clock a handler in
    a thread looks idle, and the clock runs away: test such lanes in real time.)

    ``watchdog.store`` is a `FaultyStore`. Other ``options`` are those of `open_watchdog`. Random
    numbers come from a fixed seed.
    """
    run_clock = trio.lowlevel.current_clock()
    clock = DurableClock(start, trio_clock=run_clock if isinstance(run_clock, MockClock) else None)
    options = {"random": Random(0), **options}  # noqa: S311  (the same in each run)
    async with open_store(
        ":memory:", project=project, payload_limit=payload_limit, clock=clock
    ) as inner:
        store = FaultyStore(inner)
        async with open_watchdog(store, **options) as watchdog:
            inline = InlineWatchdog.over(watchdog, clock, store)
            if lanes is not None:
                await inline.start_lanes(lanes)
            yield inline


def run_lanes(
    lanes: Lanes,
    jobs: Iterable[Job],
    *,
    start: datetime = DEFAULT_START,
    virtual_time: bool = True,
    **options: Any,
) -> list[SettledJob]:
    """The settled jobs, once ``lanes`` have run ``jobs`` and whatever those have enqueued.

    Starts a Trio run of its own, so it is for tests that are plain functions::

        def test_a_report_is_written_for_each_customer():
            ended = run_lanes(lanes, [Job("report", {"customer": n}) for n in range(3)])
            assert [job.outcome for job in ended] == ["completed"] * 3

    Deferred jobs, retries and sleeping handlers take no time. For handlers that run in threads
    give ``virtual_time=False``: then only durable time jumps. ``options`` are those of
    `open_test_watchdog`.
    """
    jobs = list(jobs)

    async def main() -> list[SettledJob]:
        async with open_test_watchdog(lanes, start=start, **options) as watchdog:
            await watchdog.enqueue_many(jobs)
            await watchdog.run_until_idle()
            return await watchdog.settled()

    return trio.run(main, clock=MockClock(autojump_threshold=0) if virtual_time else None)
