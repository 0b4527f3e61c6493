"""Leaving the block: what runs may finish, what is cut short costs nothing, nothing hangs."""

from __future__ import annotations

import pytest
import trio

from trio_watchdog import Complete, Job, QueuedJob, Recovery, RetryPolicy, RunningJob, SettledJob


async def test_leaving_the_block_lets_handlers_finish_and_records_what_they_say(open_it, store):
    started = trio.Event()

    async def handler(job: RunningJob):
        started.set()
        await trio.sleep(20)
        return Complete()

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler)
        await watchdog.enqueue(Job("mail", id="x"))
        await started.wait()
    assert isinstance(await store.read("x"), SettledJob)


async def test_a_draining_watchdog_claims_nothing_more(open_it, store):
    started = trio.Event()

    async def handler(job: RunningJob):
        started.set()
        await trio.sleep(5)

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler)
        await watchdog.enqueue_many([Job("mail", id=id) for id in "ab"])
        await started.wait()
    assert isinstance(await store.read("a"), SettledJob)
    assert isinstance(await store.read("b"), QueuedJob)


async def test_renewal_goes_on_while_draining(open_it, store):
    started = trio.Event()

    async def handler(job: RunningJob):
        started.set()
        await trio.sleep(200)

    async with open_it(lease=30, grace=300) as watchdog:
        await watchdog.start_lane("mail", handler)
        await watchdog.enqueue(Job("mail", id="x"))
        await started.wait()
    assert isinstance(await store.read("x"), SettledJob)


async def test_a_cancel_reaches_a_handler_while_draining(open_it, store):
    started = trio.Event()

    async def handler(job: RunningJob):
        started.set()
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:

        async def run(*, task_status=trio.TASK_STATUS_IGNORED):
            async with open_it(grace=1000) as watchdog:
                await watchdog.start_lane("mail", handler)
                await watchdog.enqueue(Job("mail", id="x"))
                await started.wait()
                task_status.started()

        await nursery.start(run)
        await trio.sleep(5)
        await store.cancel("x", "c")
        began = trio.current_time()
    assert trio.current_time() - began < 1
    assert (await store.read("x")).outcome == "cancelled"


async def test_cancelling_the_block_hands_off_at_once_and_at_no_cost(open_it, store, ends):
    started = trio.Event()

    async def handler(job: RunningJob):
        started.set()
        await trio.sleep_forever()

    with trio.CancelScope() as scope:
        async with open_it() as watchdog:
            await watchdog.start_lane("mail", handler, workers=2, retry=RetryPolicy(1))
            await watchdog.enqueue(Job("mail", id="x", recovery=Recovery(0)))
            await started.wait()
            began = trio.current_time()
            scope.cancel()
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert trio.current_time() - began < 0.1
    job = await store.read("x")
    assert isinstance(job, QueuedJob)
    assert (job.attempt_count, job.recovery_count) == (0, 0)
    assert ends.causes("x") == ["shutdown"]


async def test_cancelling_during_the_drain_hands_off_too(open_it, store):
    started = trio.Event()

    async def handler(job: RunningJob):
        started.set()
        await trio.sleep_forever()

    with trio.move_on_after(10) as scope:
        async with open_it(grace=1000) as watchdog:
            await watchdog.start_lane("mail", handler)
            await watchdog.enqueue(Job("mail", id="x"))
            await started.wait()
    assert scope.cancelled_caught
    assert isinstance(await store.read("x"), QueuedJob)


async def test_an_error_in_the_block_hands_off_and_is_raised_as_itself(open_it, store):
    started = trio.Event()

    async def handler(job: RunningJob):
        started.set()
        await trio.sleep_forever()

    async def serve():
        async with open_it() as watchdog:
            await watchdog.start_lane("mail", handler)
            await watchdog.enqueue(Job("mail", id="x"))
            await started.wait()
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        await serve()
    assert isinstance(await store.read("x"), QueuedJob)


async def test_a_group_that_the_block_raises_is_raised_as_it_is(open_it):
    async def serve():
        async with open_it():
            raise ExceptionGroup("mine", [ValueError("one")])

    with pytest.raises(ExceptionGroup, match="mine") as caught:
        await serve()
    assert [str(error) for error in caught.value.exceptions] == ["one"]

    async def serve_a_nursery():
        async with open_it(), trio.open_nursery():
            raise ValueError("one")

    with pytest.raises(ExceptionGroup) as caught:
        await serve_a_nursery()
    assert [str(error) for error in caught.value.exceptions] == ["one"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
async def test_what_is_no_exception_passes_from_a_handler_and_the_job_is_handed_off(
    open_it, store, ends, error
):
    async def handler(job: RunningJob):
        raise error

    async def serve():
        async with open_it() as watchdog:
            await watchdog.start_lane("mail", handler, retry=RetryPolicy(1))
            await watchdog.enqueue(Job("mail", id="x"))
            await trio.sleep_forever()

    with pytest.raises(error):
        await serve()
    job = await store.read("x")
    assert isinstance(job, QueuedJob)
    assert job.attempt_count == 0
    assert ends.causes("x") == ["shutdown"]


async def test_drain_waits_for_what_runs_and_leaves_nothing_to_wait_for(open_it, store):
    started = trio.Event()

    async def handler(job: RunningJob):
        started.set()
        await trio.sleep(50)

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler)
        await watchdog.enqueue_many([Job("mail", id=id) for id in "ab"])
        await started.wait()
        await watchdog.drain()
        assert isinstance(await watchdog.read("a"), SettledJob)
        assert isinstance(await watchdog.read("b"), QueuedJob)
        assert watchdog.statistics().is_draining
        with pytest.raises(RuntimeError, match="stopping"):
            await watchdog.start_lane("more", handler)
        began = trio.current_time()
    assert trio.current_time() == began


async def test_interrupt_cancels_and_hands_off(open_it, store):
    started = trio.Event()

    async def handler(job: RunningJob):
        started.set()
        await trio.sleep_forever()

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler)
        await watchdog.enqueue(Job("mail", id="x"))
        await started.wait()
        watchdog.interrupt()
        await watchdog.drain()
        assert isinstance(await watchdog.read("x"), QueuedJob)


async def test_a_stop_waits_for_a_handler_that_shields_itself_and_then_hands_off(open_it, store):
    started = trio.Event()

    async def handler(job: RunningJob):
        with trio.CancelScope(shield=True):
            started.set()
            await trio.sleep(100)

    async with open_it(grace=10) as watchdog:
        await watchdog.start_lane("mail", handler)
        await watchdog.enqueue(Job("mail", id="x"))
        await started.wait()
        began = trio.current_time()
    assert trio.current_time() - began == pytest.approx(100, abs=0.1)
    assert isinstance(await store.read("x"), QueuedJob)


async def test_a_handler_that_outlives_its_cancellation_is_reported_with_its_stack(open_it, caplog):
    started = trio.Event()

    async def stubborn_nap():
        with trio.CancelScope(shield=True):
            started.set()
            await trio.sleep(100)

    async def handler(job: RunningJob):
        await stubborn_nap()

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler)
        await watchdog.enqueue(Job("mail", id="x"))
        await started.wait()
        await watchdog.cancel("x")
        await watchdog.wait_settled("x")
    reports = [record for record in caplog.records if "still runs" in record.getMessage()]
    assert 1 <= len(reports) <= 4
    assert "stubborn_nap" in reports[0].getMessage()
    assert "cancellation" in reports[0].getMessage()


async def test_a_stop_with_the_store_away_is_bounded(open_it, store):
    started = trio.Event()

    async def handler(job: RunningJob):
        started.set()
        await trio.sleep_forever()

    with trio.CancelScope() as scope:
        async with open_it() as watchdog:
            await watchdog.start_lane("mail", handler, workers=3)
            await watchdog.enqueue(Job("mail", id="x"))
            await started.wait()
            store.fail(times=None)
            # Somebody is in the middle of asking, too.
            watchdog.running()
            began = trio.current_time()
            scope.cancel()
            await trio.sleep_forever()
    assert trio.current_time() - began <= 5.1


async def test_a_job_claimed_while_the_watchdog_closes_is_not_begun(open_it, store):
    ran = []

    async def handler(job: RunningJob):
        ran.append(job.id)

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler, retry=RetryPolicy(1))
        await watchdog.wait_idle()
        store.delay("claim", 10, when="after")
        await watchdog.enqueue(Job("mail", id="x"))
        await trio.sleep(1)
    assert ran == []
    job = await store.read("x")
    assert isinstance(job, QueuedJob)
    assert job.attempt_count == 0


@pytest.mark.parametrize("retry", [None, RetryPolicy(1)])
async def test_a_job_claimed_by_a_closing_lane_costs_neither_a_reservation_nor_a_run(
    open_it, store, ends, retry
):
    ran = []

    async def handler(job: RunningJob):
        ran.append(job.id)

    async with open_it() as watchdog:
        lane = await watchdog.start_lane("mail", handler, retry=retry)
        await watchdog.wait_idle()
        store.delay("claim", 10, when="after")
        await watchdog.enqueue(Job("mail", id="x"))
        await trio.sleep(1)
        await lane.drain()
        assert isinstance(await watchdog.read("x"), QueuedJob)
    assert ran == []
    assert store.calls["reserve_attempt"] == 0
    # What did not begin has no end.
    assert ends.of("x") == []


async def test_a_job_whose_attempt_is_reserved_while_the_lane_closes_is_given_back(
    open_it, store, ends
):
    ran = []

    async def handler(job: RunningJob):
        ran.append(job.id)

    async with open_it() as watchdog:
        lane = await watchdog.start_lane("mail", handler, retry=RetryPolicy(1))
        await watchdog.wait_idle()
        store.delay("reserve_attempt", 10, when="after")
        await watchdog.enqueue(Job("mail", id="x"))
        await trio.sleep(1)
        await lane.drain()
        job = await watchdog.read("x")
        assert isinstance(job, QueuedJob)
        assert job.attempt_count == 0
    assert ran == []
    assert ends.of("x") == []


async def test_a_job_cancelled_before_its_handler_starts_does_not_start(open_it, store, ends):
    ran = []

    async def handler(job: RunningJob):
        ran.append(job.id)

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler, retry=RetryPolicy(3))
        await watchdog.wait_idle()
        store.delay("reserve_attempt", 5)
        await watchdog.enqueue(Job("mail", id="x"))
        await trio.sleep(1)
        await watchdog.cancel("x")
        assert (await watchdog.wait_settled("x")).outcome == "cancelled"
        await watchdog.wait_idle()
    assert ran == []
    assert ends.causes("x") == ["cancellation"]


@pytest.mark.parametrize("ending", ["return", "raise", "cancel"])
async def test_a_block_without_a_single_step_ends(open_it, ending):
    async def serve():
        async with open_it() as watchdog:
            if ending == "raise":
                raise ValueError("at once")
            if ending == "cancel":
                scope.cancel()
            assert watchdog.running() == []

    with trio.fail_after(5), trio.CancelScope() as scope:
        if ending == "raise":
            with pytest.raises(ValueError, match="at once"):
                await serve()
        else:
            await serve()


async def test_a_stop_in_an_outage_with_nothing_running_does_not_take_the_grace(open_it, store):
    async def handler(job: RunningJob):
        return None

    async with open_it(grace=1000) as watchdog:
        await watchdog.start_lane("mail", handler, workers=3)
        await watchdog.wait_idle()
        store.fail(times=None)
        watchdog._runtime.doorbell.ring_everything()
        await trio.sleep(10)
        began = trio.current_time()
    assert trio.current_time() - began <= 10.1


async def test_a_stop_before_the_first_claim_claims_nothing(open_it, store):
    ran = []

    async def handler(job: RunningJob):
        ran.append(job.id)

    await store.enqueue(Job("mail", id="x"))
    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler)
        watchdog.interrupt()
    assert ran == []
    assert isinstance(await store.read("x"), QueuedJob)
