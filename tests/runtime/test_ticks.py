"""`tick`: one step of work for hosts that are woken from outside."""

from __future__ import annotations

from datetime import timedelta

import pytest
import trio

from trio_watchdog import (
    OTHERS,
    CompletingJob,
    Job,
    Lanes,
    QueuedJob,
    Recovery,
    RunningJob,
    SettledJob,
)
from trio_watchdog._model import to_instant
from trio_watchdog._rules import Settle
from trio_watchdog._runtime import HAND_OFF_LIMIT


@pytest.fixture
def ran():
    return []


@pytest.fixture
def lanes(ran):
    lanes = Lanes()

    async def hook(job: CompletingJob):
        ran.append(("hook", job.id))

    @lanes.lane("mail", on_completing=hook)
    async def mail(job: RunningJob):
        ran.append(("mail", job.id))
        await trio.sleep(1)

    @lanes.lane(OTHERS)
    async def others(job: RunningJob):
        ran.append(("others", job.id))

    return lanes


async def test_a_tick_runs_one_job_to_its_end(open_it, lanes, ran, store):
    async with open_it() as watchdog:
        await watchdog.enqueue_many([Job("mail", id="a"), Job("mail", id="b")])
        result = await watchdog.tick(lanes)
        assert (result.action, result.job_id) == ("ran", "a")
        assert result.wake.pending
        assert isinstance(await watchdog.read("a"), SettledJob)
        assert isinstance(await watchdog.read("b"), QueuedJob)
        assert (await watchdog.tick(lanes)).job_id == "b"
        result = await watchdog.tick(lanes)
        assert (result.action, result.job_id, result.wake.pending) == ("idle", None, False)
    assert ran == [("mail", "a"), ("hook", "a"), ("mail", "b"), ("hook", "b")]


async def test_a_tick_claims_no_second_job(open_it, ran, store):
    lanes = Lanes()

    @lanes.lane("mail")
    async def mail(job: RunningJob):
        ran.append(job.id)

    async with open_it() as watchdog:
        await watchdog.enqueue_many([Job("mail", id="a"), Job("mail", id="b")])
        store.calls.clear()
        await watchdog.tick(lanes)
        assert store.calls["claim"] == 1
        assert store.calls["hand_off"] == 0
        assert isinstance(await watchdog.read("b"), QueuedJob)


async def test_a_tick_gives_other_lanes_to_others_and_named_ones_never(open_it, lanes, ran):
    async with open_it() as watchdog:
        await watchdog.enqueue_many([Job("fax", id="f"), Job("mail", id="m")])
        while (await watchdog.tick(lanes)).action != "idle":
            pass
    assert sorted(ran) == [("hook", "m"), ("mail", "m"), ("others", "f")]


async def test_an_idle_tick_says_when_to_come_again(open_it, lanes, store):
    async with open_it() as watchdog:
        due = to_instant(store.now()) + timedelta(seconds=90)
        await watchdog.enqueue(Job("mail", not_before=due))
        result = await watchdog.tick(lanes)
        assert (result.action, result.wake.next_wake_at) == ("idle", due)


async def test_a_tick_finishes_a_completing_job_first(open_it, lanes, ran, store):
    await store.enqueue_many([Job("mail", id="c"), Job("mail", id="q")])
    await store.claim("mail", "dead", lease=1000)
    await store.decide("c", "dead", Settle("failed", "no stamps"), has_hook=True)
    await trio.sleep(2)
    async with open_it() as watchdog:
        result = await watchdog.tick(lanes)
        assert (result.action, result.job_id) == ("completed", "c")
        assert (await watchdog.read("c")).state == "settled"
    assert ran == [("hook", "c")]


async def test_a_tick_reconciles_one_disappeared_claim(open_it, lanes, ran, store):
    await store.enqueue_many([Job("mail", id=id, recovery=Recovery(1)) for id in "ab"])
    await store.claim("mail", "dead-a", lease=1000)
    await store.claim("mail", "dead-b", lease=1000)
    await trio.sleep(2)
    async with open_it() as watchdog:
        for id in "ab":
            result = await watchdog.tick(lanes)
            assert (result.action, result.job_id) == ("reconciled", id)
        assert (await watchdog.tick(lanes)).action == "ran"
    assert ran[0] == ("mail", "a")


async def test_a_tick_settles_a_cancelled_job(open_it, lanes, ran):
    async with open_it() as watchdog:
        await watchdog.enqueue(Job("mail", id="x"))
        await watchdog.cancel("x")
        result = await watchdog.tick(lanes)
        assert (result.action, result.job_id) == ("reconciled", "x")
        assert (await watchdog.read("x")).outcome == "cancelled"
    assert ran == []


async def test_lanes_take_turns(open_it, ran):
    lanes = Lanes()

    @lanes.lane("a")
    async def a(job: RunningJob):
        ran.append("a")

    @lanes.lane("b")
    async def b(job: RunningJob):
        ran.append("b")

    async with open_it() as watchdog:
        await watchdog.enqueue_many([Job(lane) for lane in "aaabbb"])
        for _ in range(6):
            assert (await watchdog.tick(lanes)).action == "ran"
    assert ran in (["a", "b"] * 3, ["b", "a"] * 3)


async def test_a_cancelled_tick_hands_its_job_off(open_it, lanes, store):
    async with open_it() as watchdog:
        await watchdog.enqueue(Job("mail", id="x"))
        with trio.move_on_after(0.5) as scope:
            await watchdog.tick(lanes)
        assert scope.cancelled_caught
        # Its handler has ended by then, as with any call that is cancelled.
        assert watchdog.running() == []
        assert isinstance(await watchdog.read("x"), QueuedJob)
        await watchdog.drain()
        assert isinstance(await watchdog.read("x"), QueuedJob)
        with pytest.raises(RuntimeError, match="stopping"):
            await watchdog.tick(lanes)


async def test_a_tick_that_is_cancelled_in_an_outage_gives_up_soon(open_it, lanes, store):
    with trio.move_on_after(1) as scope:
        async with open_it() as watchdog:
            await watchdog.enqueue(Job("mail", id="x"))
            store.fail("claim", when="after", times=None)
            await watchdog.tick(lanes)
    assert scope.cancelled_caught
    assert trio.current_time() <= 1 + 2 * HAND_OFF_LIMIT


async def test_a_hook_does_not_begin_in_a_tick_that_was_cancelled_before(open_it, store):
    called = []
    lanes = Lanes()

    @lanes.lane("mail", on_completing=lambda job: called.append(job.id))
    async def mail(job: RunningJob):
        pass

    async with open_it() as watchdog:
        await watchdog.enqueue(Job("mail", id="x"))
        store.delay("decide", 1, when="after")
        with trio.move_on_after(0.5) as scope:
            await watchdog.tick(lanes)
        assert scope.cancelled_caught
        assert called == []
        # Nobody has to wait for the lease.
        result = await watchdog.tick(lanes)
        assert (result.action, result.job_id) == ("completed", "x")
    assert called == ["x"]


async def test_ctrl_c_in_a_handler_leaves_a_tick_as_itself(open_it):
    lanes = Lanes()

    @lanes.lane("mail")
    async def mail(job: RunningJob):
        raise KeyboardInterrupt

    async def serve():
        async with open_it() as watchdog:
            await watchdog.enqueue(Job("mail"))
            await watchdog.tick(lanes)

    with pytest.raises(KeyboardInterrupt):
        await serve()


async def test_a_tick_that_a_stop_has_cut_short_says_so(open_it):
    lanes = Lanes()

    @lanes.lane("mail")
    async def mail(job: RunningJob):
        with trio.CancelScope(shield=True):
            await trio.sleep(HAND_OFF_LIMIT + 1)
        await trio.sleep(1)

    async with trio.open_nursery() as nursery:
        async with open_it(grace=0.1) as watchdog:
            await watchdog.enqueue(Job("mail", id="x"))

            async def tick():
                with pytest.raises(RuntimeError, match="has stopped"):
                    await watchdog.tick(lanes)

            nursery.start_soon(tick)
            await trio.sleep(0.5)


async def test_no_lanes_are_nothing_to_do(open_it):
    async with open_it() as watchdog:
        await watchdog.enqueue(Job("mail"))
        assert (await watchdog.tick(Lanes())).action == "idle"
