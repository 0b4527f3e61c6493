"""Handlers of every kind, stopped after any step, over a store that fails at any exchange.

Whatever happens, in the end each job is settled as it should be, its counters explain themselves,
and a stop has cost nothing.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest
import trio

from tests.kinds import THEMSELVES, points
from trio_watchdog import (
    Complete,
    CompletingJob,
    Fail,
    Job,
    Lanes,
    QueuedJob,
    Retry,
    RetryPolicy,
    RunningJob,
    SettledJob,
    Watchdog,
)
from trio_watchdog import _wishes as wishes
from trio_watchdog.testing._faulty import FaultyStore

JOBS = [
    Job("plain", id="plain 1", queue="p"),
    Job("plain", id="plain 2", queue="p"),
    Job("nursery", id="nursery", queue="n"),
    Job("hooked", id="hooked 1"),
    Job("hooked", id="hooked 2"),
    Job("retrying", id="retrying"),
    Job("failing", id="failing"),
    Job("swallowing", id="swallowing"),
    Job("teardown", id="teardown"),
    Job("asking", id="asking"),
]

EXPECTED = {
    "plain 1": ("completed", None, 1),
    "plain 2": ("completed", None, 1),
    "nursery": ("completed", None, 1),
    "hooked 1": ("failed", "no stamps", 1),
    "hooked 2": ("failed", "no stamps", 1),
    "retrying": ("completed", None, 3),
    "failing": ("failed", "attempt 2 of 2: ValueError: always", 2),
    "swallowing": ("completed", None, 1),
    "teardown": ("completed", None, 1),
    "asking": ("completed", None, 2),
}
"""Outcome, reason and attempts."""


class Program:
    """What an application would have: lanes, and effects outside of the database."""

    def __init__(self) -> None:
        self.ends: Counter[str] = Counter()
        """How often a handler came to its own end."""
        self.hooks: Counter[str] = Counter()
        self.running: Counter[str] = Counter()
        lanes = self.lanes = Lanes()

        async def hook(job: CompletingJob) -> None:
            await trio.sleep(0.3)
            self.hooks[job.id] += 1

        policy = RetryPolicy(3, delay=0.2)
        lanes.lane("plain", workers=2)(self.handler(self.plain))
        lanes.lane("nursery")(self.handler(self.nursery))
        lanes.lane("hooked", on_completing=hook)(self.handler(self.hooked))
        lanes.lane("retrying", retry=policy)(self.handler(self.retrying))
        lanes.lane("failing", retry=RetryPolicy(2, delay=0))(self.handler(self.failing))
        lanes.lane("swallowing")(self.handler(self.swallowing))
        lanes.lane("teardown")(self.handler(self.teardown))
        lanes.lane("asking")(self.handler(self.asking))

    def handler(self, function: Callable[[RunningJob], Awaitable[object]]):
        async def handler(job: RunningJob):
            self.running[job.queue] += 1
            assert self.running[job.queue] == 1, "two jobs of one queue at a time"
            try:
                said = await function(job)
                self.ends[job.id] += 1
                return said
            finally:
                self.running[job.queue] -= 1

        return handler

    async def plain(self, job: RunningJob) -> None:
        await trio.sleep(0.5)

    async def nursery(self, job: RunningJob) -> None:
        async with trio.open_nursery() as nursery:
            for n in range(3):
                nursery.start_soon(trio.sleep, n / 5)

    async def hooked(self, job: RunningJob) -> Fail:
        await trio.sleep(0.1)
        return Fail("no stamps")

    async def retrying(self, job: RunningJob) -> None:
        await trio.sleep(0.1)
        if not job.attempt.is_last:
            raise ValueError("not yet")

    async def failing(self, job: RunningJob) -> None:
        await trio.sleep(0.1)
        raise ValueError("always")

    async def swallowing(self, job: RunningJob) -> Complete:
        for _ in range(4):
            try:
                await trio.sleep(0.2)
            except BaseException:
                continue
        return Complete()

    async def teardown(self, job: RunningJob) -> None:
        try:
            await trio.sleep(0.4)
        except trio.Cancelled:
            raise LookupError("in teardown") from None

    async def asking(self, job: RunningJob) -> Retry | Complete:
        await trio.sleep(0.1)
        return Retry(after=0.3) if job.attempt.count == 1 else Complete()


async def work_to_the_end(watchdog: Watchdog, program: Program) -> None:
    await watchdog.start_lanes(program.lanes)
    with trio.fail_after(100):
        for job in JOBS:
            await watchdog.wait_settled(job.id)
        await watchdog.wait_idle()


async def check_the_end(store: FaultyStore, program: Program, *, was_stopped: bool) -> None:
    for id, (outcome, reason, attempts) in EXPECTED.items():
        job = await store.read(id)
        assert isinstance(job, SettledJob)
        assert (job.outcome, job.reason, job.attempt_count) == (outcome, reason, attempts), id
        assert job.recovery_count == 0
        # Nothing runs twice, except what a stop has cut short.
        ends = attempts if id in ("asking",) else 1
        if id == "retrying":
            assert program.ends[id] >= 1
        elif id != "failing":
            assert program.ends[id] == ends or (was_stopped and program.ends[id] >= ends), id
    assert set(program.hooks) == {"hooked 1", "hooked 2"}
    assert not +program.running


@pytest.mark.parametrize("kind", THEMSELVES)
async def test_the_program_ends_as_expected_when_nothing_happens(open_it, store):
    program = Program()
    await store.enqueue_many(JOBS)
    async with open_it() as watchdog:
        await work_to_the_end(watchdog, program)
    await check_the_end(store, program, was_stopped=False)
    assert program.hooks == {"hooked 1": 1, "hooked 2": 1}


@pytest.mark.parametrize("when", ["before", "after"])
@points("call", range(1, 60))
async def test_any_exchange_may_fail(open_it, store, ends, when, call):
    program = Program()
    await store.enqueue_many(JOBS)
    store.fail(on_call=call, when=when)
    async with open_it() as watchdog:
        await work_to_the_end(watchdog, program)
    await check_the_end(store, program, was_stopped=False)
    # One record for each attempt.
    for id, (_, _, attempts) in EXPECTED.items():
        assert len(ends.of(id)) == attempts, id


@points("call", range(1, 60, 4))
async def test_the_store_may_be_away_for_a_while_from_any_exchange_on(open_it, store, call):
    program = Program()
    await store.enqueue_many(JOBS)
    store.fail(on_call=call, times=25)
    async with open_it() as watchdog:
        await work_to_the_end(watchdog, program)
    await check_the_end(store, program, was_stopped=False)


class Stopper(trio.abc.Instrument):
    """Cancels a scope after a number of task steps."""

    def __init__(self, scope: trio.CancelScope, steps: int) -> None:
        self.scope = scope
        self.steps = steps

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.steps -= 1
        if self.steps == 0:
            self.scope.cancel()


@points("step", [*range(1, 60, 1), *range(60, 500, 11)])
async def test_the_block_may_be_cancelled_at_any_step(open_it, store, caplog, step):
    caplog.set_level(logging.ERROR)
    program = Program()
    await store.enqueue_many(JOBS)
    with trio.CancelScope() as scope:
        stopper = Stopper(scope, step)
        trio.lowlevel.add_instrument(stopper)
        try:
            async with open_it() as watchdog:
                await work_to_the_end(watchdog, program)
        finally:
            trio.lowlevel.remove_instrument(stopper)
    # A stop leaves no claim behind, and no attempt that did not come to its end.
    assert await store.ask(wishes.ReadJobs(state="running")) == []
    for job in await store.ask(wishes.ReadJobs(state="queued")):
        assert isinstance(job, QueuedJob)
        assert job.attempt_count < EXPECTED[job.id][2]
    async with open_it(lease=2, heartbeat=0.5) as watchdog:
        await trio.sleep(130)
        await work_to_the_end(watchdog, program)
    await check_the_end(store, program, was_stopped=True)
