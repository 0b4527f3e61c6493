"""The runtime on a server: lanes, renewal from a thread, cancels and jobs from elsewhere."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import trio

from trio_watchdog import (
    Complete,
    CompletingJob,
    Fail,
    Job,
    QueuedJob,
    RetryPolicy,
    RunningJob,
    open_client,
    open_watchdog,
)
from trio_watchdog._model import to_instant
from trio_watchdog._psycopg import TrioConnection


async def test_jobs_run_retry_and_complete(postgres_database):
    hooks = []

    async def handler(job: RunningJob):
        if job.attempt.count < job.payload:
            raise ValueError("not yet")
        return Fail("enough") if job.payload == 3 else Complete()

    async def hook(job: CompletingJob):
        hooks.append((job.id, job.outcome))

    async with open_watchdog(postgres_database) as watchdog:
        await watchdog.start_lane(
            "mail", handler, workers=4, retry=RetryPolicy(5, delay=0.05), on_completing=hook
        )
        await watchdog.enqueue_many([Job("mail", n % 4, id=f"{n}") for n in range(40)])
        with trio.fail_after(60):
            for n in range(40):
                settled = await watchdog.wait_settled(f"{n}")
                assert settled.outcome == ("failed" if n % 4 == 3 else "completed")
                assert settled.attempt_count == max(n % 4, 1)
            await watchdog.wait_idle()
    assert len(hooks) == 40


async def test_a_cancel_and_a_job_from_another_client_arrive_quickly(postgres_database):
    started = trio.Event()

    async def handler(job: RunningJob):
        started.set()
        await trio.sleep_forever()

    async with open_watchdog(postgres_database, poll=60) as watchdog:
        await watchdog.start_lane("mail", handler)
        async with open_client(postgres_database, poll=60) as client:
            with trio.fail_after(20):
                await client.enqueue(Job("mail", id="x"))
                await started.wait()
                await client.cancel("x")
                assert (await client.wait_settled("x")).outcome == "cancelled"


async def test_deferred_jobs_start_when_due_by_the_servers_clock(postgres_database):
    late = {}

    async with (
        await TrioConnection.connect(postgres_database, autocommit=True) as connection,
        open_watchdog(postgres_database, poll=60) as watchdog,
    ):

        async def handler(job: RunningJob):
            # What the process believes of the server's clock is off by what an answer took.
            cursor = await connection.execute("select clock_timestamp()")
            ((now,),) = await cursor.fetchall()
            late[job.id] = (now - job.not_before).total_seconds()

        await watchdog.start_lane("mail", handler)
        await watchdog.wait_idle()
        now = watchdog._runtime.store.now()
        assert now is not None
        # Time enough to enqueue them all; of those that a busy machine finds due together the first
        # one has the highest priority.
        for seconds, priority in ((2.4, 2), (2.0, 3), (2.8, 1)):
            due = to_instant(now) + timedelta(seconds=seconds)
            job = Job("mail", id=str(seconds), not_before=due, priority=priority)
            await watchdog.enqueue(job)
        with trio.fail_after(30):
            await watchdog.wait_settled("2.8")
    assert list(late) == ["2.0", "2.4", "2.8"]
    # Not before, and when it is due rather than with the poll.
    assert all(0 <= seconds < 20 for seconds in late.values()), late


async def test_a_handler_that_blocks_for_more_than_a_lease_keeps_its_job(postgres_database):
    async def handler(job: RunningJob):
        time.sleep(4.5)  # noqa: ASYNC251 (what a handler should not do)
        await trio.sleep(0.05)
        return Complete()

    # It may stand still for three seconds besides, for the machine may be busy.
    async with open_watchdog(postgres_database, lease=4, heartbeat=0.2) as watchdog:
        await watchdog.start_lane("mail", handler)
        await watchdog.enqueue(Job("mail", id="x"))
        assert (await watchdog.wait_settled("x")).outcome == "completed"


async def test_a_cancelled_block_hands_off(postgres_database):
    started = trio.Event()

    async def handler(job: RunningJob):
        started.set()
        await trio.sleep_forever()

    with trio.CancelScope() as scope:
        async with open_watchdog(postgres_database) as watchdog:
            await watchdog.start_lane("mail", handler, retry=RetryPolicy(1))
            await watchdog.enqueue(Job("mail", id="x"))
            await started.wait()
            scope.cancel()
            await trio.sleep_forever()
    async with open_client(postgres_database) as client:
        job = await client.read("x")
        assert isinstance(job, QueuedJob)
        assert job.attempt_count == 0


@pytest.mark.parametrize("workers", [1, 8])
async def test_two_watchdogs_share_a_database_and_run_each_job_once(postgres_database, workers):
    ran = []

    async def handler(job: RunningJob):
        ran.append(job.id)

    async with (
        open_watchdog(postgres_database) as first,
        open_watchdog(postgres_database) as second,
    ):
        for watchdog in (first, second):
            await watchdog.start_lane("mail", handler, workers=workers)
        await first.enqueue_many([Job("mail", id=f"{n}", queue=f"{n % 20}") for n in range(300)])
        with trio.fail_after(120):
            for n in range(300):
                await second.wait_settled(f"{n}")
    assert sorted(ran) == sorted(f"{n}" for n in range(300))


async def test_a_dead_server_does_not_hold_up_a_stop(start_server, monkeypatch):
    monkeypatch.setattr("trio_watchdog._runtime.HAND_OFF_LIMIT", 2.0)
    server = start_server()
    started = trio.Event()

    async def handler(job: RunningJob):
        started.set()
        await trio.sleep_forever()

    with trio.CancelScope() as scope:
        async with open_watchdog(server.url) as watchdog:
            await watchdog.start_lane("mail", handler)
            await watchdog.enqueue(Job("mail", id="x"))
            await started.wait()
            await trio.to_thread.run_sync(server.stop, "kill")
            began = trio.current_time()
            scope.cancel()
            await trio.sleep_forever()
    assert trio.current_time() - began < 12


async def test_lanes_resume_when_a_server_returns(start_server):
    server = start_server()
    ran = []

    async def handler(job: RunningJob):
        ran.append(job.id)

    async with open_watchdog(server.url) as watchdog:
        await watchdog.start_lane("mail", handler)
        await watchdog.enqueue(Job("mail", id="a"))
        await watchdog.wait_settled("a")
        await trio.to_thread.run_sync(server.stop, "kill")
        await trio.sleep(0.5)
        await trio.to_thread.run_sync(server.start)
        with trio.fail_after(60):
            await watchdog.enqueue(Job("mail", id="b"))
            await watchdog.wait_settled("b")
    assert ran == ["a", "b"]
