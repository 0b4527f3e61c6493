"""What a job leaves behind in the process: nothing."""

from __future__ import annotations

import gc

import trio

from trio_watchdog import Job, RunningJob, Watchdog, open_watchdog

CHUNK = 5000


async def run_chunk(watchdog: Watchdog) -> tuple[int, int]:
    """Run some no-op jobs; the Python objects and the tasks that there are afterwards."""
    await watchdog.enqueue_many([Job("noop") for _ in range(CHUNK)])
    await watchdog.wait_idle()
    gc.collect()
    return len(gc.get_objects()), trio.lowlevel.current_statistics().tasks_living


async def test_50000_jobs_through_32_lanes_leave_objects_and_tasks_flat() -> None:
    count = 0

    async def noop(job: RunningJob) -> None:
        nonlocal count
        count += 1

    async with open_watchdog(":memory:") as watchdog:
        await watchdog.start_lane("noop", noop, workers=32)
        objects, tasks = await run_chunk(watchdog)
        for _ in range(9):
            last_objects, last_tasks = await run_chunk(watchdog)
        assert count == 50_000
        assert last_tasks == tasks
        # Far less than one object for each of 45,000 jobs.
        assert last_objects < objects + 2000
        assert watchdog.statistics().claims == 0
