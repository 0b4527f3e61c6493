"""A store in a file is renewed from a thread, which no handler can starve."""

from __future__ import annotations

import time

import pytest
import trio

from trio_watchdog import (
    Complete,
    Job,
    QueuedJob,
    Recovery,
    RunningJob,
    SettledJob,
    StoreInvalid,
    StoreUnavailable,
    open_client,
    open_watchdog,
)
from trio_watchdog._open import open_store
from trio_watchdog.testing._faulty import FaultyStore

IN_REAL_TIME = True


def block(seconds: float) -> None:
    """What a handler should not do."""
    time.sleep(seconds)


async def test_a_handler_that_blocks_for_more_than_a_lease_keeps_its_job(tmp_path, ends):
    async def handler(job: RunningJob):
        deadline = job.cancel_scope.deadline
        block(4.5)
        # Its lease was renewed all the time, so it does not find itself cancelled afterwards,
        # not even before the loop has had a chance to look.
        assert not job.cancel_scope.cancel_called
        assert job.cancel_reason is None
        await trio.lowlevel.checkpoint()
        await trio.sleep(0.05)
        assert job.cancel_scope.deadline > deadline + 1
        return Complete()

    # It may stand still for three seconds besides, for the machine may be busy.
    async with open_watchdog(tmp_path / "jobs.db", lease=4, heartbeat=0.2) as watchdog:
        await watchdog.start_lane("mail", handler)
        await watchdog.enqueue(Job("mail", id="x"))
        settled = await watchdog.wait_settled("x")
    assert settled.outcome == "completed"
    assert ends.causes("x") == ["completed"]


async def test_a_scope_that_was_looked_at_during_a_block_is_not_a_wish_to_cancel(tmp_path, ends):
    runs = []

    async def handler(job: RunningJob):
        runs.append(job.id)
        if len(runs) > 1:
            return
        scope = job.cancel_scope
        block(4.5)
        # Kept by the program, it knows nothing of the renewals, and so cancels itself.
        assert scope.cancel_called
        await trio.sleep_forever()

    async with open_watchdog(tmp_path / "jobs.db", lease=4, heartbeat=0.2) as watchdog:
        await watchdog.start_lane("mail", handler)
        await watchdog.enqueue(Job("mail", id="x", recovery=Recovery(1)))
        settled = await watchdog.wait_settled("x")
    assert (settled.outcome, settled.cancellation_id) == ("completed", None)
    assert ends.causes("x")[0] == "lease_lost"


async def test_a_short_lease_is_renewed_often_enough(tmp_path):
    async def handler(job: RunningJob):
        await trio.sleep(6)

    # Short beside the heartbeat that it would have; long beside what a busy machine takes.
    async with open_watchdog(tmp_path / "jobs.db", lease=5) as watchdog:
        await watchdog.start_lane("mail", handler)
        await watchdog.enqueue(Job("mail", id="x"))
        assert (await watchdog.wait_settled("x")).outcome == "completed"


async def test_a_block_is_reported_with_job_lane_duration_and_stack(tmp_path, caplog):
    async def handler(job: RunningJob):
        async with trio.open_nursery() as nursery:

            async def child():
                block(1.0)

            nursery.start_soon(child)

    async with open_watchdog(tmp_path / "jobs.db", stall_warning=0.1) as watchdog:
        await watchdog.start_lane("mail", handler)
        await watchdog.enqueue(Job("mail", id="x"))
        await watchdog.wait_settled("x")
        block(2.0)
        await trio.sleep(0.1)
    reports = [record for record in caplog.records if "has blocked" in record.getMessage()]
    of_job = [record for record in reports if record.__dict__["job"] == "x"]
    # At growing intervals, not at every look, which would be ten times.
    assert 1 <= len(of_job) <= 6
    assert "job 'x' of lane 'mail' has blocked the event loop for" in of_job[0].getMessage()
    assert "block(1.0)" in of_job[0].getMessage()
    assert of_job[0].__dict__["duration"] >= 0.1
    of_program = [record for record in reports if record.__dict__["job"] is None]
    assert "task" in of_program[0].getMessage()


async def test_a_block_that_is_hardly_too_long_is_reported_as_well(tmp_path, caplog):
    async def handler(job: RunningJob):
        block(1.25)

    async with open_watchdog(tmp_path / "jobs.db", stall_warning=1.0) as watchdog:
        await watchdog.start_lane("mail", handler)
        await watchdog.enqueue(Job("mail", id="x"))
        await watchdog.wait_settled("x")
    reports = [record for record in caplog.records if "has blocked" in record.getMessage()]
    assert [record.__dict__["job"] for record in reports] == ["x"]
    assert reports[0].__dict__["duration"] >= 1.0


async def test_past_the_limit_the_lease_is_left_to_end(tmp_path, caplog):
    async def handler(job: RunningJob):
        block(4.5)
        await trio.sleep(10)

    async with (
        open_watchdog(
            tmp_path / "jobs.db", lease=3, heartbeat=0.1, stall_warning=0.1, stall_limit=0.4
        ) as watchdog,
        open_client(tmp_path / "jobs.db") as client,
    ):
        await watchdog.start_lane("mail", handler)
        await watchdog.enqueue(Job("mail", id="x"))
        assert (await client.wait_settled("x")).outcome == "interrupted"
    assert "leases are no longer renewed" in caplog.text


async def test_a_cancel_through_another_store_reaches_the_handler_quickly(tmp_path):
    started = trio.Event()

    async def handler(job: RunningJob):
        started.set()
        await trio.sleep_forever()

    async with (
        open_watchdog(tmp_path / "jobs.db", lease=90, heartbeat=30, poll=60) as watchdog,
        open_client(tmp_path / "jobs.db", poll=60) as client,
    ):
        await watchdog.start_lane("mail", handler)
        await client.enqueue(Job("mail", id="x"))
        with trio.fail_after(20):
            await started.wait()
            await client.cancel("x")
            assert (await client.wait_settled("x")).outcome == "cancelled"


async def test_renewal_errors_are_retried_from_the_thread(tmp_path, ends):
    async def handler(job: RunningJob):
        await trio.sleep(6)

    async with open_store(tmp_path / "jobs.db") as inner:
        store = FaultyStore(inner)
        async with open_watchdog(store, lease=5, heartbeat=0.2) as watchdog:
            await watchdog.start_lane("mail", handler)
            fault = store.fail("renew", times=3)
            await watchdog.enqueue(Job("mail", id="x"))
            assert (await watchdog.wait_settled("x")).outcome == "completed"
            assert fault.struck == 3
            age = watchdog.statistics().renewal_age
            assert age is not None
            assert 0 <= age < 5


async def test_a_lost_claim_cancels_the_handler(tmp_path, ends, until):
    started = trio.Event()

    async def handler(job: RunningJob):
        started.set()
        await trio.sleep_forever()

    async with open_store(tmp_path / "jobs.db") as store:
        async with open_watchdog(store, lease=30, heartbeat=0.1) as watchdog:
            await watchdog.start_lane("mail", handler)
            await watchdog.enqueue(Job("mail", id="x"))
            await started.wait()
            (job,) = watchdog.running()
            listeners, store.on_change[:] = list(store.on_change), []
            assert (await store.hand_off("x", job.token)).status == "queued"
            store.on_change[:] = listeners
            await until(lambda: ends.of("x"), step=0.01, limit=20)
            watchdog.interrupt()
    assert ends.causes("x")[0] == "lease_lost"


async def test_a_renewal_that_finds_the_store_rotten_ends_the_block(tmp_path):
    async with open_store(tmp_path / "jobs.db") as inner:
        store = FaultyStore(inner)

        async def handler(job: RunningJob):
            await trio.sleep_forever()

        async def serve():
            async with open_watchdog(store, heartbeat=0.1) as watchdog:
                await watchdog.start_lane("mail", handler)
                await watchdog.enqueue(Job("mail", id="x"))
                store.fail("renew", times=None, error=StoreInvalid("the file is malformed"))
                with trio.fail_after(60):
                    await trio.sleep_forever()

        with pytest.raises(StoreInvalid, match="malformed"):
            await serve()
        store.heal()
        assert isinstance(await store.read("x"), QueuedJob)


async def test_a_stop_during_a_block_still_hands_off(tmp_path):
    started = trio.Event()

    async def handler(job: RunningJob):
        started.set()
        block(4.5)
        await trio.sleep_forever()

    path = tmp_path / "jobs.db"
    async with open_watchdog(path, lease=4, heartbeat=0.2, grace=0.1) as watchdog:
        await watchdog.start_lane("mail", handler)
        await watchdog.enqueue(Job("mail", id="x"))
        await started.wait()
    async with open_client(path) as client:
        assert isinstance(await client.read("x"), QueuedJob)


async def test_two_watchdogs_share_a_file_and_run_each_job_once(tmp_path):
    path = tmp_path / "jobs.db"
    ran = []

    async def handler(job: RunningJob):
        ran.append(job.id)

    async with open_watchdog(path) as first, open_watchdog(path) as second:
        await first.start_lane("mail", handler, workers=3)
        await second.start_lane("mail", handler, workers=3)
        await first.enqueue_many([Job("mail", id=f"{n}", queue=f"{n % 7}") for n in range(100)])
        for n in range(100):
            assert isinstance(await second.wait_settled(f"{n}"), SettledJob)
    assert sorted(ran) == sorted(f"{n}" for n in range(100))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heartbeat": 0}, "heartbeat is 0 seconds"),
        ({"lease": 0}, "lease is 0 seconds"),
        ({"grace": -1}, "grace is -1 seconds"),
        ({"poll": 0}, "poll is 0 seconds"),
    ],
)
async def test_settings_that_cannot_work_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        async with open_watchdog(":memory:", **options):
            pass


async def test_a_file_that_cannot_be_opened_is_said_so_at_once(tmp_path):
    with pytest.raises(StoreUnavailable, match="does not exist"):
        async with open_watchdog(tmp_path / "nowhere" / "jobs.db"):
            pass
    (tmp_path / "not.db").write_bytes(b"nonsense" * 1000)
    with pytest.raises(StoreInvalid):
        async with open_watchdog(tmp_path / "not.db"):
            pass
