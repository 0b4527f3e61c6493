"""Attempts, back-off, and what a crash in the middle of an attempt leaves behind."""

from __future__ import annotations

from itertools import pairwise

import pytest
import trio

from trio_watchdog import Complete, Fail, Job, QueuedJob, Recovery, Retry, RetryPolicy, RunningJob


async def test_attempts_follow_each_other_by_the_policys_delays(open_it):
    at = []

    async def handler(job: RunningJob):
        at.append(trio.current_time())
        if not job.attempt.is_last:
            raise ValueError("not yet")

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler, retry=RetryPolicy(4, delay=2.0, factor=3.0))
        await watchdog.enqueue(Job("mail", id="x"))
        settled = await watchdog.wait_settled("x")
    assert settled.outcome == "completed"
    assert settled.attempt_count == 4
    gaps = [later - earlier for earlier, later in pairwise(at)]
    # A delay begins when its attempt does, so that a crash cannot dodge it.
    assert gaps == pytest.approx([2.0, 6.0, 18.0], abs=0.01)


async def test_the_last_attempt_fails_the_job_with_the_attempts_and_the_last_error(open_it, ends):
    async def handler(job: RunningJob):
        raise ValueError(f"no {job.attempt.count}")

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler, retry=RetryPolicy(3, delay=0.1))
        await watchdog.enqueue(Job("mail", id="x"))
        settled = await watchdog.wait_settled("x")
        await watchdog.wait_idle()
    assert settled.outcome == "failed"
    assert settled.reason == "attempt 3 of 3: ValueError: no 3"
    assert ends.causes("x") == ["retry", "retry", "failed"]
    assert [record.__dict__["attempt"] for record in ends.of("x")] == [1, 2, 3]


async def test_a_handler_may_say_when_it_wants_to_run_again(open_it):
    at = []

    async def handler(job: RunningJob):
        at.append(trio.current_time())
        return Retry(after=7.5, reason="busy") if len(at) == 1 else Complete()

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler)
        await watchdog.enqueue(Job("mail", id="x"))
        await watchdog.wait_settled("x")
    assert at[1] - at[0] == pytest.approx(7.5, abs=0.01)


async def test_a_retry_without_a_policy_is_not_limited(open_it):
    counts = []

    async def handler(job: RunningJob):
        counts.append(job.attempt.count)
        return Retry() if len(counts) < 6 else Complete()

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler)
        await watchdog.enqueue(Job("mail", id="x"))
        await watchdog.wait_settled("x")
    assert counts == [1, 2, 3, 4, 5, 6]


async def test_a_retried_job_blocks_its_queue_while_it_waits(open_it):
    order = []

    async def handler(job: RunningJob):
        order.append((job.id, job.attempt.count))
        if job.id == "a" and job.attempt.count == 1:
            raise ValueError

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler, workers=3, retry=RetryPolicy(2, delay=5))
        await watchdog.enqueue_many([Job("mail", id=id, queue="q") for id in "abc"])
        await watchdog.wait_settled("c")
    assert order == [("a", 1), ("a", 2), ("b", 1), ("c", 1)]


async def test_the_policy_may_depend_on_the_job(open_it):
    counts = []

    def retry(job: RunningJob) -> RetryPolicy | None:
        return RetryPolicy(job.payload, delay=0) if job.payload else None

    async def handler(job: RunningJob):
        counts.append((job.id, job.attempt.count, job.attempt.max_attempts))
        raise ValueError

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler, retry=retry)
        await watchdog.enqueue(Job("mail", 2, id="two"))
        assert (await watchdog.wait_settled("two")).reason == "attempt 2 of 2: ValueError"
        await watchdog.enqueue(Job("mail", id="none"))
        assert (await watchdog.wait_settled("none")).reason == "ValueError"
    assert counts == [("two", 1, 2), ("two", 2, 2), ("none", 1, None)]


async def test_an_attempt_counts_though_the_callable_wants_no_policy(open_it):
    seen = []

    async def handler(job: RunningJob):
        seen.append((job.attempt.count, job.attempt_count))

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler, retry=lambda job: None)
        await watchdog.enqueue(Job("mail", id="x"))
        assert (await watchdog.wait_settled("x")).attempt_count == 1
    assert seen == [(1, 1)]


async def test_a_policy_callable_that_raises_fails_only_its_job(open_it, ends):
    def retry(job: RunningJob) -> RetryPolicy | None:
        if job.id == "x":
            raise LookupError("no such customer")
        return "often" if job.id == "y" else None

    async def handler(job: RunningJob):
        return None

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler, retry=retry)
        await watchdog.enqueue_many([Job("mail", id=id) for id in "xyz"])
        assert (await watchdog.wait_settled("x")).reason == "LookupError: no such customer"
        assert "retry returned 'often'" in (await watchdog.wait_settled("y")).reason
        assert (await watchdog.wait_settled("z")).outcome == "completed"
    assert ends.causes("x") == ["failed"]


async def test_an_attempt_is_counted_before_the_handler_runs(open_it, store):
    seen = []

    async def handler(job: RunningJob):
        row = await store.read(job.id)
        seen.append((row.attempt_count, row.not_before is not None, job.attempt_count))

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler, retry=RetryPolicy(3, delay=60))
        await watchdog.enqueue(Job("mail", id="x"))
        await watchdog.wait_settled("x")
    assert seen == [(1, True, 1)]


async def test_a_job_whose_last_attempt_disappeared_fails_without_running(open_it, store, ends):
    policy = RetryPolicy(1)
    await store.enqueue(Job("mail", id="x", recovery=Recovery(3)))
    claimed = await store.claim("mail", "dead", lease=1000, counts=False)
    assert claimed.job is not None
    assert (await store.reserve_attempt("x", "dead", policy)).status == "reserved"
    ran = []

    async def handler(job: RunningJob):
        ran.append(job.id)

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler, retry=policy)
        settled = await watchdog.wait_settled("x")
        await watchdog.wait_idle()
    assert settled.outcome == "failed"
    assert "no attempt left" in settled.reason
    assert ran == []
    assert ends.causes("x") == ["disappeared", "failed"]


async def test_a_handed_off_attempt_is_given_back(open_it, store):
    started = trio.Event()

    async def handler(job: RunningJob):
        started.set()
        await trio.sleep_forever()

    for _ in range(3):
        started = trio.Event()
        async with open_it(grace=0) as watchdog:
            await watchdog.start_lane("mail", handler, retry=RetryPolicy(1))
            await watchdog.enqueue(Job("mail", id="x"))
            await started.wait()
    job = await store.read("x")
    assert isinstance(job, QueuedJob)
    assert job.attempt_count == 0


async def test_a_timed_out_attempt_is_retried(open_it, ends):
    async def handler(job: RunningJob):
        if job.attempt.count == 1:
            await trio.sleep_forever()
        return Fail(f"attempt {job.attempt.count}")

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler, timeout=3, retry=RetryPolicy(2, delay=1))
        await watchdog.enqueue(Job("mail", id="x"))
        assert (await watchdog.wait_settled("x")).reason == "attempt 2"
    assert ends.causes("x") == ["timeout", "failed"]
