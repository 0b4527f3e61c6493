"""Handlers in threads and in asyncio, with real time, for threads do not follow a mock clock."""

from __future__ import annotations

import asyncio
import contextvars
import sqlite3
import threading
import time

import pytest
import trio
import trio_asyncio

from trio_watchdog import (
    Complete,
    ExecutionFailed,
    Fail,
    Job,
    QueuedJob,
    RetryPolicy,
    RunningJob,
    SettledJob,
    asyncio_handler,
    open_watchdog,
    thread_handler,
)
from trio_watchdog._open import open_store

IN_REAL_TIME = True

variable = contextvars.ContextVar("variable", default="unset")


# -- threads --------------------------------------------------------------------------------------


async def test_a_plain_function_runs_in_a_thread_and_says_how_the_job_ended():
    threads = []

    @thread_handler
    def handler(job: RunningJob):
        threads.append((threading.get_ident(), variable.get()))
        return Fail(f"{job.payload} at {job.attempt.count}")

    variable.set("of the program")
    async with open_watchdog(":memory:") as watchdog:
        await watchdog.start_lane("mail", handler)
        await watchdog.enqueue(Job("mail", "no", id="x"))
        assert (await watchdog.wait_settled("x")).reason == "no at 1"
    ((ident, value),) = threads
    assert ident != threading.get_ident()
    assert value == "of the program"


async def test_checkpoint_tells_a_thread_to_stop():
    started = threading.Event()

    @thread_handler
    def handler(job: RunningJob):
        started.set()
        while True:
            job.checkpoint()
            time.sleep(0.005)

    async with open_watchdog(":memory:") as watchdog:
        await watchdog.start_lane("mail", handler, retry=RetryPolicy(2))
        await watchdog.enqueue(Job("mail", id="x"))
        await trio.to_thread.run_sync(started.wait)
        await watchdog.cancel("x")
        assert (await watchdog.wait_settled("x")).outcome == "cancelled"


async def test_until_a_thread_returns_its_job_is_not_settled_and_its_lane_occupied():
    started, go_on = threading.Event(), threading.Event()
    order = []

    @thread_handler
    def handler(job: RunningJob):
        order.append(job.id)
        if job.id == "a":
            started.set()
            go_on.wait(10)

    async with open_watchdog(":memory:") as watchdog:
        await watchdog.start_lane("mail", handler)
        await watchdog.enqueue_many([Job("mail", id="a"), Job("mail", id="b")])
        await trio.to_thread.run_sync(started.wait)
        await watchdog.cancel("a")
        await trio.sleep(0.2)
        assert isinstance(await watchdog.read("a"), RunningJob)
        assert isinstance(await watchdog.read("b"), QueuedJob)
        go_on.set()
        assert (await watchdog.wait_settled("a")).outcome == "cancelled"
        assert (await watchdog.wait_settled("b")).outcome == "completed"


async def test_a_stop_waits_for_a_thread_and_hands_its_job_off():
    started, go_on = threading.Event(), threading.Event()

    @thread_handler
    def handler(job: RunningJob):
        started.set()
        go_on.wait(10)
        return Complete()

    async with open_store(":memory:") as store:
        async with trio.open_nursery() as nursery:

            async def run(*, task_status=trio.TASK_STATUS_IGNORED):
                async with open_watchdog(store, grace=0.05) as watchdog:
                    await watchdog.start_lane("mail", handler)
                    await watchdog.enqueue(Job("mail", id="x"))
                    await trio.to_thread.run_sync(started.wait)
                    task_status.started()

            await nursery.start(run)
            await trio.sleep(0.3)
            assert isinstance(await store.read("x"), RunningJob)
            go_on.set()
        assert isinstance(await store.read("x"), QueuedJob)


async def test_threads_of_lanes_do_not_wait_for_trios_default_limiter(until):
    go_on = threading.Event()
    running = []

    @thread_handler
    def handler(job: RunningJob):
        running.append(job.id)
        go_on.wait(10)

    async with open_watchdog(":memory:") as watchdog:
        await watchdog.start_lane("mail", handler, workers=60)
        await watchdog.enqueue_many([Job("mail") for _ in range(60)])
        await until(lambda: len(running) == 60, step=0.01, limit=60)
        assert await trio.to_thread.run_sync(lambda: 3) == 3
        assert trio.to_thread.current_default_thread_limiter().borrowed_tokens == 0
        go_on.set()
        await watchdog.wait_idle()


# -- asyncio --------------------------------------------------------------------------------------


async def test_an_asyncio_coroutine_function_is_a_handler():
    @asyncio_handler
    async def handler(job: RunningJob):
        await asyncio.sleep(0.01)
        job.checkpoint()
        if job.payload == "raise":
            raise ValueError("no stamps")
        return Fail(f"{job.payload}")

    async with open_watchdog(":memory:") as watchdog:
        await watchdog.start_lane("mail", handler, workers=2)
        await watchdog.enqueue_many([Job("mail", "no", id="x"), Job("mail", "raise", id="y")])
        assert (await watchdog.wait_settled("x")).reason == "no"
        assert (await watchdog.wait_settled("y")).reason == "ValueError: no stamps"


async def test_cancelling_the_scope_cancels_the_asyncio_task_and_waits_for_it():
    started = trio.Event()
    steps = []

    @asyncio_handler
    async def handler(job: RunningJob):
        try:
            started.set()
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            await asyncio.sleep(0.05)
            steps.append(job.cancel_reason)
            raise

    async with open_watchdog(":memory:") as watchdog:
        await watchdog.start_lane("mail", handler)
        await watchdog.enqueue(Job("mail", id="x"))
        await started.wait()
        await watchdog.cancel("x")
        assert (await watchdog.wait_settled("x")).outcome == "cancelled"
    assert steps == ["cancellation"]


async def test_an_asyncio_task_that_cancels_itself_has_failed_and_the_lane_goes_on():
    @asyncio_handler
    async def handler(job: RunningJob):
        if job.id == "x":
            raise asyncio.CancelledError

    async with open_watchdog(":memory:") as watchdog:
        await watchdog.start_lane("mail", handler)
        await watchdog.enqueue_many([Job("mail", id="x"), Job("mail", id="y")])
        assert "cancelled from within" in (await watchdog.wait_settled("x")).reason
        assert (await watchdog.wait_settled("y")).outcome == "completed"


async def test_a_loop_around_the_watchdog_is_shared_by_its_handlers():
    loops = []

    @asyncio_handler
    async def handler(job: RunningJob):
        loops.append(asyncio.get_running_loop())

    async with trio_asyncio.open_loop(), open_watchdog(":memory:") as watchdog:
        await watchdog.start_lane("mail", handler)
        await watchdog.enqueue_many([Job("mail"), Job("mail")])
        await watchdog.wait_idle()
    assert loops[0] is loops[1]


async def test_a_limit_cancels_an_asyncio_handler_and_its_attempt_has_failed():
    runs = []

    @asyncio_handler
    async def handler(job: RunningJob):
        runs.append(job.attempt.count)
        if len(runs) == 1:
            await asyncio.sleep(60)

    async with open_watchdog(":memory:") as watchdog:
        await watchdog.start_lane("mail", handler, timeout=3, retry=RetryPolicy(2, delay=0))
        await watchdog.enqueue(Job("mail", id="x"))
        settled = await watchdog.wait_settled("x")
    assert (settled.outcome, settled.cancellation_id) == ("completed", None)
    assert runs == [1, 2]


async def test_a_thread_handler_may_ask_why_it_is_cancelled():
    reasons = []
    asked = threading.Event()

    @thread_handler
    def handler(job: RunningJob):
        reasons.append(job.cancel_reason)
        asked.set()
        while job.cancel_reason is None:
            time.sleep(0.01)
        reasons.append(job.cancel_reason)

    async with open_watchdog(":memory:") as watchdog:
        await watchdog.start_lane("mail", handler)
        await watchdog.enqueue(Job("mail", id="x"))
        await trio.to_thread.run_sync(asked.wait)
        await watchdog.cancel("x")
        assert (await watchdog.wait_settled("x")).outcome == "cancelled"
    assert reasons == [None, "cancellation"]


async def test_a_missing_trio_asyncio_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "trio_asyncio", None)

    async def handler(job: RunningJob):
        return None

    with pytest.raises(ExecutionFailed, match=r"install trio-watchdog\[asyncio\]"):
        asyncio_handler(handler)


async def test_a_watchdog_on_the_callers_connection_leaves_it_open():
    connection = sqlite3.connect(":memory:", isolation_level=None)
    async with open_watchdog(connection) as watchdog:
        await watchdog.enqueue(Job("mail", id="x"))
    assert connection.execute("select id from watchdog_jobs").fetchone() == ("x",)
    async with open_watchdog(connection) as watchdog:
        await watchdog.start_lane("mail", thread_handler(lambda job: None))
        assert isinstance(await watchdog.wait_settled("x"), SettledJob)
    connection.close()
