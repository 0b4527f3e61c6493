"""Shapes of backlog that must not make a claim dearer. For this project only.

a     one queue with many jobs in front, while its head runs in another process
b     many queues of one job each
c     very many jobs deferred to tomorrow, of higher priority than the ready ones
d     very many settled jobs
e     all of these at once, on PostgreSQL beside somebody's transaction that stays open

In b the pick-up is that of a job in a lane beside the full one, for in the full lane itself no
worker would be idle; the drain is of the full lane. In all of them, the empty table too, a second
process is up and busy with the head of that one queue.

The first round finds a backlog at which nobody has looked, and a store may have something to tidy
up: it stands for the moment after such a backlog came into being, the later ones for ever after.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, cast

import anyio
import anyio.to_thread
import trio

from .contestants import LANE

if TYPE_CHECKING:
    from .child import Bench
    from .contestants.ours import OursOnPostgres

OTHER_LANE = "other"


async def flat_fill(bench: Bench) -> dict[str, float]:
    """Prepare the database of one shape."""
    from trio_watchdog import Job

    from .child import Recorder, until

    await bench.create()
    contestant = cast("OursOnPostgres", bench.contestant)
    many, very_many, shape = (bench.options[name] for name in ("many", "very_many", "shape"))
    async with contestant.opened():
        if "d" in shape:
            await contestant.enqueue(-1)
            recorder = Recorder()
            async with contestant.working(1, recorder):
                await until(lambda: bool(recorder.events), 30)
                await anyio.sleep(0.2)
            contestant.clone(very_many, "state = 'settled'")
        await contestant.client.enqueue(Job(LANE, {"number": -2}, queue="noisy"))
        if "a" in shape:
            await contestant.client.enqueue(Job(LANE, {"number": -1}, queue="noisy"))
            last = f"sequence = (select max(sequence) from {contestant.table})"
            contestant.clone(many, last, queue="'noisy'")
        if "b" in shape:
            await contestant.client.enqueue(contestant.job(-1, OTHER_LANE))
            contestant.clone(many, f"lane = '{OTHER_LANE}'")
        if "c" in shape:
            tomorrow = datetime.now(UTC) + timedelta(days=1)
            job = Job(LANE, {"number": -1}, priority=10, not_before=tomorrow)
            await contestant.client.enqueue(job)
            contestant.clone(very_many, "priority = 10")
    return {}


async def flat(bench: Bench) -> dict[str, float]:
    """Pick-up from idle (in the same process) and drain rate in one shape."""
    from .child import Recorder, check_once, delays, produce_jobs, rate, until

    contestant = cast("OursOnPostgres", bench.contestant)
    samples, count, shape, cap = (
        bench.options[name] for name in ("samples", "count", "shape", "cap")
    )
    async with surroundings(bench, shape), contestant.opened():
        recorder = Recorder()
        async with contestant.working(1, recorder):
            called = await produce_jobs(contestant, 0, samples)
            assert await until(lambda: len(recorder.events) >= samples, 120)
        check_once(bench, recorder.events, samples)
        values = delays(called, dict(recorder.events))
        values["fresh"] = values["p50"]
        recorder = Recorder()
        lane = OTHER_LANE if shape == "b" else LANE
        if shape != "b":
            await contestant.enqueue_many(range(count))
        async with contestant.working(32, recorder, lane):
            done = await until(lambda: len(recorder.events) >= count, cap)
    if not done:
        bench.notes.append(f"stopped after {cap:g} s with {len(recorder.events)} of {count}")
    if shape != "b":
        check_once(bench, recorder.events, count if done else None)
    values["rate"] = rate([at for _, at in recorder.events][:count])
    return values


@asynccontextmanager
async def surroundings(bench: Bench, shape: str) -> AsyncIterator[None]:
    """Somebody who runs the head of the noisy queue; somebody with an open transaction."""
    foreign: Any = None
    holder = bench.process("hold", "holder")
    try:
        await anyio.to_thread.run_sync(holder.is_told)
        if bench.store == "postgres" and len(shape) > 1:
            import psycopg

            foreign = psycopg.connect(bench.database)
            foreign.execute("set transaction isolation level repeatable read")
            foreign.execute("create table if not exists foreign_table (id int)")
            foreign.execute("insert into foreign_table values (1)")
        yield
        holder.tell("stop")
        await anyio.to_thread.run_sync(holder.ended)
    finally:
        holder.process.kill()
        if foreign is not None:
            foreign.rollback()
            foreign.close()


async def hold(bench: Bench) -> dict[str, float]:
    """Run the head of the noisy queue until told to stop; then it goes back to its place."""
    from trio_watchdog import RunningJob, open_watchdog

    async def handler(job: RunningJob) -> None:
        assert job.queue == "noisy", job
        print("held", flush=True)
        await trio.sleep_forever()

    async with open_watchdog(bench.database, grace=0) as watchdog:
        await watchdog.start_lane(LANE, handler)
        await trio.to_thread.run_sync(sys.stdin.readline)
    return {}
