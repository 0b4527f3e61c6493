"""The completion hook runs at least once between the durable decision and `settled`."""

from __future__ import annotations

from itertools import pairwise

import attrs
import pytest
import trio

from trio_watchdog import (
    Complete,
    CompletingJob,
    Fail,
    Job,
    OutcomeUnknown,
    RetryPolicy,
    RunningJob,
    SettledJob,
)
from trio_watchdog._rules import Settle
from trio_watchdog._runtime import HAND_OFF_LIMIT


async def test_the_hook_sees_the_decision_and_the_job_settles_afterwards(open_it, store):
    seen = []

    async def handler(job: RunningJob):
        return Fail("no stamps")

    async def hook(job: CompletingJob):
        row = await store.read(job.id)
        seen.append((job.outcome, job.reason, row.state, job.payload))

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler, on_completing=hook)
        await watchdog.enqueue(Job("mail", {"to": "ada"}, id="x"))
        settled = await watchdog.wait_settled("x")
    assert seen == [("failed", "no stamps", "completing", {"to": "ada"})]
    assert (settled.outcome, settled.reason) == ("failed", "no stamps")


async def test_the_hook_may_be_a_plain_function(open_it):
    seen: list[CompletingJob] = []

    async def handler(job: RunningJob):
        pass

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler, on_completing=seen.append)
        await watchdog.enqueue(Job("mail", id="x"))
        await watchdog.wait_settled("x")
    assert [job.id for job in seen] == ["x"]


@pytest.mark.parametrize("said", [Complete(), OutcomeUnknown(), Fail("x"), ValueError("x")])
async def test_the_hook_runs_for_every_way_in_which_a_handler_ends_a_job(open_it, said):
    seen = []

    async def handler(job: RunningJob):
        if isinstance(said, Exception):
            raise said
        return said

    async def hook(job: CompletingJob):
        seen.append(job.outcome)

    async with open_it() as watchdog:
        await watchdog.start_lane(
            "mail", handler, on_completing=hook, retry=RetryPolicy(2, delay=0)
        )
        await watchdog.enqueue(Job("mail", id="x"))
        settled = await watchdog.wait_settled("x")
    assert seen == [settled.outcome]


async def test_the_hook_runs_for_a_cancelled_run_and_is_not_itself_cancelled(open_it):
    started = trio.Event()
    seen = []

    async def handler(job: RunningJob):
        started.set()
        await trio.sleep_forever()

    async def hook(job: CompletingJob):
        # Long enough for renewals, which tell that the cancellation is requested.
        await trio.sleep(60)
        seen.append((job.outcome, job.cancellation_id))

    async with open_it(lease=30) as watchdog:
        await watchdog.start_lane("mail", handler, on_completing=hook)
        await watchdog.enqueue(Job("mail", id="x"))
        await started.wait()
        await watchdog.cancel("x", cancellation_id="c")
        assert (await watchdog.wait_settled("x")).outcome == "cancelled"
    assert seen == [("cancelled", "c")]


async def test_a_hook_that_fails_is_called_again_with_back_off_and_blocks_its_queue(open_it, ends):
    at = []
    ran = []

    async def handler(job: RunningJob):
        ran.append(job.id)

    async def hook(job: CompletingJob):
        at.append(trio.current_time())
        if len(at) < 4:
            assert ran == ["a"]
            raise ConnectionError("the hook's own service is away")

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler, on_completing=hook, workers=2)
        await watchdog.enqueue_many([Job("mail", id=id, queue="q") for id in "ab"])
        await watchdog.wait_settled("b")
    assert ran == ["a", "b"]
    gaps = [later - earlier for earlier, later in pairwise(at[:4])]
    assert gaps == sorted(gaps)
    assert gaps[0] < 1.1
    assert 2 <= gaps[2] <= 4.1
    assert ends.causes("a") == ["completed"]


async def test_a_lane_claims_its_next_job_only_after_the_hook(open_it, store):
    held = []

    async def handler(job: RunningJob):
        return None

    async def hook(job: CompletingJob):
        await trio.sleep(5)
        if job.id == "a":
            held.append((await store.read("b")).state)

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler, on_completing=hook)
        await watchdog.enqueue_many([Job("mail", id="a"), Job("mail", id="b")])
        await watchdog.wait_settled("b")
    assert held == ["queued"]


async def test_a_long_hook_keeps_its_lease(open_it, store):
    async def handler(job: RunningJob):
        return None

    calls = []

    async def hook(job: CompletingJob):
        calls.append(job.token)
        await trio.sleep(100)

    async with open_it(lease=30) as watchdog:
        await watchdog.start_lane("mail", handler, on_completing=hook)
        await watchdog.enqueue(Job("mail", id="x"))
        await watchdog.wait_settled("x")
    assert len(calls) == 1


async def test_a_hook_that_loses_its_lease_is_cut_short_and_taken_over(open_it, store):
    calls = []

    async def handler(job: RunningJob):
        return None

    async def hook(job: CompletingJob):
        calls.append(job.token)
        if len(calls) == 1:
            store.fail("renew", times=3)
            await trio.sleep_forever()

    async with open_it(lease=30) as watchdog:
        await watchdog.start_lane("mail", handler, on_completing=hook)
        await watchdog.enqueue(Job("mail", id="x"))
        store.fail("renew", times=40)
        assert (await watchdog.wait_settled("x")).outcome == "completed"
    assert len(calls) == 2
    assert calls[0] != calls[1]


async def test_a_stop_leaves_a_hook_completing_and_the_next_start_finishes_it(open_it, store):
    started = trio.Event()
    handled = []

    async def handler(job: RunningJob):
        handled.append(job.id)

    async def stuck(job: CompletingJob):
        started.set()
        await trio.sleep_forever()

    async with open_it(grace=2) as watchdog:
        await watchdog.start_lane("mail", handler, on_completing=stuck)
        await watchdog.enqueue(Job("mail", id="x"))
        await started.wait()
    assert isinstance(await store.read("x"), CompletingJob)
    finished = []

    async def hook(job: CompletingJob):
        finished.append(job.id)

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler, on_completing=hook)
        await watchdog.wait_settled("x")
    assert (handled, finished) == (["x"], ["x"])


async def test_a_hook_does_not_begin_once_the_watchdog_is_interrupted(open_it, store):
    called = []
    recording = trio.Event()

    async def handler(job: RunningJob):
        recording.set()

    async def hook(job: CompletingJob):
        called.append(job.id)

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler, on_completing=hook)
        store.delay("decide", 2, when="after")
        await watchdog.enqueue(Job("mail", id="x"))
        await recording.wait()
        await trio.sleep(1)
        began = trio.current_time()
        watchdog.interrupt()
    # At once, and not when the bound of the stop is reached.
    assert trio.current_time() - began < 2
    assert called == []
    assert isinstance(await store.read("x"), CompletingJob)


async def test_a_hook_that_outlives_the_stop_leaves_no_lease_behind(open_it, store):
    async def nothing(job: RunningJob):
        pass

    async def hook(job: CompletingJob):
        with trio.CancelScope(shield=True):
            await trio.sleep(HAND_OFF_LIMIT + 1)
        await trio.sleep(1)

    async with open_it(grace=0.2) as watchdog:
        await watchdog.start_lane("mail", nothing, on_completing=hook)
        await watchdog.enqueue(Job("mail", id="x"))
        await trio.sleep(0.5)
    job = await store.take_completing("t", lanes=("mail",))
    assert job is not None
    assert job.id == "x"


async def leave_completing(store, id, lane="mail"):
    """A job whose owner disappeared between its decision and its hook."""
    await store.enqueue(Job(lane, {"n": id}, id=id))
    await store.claim(lane, f"dead-{id}", lease=1000)
    await store.decide(id, f"dead-{id}", Settle("completed"), has_hook=True)


async def test_orphaned_completions_are_taken_over_once_their_lease_has_ended(open_it, store):
    for id in ("a", "b", "c"):
        await leave_completing(store, id)
    finished = []

    async def handler(job: RunningJob):
        pytest.fail("the handler must not run again")

    async def hook(job: CompletingJob):
        finished.append(job.id)
        await trio.sleep(1)

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler, on_completing=hook)
        for id in ("a", "b", "c"):
            await watchdog.wait_settled(id)
    assert sorted(finished) == ["a", "b", "c"]


@pytest.mark.parametrize("has_hook", [True, False])
async def test_a_completion_may_be_taken_over_while_the_block_ends(open_it, store, has_hook):
    async def handler(job: RunningJob):
        return None

    async def hook(job: CompletingJob):
        await trio.sleep(1)

    await leave_completing(store, "x")
    await trio.sleep(121)
    # Every lane has ended before the supervisor hears what it has taken.
    store.delay("take_completing", 3, when="after")
    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler, on_completing=hook if has_hook else None)
        await trio.sleep(1)
        assert store.calls["take_completing"] == 1
    # A stop begins no hook; the next start does.
    assert isinstance(await store.read("x"), CompletingJob if has_hook else SettledJob)


async def test_takeovers_are_at_most_as_many_as_the_lane_has_workers(open_it, store):
    for id in "abcde":
        await leave_completing(store, id)
    now = []
    most = []

    async def handler(job: RunningJob):
        return None

    async def hook(job: CompletingJob):
        now.append(job.id)
        most.append(len(now))
        await trio.sleep(1)
        now.remove(job.id)

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler, on_completing=hook, workers=2)
        for id in "abcde":
            await watchdog.wait_settled(id)
    assert max(most) == 2


async def test_a_lane_without_a_hook_finishes_an_orphaned_completion_at_once(open_it, store):
    await leave_completing(store, "x")

    async def handler(job: RunningJob):
        pytest.fail("the handler must not run again")

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler)
        assert (await watchdog.wait_settled("x")).outcome == "completed"


async def test_a_lost_answer_about_the_decision_does_not_lose_the_hook(open_it, store):
    seen = []

    async def handler(job: RunningJob):
        return None

    async def hook(job: CompletingJob):
        seen.append(job.id)

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler, on_completing=hook)
        store.fail("decide", when="after")
        store.fail("finish_completing", when="after")
        await watchdog.enqueue(Job("mail", id="x"))
        await watchdog.wait_settled("x")
        await watchdog.wait_idle()
    assert seen == ["x"]


async def test_the_hook_gets_the_typed_payload_where_it_fits(open_it):
    @attrs.frozen
    class Letter:
        to: str

    seen = []

    async def handler(job: RunningJob):
        return None

    async def hook(job: CompletingJob):
        seen.append((job.payload, job.outcome))

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler, on_completing=hook, payload=Letter)
        await watchdog.enqueue(Job("mail", {"to": "ada"}, id="x"))
        await watchdog.wait_settled("x")
        await watchdog.enqueue(Job("mail", {"too": 1}, id="y"))
        await watchdog.wait_settled("y")
    assert seen == [(Letter("ada"), "completed"), ({"too": 1}, "failed")]
