"""Store checks: which job is claimed, in which order, and how a claim is kept."""

# ruff: noqa: S311  (histories are drawn from seeds, so that they can be had again)

from __future__ import annotations

import random

from .. import _wishes as wishes
from .._errors import StoreInvalid
from .._model import (
    INSTANT_LIMIT,
    Job,
    Outcome,
    Recovery,
    RetryPolicy,
    RunningJob,
    to_instant,
)
from .._rules import Settle
from ._check_tools import (
    COMPLETED,
    LEASE,
    LEASE_SECONDS,
    claim,
    complete,
    drain,
    expected_order,
    find,
    ids,
    milliseconds,
    raises,
    read,
    read_all,
    read_queued,
    read_running,
    read_settled_job,
    start,
    start_completing,
)
from ._clock import TICK
from ._store_maker import StoreMaker, store_check

# -- which job ------------------------------------------------------------------------------------


@store_check()
async def a_claim_is_written_down_with_its_token_owner_and_lease(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        await store.enqueue(Job("a", {"n": 1}, id="j", queue="q", recovery=Recovery(1)))
        job = (await store.claim("a", "token", lease=LEASE)).job
        assert job is not None
        assert job == await read_running(store, "j")
        assert (job.id, job.token, job.payload) == ("j", "token", {"n": 1})
        assert milliseconds(job.lease_until) == clock.lease_now() + LEASE
        assert await store.ask(wishes.ReadOwners()) == [store.owner]


@store_check()
async def nothing_to_claim_is_nobodys_error(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        assert await store.claim("a", "t") == wishes.Claimed(None)
        await store.enqueue(Job("b"))
        assert await store.claim("a", "t") == wishes.Claimed(None)


@store_check()
async def a_lane_claims_by_priority_and_then_by_admission(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        rng = random.Random(1)
        admitted = [
            (await store.enqueue(Job("a", priority=rng.randint(-2, 2)))).job for _ in range(60)
        ]
        assert ids(await drain(store, "a")) == expected_order(admitted)


@store_check()
async def jobs_of_one_queue_run_one_after_another(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        for n in range(3):
            await store.enqueue(Job("a", id=f"{n}", queue="q"))
        for n in range(3):
            job = await claim(store, "a")
            assert job.id == f"{n}"
            assert await find(store, "a") is None
            await complete(store, job)
        assert await find(store, "a") is None


@store_check()
async def the_head_blocks_its_queue_for_every_lane(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        await store.enqueue(Job("a", id="head", queue="q"))
        await store.enqueue(Job("b", id="next", queue="q"))
        await store.enqueue(Job("b", id="other"))
        assert (await claim(store, "b")).id == "other"
        assert await find(store, "b") is None
        job = await claim(store, "a")
        assert await find(store, "b") is None
        await complete(store, job)
        assert (await claim(store, "b")).id == "next"


@store_check()
async def a_completing_job_blocks_its_queue(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        first = await start_completing(store, Job("a", queue="q"))
        await store.enqueue(Job("a", id="next", queue="q", priority=9))
        assert await find(store, "a") is None
        await store.finish_completing(first.id, first.token)
        assert (await claim(store, "a")).id == "next"


@store_check()
async def a_newcomer_of_higher_priority_goes_first_but_interrupts_nobody(
    open_store: StoreMaker,
) -> None:
    async with open_store() as (store, _):
        await store.enqueue(Job("a", id="low", queue="q"))
        await store.enqueue(Job("a", id="lower", queue="q", priority=-1))
        running = await claim(store, "a")
        await store.enqueue(Job("a", id="high", queue="q", priority=1))
        assert (running.id, await find(store, "a")) == ("low", None)
        await complete(store, running)
        # Between two claims, too.
        await store.enqueue(Job("a", id="higher", queue="q", priority=2))
        assert ids(await drain(store, "a")) == ["higher", "high", "lower"]


@store_check()
async def a_deferred_job_is_claimable_at_its_instant_and_not_a_tick_before(
    open_store: StoreMaker,
) -> None:
    async with open_store() as (store, clock):
        await store.enqueue(Job("a", id="j", not_before=clock.instant(10)))
        assert await find(store, "a") is None
        clock.advance(10 - TICK)
        assert await find(store, "a") is None
        assert not (await store.wake_state()).pending
        clock.advance(TICK)
        assert (await store.wake_state()).pending
        assert (await claim(store, "a")).id == "j"


@store_check()
async def a_job_whose_time_was_in_the_past_is_claimable_at_once(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        await store.enqueue(Job("a", id="past", not_before=clock.instant(-3600)))
        await store.enqueue(Job("a", id="now", not_before=clock.instant()))
        await store.enqueue(Job("a", id="epoch", not_before=to_instant(0)))
        assert ids(await drain(store, "a")) == ["past", "now", "epoch"]


@store_check()
async def a_deferred_head_blocks_its_queue_until_it_has_run(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        await store.enqueue(
            Job("a", id="head", queue="q", priority=1, not_before=clock.instant(10))
        )
        await store.enqueue(Job("a", id="next", queue="q"))
        assert await find(store, "a") is None
        clock.advance(10 - TICK)
        assert await find(store, "a") is None
        clock.advance(1)
        assert ids(await drain(store, "a")) == ["head", "next"]


@store_check()
async def a_deferred_job_behind_the_head_does_not_hold_it_up(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        await store.enqueue(Job("a", id="head", queue="q"))
        await store.enqueue(Job("a", id="later", queue="q", not_before=clock.instant(10)))
        await store.enqueue(Job("a", id="last", queue="q"))
        assert ids(await drain(store, "a")) == ["head"]
        # The deferred one has become the head, and now blocks.
        assert (await store.read_queue_head("q")).job_id == "later"
        clock.advance(10)
        assert ids(await drain(store, "a")) == ["later", "last"]


@store_check()
async def a_deferred_newcomer_of_higher_priority_blocks_the_others(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        await store.enqueue(Job("a", id="ready", queue="q"))
        await store.enqueue(Job("a", id="head", queue="q", priority=1, not_before=clock.instant(5)))
        assert await find(store, "a") is None
        clock.advance(5)
        assert ids(await drain(store, "a")) == ["head", "ready"]


@store_check()
async def jobs_that_fall_due_together_go_by_priority(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        rng = random.Random(2)
        admitted = await store.enqueue_many(
            [
                Job("a", priority=rng.randint(-5, 5), not_before=clock.instant(rng.uniform(1, 9)))
                for _ in range(300)
            ]
        )
        clock.advance(10)
        assert ids(await drain(store, "a")) == expected_order([each.job for each in admitted])


@store_check()
async def a_free_job_is_found_behind_any_number_of_blocked_ones(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        running = await start(store, Job("a", queue="noisy"))
        await store.enqueue_many([Job("a", queue="noisy", priority=5) for _ in range(3000)])
        await store.enqueue(Job("a", id="free"))
        assert (await claim(store, "a")).id == "free"
        await complete(store, running)
        assert (await claim(store, "a")).queue == "noisy"


@store_check()
async def a_free_job_is_found_among_many_that_wait_in_one_batch(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        # Blocked by a deferred head, by one in another lane, and by one that is cancelled.
        await store.enqueue(Job("a", queue="x", priority=9, not_before=clock.instant(60)))
        await store.enqueue(Job("b", queue="y", priority=9))
        await store.enqueue(Job("a", id="gone", queue="z", priority=9))
        await store.cancel("gone", "c")
        await store.enqueue_many(
            [Job("a", queue=queue, priority=3) for queue in "xyz" for _ in range(100)]
        )
        await store.enqueue(Job("a", id="free", priority=-1))
        assert (await claim(store, "a")).id == "free"
        assert await store.settle_cancelled() == ["gone"]
        assert (await claim(store, "a")).queue == "z"


@store_check()
async def a_cancelled_queued_job_is_never_claimed(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        await store.enqueue(Job("a", id="now"))
        await store.enqueue(Job("a", id="later", not_before=clock.instant(5)))
        for id in ("now", "later"):
            await store.cancel(id, f"c {id}")
        clock.advance(10)
        assert await find(store, "a") is None
        assert (await store.wake_state()).pending


@store_check()
async def a_lane_that_takes_any_lane_leaves_those_that_it_is_told_to(
    open_store: StoreMaker,
) -> None:
    async with open_store() as (store, _):
        for lane in ("a", "b", "c", "d"):
            await store.enqueue(Job(lane, id=lane))

        async def any_lane(token: str, *without: str) -> RunningJob | None:
            wish = wishes.Claim(None, token, store.owner, LEASE, without=without)
            for _ in range(50):
                claimed = await store.ask(wish)
                if claimed.job is not None or not claimed.more:
                    return claimed.job
            raise AssertionError("a claim of any lane was told to look again, 50 times")

        got = {job.lane for n in range(2) if (job := await any_lane(f"t{n}", "a", "c")) is not None}
        assert got == {"b", "d"}
        assert await any_lane("t", "a", "c") is None
        job = await any_lane("u", "c")
        assert job is not None
        assert job.id == "a"


@store_check()
async def a_claim_of_any_lane_is_not_misled_by_lanes_that_are_blocked(
    open_store: StoreMaker,
) -> None:
    async with open_store() as (store, _):
        # Lane `a` comes first by priority and by name, and everything in it is blocked.
        await store.enqueue_many([Job("a", queue=f"q{n % 3}", priority=5) for n in range(90)])
        await store.enqueue_many([Job("held", queue=f"q{n}", priority=6) for n in range(3)])
        await store.enqueue(Job("b", id="free"))
        wish = wishes.Claim(None, "t", store.owner, LEASE, without=("held",))
        claimed = await store.ask(wish)
        for _ in range(20):
            if claimed.more:
                claimed = await store.ask(wish)
        assert claimed.job is not None, "it saw nothing to claim, and no reason to look again"
        assert claimed.job.id == "free"


@store_check()
async def one_exchange_claims_for_many_lanes_and_slots(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        await store.enqueue_many(
            [Job(lane, id=f"{lane}{n}", priority=-n) for lane in "abc" for n in range(3)]
        )
        asked = [
            wishes.Claim(lane, f"{lane} token {n}", store.owner, LEASE)
            for n in range(4)
            for lane in "bacx"
        ]
        answers = await store.submit(*asked)
        got = {wish.token: answer.job for wish, answer in zip(asked, answers, strict=True)}
        for token, job in got.items():
            if job is not None:
                assert (job.token, job.lane) == (token, token[0])
        for lane in "abc":
            claimed = [job.id for job in got.values() if job is not None and job.lane == lane]
            assert sorted(claimed) == [f"{lane}{n}" for n in range(3)]
        assert sum(job is None for job in got.values()) == 7


@store_check()
async def slots_of_one_exchange_never_share_a_queue(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        await store.enqueue_many([Job("a", queue=f"q{n % 3}", id=f"{n}") for n in range(12)])
        answers = await store.submit(
            *[wishes.Claim("a", f"t{n}", store.owner, LEASE) for n in range(8)]
        )
        claimed = [answer.job for answer in answers if answer.job is not None]
        assert sorted(job.id for job in claimed) == ["0", "1", "2"]


@store_check()
async def a_decision_frees_the_queue_for_a_claim_of_the_same_exchange(
    open_store: StoreMaker,
) -> None:
    async with open_store() as (store, _):
        running = await start(store, Job("a", queue="q"))
        await store.enqueue(Job("a", id="next", queue="q"))
        claimed, recorded = await store.submit(
            wishes.Claim("a", "t", store.owner, LEASE),
            wishes.Decide(running.id, running.token, COMPLETED),
        )
        assert recorded.status == "recorded"
        assert claimed.job is not None
        assert claimed.job.id == "next"


@store_check()
async def a_new_job_can_be_claimed_in_the_exchange_that_admits_it(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        claimed, _ = await store.submit(
            wishes.Claim("a", "t", store.owner, LEASE), wishes.Enqueue(Job("a", id="j"))
        )
        assert claimed.job is not None
        assert claimed.job.id == "j"


@store_check()
async def asking_again_after_a_lost_answer_gives_the_same_claim(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        await store.enqueue_many([Job("a", id=f"{n}") for n in range(3)])
        wish = wishes.Claim("a", "token", store.owner, LEASE)
        first = (await store.ask(wish)).job
        clock.advance(1)
        again = wishes.Claim("a", "token", store.owner, LEASE, again=True)
        before = await read_all(store)
        assert (await store.ask(again)).job == first
        assert await read_all(store) == before
        # If the first request never arrived, asking again claims.
        fresh = wishes.Claim("a", "another", store.owner, LEASE, again=True)
        claimed = (await store.ask(fresh)).job
        assert claimed is not None
        assert (claimed.id, claimed.token) == ("1", "another")


@store_check()
async def asking_again_does_not_disturb_other_claims_of_the_exchange(
    open_store: StoreMaker,
) -> None:
    async with open_store() as (store, _):
        await store.enqueue_many([Job("a", id=f"{n}") for n in range(4)])
        held = await claim(store, "a")
        answers = await store.submit(
            wishes.Claim("a", "new", store.owner, LEASE),
            wishes.Claim("a", held.token, store.owner, LEASE, again=True),
            wishes.Claim("a", "newer", store.owner, LEASE),
        )
        assert [answer.job.id for answer in answers] == ["1", "0", "2"]


@store_check()
async def a_job_claimed_by_one_store_is_not_claimed_by_another(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        await store.enqueue_many([Job("a") for _ in range(40)])
        got: list[str] = []
        for n in range(50):
            claimed = await store.claim("a", f"t{n}", lease=LEASE)
            if claimed.job is not None:
                got.append(claimed.job.id)
        assert len(got) == len(set(got)) == 40


@store_check("beside")
async def two_stores_share_one_order(open_store: StoreMaker) -> None:
    async with open_store() as (store, _), open_store.beside(store) as other:
        assert store.owner != other.owner
        for n in range(20):
            await (store, other)[n % 2].enqueue(Job("a", n, queue="q"))
        order: list[object] = []
        while (job := await find((store, other)[len(order) % 2], "a")) is not None:
            order.append(job.payload)
            # Claimed by one, settled by the other: the token is what counts.
            await complete((other, store)[len(order) % 2], job)
        assert order == list(range(20))


@store_check("step")
async def a_wall_clock_that_is_set_back_hides_nothing_that_is_due(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        # All of these come due, and are known to be: then the clock goes back an hour.
        await store.enqueue_many(
            [Job("a", priority=1, not_before=clock.instant(5)) for _ in range(100)]
        )
        clock.advance(10)
        first = await claim(store, "a")
        await store.enqueue(Job("a", id="free"))
        clock.step(-3600)
        assert (await claim(store, "a")).id == "free"
        assert await find(store, "a") is None
        wake = await store.wake_state()
        assert not wake.pending
        due = milliseconds(first.not_before)
        lease_end = clock.now() + LEASE
        assert milliseconds(wake.next_wake_at) == min(due, lease_end)
        clock.step(3600)
        assert len(await drain(store, "a")) == 99


# -- keeping it -----------------------------------------------------------------------------------


@store_check()
async def a_renewal_extends_the_lease_from_now(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        job = await start(store, Job("a"))
        clock.advance(7)
        assert await store.renew(job.id, job.token, lease=2 * LEASE) == wishes.Renewal("held")
        running = await read_running(store, job.id)
        assert milliseconds(running.lease_until) == clock.lease_now() + 2 * LEASE
        # A shorter one is taken as it is.
        await store.renew(job.id, job.token, lease=1)
        assert (
            milliseconds((await read_running(store, job.id)).lease_until) == clock.lease_now() + 1
        )


@store_check()
async def a_lease_is_over_at_its_end_and_not_a_tick_before(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        job = await start(store, Job("a"))
        clock.advance(LEASE_SECONDS - TICK)
        assert (await store.inspect(job.id, job.token)).status == "held"
        assert (await store.renew(job.id, job.token, lease=LEASE)).status == "held"
        clock.advance(LEASE_SECONDS)
        before = await read_all(store)
        assert (await store.inspect(job.id, job.token)).status == "lost"
        assert (await store.renew(job.id, job.token, lease=LEASE)).status == "lost"
        clock.advance(TICK)
        assert (await store.renew(job.id, job.token, lease=LEASE)).status == "lost"
        assert await read_all(store) == before


@store_check()
async def a_renewal_with_another_token_changes_nothing(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        job = await start(store, Job("a"))
        clock.advance(1)
        before = await read_all(store)
        for id, token in (
            (job.id, "other"),
            (job.id, job.token.upper() + "x"),
            ("missing", job.token),
        ):
            assert await store.renew(id, token, lease=LEASE) == wishes.Renewal("lost")
            assert await store.inspect(id, token) == wishes.Renewal("lost")
        assert await read_all(store) == before


@store_check()
async def renewals_of_jobs_that_do_not_run_are_refused(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        queued = (await store.enqueue(Job("x"))).job
        handed_off = await start(store, Job("a"))
        await store.hand_off(handed_off.id, handed_off.token)
        ended = await start(store, Job("b"))
        await complete(store, ended)
        before = await read_all(store)
        for id, token in (
            (queued.id, "t"),
            (handed_off.id, handed_off.token),
            (ended.id, ended.token),
        ):
            assert await store.renew(id, token, lease=LEASE) == wishes.Renewal("lost")
            assert await store.inspect(id, token) == wishes.Renewal("lost")
        assert await read_all(store) == before


@store_check()
async def a_completing_job_is_renewed_like_a_running_one(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        job = await start_completing(store, Job("a"))
        clock.advance(LEASE_SECONDS - TICK)
        assert (await store.renew(job.id, job.token, lease=LEASE)).status == "held"
        clock.advance(LEASE_SECONDS - TICK)
        assert (await store.inspect(job.id, job.token)).status == "held"
        clock.advance(TICK)
        assert (await store.renew(job.id, job.token, lease=LEASE)).status == "lost"


@store_check()
async def a_renewal_tells_of_a_requested_cancellation(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        running = await start(store, Job("a"))
        assert not (await store.renew(running.id, running.token)).cancellation_requested
        await store.cancel(running.id, "c")
        expected = wishes.Renewal("held", cancellation_requested=True)
        assert await store.renew(running.id, running.token) == expected
        assert await store.inspect(running.id, running.token) == expected


@store_check()
async def inspecting_a_claim_changes_nothing(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        job = await start(store, Job("a"))
        clock.advance(1)
        before = await read_all(store)
        assert await store.inspect(job.id, job.token) == wishes.Renewal("held")
        assert await read_all(store) == before


@store_check()
async def one_exchange_renews_many_claims_each_for_itself(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        jobs = [await start(store, Job(f"lane {n}")) for n in range(40)]
        await store.cancel(jobs[3].id, "c")
        await complete(store, jobs[5])
        clock.advance(10)
        asked = [wishes.Renew(job.id, job.token, LEASE + n) for n, job in enumerate(jobs)]
        asked[7] = wishes.Renew(jobs[7].id, "stolen", LEASE)
        answers = await store.submit(*asked)
        for n, (job, answer) in enumerate(zip(jobs, answers, strict=True)):
            if n in (5, 7):
                assert answer.status == "lost"
                continue
            assert answer == wishes.Renewal("held", cancellation_requested=n == 3)
            running = await read_running(store, job.id)
            assert milliseconds(running.lease_until) == clock.lease_now() + LEASE + n
        assert milliseconds((await read_running(store, jobs[7].id)).lease_until) == (
            clock.lease_now() + LEASE - 10_000
        )


@store_check("step")
async def a_wall_clock_that_is_set_neither_ends_nor_lengthens_a_lease(
    open_store: StoreMaker,
) -> None:
    async with open_store() as (store, clock):
        job = await start(store, Job("a", recovery=Recovery(1)))
        clock.step(3600)
        assert (await store.inspect(job.id, job.token)).status == "held"
        assert await store.next_running_claim() is None
        assert (await store.renew(job.id, job.token, lease=LEASE)).status == "held"
        clock.step(-7200)
        clock.advance(LEASE_SECONDS - TICK)
        assert (await store.inspect(job.id, job.token)).status == "held"
        clock.advance(TICK)
        assert (await store.inspect(job.id, job.token)).status == "lost"
        assert (await store.decide(job.id, job.token, COMPLETED)).status == "conflict"
        assert (await store.reconcile(job.id, job.token)).status == "queued"


# -- attempts -------------------------------------------------------------------------------------


@store_check()
async def a_claim_that_counts_is_an_attempt_and_one_that_does_not_is_none(
    open_store: StoreMaker,
) -> None:
    async with open_store() as (store, _):
        assert (await start(store, Job("a"), counts=True)).attempt_count == 1
        assert (await start(store, Job("b"), counts=False)).attempt_count == 0


@store_check()
async def reserving_counts_the_attempt_and_moves_the_time_of_the_next(
    open_store: StoreMaker,
) -> None:
    async with open_store() as (store, clock):
        policy = RetryPolicy(5, delay=10, factor=3, max_delay=60)
        await store.enqueue(Job("a", id="j"))
        for count, delay in ((1, 10), (2, 30), (3, 60), (4, 60)):
            job = await claim(store, "a", counts=False)
            assert job.attempt_count == count - 1
            reserved = await store.reserve_attempt("j", job.token, policy)
            assert reserved == wishes.Reserved("reserved", count)
            running = await read_running(store, "j")
            assert running.attempt_count == count
            assert milliseconds(running.not_before) == clock.now() + delay * 1000
            # The lease is as it was: reserving does not renew.
            assert running.lease_until == job.lease_until
            returned = await store.retry("j", job.token, policy, reason="again")
            assert (returned.status, returned.attempt_count) == ("queued", count)
            clock.advance(delay)


@store_check()
async def reserving_again_after_a_lost_answer_counts_once(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        policy = RetryPolicy(1, delay=10)
        job = await start(store, Job("a"), counts=False)
        for _ in range(3):
            reserved = await store.reserve_attempt(job.id, job.token, policy)
            assert reserved == wishes.Reserved("reserved", 1)
            running = await read_running(store, job.id)
            assert running.attempt_count == 1
            assert milliseconds(running.not_before) == clock.now() + 10_000
            clock.advance(1)


@store_check()
async def a_crash_cannot_dodge_the_back_off(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        policy = RetryPolicy(3, delay=LEASE_SECONDS + 100)
        job = await start(store, Job("a", id="j", recovery=Recovery(5)), counts=False)
        await store.reserve_attempt("j", job.token, policy)
        reserved_at = clock.now()
        clock.advance(LEASE_SECONDS)
        assert (await store.reconcile("j", job.token)).status == "queued"
        queued = await read_queued(store, "j")
        assert milliseconds(queued.not_before) == reserved_at + LEASE + 100_000
        assert (queued.attempt_count, queued.recovery_count) == (1, 1)
        clock.advance(100 - TICK)
        assert await find(store, "a") is None
        clock.advance(TICK)
        assert (await claim(store, "a", counts=False)).attempt_count == 1


@store_check()
async def the_attempt_that_a_crash_took_was_an_attempt(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        policy = RetryPolicy(2, delay=0)
        await store.enqueue(Job("a", id="j", recovery=Recovery(5)))
        for _ in range(2):
            job = await claim(store, "a", counts=False)
            assert (await store.reserve_attempt("j", job.token, policy)).status == "reserved"
            clock.advance(LEASE_SECONDS)
            assert (await store.reconcile("j", job.token)).status == "queued"
        job = await claim(store, "a", counts=False)
        reserved = await store.reserve_attempt("j", job.token, policy)
        assert reserved.status == "settled"
        ended = await read_settled_job(store, "j")
        assert ended.outcome is Outcome.FAILED
        assert ended.reason is not None
        assert "2 of 2 attempts" in ended.reason
        assert reserved.reason == ended.reason
        # Its claim is gone with it.
        assert (await store.inspect("j", job.token)).status == "lost"
        assert (await store.decide("j", job.token, COMPLETED)).status == "conflict"


@store_check()
async def no_attempt_is_reserved_for_a_lost_or_cancelled_claim(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        policy = RetryPolicy(3)
        job = await start(store, Job("a", id="j"), counts=False)
        cancelled = await start(store, Job("b", id="c"), counts=False)
        await store.cancel("c", "cancellation")
        before = await read_all(store)

        async def refused(id: str, token: str) -> str:
            reserved = await store.reserve_attempt(id, token, policy)
            assert await read_all(store) == before
            return reserved.status

        assert await refused("j", "other") == "conflict"
        assert await refused("missing", job.token) == "conflict"
        assert await refused("c", cancelled.token) == "cancelled"
        clock.advance(LEASE_SECONDS - TICK)
        assert await refused("c", cancelled.token) == "cancelled"
        clock.advance(TICK)
        assert await refused("j", job.token) == "conflict"
        assert await refused("c", cancelled.token) == "conflict"


@store_check()
async def a_reservation_far_in_the_future_saturates(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        policy = RetryPolicy(2**53 - 1, delay=1e11, factor=1e6, max_delay=1e11)
        job = await start(store, Job("a"), counts=False)
        assert (await store.reserve_attempt(job.id, job.token, policy)).status == "reserved"
        running = await read_running(store, job.id)
        assert milliseconds(running.not_before) <= INSTANT_LIMIT
        longest = RetryPolicy(5, delay=INSTANT_LIMIT / 1000, max_delay=INSTANT_LIMIT / 1000)
        assert (await store.retry(job.id, job.token, longest)).status == "queued"
        assert milliseconds((await read(store, job.id)).not_before) == INSTANT_LIMIT
        assert await find(store, "a") is None


@store_check()
async def jitter_shortens_the_delay_and_never_lengthens_it(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        policy = RetryPolicy(5, delay=100, jitter=0.5)
        for n, (jitter, delay) in enumerate(((0.0, 100_000), (0.5, 75_000), (1.0, 50_000))):
            job = await start(store, Job(f"{n}"), counts=False)
            await store.reserve_attempt(job.id, job.token, policy, jitter=jitter)
            running = await read_running(store, job.id)
            assert milliseconds(running.not_before) == clock.now() + delay
            await store.retry(job.id, job.token, policy, jitter=jitter)
            assert milliseconds((await read(store, job.id)).not_before) == clock.now() + delay


@store_check()
async def a_claim_with_an_illegal_token_is_refused(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        await store.enqueue(Job("a", id="j"))
        for token in ("", "x" * 257):
            with raises(StoreInvalid):
                await store.claim("a", token)
        assert (await claim(store, "a")).id == "j"
        assert (await store.decide("j", "", Settle(Outcome.COMPLETED))).status == "conflict"
