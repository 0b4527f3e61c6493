"""Store checks: what others do to a job: cancel it, fail its lane, purge, reconcile, prune."""

from __future__ import annotations

from attrs import evolve

from .. import _wishes as wishes
from .._errors import InvalidJob, StoreInvalid
from .._model import (
    CancellationResult,
    Job,
    LaneFailure,
    Outcome,
    Recovery,
    RetryPolicy,
    StoredJob,
)
from .._rules import Settle
from ._check_tools import (
    COMPLETED,
    LEASE,
    LEASE_SECONDS,
    claim,
    complete,
    drain,
    feed,
    find,
    ids,
    raises,
    read,
    read_all,
    read_queued,
    read_running,
    read_settled_job,
    settled,
    start,
    start_completing,
)
from ._clock import TICK
from ._store_maker import StoreMaker, store_check

# -- cancellation ---------------------------------------------------------------------------------


@store_check()
async def a_cancellation_is_recorded_once_and_replayed_by_its_id(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        queued = (await store.enqueue(Job("x"))).job
        running = await start(store, Job("a"))
        for job in (queued, running):
            cancellation = f"c {job.id}"
            assert await store.cancel(job.id, cancellation) == CancellationResult("recorded")
            before = await read_all(store)
            assert (await read(store, job.id)).cancellation_id == cancellation
            assert await store.cancel(job.id, cancellation) == CancellationResult("replayed")
            assert await store.cancel(job.id, "other") == CancellationResult("conflict")
            assert await read_all(store) == before
        assert (await read(store, queued.id)).state == "queued"
        assert (await read(store, running.id)).state == "running"


@store_check()
async def a_cancellation_id_belongs_to_one_job(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        for id in ("one", "two", "three"):
            await store.enqueue(Job("x", id=id))
        assert (await store.cancel("one", "c")).status == "recorded"
        assert (await store.cancel("two", "c")).status == "conflict"
        await store.settle_cancelled()
        # For as long as that job is there.
        assert (await store.cancel("two", "c")).status == "conflict"
        assert (await read(store, "two")).cancellation_id is None
        answers = await store.submit(wishes.Cancel("two", "d"), wishes.Cancel("three", "d"))
        assert sorted(answer.status for answer in answers) == ["conflict", "recorded"]


@store_check()
async def only_if_queued_spares_a_job_that_runs(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        queued = (await store.enqueue(Job("x"))).job
        running = await start(store, Job("a"))
        assert (await store.cancel(queued.id, "c", only_if_queued=True)).status == "recorded"
        assert (await store.cancel(queued.id, "c", only_if_queued=True)).status == "replayed"
        assert (await store.cancel(running.id, "d", only_if_queued=True)).status == "conflict"
        assert (await read_running(store, running.id)).cancellation_id is None
        assert (await store.cancel(running.id, "d")).status == "recorded"
        assert (await store.cancel(running.id, "d", only_if_queued=True)).status == "replayed"


@store_check()
async def cancelling_a_decided_job_tells_how_it_ended(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        completing = await start_completing(store, Job("a"))
        for only_if_queued in (False, True):
            assert await store.cancel(
                completing.id, "c", only_if_queued=only_if_queued
            ) == CancellationResult("decided", Outcome.COMPLETED)
        await store.finish_completing(completing.id, completing.token)
        assert (await store.cancel(completing.id, "c")).status == "decided"
        for ending in (Settle(Outcome.FAILED, "r"), Settle(Outcome.OUTCOME_UNKNOWN)):
            job = await start(store, Job("a"))
            await store.decide(job.id, job.token, ending)
            assert await store.cancel(job.id, "c") == CancellationResult("decided", ending.outcome)
            assert (await read(store, job.id)).cancellation_id is None
        interrupted = await start(store, Job("b"))
        clock.advance(LEASE_SECONDS)
        await store.reconcile(interrupted.id, interrupted.token)
        assert await store.cancel(interrupted.id, "c") == CancellationResult(
            "decided", Outcome.INTERRUPTED
        )


@store_check()
async def a_replayed_cancellation_says_so_even_after_the_end(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        queued = (await store.enqueue(Job("x"))).job
        running = await start(store, Job("a"))
        for job in (queued, running):
            await store.cancel(job.id, f"c {job.id}")
        await store.settle_cancelled()
        await store.decide(running.id, running.token, COMPLETED)
        for job in (queued, running):
            assert (await store.cancel(job.id, f"c {job.id}")).status == "replayed"
            assert await store.cancel(job.id, "other") == CancellationResult(
                "decided", Outcome.CANCELLED
            )


@store_check()
async def a_cancelled_queued_job_settles_at_once_and_out_of_turn(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        running = await start(store, Job("a", queue="q"))
        await store.enqueue(Job("a", id="first", queue="q"))
        await store.enqueue(Job("a", id="later", queue="q", not_before=clock.instant(60)))
        await store.enqueue(Job("a", id="last", queue="q"))
        await store.cancel("later", "c")
        assert await store.settle_cancelled() == ["later"]
        ended = await read_settled_job(store, "later")
        assert (ended.outcome, ended.reason, ended.attempt_count) == (Outcome.CANCELLED, None, 0)
        # Nothing else moved, and the one that runs is not disturbed.
        assert (await store.inspect(running.id, running.token)) == wishes.Renewal("held")
        assert await find(store, "a") is None
        await complete(store, running)
        assert ids(await drain(store, "a")) == ["first", "last"]


@store_check()
async def a_cancelled_head_makes_way_for_the_next(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        for not_before in (None, clock.instant(60)):
            await store.enqueue(Job("a", id="head", queue="q", not_before=not_before))
            await store.enqueue(Job("a", id="next", queue="q"))
            await store.cancel("head", "c")
            assert await store.settle_cancelled() == ["head"]
            assert (await store.read_queue_head("q")).job_id == "next"
            assert ids(await drain(store, "a")) == ["next"]
            await store.ask(wishes.Prune(clock.now() + 1))


@store_check()
async def two_cancelled_in_a_row_lose_nobody_behind_them(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        for queue in ("q", "r"):
            running = await start(store, Job("a", queue=queue))
            await store.enqueue_many([Job("a", n, queue=queue, id=f"{queue}{n}") for n in range(4)])
            assert await find(store, "a") is None
            for n in (0, 1):
                await store.cancel(f"{queue}{n}", f"c{queue}{n}")
                if queue == "r":
                    assert await store.settle_cancelled() == [f"r{n}"]
            if queue == "q":
                assert sorted(await store.settle_cancelled()) == ["q0", "q1"]
            await complete(store, running)
            assert ids(await drain(store, "a")) == [f"{queue}2", f"{queue}3"]


@store_check()
async def cancelled_jobs_settle_by_lane_and_up_to_a_limit(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        for n in range(10):
            await store.enqueue(Job("ab"[n % 2], id=f"{n}", queue="q"))
            await store.cancel(f"{n}", f"c{n}")
        assert await store.settle_cancelled("a", 2) == ["0", "2"]
        assert await store.settle_cancelled("x") == []
        assert await store.settle_cancelled("a") == ["4", "6", "8"]
        assert await store.settle_cancelled(limit=2) == ["1", "3"]
        assert await store.settle_cancelled() == ["5", "7", "9"]
        assert await store.settle_cancelled() == []
        assert {job.outcome for job in await feed(store)} == {Outcome.CANCELLED}


@store_check()
async def a_running_job_is_not_settled_by_its_cancellation(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        running = await start(store, Job("a"))
        await store.cancel(running.id, "c")
        assert await store.settle_cancelled() == []
        assert (await store.wake_state()).pending
        assert (await store.read_queue_head(running.queue)).cancellation_requested


# -- failed lanes ---------------------------------------------------------------------------------


@store_check()
async def a_failed_lane_settles_its_jobs_running_ones_first(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        await store.enqueue(Job("a", id="waits"))
        running = await start(store, Job("b", id="runs", queue="q"))
        await store.enqueue(Job("b", id="blocked", queue="q"))
        await store.enqueue(Job("b", id="deferred", not_before=clock.instant(60)))
        await store.enqueue(Job("b", id="unlucky"))
        await store.enqueue(Job("b", id="runs too", priority=1))
        assert (await claim(store, "b")).id == "runs too"
        failure = await store.fail_lane("b", "disk full")
        assert ids(failure.jobs) == ["runs", "runs too", "blocked", "deferred", "unlucky"]
        assert not failure.more
        for job in failure.jobs:
            assert (job.outcome, job.reason) == (Outcome.FAILED, "disk full")
            assert job == await read_settled_job(store, job.id)
        # Others are untouched, and the queue is free.
        assert (await read_queued(store, "waits")).state == "queued"
        assert (await store.read_queue_head("q")).state == "idle"
        assert await store.fail_lane("b", "again") == LaneFailure((), False)
        # The claim is void, and its holder can learn why.
        assert await store.renew("runs", running.token) == wishes.Renewal(
            "lost", settled_as_failed=True
        )
        assert await store.inspect("runs", running.token) == wishes.Renewal(
            "lost", settled_as_failed=True
        )
        assert await store.renew("runs", "other") == wishes.Renewal("lost")


@store_check()
async def a_failed_lane_settles_256_jobs_at_a_time(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        await store.enqueue_many([Job("a", id=f"{n}", queue=f"q{n % 7}") for n in range(300)])
        claimed = [await claim(store, "a") for _ in range(7)]
        first = await store.fail_lane("a", "r")
        assert (len(first.jobs), first.more) == (256, True)
        assert ids(first.jobs)[:7] == ids(claimed)
        assert ids(first.jobs)[7:] == [f"{n}" for n in range(7, 256)]
        second = await store.fail_lane("a", "r")
        assert ids(second.jobs) == [f"{n}" for n in range(256, 300)]
        assert not second.more
        assert len(await feed(store)) == 300


@store_check()
async def a_lane_of_exactly_256_jobs_fails_in_one_go(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        await store.enqueue_many([Job("a") for _ in range(256)])
        failure = await store.fail_lane("a", "r")
        assert (len(failure.jobs), failure.more) == (256, False)


@store_check()
async def a_failed_lane_frees_the_queues_for_other_lanes(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        for n, state in enumerate(("running", "queued", "deferred")):
            not_before = clock.instant(60) if state == "deferred" else None
            await store.enqueue(Job("bad", queue=f"q{n}", priority=1, not_before=not_before))
        held = await claim(store, "bad")
        assert held.queue == "q0"
        await store.enqueue_many([Job("good", id=f"{n}", queue=f"q{n}") for n in range(3)])
        assert await find(store, "good") is None
        assert len((await store.fail_lane("bad", "r")).jobs) == 3
        assert sorted(ids(await drain(store, "good"))) == ["0", "1", "2"]


@store_check()
async def a_completing_job_keeps_its_outcome_when_its_lane_fails(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        job = await start_completing(store, Job("a"))
        assert await store.fail_lane("a", "r") == LaneFailure((), False)
        assert (await store.renew(job.id, job.token)).status == "held"
        assert await store.finish_completing(job.id, job.token) == "settled"
        assert (await read_settled_job(store, job.id)).outcome is Outcome.COMPLETED


@store_check()
async def a_lane_cannot_fail_for_an_illegal_reason(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        await store.enqueue(Job("a", id="j"))
        for reason in ("", "r" * 201, "a\0b", "\ud800"):
            with raises(InvalidJob, "reason"):
                await store.fail_lane("a", reason)
        assert (await read_queued(store, "j")).state == "queued"
        assert (await store.fail_lane("a", "😀" * 200)).jobs[0].reason == "😀" * 200


# -- purges and prunes ----------------------------------------------------------------------------


@store_check()
async def a_purge_deletes_what_is_queued_and_nothing_else(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        ended = await settled(store, Job("a", queue="q"))
        running = await start(store, Job("a", queue="q"))
        await store.enqueue_many([Job("a", id=f"{n}", queue="q", priority=n % 3) for n in range(9)])
        await store.enqueue(Job("b", id="deferred", queue="q", not_before=clock.instant(60)))
        await store.enqueue(Job("b", id="cancelled", queue="q"))
        await store.cancel("cancelled", "c")
        await store.enqueue(Job("a", id="other", queue="other"))
        assert await store.purge_queue("q") == 11
        assert ids(await read_all(store)) == [ended.id, running.id, "other"]
        assert await store.purge_queue("q") == 0
        assert await store.purge_queue("nobody's") == 0
        assert (await store.inspect(running.id, running.token)).status == "held"
        # The cancellation id went with its job.
        assert (await store.cancel("other", "c")).status == "recorded"


@store_check()
async def a_purged_id_is_free_and_its_sequence_is_not(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        first = (await store.enqueue(Job("a", 1, id="j", queue="q"))).job
        assert await store.purge_queue("q") == 1
        assert await store.read("j") is None
        again = await store.enqueue(Job("a", 2, id="j", queue="q"))
        assert again.status == "queued"
        assert again.job.sequence > first.sequence


@store_check()
async def a_purged_queue_goes_on(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        await store.enqueue(Job("a", queue="q", not_before=clock.instant(60)))
        await store.enqueue(Job("a", queue="q"))
        assert await store.purge_queue("q") == 2
        running = await start(store, Job("a", queue="q"))
        await store.enqueue(Job("a", queue="q"))
        assert await store.purge_queue("q") == 1
        await store.enqueue(Job("a", id="next", queue="q"))
        await complete(store, running)
        assert ids(await drain(store, "a")) == ["next"]


@store_check()
async def a_prune_deletes_settled_jobs_from_before_an_instant(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        for n in range(6):
            await settled(store, Job("ab"[n % 2], id=f"{n}", queue=f"q{n % 3}"))
            clock.advance(1)
        await store.enqueue(Job("x", id="queued"))
        await start(store, Job("c", id="running"))
        at_the_second = clock.now() - 5_000
        assert await store.ask(wishes.Prune(at_the_second)) == 1
        assert await store.ask(wishes.Prune(at_the_second)) == 0
        assert await store.ask(wishes.Prune(at_the_second + 1)) == 1
        assert await store.ask(wishes.Prune(clock.now(), lane="b")) == 2
        assert await store.ask(wishes.Prune(clock.now(), queue="q2")) == 1
        assert ids(await feed(store)) == ["4"]
        assert await store.ask(wishes.Prune(clock.now() + 1_000_000)) == 1
        assert ids(await read_all(store)) == ["queued", "running"]


@store_check()
async def a_prune_takes_the_oldest_first_and_keeps_to_its_limit(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        for n in range(5):
            await settled(store, Job("a", id=f"{n}"))
        assert await store.ask(wishes.Prune(clock.now() + 1, limit=2)) == 2
        assert ids(await feed(store)) == ["2", "3", "4"]
        assert (await store.enqueue(Job("a", id="0"))).status == "queued"


@store_check()
async def a_prune_keeps_as_many_of_the_newest_as_it_is_told(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        for n in range(9):
            await settled(store, Job("ab"[n % 2], id=f"{n}", queue=f"q{n % 3}"))
            clock.advance(1)
        assert await store.prune(keep=9) == 0
        assert await store.prune(keep=8) == 1
        assert await store.prune(keep=2, lane="b") == 2
        assert ids(await feed(store)) == ["2", "4", "5", "6", "7", "8"]
        assert await store.prune(keep=1, queue="q2") == 2
        assert ids(await feed(store)) == ["4", "6", "7", "8"]
        # Both conditions: too old, or too many.
        assert await store.prune(before=clock.now() - 4_000, keep=1) == 1
        assert await store.prune(before=clock.now() - 1, keep=3) == 0
        assert await store.prune(keep=0) == 3
        assert await store.prune(keep=0) == 0


@store_check()
async def a_prune_spares_what_a_protected_reader_has_still_to_read(
    open_store: StoreMaker,
) -> None:
    async with open_store() as (store, clock):
        for n in range(6):
            await settled(store, Job("a", id=f"{n}"))
        second = (await store.read_settled(2)).cursor
        fourth = (await store.read_settled(4)).cursor
        await store.protect_settled("slow", None)
        await store.protect_settled("fast", fourth)
        later = clock.now() + 1
        assert await store.prune(before=later) == 0
        assert await store.prune(keep=0) == 0
        await store.protect_settled("slow", second)
        assert await store.prune(before=later) == 2
        assert ids(await feed(store)) == ["2", "3", "4", "5"]
        assert await store.release_settled("slow")
        assert not await store.release_settled("slow")
        assert await store.prune(keep=0) == 2
        # What settles later is protected, too.
        await settled(store, Job("a", id="6"))
        assert await store.prune(keep=0, lane="a") == 0
        assert ids(await feed(store)) == ["4", "5", "6"]
        with raises(InvalidJob, "cursor"):
            await store.protect_settled("fast", "nonsense")
        await store.release_settled("fast")
        assert await store.prune(keep=0) == 3


# -- moving ---------------------------------------------------------------------------------------


@store_check()
async def unsettled_jobs_move_to_another_database_as_they_are(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock), open_store() as (other, _):
        await settled(store, Job("a", id="settled"))
        running = await start(store, Job("a", id="running", queue="q"))
        await store.enqueue(Job("a", {"n": 1}, id="waits", queue="q", recovery=Recovery(3, 60)))
        await store.enqueue(Job("b", id="later", priority=7, not_before=clock.instant(600)))
        await store.cancel("later", "c")
        completing = await start_completing(store, Job("c", id="completing", queue="r"))
        retried = await start(store, Job("d", id="retried", recovery=Recovery(2)))
        await store.retry("retried", retried.token)
        again = await claim(store, "d")
        clock.advance(2 * LEASE_SECONDS)
        await store.reconcile("retried", again.token)
        exported = await store.ask(wishes.Export(limit=2))
        assert [row[0] for row in exported.rows] == ["waits", "later"]
        rest = await store.ask(wishes.Export(exported.last))
        rows = [*exported.rows, *rest.rows]
        assert [row[0] for row in rows] == ["waits", "later", "completing", "retried"]
        await other.enqueue(Job("a", id="there before"))
        assert await other.ask(wishes.Import(rows)) == 4
        assert await other.ask(wishes.Import(rows)) == 0
        for id in ("waits", "later", "retried"):
            old, new = await read_queued(store, id), await read_queued(other, id)
            assert evolve(old, sequence=0) == evolve(new, sequence=0)
        assert (await read_queued(other, "retried")).attempt_count == 2
        assert (await read_queued(other, "retried")).recovery_count == 1
        # The completion has no owner there, so the first who looks takes it over.
        taken = await other.take_completing("t", lease=LEASE)
        assert taken is not None
        assert (taken.id, taken.outcome) == ("completing", Outcome.COMPLETED)
        assert await other.settle_cancelled() == ["later"]
        assert ids(await drain(other, "a", "d")) == ["there before", "retried", "waits"]
        # Then they go from where they came; what runs there stays.
        assert await store.ask(wishes.Remove([row[0] for row in rows])) == 4
        assert await store.ask(wishes.Remove(["running", "settled"])) == 0
        assert ids(await read_all(store)) == ["settled", "running"]
        assert await store.finish_completing("completing", completing.token) == "missing"
        assert (await store.renew("running", running.token)).status == "lost"


@store_check()
async def whoever_queued_up_behind_removed_jobs_is_not_lost(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        await store.enqueue_many([Job("a", id=f"{n}", queue="q") for n in range(3)])
        await store.enqueue(Job("b", id="behind", queue="q"))
        assert await find(store, "b") is None
        assert await store.ask(wishes.Remove(["0", "1", "2"])) == 3
        assert (await claim(store, "b")).id == "behind"


# -- disappeared claims ---------------------------------------------------------------------------


@store_check()
async def a_claim_has_disappeared_when_its_lease_is_over(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        job = await start(store, Job("a", recovery=Recovery(1)))
        clock.advance(LEASE_SECONDS - TICK)
        before = await read_all(store)
        assert await store.next_running_claim() is None
        assert (await store.reconcile(job.id, job.token)).status == "untouched"
        assert await read_all(store) == before
        clock.advance(TICK)
        assert await store.next_running_claim() == await read_running(store, job.id)
        assert (await store.reconcile(job.id, job.token)).status == "queued"


@store_check()
async def a_disappeared_job_without_recovery_is_interrupted(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        job = await start(store, Job("a", queue="q"))
        await store.enqueue(Job("a", id="next", queue="q"))
        clock.advance(LEASE_SECONDS)
        reconciled = await store.reconcile(job.id, job.token)
        ended = await read_settled_job(store, job.id)
        assert ended.outcome is Outcome.INTERRUPTED
        assert ended.reason
        assert reconciled == wishes.Reconciled("settled", Settle(Outcome.INTERRUPTED, ended.reason))
        assert (await claim(store, "a")).id == "next"


@store_check()
async def a_disappeared_job_whose_cancellation_is_recorded_is_cancelled(
    open_store: StoreMaker,
) -> None:
    async with open_store() as (store, clock):
        for recovery in (None, Recovery(0), Recovery(9)):
            job = await start(store, Job("a", recovery=recovery))
            await store.cancel(job.id, f"c {job.id}")
            clock.advance(LEASE_SECONDS)
            assert (await store.reconcile(job.id, job.token)).status == "settled"
            ended = await read_settled_job(store, job.id)
            assert (ended.outcome, ended.reason) == (Outcome.CANCELLED, None)


@store_check()
async def a_recovery_budget_is_spent_one_by_one_and_then_exhausted(
    open_store: StoreMaker,
) -> None:
    async with open_store() as (store, clock):
        for most in (0, 1, 3):
            await store.enqueue(Job("a", id=f"{most}", recovery=Recovery(most)))
            for count in range(most):
                job = await claim(store, "a")
                assert job.recovery_count == count
                clock.advance(LEASE_SECONDS)
                assert (await store.reconcile(job.id, job.token)).status == "queued"
                assert (await read_queued(store, job.id)).recovery_count == count + 1
            job = await claim(store, "a")
            clock.advance(LEASE_SECONDS)
            assert (await store.reconcile(job.id, job.token)).status == "settled"
            ended = await read_settled_job(store, job.id)
            assert ended.outcome is Outcome.INTERRUPTED
            assert ended.reason is not None
            assert "budget exhausted" in ended.reason
            assert f"{most} of {most}" in ended.reason
            assert ended.recovery_count == most


@store_check()
async def a_recovery_window_opens_anew_at_its_end_and_not_a_tick_before(
    open_store: StoreMaker,
) -> None:
    # The window begins at the first recovery of the window.
    for ticks_after, status in ((-1, "settled"), (0, "queued"), (1, "queued")):
        async with open_store() as (store, clock):
            await store.enqueue(Job("a", id="j", recovery=Recovery(1, 600)))
            job = await claim(store, "a")
            clock.advance(LEASE_SECONDS + 40)
            assert (await store.reconcile("j", job.token)).status == "queued"
            clock.advance(100)
            job = await claim(store, "a")
            clock.advance(500 + ticks_after * TICK)
            assert (await store.reconcile("j", job.token)).status == status
            if status == "settled":
                ended = await read_settled_job(store, "j")
                assert ended.outcome is Outcome.INTERRUPTED
                assert "budget exhausted" in (ended.reason or "")
                continue
            # A fresh count, and a fresh window that begins now.
            assert (await read_queued(store, "j")).recovery_count == 1
            job = await claim(store, "a")
            clock.advance(600 - TICK)
            assert (await store.reconcile("j", job.token)).status == "settled"


@store_check()
async def a_window_counts_all_recoveries_since_it_opened(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        await store.enqueue(Job("a", id="j", recovery=Recovery(3, 1000)))
        counts: list[int] = []
        for _ in range(3):
            job = await claim(store, "a")
            clock.advance(300)
            await store.reconcile("j", job.token)
            counts.append((await read_queued(store, "j")).recovery_count)
        # 600 s after the first recovery; the fourth disappearance comes after 1000, a new window.
        job = await claim(store, "a")
        clock.advance(400)
        await store.reconcile("j", job.token)
        counts.append((await read_queued(store, "j")).recovery_count)
        assert counts == [1, 2, 3, 1]


@store_check()
async def a_recovered_job_keeps_its_place(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        for n in range(3):
            await store.enqueue(Job("a", id=f"{n}", queue="q", recovery=Recovery(1)))
        job = await claim(store, "a")
        clock.advance(LEASE_SECONDS)
        assert await find(store, "a") is None
        await store.reconcile("0", job.token)
        assert (await store.read_queue_head("q")).job_id == "0"
        assert ids(await drain(store, "a")) == ["0", "1", "2"]


@store_check()
async def retries_and_recoveries_are_counted_apart(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        policy = RetryPolicy(9, delay=0)
        await store.enqueue(Job("a", id="j", recovery=Recovery(1)))
        for _ in range(3):
            job = await claim(store, "a")
            await store.retry("j", job.token, policy)
        job = await claim(store, "a")
        clock.advance(LEASE_SECONDS)
        await store.reconcile("j", job.token)
        job = await claim(store, "a")
        assert (job.attempt_count, job.recovery_count) == (5, 1)
        # A retry gives no recovery back.
        await store.retry("j", job.token, policy)
        job = await claim(store, "a")
        clock.advance(LEASE_SECONDS)
        assert (await store.reconcile("j", job.token)).status == "settled"


@store_check()
async def a_disappearance_is_reconciled_once_whoever_gets_there_first(
    open_store: StoreMaker,
) -> None:
    async with open_store() as (store, clock):
        job = await start(store, Job("a", recovery=Recovery(5)))
        clock.advance(LEASE_SECONDS)
        answers = await store.submit(
            wishes.Reconcile(job.id, job.token), wishes.Reconcile(job.id, job.token)
        )
        assert sorted(answer.status for answer in answers) == ["queued", "untouched"]
        assert (await read_queued(store, job.id)).recovery_count == 1
        newer = await claim(store, "a")
        assert (await store.reconcile(job.id, job.token)).status == "untouched"
        assert (await store.reconcile("missing", job.token)).status == "untouched"
        assert (await store.inspect(newer.id, newer.token)).status == "held"


@store_check()
async def a_renewal_that_came_first_saves_the_claim(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        job = await start(store, Job("a", recovery=Recovery(5)))
        clock.advance(LEASE_SECONDS - TICK)
        await store.renew(job.id, job.token, lease=LEASE)
        clock.advance(TICK)
        assert await store.next_running_claim() is None
        assert (await store.reconcile(job.id, job.token)).status == "untouched"


@store_check()
async def disappeared_claims_are_found_in_order_past_those_left_alone(
    open_store: StoreMaker,
) -> None:
    async with open_store() as (store, clock):
        jobs: list[StoredJob] = [await start(store, Job(f"{n}", {"n": n})) for n in range(4)]
        alive = await start(store, Job("alive"), lease=10 * LEASE)
        await start_completing(store, Job("completing"))
        clock.advance(LEASE_SECONDS)
        found: list[str] = []
        after = 0
        while (job := await store.next_running_claim(after)) is not None:
            # Whether it is alive is unknown, so it is left alone.
            found.append(job.id)
            after = job.sequence
        assert found == ids(jobs)
        assert (await store.inspect(alive.id, alive.token)).status == "held"
        # And asked again later.
        first = await store.next_running_claim()
        assert first is not None
        assert (first.id, first.payload) == (jobs[0].id, {"n": 0})


@store_check()
async def an_owner_known_dead_has_disappeared_whatever_its_lease(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        job = await start(store, Job("a", recovery=Recovery(1)))
        completing = await start_completing(store, Job("b"))
        dead = (store.owner, "somebody else")
        assert await store.ask(wishes.NextRunningClaim(0, ("nobody",))) is None
        found = await store.ask(wishes.NextRunningClaim(0, dead))
        assert found is not None
        assert found.id == job.id
        untouched = await store.ask(wishes.Reconcile(job.id, job.token, ("nobody",)))
        assert untouched.status == "untouched"
        assert (await store.ask(wishes.Reconcile(job.id, "stolen", dead))).status == "untouched"
        assert (await store.ask(wishes.Reconcile(job.id, job.token, dead))).status == "queued"
        take = wishes.TakeCompleting("new", "owner", LEASE, dead=("nobody",))
        assert await store.ask(take) is None
        take = wishes.TakeCompleting("new", "owner", LEASE, dead=dead)
        taken = await store.ask(take)
        assert taken is not None
        assert (taken.id, taken.token) == (completing.id, "new")
        # Its new owner is not the dead one.
        assert await store.ask(wishes.TakeCompleting("newer", "owner", LEASE, dead=dead)) is None


@store_check()
async def nonsense_is_refused_and_changes_nothing(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        await store.enqueue(Job("a", id="j"))
        before = await read_all(store)
        for cancellation in ("", "x" * 257, "a\0b", "\ud800"):
            with raises(InvalidJob, "cancellation_id"):
                await store.cancel("j", cancellation)
        for limit in (0, -1, 257, True, 1.5, None):
            with raises(StoreInvalid, "limit"):
                await store.read_settled(limit)  # type: ignore[arg-type]
        for cursor in ("", "1", "x.y", "1.", ".1", "-1.1", "1.1.1", "٣.٣", f"{2**63}.0", " 1.1"):
            with raises(InvalidJob, "cursor"):
                await store.read_settled(after=cursor)
        assert await read_all(store) == before
