"""Claims that disappeared, and what nobody else sees to."""

from __future__ import annotations

import logging

import trio

from trio_watchdog import (
    Job,
    Lanes,
    QueuedJob,
    Recovery,
    RunningJob,
    SettlementRejected,
    StoreInvalid,
)


async def nothing(job: RunningJob):
    return None


async def disappear(store, id, lane="gone", recovery=None, lease=1.0):
    """A claim whose owner is not there any more."""
    await store.enqueue(Job(lane, id=id, recovery=recovery))
    claimed = await store.claim(lane, f"dead-{id}", lease=int(lease * 1000))
    assert claimed.job is not None


async def test_a_disappeared_job_runs_again_within_its_budget(open_it, store, ends):
    await disappear(store, "x", "mail", Recovery(1), lease=20)
    async with open_it(poll=1000) as watchdog:
        await watchdog.start_lane("mail", nothing)
        began = trio.current_time()
        settled = await watchdog.wait_settled("x")
        # By the alarm, not by the poll.
        assert 19.9 <= trio.current_time() - began <= 20.2
    assert (settled.outcome, settled.recovery_count) == ("completed", 1)
    assert ends.causes("x") == ["disappeared", "completed"]


async def test_without_a_budget_it_settles_as_interrupted_with_one_record(open_it, store, ends):
    await disappear(store, "x")
    async with open_it() as watchdog:
        await watchdog.start_lane("mail", nothing)
        settled = await watchdog.wait_settled("x")
    assert settled.outcome == "interrupted"
    (record,) = ends.of("x")
    assert record.levelno == logging.WARNING
    assert record.__dict__["cause"] == "disappeared"
    assert record.__dict__["lane"] == "gone"


async def test_a_process_without_lanes_leaves_a_time_to_those_who_tick(open_it, store):
    await disappear(store, "x")
    answers = [True] * 5

    def is_alive(job: RunningJob) -> bool:
        return answers.pop() if answers else False

    async with open_it(poll=5, is_alive=is_alive) as watchdog:
        await watchdog.enqueue(Job("mail", id="y"))
        await watchdog.cancel("y")
        for _ in range(5):
            await trio.sleep(4)
            assert isinstance(await watchdog.read("x"), RunningJob)
            await watchdog.tick(Lanes())
        began = trio.current_time()
        assert (await watchdog.wait_settled("x")).outcome == "interrupted"
        assert 5 <= trio.current_time() - began <= 20
        assert (await watchdog.wait_settled("y")).outcome == "cancelled"


async def test_many_disappeared_claims_are_decided_in_one_pass(open_it, store):
    for n in range(40):
        await disappear(store, f"{n}")
    async with open_it(poll=1000) as watchdog:
        await watchdog.start_lane("mail", nothing)
        for n in range(40):
            assert (await watchdog.wait_settled(f"{n}")).outcome == "interrupted"
        assert trio.current_time() < 60


async def test_is_alive_alone_lets_a_job_be_decided_about(open_it, store):
    for id in ("alive", "dead", "unknown", "raises"):
        await disappear(store, id)
    asked = []
    verdicts = {"alive": True, "dead": False, "unknown": None}

    async def is_alive(job: RunningJob) -> bool | None:
        asked.append(job.id)
        await trio.sleep(0.1)
        return verdicts[job.id]

    async with open_it(is_alive=is_alive) as watchdog:
        await watchdog.start_lane("mail", nothing)
        assert (await watchdog.wait_settled("dead")).outcome == "interrupted"
        await trio.sleep(30)
        for id in ("alive", "unknown", "raises"):
            assert isinstance(await watchdog.read(id), RunningJob)
        verdicts.update(unknown=False, raises=False)
        await watchdog.wait_settled("unknown")
        await watchdog.wait_settled("raises")
    assert asked.count("dead") == 1
    # About once for each poll of five seconds.
    assert 4 <= asked.count("alive") <= 12


async def test_an_is_alive_that_raises_or_hangs_is_unknown_and_logged(open_it, store, caplog):
    await disappear(store, "raises")
    await disappear(store, "hangs")
    await disappear(store, "gone")

    async def is_alive(job: RunningJob) -> bool | None:
        if job.id == "raises":
            raise ConnectionError("no route to the cluster")
        if job.id == "hangs":
            await trio.sleep_forever()
        return False

    async with open_it(is_alive=is_alive) as watchdog:
        await watchdog.start_lane("mail", nothing)
        await watchdog.wait_settled("gone")
        for id in ("raises", "hangs"):
            assert isinstance(await watchdog.read(id), RunningJob)
    assert "no route to the cluster" in caplog.text
    assert "LivenessUnavailable" in caplog.text


async def test_is_alive_may_be_a_plain_function(open_it, store, ends, until):
    await disappear(store, "x", recovery=Recovery(2))
    async with open_it(is_alive=lambda job: job.id != "x") as watchdog:
        await watchdog.start_lane("mail", nothing)
        await until(lambda: ends.of("x"))
        assert isinstance(await watchdog.read("x"), QueuedJob)


async def test_a_lost_claim_whose_handler_still_runs_here_is_not_started_again_here(
    open_it, store, ends
):
    running = []
    most = []

    async def handler(job: RunningJob):
        running.append(job.id)
        most.append(len(running))
        try:
            with trio.CancelScope(shield=len(most) == 1):
                await trio.sleep(100)
        finally:
            running.pop()

    async with open_it(lease=30) as watchdog:
        await watchdog.start_lane("mail", handler, workers=3)
        store.fail("renew", times=25)
        await watchdog.enqueue(Job("mail", id="x", recovery=Recovery(5)))
        await watchdog.wait_settled("x")
    assert max(most) == 1
    assert ends.causes("x")[0] == "lease_lost"


async def test_cancelled_jobs_of_lanes_that_nobody_works_are_settled(open_it):
    async with open_it() as watchdog:
        await watchdog.start_lane("mail", nothing)
        await watchdog.enqueue_many([Job("nobody", id=f"{n}", queue="q") for n in range(5)])
        for n in range(5):
            await watchdog.cancel(f"{n}")
            assert (await watchdog.wait_settled(f"{n}")).outcome == "cancelled"


async def test_a_pass_that_meets_an_outage_is_repeated(open_it, store):
    for id in "abc":
        await disappear(store, id)
    async with open_it(poll=1000) as watchdog:
        store.fail("reconcile", on_call=2, times=3)
        store.fail("next_running_claim", on_call=2, times=2)
        await watchdog.start_lane("mail", nothing)
        for id in "abc":
            assert (await watchdog.wait_settled(id)).outcome == "interrupted"


async def test_one_claim_that_cannot_be_decided_does_not_keep_the_others(open_it, store, caplog):
    for id in "abc":
        await disappear(store, id)
    refusals = [StoreInvalid("the row is nonsense"), SettlementRejected("the projector said no")]
    async with open_it() as watchdog:
        for error in refusals:
            store.fail("reconcile", error=error)
        await watchdog.start_lane("mail", nothing)
        for id in "abc":
            assert (await watchdog.wait_settled(id)).outcome == "interrupted"
    assert "the row is nonsense" in caplog.text


async def test_slow_answers_about_liveness_keep_neither_duties_nor_later_claims_waiting(
    open_it, store
):
    for n in range(8):
        await disappear(store, f"hangs {n}")
    await disappear(store, "gone")

    async def is_alive(job: RunningJob) -> bool | None:
        if job.id != "gone":
            await trio.sleep_forever()
        return False

    async with open_it(is_alive=is_alive) as watchdog:
        await watchdog.start_lane("mail", nothing)
        await trio.sleep(30)
        await watchdog.enqueue(Job("nobody", id="x"))
        await watchdog.cancel("x")
        began = trio.current_time()
        await watchdog.wait_settled("x")
        assert trio.current_time() - began < 21
        assert (await watchdog.wait_settled("gone")).outcome == "interrupted"
        assert trio.current_time() < 180


async def test_an_idle_supervisor_only_reads(open_it, store):
    async with open_it() as watchdog:
        await watchdog.start_lane("mail", nothing)
        await watchdog.wait_idle()
        store.calls.clear()
        await trio.sleep(60)
    # The last is not the supervisor's, but a chore.
    assert set(store.calls) <= {"read_wake_state", "claim", "read_lost"}
    assert store.calls["read_wake_state"] <= 14
