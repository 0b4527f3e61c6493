"""Store checks: heads, the settled feed, listings, and when to look again."""

# ruff: noqa: S311  (histories are drawn from seeds, so that they can be had again)

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import datetime

import trio

from .. import _wishes as wishes
from .._model import (
    CompletingJob,
    Job,
    Outcome,
    QueuedJob,
    QueueHead,
    Recovery,
    RetryPolicy,
    RunningJob,
    StoredJob,
    WakeState,
    to_instant,
)
from .._rules import Settle
from .._store import Store
from ._check_tools import (
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
    read_settled_job,
    settled,
    start,
    start_completing,
)
from ._clock import TICK, DurableClock
from ._store_maker import StoreMaker, store_check

# -- heads ----------------------------------------------------------------------------------------


@store_check()
async def a_queue_head_is_told_in_each_state(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        assert await store.read_queue_head("q") == QueueHead("idle")
        await store.enqueue(Job("a", id="low", queue="q", priority=-1))
        assert await store.read_queue_head("q") == QueueHead("queued", "low")
        await store.enqueue(Job("a", id="high", queue="q"))
        assert await store.read_queue_head("q") == QueueHead("queued", "high")
        await store.cancel("high", "c")
        assert await store.read_queue_head("q") == QueueHead("queued", "high", True)
        await store.settle_cancelled()
        job = await claim(store, "a")
        await store.enqueue(Job("a", id="higher", queue="q", priority=5))
        assert await store.read_queue_head("q") == QueueHead("running", "low")
        await store.cancel("low", "d")
        assert await store.read_queue_head("q") == QueueHead("running", "low", True)
        await store.decide("low", job.token, Settle(Outcome.COMPLETED), has_hook=True)
        assert await store.read_queue_head("q") == QueueHead("running", "low", True)
        await store.finish_completing("low", job.token)
        assert await store.read_queue_head("q") == QueueHead("queued", "higher")
        await drain(store, "a")
        assert await store.read_queue_head("q") == QueueHead("idle")


@store_check()
async def heads_of_many_queues_are_told_apart(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        for n in range(5):
            await store.enqueue(Job("a", id=f"{n}", queue=f"q{n}"))
        answers = await store.submit(*[wishes.ReadQueueHead(f"q{n}") for n in (3, 1, 9, 3)])
        assert [head.job_id for head in answers] == ["3", "1", None, "3"]


# -- what was settled -----------------------------------------------------------------------------


@store_check()
async def the_latest_settled_job_is_the_one_that_settled_last(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        assert await store.read_latest_settled("q") is None
        for n in range(3):
            await store.enqueue(Job("a", id=f"{n}", queue="q", not_before=clock.instant(60)))
        await settled(store, Job("a", id="other"))
        assert await store.read_latest_settled("q") is None
        # In an order that is not that of admission, at one instant.
        for n in (1, 2, 0):
            await store.cancel(f"{n}", f"c{n}")
            await store.settle_cancelled()
            assert await store.read_latest_settled("q") == await read_settled_job(store, f"{n}")
        job = await start(store, Job("a", queue="q"))
        latest = await store.read_latest_settled("q")
        assert latest is not None
        assert latest.id == "0"
        await complete(store, job)
        assert await store.read_latest_settled("q") == await read_settled_job(store, job.id)


@store_check()
async def the_feed_has_every_settled_job_once_in_the_order_of_settling(
    open_store: StoreMaker,
) -> None:
    async with open_store() as (store, clock):
        assert await store.read_settled() == await store.read_settled(1)
        assert (await store.read_settled()).jobs == ()
        assert (await store.read_settled()).cursor is None
        jobs = [await start(store, Job(f"{n % 3}", id=f"{n}")) for n in range(30)]
        random.Random(3).shuffle(jobs)
        for job in jobs:
            await complete(store, job)
            clock.advance(TICK)
        for limit in (1, 7, 29, 30, 31, 256):
            assert ids(await feed(store, limit=limit)) == ids(jobs)
        page = await store.read_settled(7)
        assert len(page.jobs) == 7
        assert list(page.jobs) == [await read_settled_job(store, job.id) for job in jobs[:7]]
        for lane in ("0", "1", "2", "x"):
            expected = [job.id for job in jobs if job.lane == lane]
            assert ids(await feed(store, limit=4, lane=lane)) == expected


@store_check()
async def a_cursor_at_the_end_sees_what_settles_later(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        early = await start(store, Job("a", id="early"))
        await settled(store, Job("b", id="late"))
        page = await store.read_settled()
        assert ids(page.jobs) == ["late"]
        assert await store.read_settled(after=page.cursor) == await store.read_settled(
            1, page.cursor
        )
        assert (await store.read_settled(after=page.cursor)).jobs == ()
        # Admitted before what the reader has seen, and settled after it.
        await complete(store, early)
        page = await store.read_settled(after=page.cursor)
        assert ids(page.jobs) == ["early"]


@store_check()
async def a_page_may_end_among_jobs_that_settled_together(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        await store.enqueue_many([Job("a", id=f"{n}") for n in range(10)])
        await store.fail_lane("a", "r")
        jobs = [await start(store, Job(f"{n}")) for n in range(6)]
        await store.submit(
            *[wishes.Decide(job.id, job.token, Settle(Outcome.COMPLETED)) for job in jobs]
        )
        for limit in (1, 3, 4):
            seen = ids(await feed(store, limit=limit))
            assert seen[:10] == [f"{n}" for n in range(10)]
            assert sorted(seen[10:]) == sorted(ids(jobs))


@store_check()
async def every_way_of_settling_shows_in_the_feed(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        expected: list[tuple[str, Outcome]] = []

        def ended(id: str, outcome: Outcome) -> None:
            expected.append((id, outcome))

        await settled(store, Job("a", id="decided"))
        ended("decided", Outcome.COMPLETED)
        job = await start_completing(store, Job("a", id="finished"))
        await store.finish_completing("finished", job.token)
        ended("finished", Outcome.COMPLETED)
        await store.enqueue(Job("a", id="cancelled"))
        await store.cancel("cancelled", "c")
        await store.settle_cancelled()
        ended("cancelled", Outcome.CANCELLED)
        await store.enqueue(Job("f", id="failed lane"))
        await store.fail_lane("f", "r")
        ended("failed lane", Outcome.FAILED)
        job = await start(store, Job("a", id="last attempt"))
        await store.retry("last attempt", job.token, RetryPolicy(1))
        ended("last attempt", Outcome.FAILED)
        job = await start(store, Job("a", id="no attempt", recovery=Recovery(1)))
        clock.advance(LEASE_SECONDS)
        await store.reconcile("no attempt", job.token)
        job = await claim(store, "a", counts=False)
        await store.reserve_attempt("no attempt", job.token, RetryPolicy(1))
        ended("no attempt", Outcome.FAILED)
        job = await start(store, Job("a", id="interrupted"))
        clock.advance(LEASE_SECONDS)
        await store.reconcile("interrupted", job.token)
        ended("interrupted", Outcome.INTERRUPTED)
        assert [(job.id, job.outcome) for job in await feed(store, limit=2)] == expected


@store_check()
async def a_reader_misses_nothing_while_jobs_are_purged_and_pruned(
    open_store: StoreMaker,
) -> None:
    async with open_store() as (store, clock):
        rng = random.Random(4)
        seen: list[str] = []
        ended: list[str] = []
        cursor: str | None = None
        running: list[RunningJob] = []
        for n in range(300):
            match rng.randrange(6):
                case 0 | 1 | 2:
                    await store.enqueue(Job("a", id=f"{n}"))
                    running.append(await claim(store, "a"))
                case 3 | 4 if running:
                    job = running.pop(rng.randrange(len(running)))
                    await complete(store, job)
                    ended.append(job.id)
                case _:
                    await store.enqueue(Job("x", queue="q"))
                    await store.purge_queue("q")
            clock.advance(TICK)
            if n % 7 == 0:
                page = await store.read_settled(rng.randint(1, 5), cursor)
                seen += ids(page.jobs)
                cursor = page.cursor
                # What the reader has seen may go.
                if rng.random() < 0.5 and page.jobs:
                    await store.ask(wishes.Prune(milliseconds(page.jobs[0].settled_at)))
        while (page := await store.read_settled(5, cursor)).jobs:
            seen += ids(page.jobs)
            cursor = page.cursor
        assert seen == ended


@store_check("beside")
async def a_reader_sees_each_job_once_while_others_settle(open_store: StoreMaker) -> None:
    async with open_store() as (store, _), open_store.beside(store) as reader:
        count = 240
        await store.enqueue_many(
            [Job(f"{n % 6}", id=f"{n}", queue=f"q{n % 40}") for n in range(count)]
        )
        seen: list[str] = []

        async def read() -> None:
            cursor: str | None = None
            while len(seen) < count:
                page = await reader.read_settled(11, cursor)
                seen.extend(ids(page.jobs))
                cursor = page.cursor
                await trio.lowlevel.checkpoint()

        async def settle(lane: str, owner: Store) -> None:
            while True:
                job = await find(owner, lane)
                if job is not None:
                    if job.sequence % 5 == 0:
                        await owner.decide(
                            job.id, job.token, Settle(Outcome.COMPLETED), has_hook=True
                        )
                        await owner.finish_completing(job.id, job.token)
                    else:
                        await complete(owner, job)
                elif len(seen) == count or len(await read_unsettled(owner, lane)) == 0:
                    return

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(read)
                for n in range(6):
                    nursery.start_soon(settle, f"{n}", (store, reader)[n % 2])
        assert sorted(seen, key=int) == [f"{n}" for n in range(count)]
        assert seen == ids(await feed(store))


async def read_unsettled(store: Store, lane: str) -> list[StoredJob]:
    """The lane's jobs that are not settled."""
    jobs: list[StoredJob] = await store.ask(wishes.ReadJobs(lane=lane, limit=1000))
    return [job for job in jobs if job.state != "settled"]


# -- listings -------------------------------------------------------------------------------------


@store_check()
async def listings_are_newest_first_and_filtered(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        await settled(store, Job("a", id="1", queue="q"))
        await start_completing(store, Job("a", id="2", queue="r"))
        await start(store, Job("a", id="3", queue="q"))
        await store.enqueue(Job("a", id="4", queue="q"))
        await store.enqueue(Job("b", id="5", queue="q"))

        async def listed(**filters: object) -> list[str]:
            return ids(await store.ask(wishes.ReadJobs(**filters)))  # type: ignore[arg-type]

        assert await listed() == ["5", "4", "3", "2", "1"]
        assert await listed(limit=2) == ["5", "4"]
        assert await listed(lane="a") == ["4", "3", "2", "1"]
        assert await listed(queue="q") == ["5", "4", "3", "1"]
        assert await listed(queue="q", lane="a", state="queued") == ["4"]
        for state, id in (("running", "3"), ("completing", "2"), ("settled", "1")):
            assert await listed(state=state) == [id]
        counts = await store.ask(wishes.ReadCounts())
        assert sorted(counts, key=str) == sorted(
            [
                ("a", "completing", "completed", 1),
                ("a", "queued", None, 1),
                ("a", "running", None, 1),
                ("a", "settled", "completed", 1),
                ("b", "queued", None, 1),
            ],
            key=str,
        )


# -- when to look again ---------------------------------------------------------------------------


def expected_wake_state(jobs: Sequence[StoredJob], now: int, lease_now: int) -> WakeState:
    """What the specification says of these rows, computed the slow way."""
    pending = False
    instants: list[int] = []
    queues = {job.queue for job in jobs}
    for job in jobs:
        if isinstance(job, (QueuedJob, RunningJob)) and job.cancellation_id is not None:
            pending = True
        if isinstance(job, (RunningJob, CompletingJob)):
            remaining = milliseconds(job.lease_until) - lease_now
            pending |= isinstance(job, CompletingJob) or remaining <= 0
            instants += [now + remaining] if remaining > 0 else []
    for queue in queues:
        members = [job for job in jobs if job.queue == queue]
        if any(isinstance(job, (RunningJob, CompletingJob)) for job in members):
            continue
        waiting = [job for job in members if isinstance(job, QueuedJob)]
        if waiting:
            head = min(waiting, key=lambda job: (-job.priority, job.sequence))
            due = milliseconds(head.not_before)
            pending |= due <= now
            if due > now and head.cancellation_id is None:
                instants.append(due)
    return WakeState(pending, to_instant(min(instants)) if instants else None)


async def wakes_as_expected(store: Store, clock: DurableClock) -> WakeState:
    """The wake state, compared with the slow way."""
    wake = await store.wake_state()
    assert wake == expected_wake_state(await read_all(store), clock.now(), clock.lease_now())
    return wake


@store_check()
async def an_empty_store_has_nothing_to_wake_for(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        assert await store.wake_state() == WakeState(False, None)
        await settled(store, Job("a"))
        assert await wakes_as_expected(store, clock) == WakeState(False, None)


@store_check()
async def the_wake_state_of_each_situation(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):

        async def wake() -> tuple[bool, float | None]:
            state = await wakes_as_expected(store, clock)
            at = state.next_wake_at
            return state.pending, None if at is None else (at - clock.instant()).total_seconds()

        await store.enqueue(Job("a", id="j", queue="q", recovery=Recovery(1)))
        assert await wake() == (True, None)
        # Running: its lease. What waits behind it does not count.
        job = await claim(store, "a")
        await store.enqueue(Job("a", queue="q", not_before=clock.instant(5)))
        await store.enqueue(Job("a", queue="q"))
        assert await wake() == (False, LEASE_SECONDS)
        clock.advance(LEASE_SECONDS - TICK)
        assert await wake() == (False, TICK)
        clock.advance(TICK)
        assert await wake() == (True, None)
        await store.reconcile("j", job.token)
        assert await wake() == (True, None)
        # A retry: when it is due.
        job = await claim(store, "a")
        await store.retry("j", job.token, after=7_000)
        assert await wake() == (False, 7)
        clock.advance(7)
        assert await wake() == (True, None)
        # Completing is due, also while somebody with a lease is at it.
        job = await claim(store, "a")
        await store.decide("j", job.token, Settle(Outcome.COMPLETED), has_hook=True)
        assert await wake() == (True, LEASE_SECONDS)
        clock.advance(LEASE_SECONDS)
        assert await wake() == (True, None)
        await store.finish_completing("j", job.token)
        assert await wake() == (True, None)
        await drain(store, "a")
        assert await wake() == (False, None)
        # The earliest of several.
        await store.enqueue(Job("b", not_before=clock.instant(50)))
        await store.enqueue(Job("b", id="k", not_before=clock.instant(20)))
        await start(store, Job("c"), lease=30_000)
        assert await wake() == (False, 20)
        # A requested cancellation is due at once, even of a job that is not.
        await store.cancel("k", "c")
        assert await wake() == (True, 30)
        await store.settle_cancelled()
        assert await wake() == (False, 30)


@store_check()
async def a_deferred_head_wakes_and_what_it_blocks_does_not(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        await store.enqueue(Job("a", queue="q", not_before=clock.instant(60)))
        await store.enqueue(Job("a", queue="q", not_before=clock.instant(5)))
        await store.enqueue(Job("a", queue="q"))
        wake = await wakes_as_expected(store, clock)
        assert wake == WakeState(False, clock.instant(60))
        clock.advance(5)
        assert await wakes_as_expected(store, clock) == wake


@store_check()
async def the_wake_state_can_be_asked_for_another_instant(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        await store.enqueue(Job("a", not_before=clock.instant(60)))
        await store.enqueue(Job("a", not_before=clock.instant(20)))
        await start(store, Job("b"), lease=40_000)
        # Known to be due, and then asked for an instant before that.
        clock.advance(21)
        assert await find(store, "x") is None
        jobs, now, lease_now = await read_all(store), clock.now(), clock.lease_now()
        for offset in (-30_000, -1_001, -1_000, -999, 0, 18_999, 19_000, 38_999, 39_000, 10**9):
            expected = expected_wake_state(jobs, now + offset, lease_now + offset)
            assert await store.wake_state(now + offset) == expected, offset


@store_check()
async def the_wake_state_is_right_after_any_history(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        rng = random.Random(5)
        held: list[RunningJob] = []
        for n in range(250):
            match rng.randrange(10):
                case 0 | 1 | 2:
                    due: datetime | None = None
                    if rng.random() < 0.5:
                        due = clock.instant(rng.choice((1, 2, 5, 30)))
                    await store.enqueue(
                        Job(
                            rng.choice("ab"),
                            id=f"{n}",
                            queue=f"q{rng.randrange(4)}",
                            priority=rng.randrange(3),
                            not_before=due,
                            recovery=rng.choice((None, Recovery(2))),
                        )
                    )
                case 3 | 4:
                    job = await find(store, rng.choice("ab"), lease=rng.choice((2_000, LEASE)))
                    held += [] if job is None else [job]
                case 5 | 6 if held:
                    job = held.pop(rng.randrange(len(held)))
                    match rng.randrange(4):
                        case 0:
                            await store.retry(job.id, job.token, after=rng.choice((0, 3_000)))
                        case 1:
                            await store.hand_off(job.id, job.token)
                        case 2:
                            await store.decide(
                                job.id, job.token, Settle(Outcome.COMPLETED), has_hook=True
                            )
                        case _:
                            await complete_if_held(store, job)
                case 7:
                    job_or_none = await store.next_running_claim()
                    if job_or_none is not None:
                        await store.reconcile(job_or_none.id, job_or_none.token)
                    taken = await store.take_completing(f"t{n}", lease=LEASE)
                    if taken is not None:
                        await store.finish_completing(taken.id, taken.token)
                case 8:
                    await store.cancel(f"{rng.randrange(n + 1)}", f"c{n}")
                    if rng.random() < 0.5:
                        await store.settle_cancelled()
                case _:
                    wake = await store.wake_state()
                    if wake.next_wake_at is not None and rng.random() < 0.5:
                        clock.advance_to(wake.next_wake_at)
                    else:
                        clock.advance(rng.choice((TICK, 1, 5)))
            await wakes_as_expected(store, clock)


async def complete_if_held(store: Store, job: RunningJob) -> None:
    """Settle a job whose claim may be lost by now."""
    await store.decide(job.id, job.token, Settle(Outcome.COMPLETED))
