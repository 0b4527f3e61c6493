"""Store checks: projectors, reports of changes, broken rows, and histories as a whole."""

# ruff: noqa: S311  (histories are drawn from seeds, so that they can be had again)

from __future__ import annotations

import contextlib
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

import trio

from .. import _wishes as wishes
from .._errors import SettlementRejected, StoreInvalid
from .._identity import fresh_token
from .._model import (
    CompletingJob,
    Job,
    Outcome,
    QueueHead,
    QueueTransition,
    Recovery,
    RetryPolicy,
    RunningJob,
)
from .._rules import Settle
from .._store import ELSEWHERE, Change, Store
from ._check_tools import (
    COMPLETED,
    LEASE,
    LEASE_SECONDS,
    claim,
    complete,
    drain,
    expected_order,
    feed,
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
)
from ._clock import DurableClock
from ._store_maker import StoreMaker, store_check

# -- projectors -----------------------------------------------------------------------------------


@store_check()
async def a_projector_is_told_of_each_change_of_a_queue(open_store: StoreMaker) -> None:
    told: list[QueueTransition] = []
    async with open_store(project=lambda transition, _: told.append(transition)) as (store, clock):

        async def after(action: Awaitable[Any]) -> list[tuple[QueueHead, str | None]]:
            told.clear()
            await action
            assert {transition.queue for transition in told} <= {"q"}
            return [(each.head, None if each.settled is None else each.settled.id) for each in told]

        queued = QueueHead("queued", "j")
        assert await after(
            store.enqueue(Job("a", {"n": 1}, id="j", queue="q", recovery=Recovery(1)))
        ) == [(queued, None)]
        assert await after(store.enqueue(Job("a", id="next", queue="q"))) == [(queued, None)]
        assert await after(store.claim("a", "t1", lease=LEASE)) == [
            (QueueHead("running", "j"), None)
        ]
        assert await after(store.retry("j", "t1")) == [(queued, None)]
        await store.claim("a", "t2", lease=LEASE)
        assert await after(store.hand_off("j", "t2")) == [(queued, None)]
        await store.claim("a", "t3", lease=LEASE)
        clock.advance(LEASE_SECONDS)
        assert await after(store.reconcile("j", "t3")) == [(queued, None)]
        await store.claim("a", "t4", lease=LEASE)
        assert await after(store.cancel("next", "c")) == [(QueueHead("running", "j"), None)]
        assert await after(store.settle_cancelled()) == [(QueueHead("running", "j"), "next")]
        assert await after(store.decide("j", "t4", COMPLETED, has_hook=True)) == [
            (QueueHead("running", "j"), None)
        ]
        assert await after(store.finish_completing("j", "t4")) == [(QueueHead("idle"), "j")]
        # The job is told whole.
        assert told[0].settled == await read_settled_job(store, "j")
        await store.enqueue(Job("b", id="k", queue="q"))
        assert await after(store.fail_lane("b", "r")) == [(QueueHead("idle"), "k")]
        await store.enqueue(Job("b", id="l", queue="q"))
        assert await after(store.purge_queue("q")) == [(QueueHead("idle"), None)]


@store_check()
async def a_projector_is_not_told_of_what_changed_nothing(open_store: StoreMaker) -> None:
    told: list[QueueTransition] = []
    async with open_store(project=lambda transition, _: told.append(transition)) as (store, clock):
        job = Job("a", id="j", queue="q")
        await store.enqueue(job)
        await store.claim("a", "t", lease=LEASE)
        await store.cancel("j", "c")
        told.clear()
        await store.enqueue(job)
        await store.claim("a", "u")
        await store.renew("j", "t", lease=LEASE)
        await store.inspect("j", "t")
        await store.cancel("j", "c")
        await store.cancel("j", "d")
        await store.decide("j", "stolen", COMPLETED)
        await store.retry("j", "t")
        await store.hand_off("j", "stolen")
        await store.finish_completing("j", "t")
        await store.reconcile("j", "t")
        await store.settle_cancelled()
        await store.purge_queue("q")
        await store.fail_lane("b", "r")
        await store.wake_state()
        await store.read_settled()
        clock.advance(1)
        assert told == []


@store_check()
async def a_projector_that_raises_undoes_the_change(open_store: StoreMaker) -> None:
    class Refused(Exception):
        pass

    refuses = False

    def project(transition: QueueTransition, _: Any) -> None:
        if refuses:
            raise Refused(f"not {transition.queue}")

    async with open_store(project=project) as (store, clock):
        running = await start(store, Job("a", id="r", queue="q", recovery=Recovery(1)))
        completing = await start(store, Job("b", id="c"))
        await store.decide("c", completing.token, COMPLETED, has_hook=True)
        await store.enqueue(Job("a", id="waits", queue="q"))
        await store.enqueue(Job("d", id="free"))
        await store.enqueue(Job("d", id="gone"))
        await store.cancel("gone", "x")
        expired = await start(store, Job("e", id="e"), lease=1)
        clock.advance(1)
        before = await read_all(store)
        refuses = True
        actions: list[Callable[[], Awaitable[Any]]] = [
            lambda: store.enqueue(Job("a", queue="q")),
            lambda: store.enqueue_many([Job("a"), Job("a")]),
            lambda: store.enqueue_select("select 'a' as lane"),
            lambda: store.claim("d", "t", lease=LEASE),
            lambda: store.decide("r", running.token, COMPLETED),
            lambda: store.decide("r", running.token, COMPLETED, has_hook=True),
            lambda: store.retry("r", running.token),
            lambda: store.retry("r", running.token, RetryPolicy(1)),
            lambda: store.hand_off("r", running.token),
            lambda: store.finish_completing("c", completing.token),
            lambda: store.cancel("r", "y"),
            store.settle_cancelled,
            lambda: store.fail_lane("a", "r"),
            lambda: store.purge_queue("q"),
            lambda: store.reconcile("e", expired.token),
        ]
        for action in actions:
            with raises(SettlementRejected, "not ") as caught:
                await action()
            assert isinstance(caught.error.__cause__, Refused)
            assert await read_all(store) == before
        # What changes no queue is not held up.
        assert (await store.renew("r", running.token, lease=LEASE)).status == "held"
        refuses = False
        assert (await store.decide("r", running.token, COMPLETED)).status == "recorded"


@store_check()
async def a_projector_that_refuses_one_change_hurts_no_other(open_store: StoreMaker) -> None:
    def project(transition: QueueTransition, _: Any) -> None:
        if transition.queue == "bad":
            raise ValueError("bad queue")

    async with open_store(project=project) as (store, _):
        answers = await store.submit(
            wishes.Enqueue(Job("a", id="1")),
            wishes.Enqueue(Job("a", id="2", queue="bad")),
            wishes.Enqueue(Job("a", id="3")),
            wishes.Cancel("1", "c"),
        )
        assert [type(answer).__name__ for answer in answers] == [
            "Admission",
            "SettlementRejected",
            "Admission",
            "CancellationResult",
        ]
        assert ids(await read_all(store)) == ["1", "3"]


@store_check()
async def a_projector_runs_inside_the_transaction_of_the_change(open_store: StoreMaker) -> None:
    seen: list[tuple[int, int]] = []

    def project(_: QueueTransition, connection: Any) -> None:
        # Its own writes are part of the transition: done with it, undone with it.
        cursor = connection.cursor()
        cursor.execute("create table if not exists projected (n integer)")
        cursor.execute("insert into projected values (1)")
        cursor.execute("select n from projected")
        seen.append((len(cursor.fetchall()), refusing))
        if refusing:
            raise ValueError("no")

    refusing = 0
    async with open_store(project=project) as (store, _):
        await store.enqueue(Job("a"))
        refusing = 1
        with raises(SettlementRejected):
            await store.enqueue(Job("a"))
        refusing = 0
        await store.enqueue(Job("a"))
        assert [count for count, refused in seen if not refused] == [1, 2]


# -- reports of changes ---------------------------------------------------------------------------


@store_check()
async def a_store_tells_which_lanes_may_have_work_and_from_when(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        changes: list[Change] = []
        store.on_change.append(changes.append)

        async def told(action: Awaitable[Any]) -> Change:
            changes.clear()
            await action
            lanes: dict[str, int] = {}
            for change in changes:
                for lane, due in change.lanes.items():
                    lanes[lane] = min(due, lanes.get(lane, due))
            return Change(
                lanes,
                any(change.cancelled for change in changes),
                frozenset[str]().union(*[change.claims for change in changes]),
                frozenset[str]().union(*[change.settled for change in changes]),
            )

        assert (await told(store.enqueue(Job("a", id="j", queue="q")))).lanes == {"a": 0}
        due = clock.instant(5)
        change = await told(store.enqueue(Job("b", id="later", not_before=due)))
        assert change.lanes == {"b": milliseconds(due)}
        job = await claim(store, "a")
        await store.enqueue(Job("c", id="next", queue="q"))
        # Whoever frees a queue tells the lane of its next job, not its own.
        change = await told(store.decide("j", job.token, COMPLETED))
        assert "c" in change.lanes
        assert change.lanes["c"] <= clock.now()
        assert change.settled == {"j"}
        job = await claim(store, "c")
        change = await told(store.retry("next", job.token, after=3_000))
        assert change.lanes == {"c": clock.now() + 3_000}
        clock.advance(3)
        job = await claim(store, "c")
        assert (await told(store.hand_off("next", job.token))).lanes["c"] <= clock.now()
        job = await claim(store, "c")
        # A request to cancel: running claims are to be looked at, queued jobs to be settled.
        change = await told(store.cancel("next", "x"))
        assert (change.cancelled, change.claims) == (True, {"next"})
        change = await told(store.fail_lane("c", "r"))
        assert change.claims == change.settled == {"next"}
        await store.cancel("later", "y")
        assert (await told(store.settle_cancelled())).settled == {"later"}


@store_check()
async def whoever_frees_a_deferred_head_tells_when_it_is_due(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        job = await start(store, Job("a", queue="q"))
        due = clock.instant(30)
        await store.enqueue(Job("b", queue="q", not_before=due))
        changes: list[Change] = []
        store.on_change.append(changes.append)
        await complete(store, job)
        assert {lane: at for change in changes for lane, at in change.lanes.items()} == {
            "b": milliseconds(due)
        }


@store_check()
async def a_store_that_did_nothing_tells_nothing(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        job = Job("a", id="j")
        await store.enqueue(job)
        running = await claim(store, "a")
        changes: list[Change] = []
        store.on_change.append(changes.append)
        await store.enqueue(job)
        await store.claim("a", "t")
        await store.renew("j", running.token)
        await store.read("j")
        await store.wake_state()
        await store.decide("j", "stolen", COMPLETED)
        await store.settle_cancelled()
        assert changes == []


@store_check("beside")
async def what_another_store_does_is_reported(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock), open_store.beside(store) as other:
        send, receive = trio.open_memory_channel[Change](1000)

        async def is_reported(
            action: Callable[[], Awaitable[Any]], concerns: Callable[[Change], bool]
        ) -> None:
            with contextlib.suppress(trio.WouldBlock):
                while True:
                    receive.receive_nowait()
            await action()
            with trio.fail_after(5):
                async for change in receive:
                    if change is ELSEWHERE or concerns(change):
                        return

        async with trio.open_nursery() as nursery:
            await nursery.start(store.watch)
            store.on_change.append(send.send_nowait)
            job = Job("a", id="j", queue="q")
            await is_reported(lambda: other.enqueue(job), lambda c: c.lanes.get("a") == 0)
            await is_reported(
                lambda: other.cancel("j", "c"), lambda c: c.cancelled and "j" in c.claims
            )
            # What is due later is told beside what is due now.
            jobs = [Job("b", not_before=clock.instant(1000)), Job("b"), Job("c")]
            await is_reported(
                lambda: other.enqueue_many(jobs),
                lambda c: c.lanes.get("b") == 0 and c.later is not None,
            )
            running = await claim(store, "c")
            await is_reported(
                lambda: other.hand_off(running.id, running.token),
                lambda c: c.lanes.get("c") == 0,
            )
            nursery.cancel_scope.cancel()


# -- rows that somebody broke ---------------------------------------------------------------------


@store_check("raw_sql")
async def a_row_that_cannot_be_read_is_reported_by_name(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        for id in ("broken", "whole"):
            await store.enqueue(Job("a", {"n": 1}, id=id))
        for payload in ('{"n": 1', "", "NaN", "[1e999]", "nul", "{'n': 1}"):
            await open_store.execute(
                store,
                "update {jobs} set payload = :payload where id = 'broken'",
                {"payload": payload},
            )
            with raises(StoreInvalid, "'broken'"):
                await store.read("broken")
            broken, whole = await store.submit(wishes.Read("broken"), wishes.Read("whole"))
            assert isinstance(broken, StoreInvalid)
            assert whole.payload == {"n": 1}
            with raises(StoreInvalid):
                await store.enqueue(Job("a", {"n": 1}, id="broken"))
            assert (await store.enqueue(Job("a", {"n": 1}, id="whole"))).status == "duplicate"


@store_check("raw_sql")
async def a_broken_payload_fails_its_own_job_and_its_lane_goes_on(
    open_store: StoreMaker,
) -> None:
    told: list[QueueTransition] = []

    def tell(transition: QueueTransition, _: Any) -> None:
        told.append(transition)

    for project in (None, tell):
        async with open_store(project=project) as (store, _):
            await store.enqueue(Job("a", id="broken", queue="q", priority=1))
            await store.enqueue(Job("a", id="whole", queue="q"))
            await open_store.execute(store, "update {jobs} set payload = '{' where id = 'broken'")
            assert (await claim(store, "a")).id == "whole"
            rows = await open_store.execute(
                store, "select state, outcome, reason from {jobs} where id = 'broken'"
            )
            assert [tuple(row[:2]) for row in rows] == [("settled", "failed")]
            assert "payload" in rows[0][2]


@store_check("raw_sql")
async def a_broken_payload_does_not_hide_other_jobs_from_the_supervisor(
    open_store: StoreMaker,
) -> None:
    async with open_store() as (store, clock):
        await start(store, Job("a", id="broken", recovery=Recovery(3)))
        await start(store, Job("b", id="whole", recovery=Recovery(3)))
        for lane, id in (("c", "broken too"), ("d", "whole too")):
            job = await start(store, Job(lane, id=id))
            await store.decide(id, job.token, COMPLETED, has_hook=True)
        await open_store.execute(
            store, "update {jobs} set payload = '{' where id in ('broken', 'broken too')"
        )
        clock.advance(LEASE_SECONDS)
        # Whatever becomes of the broken ones: the others are recovered and finished.
        finished: set[str] = set()
        for n in range(6):
            try:
                job = await store.next_running_claim()
                if job is not None:
                    await store.reconcile(job.id, job.token)
            except StoreInvalid as error:
                assert "broken" in str(error)  # noqa: PT017
            try:
                taken = await store.take_completing(f"t{n}", lease=LEASE)
                if taken is not None:
                    await store.finish_completing(taken.id, taken.token)
                    finished.add(taken.id)
            except StoreInvalid as error:
                assert "broken" in str(error)  # noqa: PT017
        assert (await read_queued(store, "whole")).recovery_count == 1
        assert finished == {"whole too"}


@store_check("raw_sql")
async def a_broken_row_in_the_feed_is_named_and_what_comes_before_it_is_read(
    open_store: StoreMaker,
) -> None:
    async with open_store() as (store, _):
        for id in ("1", "2", "broken", "4"):
            await complete(store, await start(store, Job("a", id=id)))
        await open_store.execute(store, "update {jobs} set payload = '{' where id = 'broken'")
        page = await store.read_settled()
        assert ids(page.jobs) == ["1", "2"]
        for _ in range(2):
            with raises(StoreInvalid, "'broken'"):
                await store.read_settled(after=page.cursor)
        # Mended, it is read on, and nothing was passed over.
        await open_store.execute(store, "update {jobs} set payload = '1' where id = 'broken'")
        page = await store.read_settled(after=page.cursor)
        assert ids(page.jobs) == ["broken", "4"]


@store_check("raw_sql")
async def a_lane_with_a_broken_row_can_be_failed(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        for id in ("1", "broken", "3"):
            await store.enqueue(Job("a", id=id))
        await open_store.execute(store, "update {jobs} set payload = '{' where id = 'broken'")
        failure = await store.fail_lane("a", "r")
        assert not failure.more
        assert {"1", "3"} <= set(ids(failure.jobs))
        rows = await open_store.execute(store, "select id from {jobs} where state <> 'settled'")
        assert rows == []


@store_check("raw_sql")
async def a_cancelled_job_with_a_broken_row_settles(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        for id in ("1", "broken"):
            await store.enqueue(Job("a", id=id))
            await store.cancel(id, f"c{id}")
        await open_store.execute(store, "update {jobs} set payload = '{' where id = 'broken'")
        assert sorted(await store.settle_cancelled()) == ["1", "broken"]


@store_check("raw_sql")
async def a_row_that_breaks_the_grammar_is_reported_and_never_guessed_at(
    open_store: StoreMaker,
) -> None:
    for breakage in (
        "state = 'paused'",
        "outcome = 'fine'",
        "priority = 'high'",
        "settled_at = null",
        "outcome = null",
        "not_before = 'soon'",
        "recovery_count = 'x'",
        "sequence = -5",
    ):
        async with open_store() as (store, _):
            await complete(store, await start(store, Job("a", id="broken")))
            await store.enqueue(Job("a", id="whole"))
            try:
                sql = f"update {{jobs}} set {breakage} where id = 'broken'"  # noqa: S608
                await open_store.break_rows(store, sql)
            except Exception:
                # This database cannot even be made to hold it.
                assert (await read_settled_job(store, "broken")).id == "broken"
                continue
            with raises(StoreInvalid, "broken"):
                await store.read("broken")
            assert (await claim(store, "a")).id == "whole"


# -- histories ------------------------------------------------------------------------------------


@store_check()
async def hundreds_of_jobs_in_few_queues_run_in_exact_order(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        rng = random.Random(6)
        jobs = [
            Job(f"l{rng.randrange(3)}", queue=f"q{rng.randrange(5)}", priority=rng.randint(-3, 3))
            for _ in range(400)
        ]
        admitted = [each.job for each in await store.enqueue_many(jobs)]
        order: dict[str, list[str]] = defaultdict(list)
        running: list[RunningJob] = []
        done = 0
        while done < len(jobs):
            asked = [
                wishes.Claim(f"l{lane}", fresh_token(), store.owner, LEASE)
                for lane in range(3)
                for _ in range(2)
            ]
            answers: list[wishes.Claimed] = await store.submit(*asked)
            claimed = [answer.job for answer in answers if answer.job is not None]
            assert claimed or running or any(answer.more for answer in answers)
            for job in claimed:
                assert job.queue not in {other.queue for other in running}
                order[job.queue].append(job.id)
                running.append(job)
            rng.shuffle(running)
            ended = [running.pop() for _ in range(rng.randint(0, len(running)))]
            recorded = await store.submit(
                *[wishes.Decide(job.id, job.token, COMPLETED) for job in ended]
            )
            assert all(answer.status == "recorded" for answer in recorded)
            done += len(ended)
        for queue, run in order.items():
            assert run == expected_order([job for job in admitted if job.queue == queue])
        assert len(await feed(store)) == len(jobs)


@store_check("beside")
async def many_workers_keep_the_order_of_each_queue(open_store: StoreMaker) -> None:
    async with open_store() as (store, _), open_store.beside(store) as other:
        rng = random.Random(7)
        jobs = [
            Job("a", queue=f"q{rng.randrange(7)}", priority=rng.randint(-2, 2)) for _ in range(210)
        ]
        admitted = [each.job for each in await store.enqueue_many(jobs)]
        order: dict[str, list[str]] = defaultdict(list)
        running: set[str] = set()

        async def work(owner: Store) -> None:
            while sum(map(len, order.values())) < len(jobs):
                job = await find(owner, "a")
                if job is None:
                    await trio.lowlevel.checkpoint()
                    continue
                assert job.queue not in running, f"two jobs of {job.queue} run at once"
                running.add(job.queue)
                order[job.queue].append(job.id)
                await trio.lowlevel.checkpoint()
                running.discard(job.queue)
                await complete(owner, job)

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for n in range(6):
                    nursery.start_soon(work, (store, other)[n % 2])
        for queue, run in order.items():
            assert run == expected_order([job for job in admitted if job.queue == queue])


@store_check()
async def no_history_loses_a_job(open_store: StoreMaker) -> None:
    for seed in range(6):
        async with open_store() as (store, clock):
            await random_history(store, clock, random.Random(seed))
            await drain_whatever_is_left(store, clock)
            assert [job.id for job in await read_all(store) if job.state != "settled"] == []
            assert sorted(ids(await feed(store))) == sorted(ids(await read_all(store)))


async def random_history(store: Store, clock: DurableClock, rng: random.Random) -> None:
    """A hundred random operations on three lanes and four queues."""
    held: list[RunningJob] = []
    for n in range(100):
        match rng.randrange(13):
            case 0 | 1 | 2 | 3:
                due = clock.instant(rng.choice((1, 60))) if rng.random() < 0.3 else None
                await store.enqueue_many(
                    [
                        Job(
                            rng.choice("abc"),
                            id=f"{n}.{m}",
                            queue=f"q{rng.randrange(4)}",
                            priority=rng.randint(-1, 1),
                            not_before=due,
                            recovery=rng.choice((None, Recovery(1))),
                        )
                        for m in range(rng.choice((1, 1, 4)))
                    ]
                )
            case 4 | 5 | 6:
                claimed = await store.claim(rng.choice("abc"), fresh_token(), lease=LEASE)
                held += [] if claimed.job is None else [claimed.job]
            case 7 | 8 if held:
                job = held.pop(rng.randrange(len(held)))
                await store.decide(job.id, job.token, COMPLETED, has_hook=rng.random() < 0.3)
            case 9 if held:
                job = held.pop(rng.randrange(len(held)))
                if rng.random() < 0.5:
                    await store.retry(job.id, job.token, after=rng.choice((0, 5_000)))
                else:
                    await store.hand_off(job.id, job.token)
            case 10:
                waiting = [job.id for job in await read_all(store) if job.state == "queued"]
                for id in rng.sample(waiting, min(2, len(waiting))):
                    await store.cancel(id, f"c{n}{id}")
                if rng.random() < 0.5:
                    await store.settle_cancelled(limit=rng.choice((1, 256)))
            case 11:
                if rng.random() < 0.2:
                    await store.fail_lane(rng.choice("abc"), "r")
                else:
                    await store.purge_queue(f"q{rng.randrange(4)}")
            case _:
                clock.advance(rng.choice((0.001, 1, 30)))


async def drain_whatever_is_left(store: Store, clock: DurableClock) -> None:
    """Do all there is to do, in virtual time, until the store says that nothing is left."""
    for n in range(2000):
        await store.settle_cancelled()
        taken = await store.take_completing(f"taken {n}", lease=LEASE)
        if taken is not None:
            await store.finish_completing(taken.id, taken.token)
            continue
        disappeared = await store.next_running_claim()
        if disappeared is not None:
            await store.reconcile(disappeared.id, disappeared.token)
            continue
        if await drain(store, "a", "b", "c"):
            continue
        wake = await store.wake_state()
        # Who decided may still be at it.
        is_completing = any(isinstance(job, CompletingJob) for job in await read_all(store))
        assert wake.pending == is_completing, "something is pending, and nothing can be done"
        if wake.next_wake_at is None:
            return
        clock.advance_to(wake.next_wake_at)
    raise AssertionError("there is no end to it")


@store_check()
async def a_verb_that_is_cancelled_beforehand_has_done_nothing(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        with trio.CancelScope() as scope:
            scope.cancel()
            await store.enqueue(Job("a"))
        assert scope.cancelled_caught
        assert await read_all(store) == []
        # And the store goes on.
        await store.enqueue(Job("a", id="j"))
        assert (await claim(store, "a")).id == "j"


@store_check()
async def one_exchange_answers_each_wish_in_its_place(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        running = await start(store, Job("a", id="r"))
        gone = await start(store, Job("b", id="g"), lease=1)
        clock.advance(1)
        answers = await store.submit(
            wishes.ReadWakeState(),
            wishes.Read("r"),
            wishes.Claim("new", "t", store.owner, LEASE),
            wishes.Enqueue(Job("new", id="n")),
            wishes.Reconcile("g", gone.token),
            wishes.Decide("r", running.token, Settle(Outcome.FAILED, "x")),
            wishes.Renew("r", running.token, LEASE),
            wishes.ReadSettled(),
        )
        wake, read_one, claimed, admitted, reconciled, recorded, renewed, page = answers
        assert not wake.pending
        assert read_one == await read(store, "r")
        assert claimed.job == await read_running(store, "n")
        assert admitted.status == "queued"
        assert reconciled.status == "settled"
        assert recorded.status == "recorded"
        # Renewals come before all else, so that nothing can delay them into refusal.
        assert renewed.status == "held"
        assert sorted(ids(page.jobs)) == ["g", "r"]
        assert await find(store, "new") is None


@store_check()
async def a_store_that_was_closed_says_so_to_all_who_come_late(open_store: StoreMaker) -> None:
    refusals = 0

    async def come_late(store: Store) -> None:
        nonlocal refusals
        with raises(StoreInvalid, "closed"):
            await store.enqueue(Job("a"))
        refusals += 1

    async with open_store() as (store, _):
        await store.enqueue(Job("a"))
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(come_late, store)
    assert refusals == 3
