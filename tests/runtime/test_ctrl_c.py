"""Ctrl-C may come at any moment; it never splits what the runtime does in two."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import trio

from trio_watchdog import Job, RunningJob, open_client, open_watchdog

IN_REAL_TIME = True


@pytest.fixture(autouse=True)
def ctrl_c_is_heard():
    # Shells start background jobs with the signal ignored, and Python then leaves it at that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("delay", [n * 0.007 for n in range(12)])
def test_ctrl_c_hands_off_what_runs_and_leaves_no_claim(tmp_path, delay):
    path = tmp_path / "jobs.db"
    started = threading.Event()

    async def quick(job: RunningJob):
        started.set()
        await trio.lowlevel.checkpoint()

    async def slow(job: RunningJob):
        await trio.sleep_forever()

    def press():
        started.wait()
        time.sleep(delay)
        os.kill(os.getpid(), signal.SIGINT)

    async def serve():
        async with open_watchdog(path, synchronous="normal") as watchdog:
            await watchdog.enqueue_many([Job("quick", id=f"q{n}") for n in range(2000)])
            await watchdog.enqueue_many([Job("slow", id=f"s{n}") for n in range(4)])
            threading.Thread(target=press, daemon=True).start()
            await watchdog.start_lane("quick", quick, workers=8)
            await watchdog.start_lane("slow", slow, workers=2)
            await trio.sleep_forever()

    async def check():
        async with open_client(path) as client:
            assert await client.list_jobs("running") == []
            queued = await client.list_jobs("queued", limit=5000)
            settled = await client.list_jobs("settled", limit=5000)
            assert len(queued) + len(settled) == 2004
            assert {job.id for job in queued} >= {f"s{n}" for n in range(4)}
            assert all(job.attempt_count == 0 for job in queued)

    # Not by pytest-trio: Ctrl-C goes to the main task.
    with pytest.raises(KeyboardInterrupt):
        trio.run(serve)
    trio.run(check)
