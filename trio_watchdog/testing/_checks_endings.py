"""Store checks: what the holder of a claim writes at the end of a run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from .. import _wishes as wishes
from .._model import (
    INSTANT_LIMIT,
    Job,
    Outcome,
    QueuedJob,
    Recovery,
    RetryPolicy,
    RunningJob,
)
from .._rules import Settle
from .._store import Store
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
    milliseconds,
    read_all,
    read_completing,
    read_queued,
    read_settled_job,
    start,
    start_completing,
)
from ._clock import TICK, DurableClock
from ._store_maker import StoreMaker, store_check

ENDINGS = (
    Settle(Outcome.COMPLETED),
    Settle(Outcome.FAILED, "it broke"),
    Settle(Outcome.FAILED, "😀" * 200),
    Settle(Outcome.CANCELLED),
    Settle(Outcome.OUTCOME_UNKNOWN),
)

# -- decisions ------------------------------------------------------------------------------------


@store_check()
async def a_decision_settles_the_job_with_its_outcome_and_reason(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        for n, ending in enumerate(ENDINGS):
            job = await start(store, Job("a", id=f"{n}"))
            clock.advance(1)
            assert await store.decide(job.id, job.token, ending) == wishes.Recorded(
                "recorded", ending
            )
            ended = await read_settled_job(store, f"{n}")
            assert (ended.outcome, ended.reason) == (ending.outcome, ending.reason)
            assert milliseconds(ended.settled_at) == clock.now()
            assert (ended.sequence, ended.attempt_count) == (job.sequence, 1)


@store_check()
async def a_decision_with_a_hook_is_durable_before_the_job_is_settled(
    open_store: StoreMaker,
) -> None:
    async with open_store() as (store, _):
        for n, ending in enumerate(ENDINGS):
            job = await start(store, Job("a", id=f"{n}"))
            recorded = await store.decide(job.id, job.token, ending, has_hook=True)
            assert recorded == wishes.Recorded("recorded", ending)
            completing = await read_completing(store, f"{n}")
            assert (completing.outcome, completing.reason) == (ending.outcome, ending.reason)
            assert (completing.token, completing.lease_until) == (job.token, job.lease_until)
            assert ids(await feed(store)) == [f"{m}" for m in range(n)]
            assert await store.finish_completing(job.id, job.token) == "settled"
            ended = await read_settled_job(store, f"{n}")
            assert (ended.outcome, ended.reason) == (ending.outcome, ending.reason)


@store_check()
async def the_same_decision_again_is_replayed(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        for has_hook in (False, True):
            for ending in ENDINGS:
                job = await start(store, Job("a"))
                await store.decide(job.id, job.token, ending, has_hook=has_hook)
                clock.advance(1)
                before = await read_all(store)
                replayed = await store.decide(job.id, job.token, ending, has_hook=has_hook)
                assert replayed == wishes.Recorded("replayed", ending)
                # Even when the lease is long over: the decision was in time.
                clock.advance(LEASE_SECONDS)
                replayed = await store.decide(job.id, job.token, ending, has_hook=has_hook)
                assert replayed.status == "replayed"
                assert await read_all(store) == before
                if has_hook:
                    await store.finish_completing(job.id, job.token)
                    replayed = await store.decide(job.id, job.token, ending, has_hook=True)
                    assert replayed.status == "replayed"


@store_check()
async def another_decision_is_a_conflict_and_the_first_one_stands(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        for first in ENDINGS:
            for other in (*ENDINGS, Settle(Outcome.FAILED, "it broke otherwise")):
                if first == other:
                    continue
                job = await start(store, Job("a"))
                await store.decide(job.id, job.token, first, has_hook=True)
                before = await read_all(store)
                for has_hook in (True, False):
                    decided = await store.decide(job.id, job.token, other, has_hook=has_hook)
                    assert decided.status == "conflict"
                assert await read_all(store) == before
                await store.finish_completing(job.id, job.token)
                assert (await store.decide(job.id, job.token, other)).status == "conflict"


@store_check()
async def a_decision_at_the_end_of_the_lease_is_a_conflict(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        for has_hook in (False, True):
            job = await start(store, Job("a", recovery=Recovery(9)))
            clock.advance(LEASE_SECONDS)
            before = await read_all(store)
            decided = await store.decide(job.id, job.token, COMPLETED, has_hook=has_hook)
            assert decided == wishes.Recorded("conflict")
            assert await read_all(store) == before
            await store.reconcile(job.id, job.token)
            job = await claim(store, "a")
            clock.advance(LEASE_SECONDS - TICK)
            decided = await store.decide(job.id, job.token, COMPLETED, has_hook=has_hook)
            assert decided.status == "recorded"


@store_check()
async def a_decision_on_an_unknown_job_is_missing(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        assert (await store.decide("j", "t", COMPLETED)).status == "missing"
        assert await store.finish_completing("j", "t") == "missing"
        assert (await store.retry("j", "t")).status == "missing"
        assert (await store.hand_off("j", "t")).status == "missing"
        assert (await store.cancel("j", "c")).status == "missing"


@store_check()
async def a_late_decision_cannot_touch_a_newer_claim(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        old = await start(store, Job("a", recovery=Recovery(1)))
        clock.advance(LEASE_SECONDS)
        assert (await store.reconcile(old.id, old.token)).status == "queued"
        new = await claim(store, "a")
        assert new.id == old.id
        assert new.token != old.token
        before = await read_all(store)
        await everything_is_refused(store, old)
        assert await read_all(store) == before
        assert (await store.decide(new.id, new.token, COMPLETED)).status == "recorded"
        await everything_is_refused(store, old)


@store_check()
async def a_late_decision_cannot_touch_a_job_that_waits_again(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        recovered = await start(store, Job("a", recovery=Recovery(1)))
        clock.advance(LEASE_SECONDS)
        await store.reconcile(recovered.id, recovered.token)
        retried = await start(store, Job("b"))
        await store.retry(retried.id, retried.token)
        handed_off = await start(store, Job("c"))
        await store.hand_off(handed_off.id, handed_off.token)
        before = await read_all(store)
        for job in (recovered, retried, handed_off):
            await everything_is_refused(store, job)
        assert await read_all(store) == before


@store_check()
async def a_late_decision_cannot_touch_a_job_that_was_settled_by_others(
    open_store: StoreMaker,
) -> None:
    async with open_store() as (store, clock):
        interrupted = await start(store, Job("a"))
        clock.advance(LEASE_SECONDS)
        await store.reconcile(interrupted.id, interrupted.token)
        failed = await start(store, Job("b"))
        await store.fail_lane("b", "the lane is broken")
        before = await read_all(store)
        for job in (interrupted, failed):
            await everything_is_refused(store, job)
        assert await read_all(store) == before


async def everything_is_refused(store: Store, job: RunningJob) -> None:
    """No holder's operation gets through with this claim."""
    for has_hook in (False, True):
        decided = await store.decide(job.id, job.token, COMPLETED, has_hook=has_hook)
        assert decided == wishes.Recorded("conflict")
    assert await store.finish_completing(job.id, job.token) in ("conflict", "replayed")
    assert (await store.retry(job.id, job.token, RetryPolicy(9))).status == "conflict"
    assert (await store.retry(job.id, job.token, RetryPolicy(1))).status == "conflict"
    assert (await store.hand_off(job.id, job.token)).status == "conflict"
    assert (await store.reserve_attempt(job.id, job.token, RetryPolicy(9))).status == "conflict"
    assert (await store.renew(job.id, job.token)).status == "lost"
    assert (await store.inspect(job.id, job.token)).status == "lost"
    assert (await store.reconcile(job.id, job.token)).status == "untouched"


@store_check()
async def a_recorded_cancellation_turns_any_decision_into_cancelled(
    open_store: StoreMaker,
) -> None:
    async with open_store() as (store, _):
        cancelled = Settle(Outcome.CANCELLED)
        for n, ending in enumerate(ENDINGS):
            for has_hook in (False, True):
                job = await start(store, Job("a"))
                await store.cancel(job.id, f"c{n}{has_hook}")
                recorded = await store.decide(job.id, job.token, ending, has_hook=has_hook)
                assert recorded == wishes.Recorded("recorded", cancelled)
                # The same request again is the same decision, though another outcome stands.
                again = await store.decide(job.id, job.token, ending, has_hook=has_hook)
                assert again == wishes.Recorded("replayed", cancelled)
                if has_hook:
                    completing = await read_completing(store, job.id)
                    assert (completing.outcome, completing.reason) == (Outcome.CANCELLED, None)
                    await store.finish_completing(job.id, job.token)
                ended = await read_settled_job(store, job.id)
                assert (ended.outcome, ended.reason) == (Outcome.CANCELLED, None)
                assert ended.cancellation_id == f"c{n}{has_hook}"


@store_check()
async def one_exchange_takes_many_decisions_each_for_itself(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        jobs = [await start(store, Job(f"{n}", id=f"{n}")) for n in range(30)]
        await store.cancel("4", "c")
        await store.hand_off("6", jobs[6].token)
        clock.advance(LEASE_SECONDS - TICK)
        for n in range(0, 30, 2):
            await store.renew(f"{n}", jobs[n].token, lease=LEASE)
        clock.advance(TICK)
        asked = [
            wishes.Decide(job.id, job.token, ENDINGS[n % 5], has_hook=n % 3 == 0)
            for n, job in enumerate(jobs)
        ]
        answers = await store.submit(
            *asked, wishes.Decide("8", "stolen", COMPLETED), wishes.Decide("no", "t", COMPLETED)
        )
        assert answers[30].status == "conflict"
        assert answers[31].status == "missing"
        for n, answer in enumerate(answers[:30]):
            if n % 2 == 1 or n == 6:
                assert answer == wishes.Recorded("conflict")
                continue
            ending = Settle(Outcome.CANCELLED) if n == 4 else ENDINGS[n % 5]
            assert answer == wishes.Recorded("recorded", ending)
            job = await store.read(f"{n}")
            assert job is not None
            assert job.state == ("completing" if n % 3 == 0 else "settled")


@store_check()
async def one_exchange_can_hold_the_same_decision_twice(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        job = await start(store, Job("a"))
        first, second, third = await store.submit(
            wishes.Decide(job.id, job.token, COMPLETED),
            wishes.Decide(job.id, job.token, COMPLETED),
            wishes.Decide(job.id, job.token, Settle(Outcome.FAILED, "no")),
        )
        assert (first.status, second.status, third.status) == ("recorded", "replayed", "conflict")


# -- the second phase -----------------------------------------------------------------------------


@store_check()
async def finishing_a_completion_settles_it_once(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        job = await start_completing(store, Job("a"))
        assert await store.finish_completing(job.id, "other") == "conflict"
        clock.advance(1)
        assert await store.finish_completing(job.id, job.token) == "settled"
        ended = await read_settled_job(store, job.id)
        assert milliseconds(ended.settled_at) == clock.now()
        before = await read_all(store)
        assert await store.finish_completing(job.id, job.token) == "replayed"
        assert await store.finish_completing(job.id, "other") == "conflict"
        assert await read_all(store) == before


@store_check()
async def a_job_that_is_not_completing_cannot_be_finished(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        queued = (await store.enqueue(Job("x"))).job
        running = await start(store, Job("a"))
        before = await read_all(store)
        assert await store.finish_completing(queued.id, "t") == "conflict"
        assert await store.finish_completing(running.id, running.token) == "conflict"
        assert await read_all(store) == before


@store_check()
async def one_exchange_finishes_many_completions(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        jobs = [await start_completing(store, Job(f"{n}", id=f"{n}")) for n in range(6)]
        answers = await store.submit(
            *[wishes.FinishCompleting(job.id, job.token) for job in jobs],
            wishes.FinishCompleting("0", jobs[0].token),
            wishes.FinishCompleting("1", "other"),
            wishes.FinishCompleting("no", "t"),
        )
        assert answers == ["settled"] * 6 + ["replayed", "conflict", "missing"]


@store_check()
async def a_completion_is_taken_over_when_its_lease_has_ended(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        job = await start_completing(store, Job("a", {"n": 1}, id="j"))
        clock.advance(LEASE_SECONDS - TICK)
        assert await store.take_completing("new", lease=LEASE) is None
        clock.advance(TICK)
        taken = await store.take_completing("new", lease=LEASE)
        assert taken is not None
        assert taken == await read_completing(store, "j")
        assert (taken.token, taken.outcome, taken.payload) == ("new", Outcome.COMPLETED, {"n": 1})
        assert milliseconds(taken.lease_until) == clock.lease_now() + LEASE
        # It is taken: nobody else gets it, and its former owner has lost it.
        assert await store.take_completing("newer", lease=LEASE) is None
        assert (await store.renew("j", job.token)).status == "lost"
        assert await store.finish_completing("j", job.token) == "conflict"
        assert (await store.renew("j", "new", lease=LEASE)).status == "held"
        assert await store.finish_completing("j", "new") == "settled"


@store_check()
async def completions_are_taken_over_oldest_first_from_the_lanes_named(
    open_store: StoreMaker,
) -> None:
    async with open_store() as (store, clock):
        for lane in ("a", "b", "c", "a", "d"):
            await start_completing(store, Job(lane), lease=LEASE)
        await start(store, Job("a", id="running"))
        clock.advance(LEASE_SECONDS)

        async def take(
            token: str, lanes: tuple[str, ...] | None = None, without: tuple[str, ...] = ()
        ) -> str | None:
            job = await store.take_completing(token, lease=LEASE, lanes=lanes, without=without)
            return None if job is None else job.lane

        assert await take("1", ("x", "c")) == "c"
        assert await take("2", ("x", "c")) is None
        assert await take("3", ()) is None
        assert await take("4", None, ("a",)) == "b"
        assert await take("5", ("a", "d"), ("a",)) == "d"
        assert [await take("6"), await take("7"), await take("8")] == ["a", "a", None]


@store_check()
async def a_completion_can_be_finished_late_if_nobody_took_it_over(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        job = await start_completing(store, Job("a"))
        clock.advance(2 * LEASE_SECONDS)
        assert await store.finish_completing(job.id, job.token) == "settled"


@store_check()
async def a_completing_job_never_runs_again(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        job = await start_completing(store, Job("a", recovery=Recovery(5)))
        clock.advance(LEASE_SECONDS)
        assert await store.next_running_claim() is None
        assert (await store.reconcile(job.id, job.token)).status == "untouched"
        assert (await store.retry(job.id, job.token)).status == "conflict"
        assert (await store.hand_off(job.id, job.token)).status == "conflict"
        assert (await store.reserve_attempt(job.id, job.token, RetryPolicy(5))).status == "conflict"
        assert await find(store, "a") is None
        assert (await read_completing(store, job.id)).token == job.token


# -- retries --------------------------------------------------------------------------------------


@store_check()
async def a_retry_is_due_by_the_policy_and_not_a_tick_before(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        policy = RetryPolicy(5, delay=10, factor=2, max_delay=25)
        await store.enqueue(Job("a", id="j"))
        for count, delay in ((1, 10), (2, 20), (3, 25), (4, 25)):
            job = await claim(store, "a")
            returned = await store.retry("j", job.token, policy, reason="again")
            assert returned == wishes.Returned("queued", attempt_count=count)
            queued = await read_queued(store, "j")
            assert milliseconds(queued.not_before) == clock.now() + delay * 1000
            assert (queued.attempt_count, queued.recovery_count) == (count, 0)
            clock.advance(delay - TICK)
            assert await find(store, "a") is None
            clock.advance(TICK)
        assert (await claim(store, "a")).attempt_count == 5


@store_check()
async def a_retry_without_a_policy_is_due_at_once_and_has_no_limit(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        await store.enqueue(Job("a", id="j"))
        for count in range(1, 12):
            job = await claim(store, "a")
            assert job.attempt_count == count
            assert (await store.retry("j", job.token)).status == "queued"


@store_check()
async def the_handlers_own_delay_goes_before_the_policys(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        policy = RetryPolicy(2, delay=10)
        job = await start(store, Job("a", id="j"))
        await store.retry("j", job.token, policy, after=3_000)
        clock.advance(3 - TICK)
        assert await find(store, "a") is None
        clock.advance(TICK)
        job = await claim(store, "a")
        # But the policy still says how many there are.
        returned = await store.retry("j", job.token, policy, after=3_000, reason="tired")
        assert returned.status == "settled"
        await store.enqueue(Job("b", id="k"))
        job = await claim(store, "b")
        await store.retry("k", job.token, after=0)
        assert (await claim(store, "b")).id == "k"
        await store.enqueue(Job("c", id="far"))
        job = await claim(store, "c")
        await store.retry("far", job.token, after=2**62)
        assert milliseconds((await read_queued(store, "far")).not_before) == INSTANT_LIMIT


@store_check()
async def after_the_last_attempt_a_retry_fails_the_job(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        policy = RetryPolicy(3, delay=0)
        for reserves in (False, True):
            for has_hook in (False, True):
                await store.enqueue(Job("a"))
                for count in (1, 2, 3):
                    job = await claim(store, "a", counts=not reserves)
                    if reserves:
                        reserved = await store.reserve_attempt(job.id, job.token, policy)
                        assert reserved.attempt_count == count
                    returned = await store.retry(
                        job.id, job.token, policy, reason="ValueError: oh", has_hook=has_hook
                    )
                    if count < 3:
                        assert returned.status == "queued"
                        clock.advance(TICK)
                assert returned.status == ("completing" if has_hook else "settled")
                assert returned.reason is not None
                assert "3 of 3" in returned.reason
                assert "ValueError: oh" in returned.reason
                if has_hook:
                    assert (await read_completing(store, job.id)).reason == returned.reason
                    assert await store.finish_completing(job.id, job.token) == "settled"
                ended = await read_settled_job(store, job.id)
                assert (ended.outcome, ended.reason) == (Outcome.FAILED, returned.reason)
                assert ended.attempt_count == 3


@store_check()
async def a_reason_of_any_length_becomes_a_legal_one_when_retries_end(
    open_store: StoreMaker,
) -> None:
    async with open_store() as (store, _):
        for reason in (None, "", "r" * 200, "r" * 100_000, "a\0b", "\ud800", "😀" * 300):
            job = await start(store, Job("a"))
            returned = await store.retry(job.id, job.token, RetryPolicy(1), reason=reason)
            assert returned.status == "settled"
            ended = await read_settled_job(store, job.id)
            assert ended.reason is not None
            assert 1 <= len(ended.reason) <= 200
            assert "1 of 1" in ended.reason


@store_check()
async def a_retry_is_refused_when_the_claim_is_lost_or_cancelled(open_store: StoreMaker) -> None:
    for give_back in (retry_once, retry_the_last_time, hand_off):
        async with open_store() as (store, clock):
            await refused_when_lost_or_cancelled(store, clock, give_back)


GiveBack = Callable[[Store, str, str], Awaitable[wishes.Returned]]


async def retry_once(store: Store, id: str, token: str) -> wishes.Returned:
    """Give a job back with attempts left."""
    return await store.retry(id, token, RetryPolicy(9))


async def retry_the_last_time(store: Store, id: str, token: str) -> wishes.Returned:
    """Give a job back with no attempts left."""
    return await store.retry(id, token, RetryPolicy(1))


async def hand_off(store: Store, id: str, token: str) -> wishes.Returned:
    """Give a job back for a planned stop."""
    return await store.hand_off(id, token)


async def refused_when_lost_or_cancelled(
    store: Store, clock: DurableClock, give_back: GiveBack
) -> None:
    """The refusals that a retry and a hand-off share."""
    job = await start(store, Job("a", id="j"))
    cancelled = await start(store, Job("b", id="c"))
    await store.cancel("c", "cancellation")
    before = await read_all(store)

    async def refused(id: str, token: str) -> str:
        returned = await give_back(store, id, token)
        assert await read_all(store) == before
        return returned.status

    assert await refused("j", "other") == "conflict"
    assert await refused("missing", job.token) == "missing"
    assert await refused("c", cancelled.token) == "cancelled"
    clock.advance(LEASE_SECONDS - TICK)
    assert await refused("c", cancelled.token) == "cancelled"
    clock.advance(TICK)
    assert await refused("j", job.token) == "conflict"
    assert await refused("c", cancelled.token) == "conflict"


@store_check()
async def a_retry_in_the_last_tick_of_the_lease_is_accepted(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        retried = await start(store, Job("a"))
        handed_off = await start(store, Job("b"))
        clock.advance(LEASE_SECONDS - TICK)
        assert (await store.retry(retried.id, retried.token)).status == "queued"
        assert (await store.hand_off(handed_off.id, handed_off.token)).status == "queued"


@store_check()
async def a_retry_whose_answer_was_lost_is_refused_and_changes_nothing(
    open_store: StoreMaker,
) -> None:
    async with open_store() as (store, _):
        for give_back in (retry_once, retry_the_last_time, hand_off):
            job = await start(store, Job(give_back.__name__))
            first = await give_back(store, job.id, job.token)
            assert first.status in ("queued", "settled")
            before = await read_all(store)
            assert (await give_back(store, job.id, job.token)).status == "conflict"
            assert await read_all(store) == before


# -- places in the queue --------------------------------------------------------------------------


@store_check()
async def a_retried_job_keeps_its_place_and_blocks_its_queue_meanwhile(
    open_store: StoreMaker,
) -> None:
    async with open_store() as (store, clock):
        for n in range(3):
            await store.enqueue(Job("a", id=f"{n}", queue="q"))
        job = await claim(store, "a")
        await store.retry("0", job.token, RetryPolicy(5, delay=10))
        assert await find(store, "a") is None
        assert (await store.read_queue_head("q")).job_id == "0"
        clock.advance(10 - TICK)
        assert await find(store, "a") is None
        clock.advance(TICK)
        assert ids(await drain(store, "a")) == ["0", "1", "2"]


@store_check()
async def a_handed_off_job_keeps_its_place(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        for n in range(3):
            await store.enqueue(Job("a", id=f"{n}", queue="q"))
        job = await claim(store, "a")
        assert (await store.hand_off("0", job.token)).status == "queued"
        assert (await store.read_queue_head("q")).job_id == "0"
        assert ids(await drain(store, "a")) == ["0", "1", "2"]


@store_check()
async def a_returned_job_lets_those_of_higher_priority_go_first(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        for n, give_back in enumerate((retry_once, hand_off)):
            queue = f"q{n}"
            job = await start(store, Job("a", id=f"{n} low", queue=queue))
            await store.enqueue(Job("a", id=f"{n} same", queue=queue))
            await store.enqueue(Job("a", id=f"{n} high", queue=queue, priority=1))
            await give_back(store, job.id, job.token)
            order = ids(await drain(store, "a"))
            assert order[0] == f"{n} high"
            clock.advance(10)
            order += ids(await drain(store, "a"))
            assert order == [f"{n} high", f"{n} low", f"{n} same"]


@store_check()
async def a_hand_off_costs_neither_attempt_nor_recovery(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        policy = RetryPolicy(2, delay=30)
        await store.enqueue(Job("a", id="j", recovery=Recovery(1)))
        for _ in range(5):
            # Before the attempt is reserved, afterwards, and where the claim itself counts.
            job = await claim(store, "a", counts=False)
            assert await store.hand_off("j", job.token) == wishes.Returned("queued")
            job = await claim(store, "a", counts=False)
            await store.reserve_attempt("j", job.token, policy)
            assert (await store.hand_off("j", job.token)).status == "queued"
            job = await claim(store, "a", counts=True)
            assert (await store.hand_off("j", job.token)).status == "queued"
            queued = await read_queued(store, "j")
            assert isinstance(queued, QueuedJob)
            assert (queued.attempt_count, queued.recovery_count) == (0, 0)
            assert milliseconds(queued.not_before) <= clock.now()
            clock.advance(1)
        assert (await claim(store, "a")).attempt_count == 1


@store_check()
async def an_earlier_attempt_is_not_given_back_by_a_hand_off(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        policy = RetryPolicy(9, delay=0)
        await store.enqueue(Job("a", id="j"))
        job = await claim(store, "a")
        await store.retry("j", job.token, policy)
        job = await claim(store, "a", counts=False)
        await store.hand_off("j", job.token)
        assert (await read_queued(store, "j")).attempt_count == 1
        # A retry without a reservation counts the attempt itself.
        job = await claim(store, "a", counts=False)
        assert (await store.retry("j", job.token, policy)).attempt_count == 2


@store_check()
async def one_exchange_gives_many_jobs_back_each_for_itself(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        jobs = [await start(store, Job(f"{n}", id=f"{n}")) for n in range(8)]
        await store.cancel("1", "c")
        answers = await store.submit(
            wishes.RetryJob("0", jobs[0].token, RetryPolicy(5, delay=5)),
            wishes.RetryJob("1", jobs[1].token, RetryPolicy(5)),
            wishes.RetryJob("2", jobs[2].token, RetryPolicy(1), reason="r"),
            wishes.RetryJob("3", jobs[3].token, RetryPolicy(1), reason="r", has_hook=True),
            wishes.RetryJob("4", "stolen"),
            wishes.RetryJob("no", "t"),
            wishes.RetryJob("0", jobs[0].token),
            wishes.HandOff("5", jobs[5].token),
            wishes.HandOff("6", "stolen"),
            wishes.HandOff("no", "t"),
        )
        assert [answer.status for answer in answers] == [
            "queued",
            "cancelled",
            "settled",
            "completing",
            "conflict",
            "missing",
            "conflict",
            "queued",
            "conflict",
            "missing",
        ]
        assert [job.state for job in await read_all(store)] == [
            "queued",
            "running",
            "settled",
            "completing",
            "running",
            "queued",
            "running",
            "running",
        ]
        assert milliseconds((await read_queued(store, "0")).not_before) == clock.now() + 5_000
        await complete(store, jobs[7])
