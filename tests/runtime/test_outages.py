"""The store goes away, loses answers, refuses, or turns out to be rotten."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.kinds import THEMSELVES
from trio_watchdog import (
    ClaimUnavailable,
    Complete,
    Fail,
    Job,
    QueuedJob,
    Recovery,
    Retry,
    RetryPolicy,
    RunningJob,
    SettlementRejected,
    StoreInvalid,
    StoreUnavailable,
    open_client,
    open_watchdog,
)
from trio_watchdog._outage import Outage
from trio_watchdog._store import ELSEWHERE


@pytest.fixture(params=THEMSELVES)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


async def nothing(job: RunningJob):
    return None


class Counting:
    """A handler that counts its runs by job."""

    def __init__(self, says=None, duration=0.0) -> None:
        self.runs: list[str] = []
        self.says = says
        self.duration = duration

    async def __call__(self, job: RunningJob):
        self.runs.append(job.id)
        await trio.sleep(self.duration)
        return self.says


async def test_a_claim_that_waited_long_to_be_sent_is_run_all_the_same(open_it, store, ends):
    handler = Counting()
    async with open_it(lease=30, heartbeat=10, poll=5) as watchdog:
        await watchdog.start_lane("mail", handler)
        await watchdog.wait_idle()
        # As of a process that is frozen in between: the lease begins when the claim is made.
        store.delay("claim", 28)
        await watchdog.enqueue(Job("mail", id="x"))
        assert (await watchdog.wait_settled("x")).outcome == "completed"
    assert handler.runs == ["x"]
    assert ends.causes("x") == ["completed"]


# -- lost answers ---------------------------------------------------------------------------------


async def test_a_claim_that_ended_before_its_answer_arrived_is_logged_with_its_job(
    open_it, store, caplog
):
    handler = Counting()
    async with open_it(lease=60, heartbeat=15) as watchdog:
        await watchdog.start_lane("mail", handler)
        await watchdog.wait_idle()
        store.fail("claim", when="after")
        away = store.fail("claim", on_call=2, times=None)
        await watchdog.enqueue(Job("mail", id="x", recovery=Recovery(1)))
        await trio.sleep(30)
        # By now it is not known whether the lease goes on: it is looked at, and is over.
        store.delay("renew", 70, times=None)
        away.remove()
        await trio.sleep(100)
        store.heal()
        assert (await watchdog.wait_settled("x")).recovery_count == 1
    assert handler.runs == ["x"]
    (record,) = [each for each in caplog.records if "before its answer" in each.message]
    (error,) = record.args
    assert isinstance(error, ClaimUnavailable)
    assert error.kind == "claim_unavailable"
    assert str(error) == (
        "the claim on job 'x' of lane 'mail' ended before its answer arrived; recovery decides"
    )


@pytest.mark.parametrize("losses", [1, 4])
async def test_a_claim_whose_answer_was_lost_is_found_again(open_it, store, losses):
    handler = Counting()
    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler)
        await watchdog.wait_idle()
        store.fail("claim", when="after", times=losses)
        await watchdog.enqueue(Job("mail", id="x"))
        began = trio.current_time()
        settled = await watchdog.wait_settled("x")
        # Not after its lease: nobody had to reconcile it.
        assert trio.current_time() - began < 3
    assert handler.runs == ["x"]
    assert settled.attempt_count == 1


async def test_a_claim_that_is_found_again_late_is_renewed_before_it_begins(open_it, store, ends):
    handler = Counting(duration=20)
    async with open_it(lease=30) as watchdog:
        await watchdog.start_lane("mail", handler)
        await watchdog.wait_idle()
        # Heartbeats come at 10 and 20, and the third comes too late for the first lease.
        await trio.sleep(9)
        store.fail("claim", when="after")
        await watchdog.enqueue(Job("mail", id="x"))
        await wait_all_tasks_blocked()
        away = store.fail(times=None)
        await trio.sleep(25)
        away.remove()
        assert (await watchdog.wait_settled("x")).outcome == "completed"
    assert handler.runs == ["x"]
    assert ends.causes("x") == ["completed"]


async def test_a_claim_whose_answer_was_lost_for_longer_than_its_lease_does_not_begin(
    open_it, store, ends
):
    handler = Counting(duration=5)
    async with open_it(lease=30) as watchdog:
        await watchdog.start_lane("mail", handler)
        await watchdog.wait_idle()
        store.fail("claim", when="after")
        await watchdog.enqueue(Job("mail", id="x", recovery=Recovery(1)))
        await wait_all_tasks_blocked()
        away = store.fail(times=None)
        await trio.sleep(60)
        away.remove()
        assert (await watchdog.wait_settled("x")).outcome == "completed"
    assert handler.runs == ["x"]
    assert ends.causes("x") == ["disappeared", "completed"]


@pytest.mark.parametrize("says", [Complete(), Fail("no stamps")])
@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_decision_whose_answer_was_lost_is_repeated_and_counts_once(
    open_it, store, ends, says, when
):
    handler = Counting(says)
    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler)
        store.fail("decide", when=when, times=2)
        await watchdog.enqueue_many([Job("mail", id=id) for id in "ab"])
        for id in "ab":
            settled = await watchdog.wait_settled(id)
            assert (settled.outcome == "completed") == (says == Complete())
        await watchdog.wait_idle()
    assert handler.runs == ["a", "b"]
    assert len(ends.of("a")) == len(ends.of("b")) == 1


@pytest.mark.parametrize("verb", ["reserve_attempt", "decide", "retry", "claim"])
@pytest.mark.parametrize("when", ["before", "after"])
async def test_no_lost_answer_costs_an_attempt_or_runs_a_job_twice(
    open_it, store, ends, verb, when
):
    counts = []

    async def handler(job: RunningJob):
        counts.append(job.attempt.count)
        return Retry() if len(counts) == 1 else Complete()

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler, retry=RetryPolicy(5, delay=0.5))
        store.fail(verb, when=when)
        await watchdog.enqueue(Job("mail", id="x"))
        settled = await watchdog.wait_settled("x")
        await watchdog.wait_idle()
    assert ends.causes("x") == ["retry", "completed"]
    assert counts == [1, 2]
    assert settled.attempt_count == 2
    assert settled.recovery_count == 0


async def test_a_hand_off_whose_answer_was_lost_is_a_hand_off(open_it, store, until):
    async with open_it(grace=0) as watchdog:
        handler = Counting(duration=1000)
        await watchdog.start_lane("mail", handler)
        await watchdog.enqueue(Job("mail", id="x"))
        await until(lambda: handler.runs)
        store.fail("hand_off", when="after")
    assert isinstance(await store.read("x"), QueuedJob)


# -- away -----------------------------------------------------------------------------------------


async def test_handlers_run_on_through_a_short_outage_and_lanes_resume(open_it, store, ends, until):
    handler = Counting(duration=30)
    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler)
        await watchdog.enqueue_many([Job("mail", id=id) for id in "ab"])
        await until(lambda: handler.runs)
        away = store.fail(times=None)
        await trio.sleep(60)
        assert not watchdog.statistics().is_store_available
        assert handler.runs == ["a"]
        away.remove()
        began = trio.current_time()
        await watchdog.wait_settled("a")
        assert trio.current_time() - began < 6
        await watchdog.wait_settled("b")
        assert watchdog.statistics().is_store_available
    assert handler.runs == ["a", "b"]
    assert ends.causes("a") == ["completed"]


async def test_an_outage_longer_than_the_lease_cancels_handlers_in_time(
    open_it, store, ends, until
):
    handler = Counting(duration=1000)
    async with open_it(lease=30) as watchdog:
        await watchdog.start_lane("mail", handler)
        await watchdog.enqueue(Job("mail", id="x", recovery=Recovery(1)))
        await until(lambda: handler.runs)
        away = store.fail(times=None)
        began = trio.current_time()
        await until(lambda: ends.of("x"))
        assert trio.current_time() - began <= 27.2
        await trio.sleep(30)
        away.remove()
        await until(lambda: len(handler.runs) == 2)
        # Queued again by the supervisor, from its recovery budget.
        assert (await watchdog.read("x")).recovery_count == 1
        watchdog.interrupt()
    assert ends.causes("x")[0] == "lease_lost"


async def test_a_decision_is_given_up_when_the_lease_is_over(open_it, store, ends, until):
    async with open_it(lease=30) as watchdog:
        await watchdog.start_lane("mail", nothing)
        store.fail("decide", times=None)
        await watchdog.enqueue(Job("mail", id="x"))
        began = trio.current_time()
        # Renewals are answered, so it is not the lease alone that ends it.
        await until(lambda: ends.of("x"))
        assert 27 <= trio.current_time() - began <= 31
        (record,) = ends.of("x")
        assert record.__dict__["result"] == "unwritten"
        assert "left to whoever reconciles" in record.getMessage()
        store.heal()
        assert (await watchdog.wait_settled("x")).outcome == "interrupted"


async def test_an_outage_is_logged_once_however_many_lanes_meet_it(open_it, store, caplog):
    caplog.set_level("INFO", logger="trio_watchdog")
    async with open_it(poll=1) as watchdog:
        for n in range(20):
            await watchdog.start_lane(f"{n}", nothing)
        await watchdog.wait_idle()
        away = store.fail(times=None)
        await trio.sleep(100)
        away.remove()
        await trio.sleep(20)
    texts = [record.getMessage() for record in caplog.records]
    assert len([text for text in texts if "the store is unavailable" in text]) == 1
    assert len([text for text in texts if "the store answers again" in text]) == 1


async def test_back_off_keeps_a_long_outage_cheap(open_it, store):
    async with open_it(poll=1000) as watchdog:
        await watchdog.start_lane("mail", nothing)
        await watchdog.wait_idle()
        store.fail(times=None)
        watchdog._runtime.doorbell.ring_everything()
        before = store.exchanges
        await trio.sleep(300)
        # A slot and the supervisor, each about once in four seconds.
        assert store.exchanges - before < 250


async def test_riding_out_gives_up_in_time_and_wakes_early_when_the_store_returns():
    outage = Outage(random.Random(1))

    async def away():
        raise StoreUnavailable("away")

    began = trio.current_time()
    with pytest.raises(StoreUnavailable):
        await outage.riding_out(away, until=began + 10)
    assert 5 <= trio.current_time() - began <= 10
    tries = []

    async def back_soon():
        tries.append(trio.current_time())
        if len(tries) < 12:
            raise StoreUnavailable("away")
        return 3

    async with trio.open_nursery() as nursery:
        nursery.start_soon(outage.riding_out, back_soon)
        await trio.sleep(11.3)
        # Somebody else was answered; and it goes away again at once.
        outage.answered()
        await wait_all_tasks_blocked()
        assert trio.current_time() - tries[-1] < 0.01
    assert all(b - a >= 0.05 for a, b in pairwise(tries))


# -- clients --------------------------------------------------------------------------------------


async def test_operations_of_a_client_ride_out_an_outage(store):
    async with open_client(store, retry_for=30) as client:
        store.fail(times=5)
        assert (await client.enqueue(Job("mail", id="x"))).status == "queued"
        store.fail("cancel", when="after")
        assert (await client.cancel("x")).status == "recorded"
        assert (await client.cancel("x", cancellation_id="c")).status == "conflict"


async def test_operations_of_a_client_give_up_after_retry_for(store):
    async with open_client(store, retry_for=12) as client:
        store.fail(times=None)
        began = trio.current_time()
        with pytest.raises(StoreUnavailable):
            await client.enqueue(Job("mail"))
        assert 5 <= trio.current_time() - began <= 12


async def test_a_client_that_waits_hears_of_the_end(store):
    async with open_client(store) as client, open_watchdog(store) as watchdog:
        await client.enqueue(Job("mail", id="x"))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.wait_settled, "x")
            await trio.sleep(1)
            await watchdog.start_lane("mail", nothing)
            began = trio.current_time()
        assert trio.current_time() == began


# -- refusals and rot -----------------------------------------------------------------------------


async def test_a_projector_that_refuses_a_decision_is_asked_again_and_the_queue_waits(
    open_it, store, caplog
):
    handler = Counting()
    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler)
        refusal = store.fail("decide", times=None, error=SettlementRejected("the mirror is dim"))
        await watchdog.enqueue(Job("mail", id="x"))
        await trio.sleep(10)
        assert isinstance(await watchdog.read("x"), RunningJob)
        refusal.remove()
        assert (await watchdog.wait_settled("x")).outcome == "completed"
    assert handler.runs == ["x"]
    assert "the mirror is dim" in caplog.text


@pytest.mark.parametrize("verb", ["claim", "decide", "renew", "inspect", "wake_state"])
async def test_a_rotten_store_ends_the_block_with_its_error(open_it, store, verb):
    async def serve():
        async with open_it() as watchdog:
            await watchdog.start_lane("mail", Counting(duration=25))
            await watchdog.start_lane("fax", nothing)
            store.fail(verb, times=None, error=StoreInvalid("the file is malformed"))
            await watchdog.enqueue(Job("mail", id="x"))
            with trio.fail_after(60):
                await trio.sleep(1)
                # As when another process has written something, which may be about our claims.
                store.report(ELSEWHERE)
                await trio.sleep_forever()

    with pytest.raises(StoreInvalid, match="malformed"):
        await serve()
