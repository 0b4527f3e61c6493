"""A program whose connection breaks at any one of its trips to the server.

The trip is lost before the server hears of it, or in the middle, so that it is undone, or it is
made and its answer lost, so that whoever asks again asks for the second time. Whatever it was for:
nothing is lost, and nothing is run twice or by two.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, get_args

import psycopg
import pytest
import trio

from tests.postgres.proxy import Proxy, When, open_proxy
from trio_watchdog import (
    CompletingJob,
    Fail,
    Job,
    Lanes,
    Retry,
    RetryPolicy,
    RunningJob,
    SettledJob,
    StoreUnavailable,
    Watchdog,
    open_client,
    open_watchdog,
)
from trio_watchdog import _wishes as w
from trio_watchdog._borrowed import transactional
from trio_watchdog._model import Outcome
from trio_watchdog._operations import CLAIM_WINDOW
from trio_watchdog._postgres import open_postgres_store
from trio_watchdog._rules import Settle

TRIPS = 60
"""About as many as the program makes."""

SHARE = 4
"""Of so many trips one is tried in each way, in each way another."""

TOGETHER = 4
"""Programs that run at the same time, each in a schema of its own."""

EXPECTED = {
    "first": ("completed", None, 1),
    "second": ("completed", None, 1),
    "retrying": ("completed", None, 3),
    "asking": ("completed", None, 2),
    "failing": ("failed", "no stamps", 1),
    "hooked": ("completed", None, 1),
    "cancelled": ("cancelled", None, 1),
}
"""Outcome, reason and attempts."""


class Program:
    """Two processes, as far as the server can tell, that share their lanes."""

    def __init__(self) -> None:
        self.runs: Counter[str] = Counter()
        self.hooks: Counter[str] = Counter()
        self.running: Counter[str] = Counter()
        self.together: list[str] = []
        self.cancelled_runs = trio.Event()
        lanes = self.lanes = Lanes()

        async def hook(job: CompletingJob) -> None:
            self.hooks[job.id] += 1

        lanes.lane("plain", retry=RetryPolicy(3, delay=0.01))(self.handler)
        lanes.lane("hooked", on_completing=hook)(self.handler)

    async def handler(self, job: RunningJob) -> Any:
        self.runs[job.id] += 1
        # Also two jobs of one queue.
        self.running[job.queue] += 1
        if self.running[job.queue] > 1:
            self.together.append(job.id)
        try:
            await trio.sleep(0.03)
            if job.id == "cancelled":
                self.cancelled_runs.set()
                await trio.sleep_forever()
            if job.id == "failing":
                return Fail("no stamps")
            if job.id == "asking" and job.attempt.count == 1:
                return Retry(after=0.05)
            if job.id == "retrying" and not job.attempt.is_last:
                raise ValueError("not yet")
        finally:
            self.running[job.queue] -= 1
        return None

    async def work(self, near: Watchdog, far: Watchdog) -> None:
        """By way of the connection that breaks; the other one only runs what it gets."""
        for watchdog in (near, far):
            await watchdog.start_lanes(self.lanes)
        await near.enqueue(Job("plain", id="first", queue="q"))
        await near.enqueue_many(
            [
                Job("plain", id="second", queue="q"),
                Job("plain", id="retrying"),
                Job("plain", id="asking"),
                Job("plain", id="failing"),
            ]
        )
        await near.enqueue(Job("hooked", id="hooked"))
        await near.enqueue(Job("plain", id="cancelled", priority=-1))
        await self.cancelled_runs.wait()
        result = await near.cancel("cancelled", cancellation_id="c")
        assert result.status in ("recorded", "replayed"), result
        for id in EXPECTED:
            await near.wait_settled(id)


@asynccontextmanager
async def opened(url: str, **options: Any) -> AsyncGenerator[Watchdog]:
    # Prompt where it looks again by itself: an answer that told of work may be among the lost.
    async with open_watchdog(url, lease=60, heartbeat=0.05, poll=0.5, **options) as watchdog:
        yield watchdog


async def run(url: str, schema: str, number: int, when: When) -> bool:
    """Run the program, with that trip broken; whether it came so far."""
    program = Program()
    async with open_proxy(url) as proxy:
        with trio.fail_after(100):
            async with (
                opened(url, schema=schema) as far,
                opened(proxy.url, schema=schema) as near,
            ):
                proxy.break_trip(number, when)
                await program.work(near, far)
            is_broken = proxy.trips >= number
    where = f"trip {number} was lost {when} its effect"
    assert program.together == [], where
    assert program.runs == {id: attempts for id, (_, _, attempts) in EXPECTED.items()}, where
    assert set(program.hooks) == {"hooked"}, where
    async with open_client(url, schema=schema) as client:
        for id, (outcome, reason, attempts) in EXPECTED.items():
            job = await client.read(id)
            assert isinstance(job, SettledJob), (where, job)
            assert (job.outcome, job.reason) == (outcome, reason), (where, job)
            assert (job.attempt_count, job.recovery_count) == (attempts, 0), (where, job)
        told: list[str] = []
        cursor: str | None = None
        # What settled last is shown when the other programs' open transactions have ended.
        with trio.fail_after(60):
            while len(told) < len(EXPECTED):
                page = await client.read_settled(after=cursor)
                told += [job.id for job in page.jobs]
                cursor = page.cursor
                await trio.sleep(0.01)
        assert sorted(told) == sorted(EXPECTED), where
    return is_broken


@pytest.mark.parametrize("when", get_args(When))
async def test_any_trip_of_a_program_may_be_lost(when: When, quick_database: str) -> None:
    numbers = list(range(1 + get_args(When).index(when), TRIPS, SHARE))
    broken: list[bool] = []

    async def work(place: int) -> None:
        while numbers:
            number = numbers.pop()
            schema = f"trips_{when}_{number}"
            broken.append(await run(quick_database, schema, number, when))

    async with trio.open_nursery() as nursery:
        for place in range(TOGETHER):
            nursery.start_soon(work, place)
    # Few were to come after the program's end. How many it makes depends on which of the two
    # processes is quicker to claim a job.
    assert sum(broken) > len(broken) * 2 / 3


@pytest.mark.parametrize("when", get_args(When))
async def test_a_claim_and_a_decision_that_were_lost_can_be_asked_for_again(
    when: When, quick_database: str
) -> None:
    """Without a runtime that tries again, one sees what was done."""
    async with open_proxy(quick_database) as proxy:
        open_it = functools.partial(open_postgres_store, schema=f"lost_{when}")
        async with open_it(quick_database) as store, open_it(proxy.url) as broken:
            await store.enqueue(Job("l", id="x"))
            await attempt(proxy, when, broken, w.Claim("l", "t", "o", 60_000))
            job = await store.read("x")
            assert job is not None
            assert job.state == ("running" if when == "after" else "queued")
            # Asked again, by the token, it is the same claim and no second one.
            (answer,) = await broken.submit(w.Claim("l", "t", "o", 60_000, again=True))
            assert (answer.job.id, answer.job.attempt_count) == ("x", 1)
            decide = w.Decide("x", "t", Settle(Outcome.COMPLETED))
            await attempt(proxy, when, broken, decide)
            job = await store.read("x")
            assert job is not None
            assert job.state == ("settled" if when == "after" else "running")
            (answer,) = await broken.submit(decide)
            assert answer.status == ("replayed" if when == "after" else "recorded")


@pytest.mark.parametrize("when", get_args(When))
async def test_a_claim_whose_second_look_was_lost_can_be_asked_for_again(
    when: When, quick_database: str
) -> None:
    async with open_proxy(quick_database) as proxy:
        schema = f"beyond_{when}"
        open_it = functools.partial(open_postgres_store, schema=schema)
        async with open_it(quick_database) as store, open_it(proxy.url) as broken:
            await store.enqueue(Job("l", queue="q", priority=9))
            assert (await store.claim("l", "first")).job is not None
            with psycopg.connect(quick_database) as connection:
                # More than a first look sees; in an application's transaction they are not lowered.
                for _ in range(CLAIM_WINDOW + 20):
                    transactional(connection, schema=schema).enqueue(Job("l", queue="q"))
            await store.enqueue(Job("l", id="x", priority=-1))
            await attempt(proxy, when, broken, w.Claim("l", "t", "o", 60_000), number=2)
            job = await store.read("x")
            assert job is not None
            assert job.state == ("running" if when == "after" else "queued")
            (answer,) = await broken.submit(w.Claim("l", "t", "o", 60_000, again=True))
            assert (answer.job.id, answer.job.attempt_count) == ("x", 1)


async def attempt(proxy: Proxy, when: When, store: Any, wish: w.Wish[Any], number: int = 1) -> None:
    # Make the connection first: that takes a trip, too.
    await store.submit(w.NextRunningClaim())
    proxy.break_trip(number, when)
    with pytest.raises(StoreUnavailable):
        await store.submit(wish)
    assert proxy.trips >= number
