"""Many jobs, several processes: every queue in its exact order, one at a time, none lost."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import trio

from tests.process.harness import ALONE, IS_FULL, Worker, World, at_once, on, out_of_order
from trio_watchdog import Job, Recovery

KILLS = 4
"""At least, however quick the jobs are."""


def jobs_of(
    count: int, queues: int, lanes: int, dice: random.Random, **fields: object
) -> list[Job]:
    """Jobs that take a few milliseconds, some of which want to run again."""
    jobs: list[Job] = []
    for number in range(count):
        steps: list[list[object]] = [["sleep", dice.uniform(0.0, 0.03)]]
        if fields and dice.random() < 0.1:
            steps.append(["retry", dice.randint(1, 3)])
        jobs.append(
            Job(
                f"lane{dice.randrange(lanes)}",
                {"steps": steps},
                id=f"job{number}",
                queue=f"queue{dice.randrange(queues)}",
                priority=dice.randint(-3, 3),
                **fields,  # type: ignore[arg-type]
            )
        )
    return jobs


@on("sqlite")
async def two_processes_and_2000_jobs_keep_the_order_of_50_queues(world: World) -> None:
    lanes = [{"name": f"lane{number}", "workers": 4} for number in range(4)]
    workers = [world.launch(name, lanes=lanes, lease=20.0) for name in "ab"]
    await world.ready(*workers)
    # All at once, and when both are there: one alone would soon be done with them.
    await world.client.enqueue_many(jobs_of(2000, 50, 4, random.Random(1)))
    await world.settled(seconds=120)
    jobs = world.check()
    assert out_of_order(world.ledger, jobs.values()) == []
    runs = Counter(run.job for run in world.ledger.executions())
    assert set(runs) == set(jobs)
    assert set(runs.values()) == {1}
    assert {row["outcome"] for row in jobs.values()} == {"completed"}
    # Both had their part in it.
    by = Counter(run.worker for run in world.ledger.executions())
    assert min(by["a"], by["b"]) > 100, by


async def kill_and_restart(world: World, victims: list[str], dice: random.Random, **config) -> int:
    """Until cancelled, kill one of the victims and start it again; one after the other.

    After a few kills the gate is opened, so that there is something to do until then.
    """
    kills = 0
    workers = {worker.name: worker for worker in world.workers}
    try:
        while True:
            name = dice.choice(victims)
            await world.ready(workers[name])
            await trio.sleep(dice.uniform(0.05, 0.4))
            workers[name].kill()
            kills += 1
            if kills == KILLS:
                world.open("go")
            workers[name] = world.launch(name, **config)
    finally:
        world.ledger.note("kills", count=kills)


async def cancel_at_random(world: World, ids: list[str], dice: random.Random) -> dict[str, str]:
    """Cancel these jobs, whatever they do at the moment; what became of each wish."""
    results: dict[str, str] = {}
    for id in ids:
        results[id] = (await world.client.cancel(id)).status
        await trio.sleep(dice.uniform(0.0, 0.05))
    return results


@on("sqlite", "postgres")
async def four_processes_keep_order_while_two_of_them_are_killed_again_and_again(
    world: World,
) -> None:
    count, queues = (10_000, 200) if IS_FULL else (400, 60)
    if world.is_sqlite:
        count, queues = count // 2, queues // 2
    dice = random.Random(3)
    jobs = jobs_of(count, queues, 4, dice, recovery=Recovery(1000))
    cancelled = dice.sample([job.id for job in jobs], count // 20)
    fields = {"priority": 9, "recovery": Recovery(1000)}
    jobs += [
        Job(f"lane{n % 4}", {"steps": [["gate", "go"]]}, id=f"gate{n}", queue=f"queue{n}", **fields)
        for n in range(8)
    ]
    await world.client.enqueue_many(jobs)
    lanes = [
        {"name": f"lane{number}", "attempts": 1000, "delay": 0.01, "hook": number == 1}
        for number in range(4)
    ]
    # On the host of an SQLite file no lease is waited for: a killed owner is known by its lock.
    lease = {"lease": 3600.0, "heartbeat": 1.0} if world.is_sqlite else ALONE
    config = {"lanes": lanes, **lease}
    workers: list[Worker] = [world.launch(name, **config) for name in "abcd"]
    results: dict[str, str] = {}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: kill_and_restart(world, ["c", "d"], dice, **config))

        async def cancel() -> None:
            results.update(await cancel_at_random(world, cancelled, dice))

        await world.ready(*workers)
        async with trio.open_nursery() as inner:
            inner.start_soon(cancel)
            await world.settled(seconds=3000 if IS_FULL else 240)
        nursery.cancel_scope.cancel()
    rows = world.check()
    kills = world.ledger.lines("kills")[0].facts["count"]
    assert kills >= KILLS
    assert all(worker.is_running for worker in workers[:2])

    assert set(rows) == {job.id for job in jobs}
    assert out_of_order(world.ledger, rows.values()) == []
    runs = Counter(run.job for run in world.ledger.executions())
    for job in jobs:
        row = rows[job.id]
        assert row["outcome"] == "cancelled" or row["outcome"] == "completed", row
        if results.get(job.id) == "recorded":
            assert row["outcome"] == "cancelled", row
        if row["outcome"] == "cancelled":
            assert row["cancellation_id"] is not None, row
        else:
            assert runs[job.id] >= 1, f"{job.id} is completed and never ran"
        # No more executions than were asked for, or than disappearances made necessary.
        retries = sum(step[1] for step in job.payload["steps"] if step[0] == "retry")
        assert runs[job.id] <= 1 + retries + row["recovery_count"], row
    assert sum(row["recovery_count"] for row in rows.values()) <= kills * len(lanes)
    # The hook ran at least once for each job of its lane that a handler has ended.
    hooks = {line.job for line in world.ledger.lines("hooked", how="returned")}
    assert {
        job.id for job in jobs if job.lane == "lane1" and rows[job.id]["outcome"] == "completed"
    } <= hooks


test_many_jobs = pytest.mark.timeout(3600 if IS_FULL else 300)(
    at_once(
        two_processes_and_2000_jobs_keep_the_order_of_50_queues,
        four_processes_keep_order_while_two_of_them_are_killed_again_and_again,
    )
)
