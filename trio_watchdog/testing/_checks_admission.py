"""Store checks: how jobs are admitted, and what the database refuses to hold."""

from __future__ import annotations

from collections.abc import Awaitable
from datetime import UTC, datetime
from typing import Any, cast

from .. import _wishes as wishes
from .._errors import InvalidJob, JobConflict, StoreInvalid
from .._model import (
    INSTANT_LIMIT,
    PRIORITY_LIMIT,
    Job,
    Outcome,
    QueuedJob,
    Recovery,
)
from .._rules import Settle
from .._store import Store
from ._check_tools import (
    LEASE,
    as_values,
    claim,
    complete,
    drain,
    find,
    ids,
    raises,
    read,
    read_all,
    read_queued,
    start,
    start_completing,
)
from ._store_maker import StoreMaker, store_check


@store_check()
async def a_new_job_is_queued_with_every_field_it_was_given(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        due = clock.instant(90)
        job = Job(
            "mail",
            {"to": ["ada", "eve"], "n": 1.5},
            queue="q",
            id="j",
            priority=-3,
            not_before=due,
            recovery=Recovery(2, 30.5),
        )
        admission = await store.enqueue(job)
        assert admission.status == "queued"
        expected = QueuedJob(
            id="j",
            queue="q",
            lane="mail",
            priority=-3,
            payload={"to": ["ada", "eve"], "n": 1.5},
            not_before=due,
            recovery=Recovery(2, 30.5),
            sequence=admission.job.sequence,
            cancellation_id=None,
            recovery_count=0,
            attempt_count=0,
        )
        assert admission.job == expected
        assert await store.read("j") == expected


@store_check()
async def later_jobs_have_higher_sequences(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        first = await store.enqueue(Job("a"))
        batch = await store.enqueue_many([Job("b", n) for n in range(20)])
        last = await store.enqueue(Job("a"))
        sequences = [admission.job.sequence for admission in (first, *batch, last)]
        assert sequences == sorted(set(sequences))
        assert [admission.job.payload for admission in batch] == list(range(20))


@store_check()
async def an_unknown_job_is_missing(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        await store.enqueue(Job("a", id="here"))
        for id in ("her", "here ", "HERE", "%", "'", "hér\u0301e"):
            assert await store.read(id) is None


@store_check()
async def the_same_job_again_is_a_duplicate_whatever_its_state(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        job = Job("a", {"x": 1, "y": 2}, queue="q", id="j", priority=4, recovery=Recovery(1, 5))
        same = Job("a", {"y": 2, "x": 1}, queue="q", id="j", priority=4, recovery=Recovery(1, 5.0))

        async def again() -> str:
            before = await read_all(store)
            admission = await store.enqueue(same)
            assert admission.status == "duplicate"
            assert await read_all(store) == before == [admission.job]
            return admission.job.state

        await store.enqueue(job)
        assert await again() == "queued"
        running = await claim(store, "a")
        assert await again() == "running"
        await store.retry("j", running.token, after=5_000)
        assert await again() == "queued"
        clock.advance(5)
        running = await claim(store, "a")
        await store.decide("j", running.token, Settle(Outcome.COMPLETED), has_hook=True)
        assert await again() == "completing"
        await store.finish_completing("j", running.token)
        assert await again() == "settled"


@store_check()
async def a_duplicate_does_not_move_the_time_of_the_first(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        due = clock.instant(60)
        await store.enqueue(Job("a", id="j", queue="q", not_before=due))
        for other in (None, clock.instant(5), clock.instant(600)):
            assert (await store.enqueue(Job("a", id="j", queue="q", not_before=other))).status == (
                "duplicate"
            )
        assert (await read(store, "j")).not_before == due


@store_check()
async def a_different_job_under_the_same_id_is_a_conflict(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):

        def job(**changes: Any) -> Job:
            fields: dict[str, Any] = {
                "lane": "a",
                "payload": {"n": 1},
                "queue": "q",
                "priority": 0,
                "recovery": Recovery(1, 60),
            }
            return Job(id="j", **{**fields, **changes})

        await store.enqueue(job())
        before = await read_all(store)
        for changes in (
            {"lane": "b"},
            {"queue": "r"},
            {"priority": 1},
            {"payload": {"n": 2}},
            {"payload": {"n": 1.0}},
            {"payload": {"n": True}},
            {"payload": {"n": "1"}},
            {"recovery": None},
            {"recovery": Recovery(1)},
            {"recovery": Recovery(2, 60)},
            {"recovery": Recovery(1, 60.001)},
        ):
            with raises(JobConflict, "'j'"):
                await store.enqueue(job(**changes))
            assert await read_all(store) == before
        # Whatever its state, too.
        await complete(store, await claim(store, "a"))
        with raises(JobConflict, "priority"):
            await store.enqueue(job(priority=7))


@store_check()
async def a_conflict_hurts_no_other_wish_of_the_same_exchange(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        await store.enqueue(Job("a", 1, id="taken"))
        answers = await store.submit(
            wishes.Enqueue(Job("a", id="x")),
            wishes.Enqueue(Job("a", 2, id="taken")),
            wishes.Enqueue(Job("a", id="y")),
            wishes.Read("taken"),
        )
        assert answers[0].status == answers[2].status == "queued"
        assert isinstance(answers[1], JobConflict)
        assert answers[3].payload == 1
        assert ids(await read_all(store)) == ["taken", "x", "y"]


@store_check()
async def one_exchange_can_hold_the_same_job_twice(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        job = Job("a", {"n": 1}, id="j")
        answers = await store.submit(
            wishes.Enqueue(job), wishes.Enqueue(job), wishes.Enqueue(Job("a", {"n": 2}, id="j"))
        )
        assert [answer.status for answer in answers[:2]] == ["queued", "duplicate"]
        assert isinstance(answers[2], JobConflict)
        assert ids(await read_all(store)) == ["j"]


@store_check()
async def many_are_admitted_in_order_or_none_at_all(open_store: StoreMaker) -> None:
    async with open_store(payload_limit=50) as (store, _):
        assert await store.enqueue_many([]) == []
        await store.enqueue(Job("a", "first", id="taken"))
        before = await read_all(store)
        fine = [Job("a", n) for n in range(5)]
        with raises(JobConflict, "taken"):
            await store.enqueue_many([*fine, Job("a", "other", id="taken")])
        assert await read_all(store) == before
        with raises(JobConflict, "'twice'"):
            await store.enqueue_many([*fine, Job("a", 1, id="twice"), Job("a", 2, id="twice")])
        assert await read_all(store) == before
        with raises(InvalidJob, "limit of 50"):
            await store.enqueue_many([Job("a", "x" * 49), *fine])
        assert await read_all(store) == before
        # A failed attempt leaves the ids free, and duplicates are not errors.
        twin = Job("a", 5, id="twin")
        admissions = await store.enqueue_many([*fine, twin, twin, Job("a", "first", id="taken")])
        assert [admission.status for admission in admissions] == (
            ["queued"] * 6 + ["duplicate"] * 2
        )
        assert [a.job.id for a in admissions] == [*ids_of(fine), "twin", "twin", "taken"]
        assert ids(await read_all(store)) == ["taken", *ids_of(fine), "twin"]


def ids_of(jobs: list[Job]) -> list[str]:
    """Ids of jobs that are not stored yet."""
    return [job.id for job in jobs]


@store_check()
async def many_admitted_to_one_queue_keep_their_order(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        jobs = [Job("a", n, queue="q", priority=n % 3) for n in range(60)]
        await store.enqueue_many(jobs)
        order = [job.payload for job in await drain(store, "a")]
        assert order == sorted(range(60), key=lambda n: (-(n % 3), n))


@store_check()
async def a_queue_named_like_a_job_is_the_queue_of_that_job(open_store: StoreMaker) -> None:
    for is_many in (False, True):
        async with open_store() as (store, _):
            first = await start(store, Job("a", 0, queue="j", id="first"))
            # By default its queue is its id, and somebody is in front of it there.
            later = [Job("a", 1, id="j"), Job("a", 2, queue="j")]
            if is_many:
                await store.enqueue_many(later)
            else:
                for job in later:
                    await store.enqueue(job)
            assert await find(store, "a") is None
            await complete(store, first)
            assert [job.payload for job in await drain(store, "a")] == [1, 2]


@store_check()
async def a_first_job_that_was_there_already_does_not_hide_the_second(
    open_store: StoreMaker,
) -> None:
    async with open_store() as (store, _):
        first = Job("a", 0, queue="q", id="first")
        await store.enqueue(first)
        await drain(store, "a")
        await store.enqueue(Job("a", 1, queue="elsewhere", id="other", priority=9))
        later = [Job("a", n, queue="q") for n in range(2, 5)]
        admissions = await store.enqueue_many([first, *later])
        assert [admission.status for admission in admissions] == ["duplicate", *["queued"] * 3]
        assert [job.payload for job in await drain(store, "a")] == [1, 2, 3, 4]


@store_check()
async def more_than_go_to_the_database_at_once_are_admitted_or_none(
    open_store: StoreMaker,
) -> None:
    async with open_store() as (store, _):
        await store.enqueue(Job("a", "first", id="taken"))
        jobs = [Job("a", n, queue=f"q{n % 2}", priority=n // 400) for n in range(1100)]
        with raises(JobConflict, "taken"):
            await store.enqueue_many([*jobs, Job("a", "other", id="taken")])
        assert ids(await read_all(store)) == ["taken"]
        admissions = await store.enqueue_many(jobs)
        assert [admission.job.id for admission in admissions] == ids_of(jobs)
        assert ids(await read_all(store)) == ["taken", *ids_of(jobs)]


@store_check()
async def a_select_admits_each_row_that_it_yields(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        jobs = [
            Job("a", {"it's": [n, None, "é😀"]}, queue="q", priority=n, recovery=Recovery(n))
            for n in range(3)
        ]
        admissions = await store.enqueue_select(as_values(*jobs))
        assert [admission.status for admission in admissions] == ["queued"] * 3
        for job, admission in zip(jobs, admissions, strict=True):
            stored = await read(store, job.id)
            assert stored == admission.job
            assert (
                stored.payload,
                stored.queue,
                stored.lane,
                stored.priority,
                stored.recovery,
            ) == (
                job.payload,
                "q",
                "a",
                job.priority,
                job.recovery,
            )
        # The same rules as for a single job, by whatever way it came.
        assert {a.status for a in await store.enqueue_select(as_values(*jobs))} == {"duplicate"}
        assert (await store.enqueue(jobs[0])).status == "duplicate"


@store_check()
async def a_select_needs_only_a_lane(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        (admission,) = await store.enqueue_select("select 'mail' as lane")
        job = await read_queued(store, admission.job.id)
        assert (job.lane, job.queue, job.priority, job.payload) == ("mail", job.id, 0, None)
        assert (job.not_before, job.recovery) == (None, None)
        assert await store.enqueue_select("select 'mail' as lane where 1 = 0") == []
        # With its window, and with a recovery as JSON.
        (admission,) = await store.enqueue_select(
            "select 'mail' as lane, 3 as max_recoveries, 60 as \"window\""
        )
        assert admission.job.recovery == Recovery(3, 60)
        (admission,) = await store.enqueue_select(
            "select 'mail' as lane, '{\"max_recoveries\": 1}' as recovery"
        )
        assert admission.job.recovery == Recovery(1)
        (admission,) = await store.enqueue_select(
            "select 'mail' as lane, '2031-01-02T03:04:05.678+02:00' as not_before"
        )
        assert admission.job.not_before == datetime(2031, 1, 2, 1, 4, 5, 678000, UTC)


@store_check()
async def a_select_with_one_bad_row_admits_none(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        await store.enqueue(Job("a", 1, id="taken"))
        before = await read_all(store)
        good = "select 'a' as lane, 'x' as id, '1' as payload union all "
        for row, error, word in (
            ("select 'a', 'taken', '2'", JobConflict, "taken"),
            ("select 'a', '', '1'", InvalidJob, "id"),
            ("select '', 'y', '1'", InvalidJob, "lane"),
            ("select null, 'y', '1'", InvalidJob, "lane"),
            ("select 'a', 'y', 'not json'", InvalidJob, "payload"),
            ("select 'a', 'x', '2'", JobConflict, "x"),
        ):
            with raises(error, word):
                await store.enqueue_select(good + row)
            assert await read_all(store) == before
        for select, error, word in (
            ("select 'y' as id", InvalidJob, "lane"),
            ("select 'a' as lane, 1 as colour", InvalidJob, "colour"),
            ("select 'a' as lane, '2031-01-01T00:00:00' as not_before", InvalidJob, "naive"),
            ("select 'a' as lane, 'soon' as not_before", InvalidJob, "soon"),
            ("select 'a' as lane, '7' as recovery", InvalidJob, "recovery"),
            ("select 'a' as lane from no_such_table", StoreInvalid, "no_such_table"),
            ("selekt 'a' as lane", StoreInvalid, ""),
            ("", StoreInvalid, "rows"),
            ("commit", StoreInvalid, "rows"),
            ("rollback", StoreInvalid, "rows"),
        ):
            with raises(error, word):
                await store.enqueue_select(select)
            assert await read_all(store) == before
        # And the store goes on.
        assert (await store.enqueue(Job("a", id="y"))).status == "queued"


@store_check()
async def a_payload_may_be_as_large_as_the_limit_and_no_larger(open_store: StoreMaker) -> None:
    async with open_store(payload_limit=100) as (store, _):
        await store.enqueue(Job("a", "x" * 98, id="fits"))
        # Bytes count, not characters: each of these has two, and four.
        await store.enqueue(Job("a", "é" * 49, id="fits too"))
        await store.enqueue(Job("a", "😀" * 24 + "xx", id="fits as well"))
        for payload in ("x" * 99, "é" * 49 + "x", "😀" * 24 + "xxx", ["x" * 97]):
            with raises(InvalidJob, "101", "100"):
                await store.enqueue(Job("a", payload))
        answers = await store.submit(
            wishes.Enqueue(Job("a", "x" * 99)), wishes.Enqueue(Job("a", "x", id="small"))
        )
        assert isinstance(answers[0], InvalidJob)
        assert answers[1].status == "queued"
        assert ids(await read_all(store)) == ["fits", "fits too", "fits as well", "small"]


@store_check()
async def a_payload_of_a_megabyte_fits_by_default(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        limit = 1024 * 1024
        text = "é😀" * ((limit - 2) // 6)
        text += "x" * (limit - 2 - len(text.encode()))
        await store.enqueue(Job("a", text, id="j"))
        with raises(InvalidJob, "1048577", "1048576"):
            await store.enqueue(Job("a", text + "x"))
        assert (await read(store, "j")).payload == text
        assert (await claim(store, "a")).payload == text


PAYLOADS: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    2**53 + 1,
    2**63,
    -(2**64),
    10**3999,
    1.0,
    -0.0,
    1e308,
    5e-324,
    0.1,
    "",
    "\0",
    "a\0b",
    "\u2028 \x7f \x1f \ufffe \U0010ffff",
    "é e\u0301 ß 😀 \ud7ff",
    "'; drop table jobs; --",
    '%s %(x)s {jobs} {rows} $1 ?1 :now @x \\ " \n\r\t',
    '{"json": "inside"}',
    [],
    {},
    [[[[[]]]], {"": {"\0": [None]}}],
    {"z": 1, "a": {"c": 2, "B": 3}, "😀": "é"},
    {"true": True, "1": 1},
)


@store_check()
async def every_payload_comes_back_as_it_went_in(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        deep: Any = "bottom"
        for _ in range(99):
            deep = [deep]
        payloads = [*PAYLOADS, deep]
        await store.enqueue_many(
            [Job("a", payload, id=f"{n}") for n, payload in enumerate(payloads)]
        )
        for n, payload in enumerate(payloads):
            job = await claim(store, "a")
            stored = await read(store, f"{n}")
            # By text: to Python 1, 1.0 and True are equal.
            assert repr(job.payload) == repr(stored.payload) == repr(in_json(payload))
            assert (await store.enqueue(Job("a", payload, id=f"{n}"))).status == "duplicate"
            await complete(store, job)


def in_json(payload: Any) -> Any:
    """The payload with its keys in the order in which it is stored."""
    if isinstance(payload, dict):
        items = cast("dict[str, Any]", payload)
        return {key: in_json(items[key]) for key in sorted(items)}
    if isinstance(payload, list):
        return [in_json(item) for item in cast("list[Any]", payload)]
    return payload


NAMES = (
    "x",
    "x" * 256,
    "😀" * 256,
    "e\u0301" * 128,
    "'quoted' \"twice\" `and` \\",
    "%s %(x)s {jobs} {rows} $1 ?1 :now @x",
    "; drop table jobs; --",
    " ",
    "\n\t\x01",
    "null",
    "0",
    "1e5",
    "[1]",
    "\U0010ffff\ufffe",
)


@store_check()
async def every_legal_name_is_taken_as_it_is(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        for name in NAMES:
            job = Job(name, name, queue=name, id=name)
            assert (await store.enqueue(job)).job.id == name
            assert (await store.enqueue(job)).status == "duplicate"
            assert (await store.read_queue_head(name)).job_id == name
            claimed = (await store.claim(name, name, lease=LEASE)).job
            assert claimed is not None
            assert (claimed.id, claimed.queue, claimed.lane, claimed.token) == (name,) * 4
            assert (await store.renew(name, name, lease=LEASE)).status == "held"
            assert (await store.cancel(name, name)).status == "recorded"
            assert (await store.decide(name, name, Settle(Outcome.COMPLETED))).status == "recorded"
            latest = await store.read_latest_settled(name)
            assert latest is not None
            assert (latest.id, latest.cancellation_id) == (name, name)
            assert ids(list((await store.read_settled(lane=name)).jobs)) == [name]
        assert len(await read_all(store)) == len(NAMES)


@store_check()
async def names_that_look_alike_are_different(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        # Case, normal forms, trailing space, numbers: nothing is folded.
        names = ["k", "K", "k ", "\u212a", "é", "e\u0301", "1", "1.0", "01"]
        for name in names:
            await store.enqueue(Job(name, queue=name, id=name))
        for name in names:
            job = await claim(store, name)
            assert job.id == name
        assert {(await store.read_queue_head(name)).job_id for name in names} == set(names)


@store_check()
async def priorities_are_exact_up_to_their_limit(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        priorities = [0, -PRIORITY_LIMIT, PRIORITY_LIMIT, -PRIORITY_LIMIT + 1, PRIORITY_LIMIT - 1]
        for priority in priorities:
            await store.enqueue(Job("a", queue="q", id=f"{priority}", priority=priority))
        order = [job.priority for job in await drain(store, "a")]
        assert order == sorted(priorities, reverse=True)
        for beyond in (PRIORITY_LIMIT + 1, -PRIORITY_LIMIT - 1):
            with raises(InvalidJob, str(beyond)):
                await store.enqueue(Job("a", priority=beyond))


@store_check()
async def the_far_future_does_not_overflow(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        last = datetime(9999, 12, 31, 23, 59, 59, 999999, UTC)
        await store.enqueue(Job("a", id="j", not_before=last))
        job = await read_queued(store, "j")
        assert job.not_before is not None
        assert round(job.not_before.timestamp() * 1000) == INSTANT_LIMIT
        assert (await store.wake_state()).next_wake_at == job.not_before
        assert (await store.claim("a", "t")).job is None
        assert (await store.enqueue(Job("a", id="j", not_before=last))).status == "duplicate"


@store_check()
async def an_instant_before_the_next_millisecond_is_rounded_up(open_store: StoreMaker) -> None:
    async with open_store() as (store, clock):
        due = clock.instant(1).replace(microsecond=1)
        await store.enqueue(Job("a", id="j", not_before=due))
        stored = (await read(store, "j")).not_before
        assert stored is not None
        assert 0 < (stored - due).total_seconds() < 0.001


# -- the database's own refusals ------------------------------------------------------------------

ROW = {
    "id": "row",
    "queue": "row's queue",
    "lane": "row's lane",
    "priority": 0,
    "not_before": 0,
    "max_recoveries": None,
    "recovery_window": None,
    "state": "queued",
    "hint": "ready",
    "token": None,
    "owner": None,
    "lease_until": None,
    "attempt_count": 0,
    "attempt_open": 0,
    "recovery_count": 0,
    "window_began_at": None,
    "cancellation_id": None,
    "outcome": None,
    "reason": None,
    "settled_group": None,
    "settled_at": None,
    "payload": "null",
}

RUNNING = {"state": "running", "hint": None, "token": "t", "owner": "o", "lease_until": 5}
COMPLETING = {**RUNNING, "state": "completing", "outcome": "completed"}
SETTLED = {
    "state": "settled",
    "hint": None,
    "outcome": "completed",
    "settled_group": 0,
    "settled_at": 5,
}


async def insert(open_store: StoreMaker, store: Store, **changes: Any) -> None:
    """Insert a row by hand: a legal queued one, but for the changes."""
    row = {**ROW, **changes}
    columns, values = ", ".join(row), ", ".join(f":{name}" for name in row)
    sql = f"insert into {{jobs}} ({columns}) values ({values})"  # noqa: S608
    await open_store.execute(store, sql, row)


async def is_refused(insertion: Awaitable[None]) -> bool:
    """Whether the database itself refuses what is inserted."""
    try:
        await insertion
    except Exception as error:
        message = str(error).lower()
    else:
        return False
    assert "constraint" in message or "violates" in message, message
    return True


@store_check("raw_sql")
async def the_database_takes_the_rows_that_the_checks_call_legal(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        for n, changes in enumerate(
            (
                {},
                {"hint": "lowered", "cancellation_id": "c"},
                {"hint": "deferred", "not_before": INSTANT_LIMIT},
                {"max_recoveries": 0},
                {"max_recoveries": 1, "recovery_window": 1},
                {"priority": PRIORITY_LIMIT},
                {"priority": -PRIORITY_LIMIT},
                {"id": "x" * 256},
                {"id": "😀" * 256},
                RUNNING,
                COMPLETING,
                {**COMPLETING, "outcome": "failed", "reason": "r" * 200},
                SETTLED,
                {**SETTLED, "token": "t"},
                *({**SETTLED, "outcome": outcome} for outcome in ("cancelled", "outcome_unknown")),
                *(
                    {**SETTLED, "outcome": outcome, "reason": "r"}
                    for outcome in ("failed", "interrupted")
                ),
            )
        ):
            await insert(open_store, store, **{"id": f"{n}", "queue": f"{n}", **changes})
        assert len(await read_all(store)) == 18


@store_check("raw_sql")
async def the_database_itself_enforces_the_limits_of_fields(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        for name in ("id", "queue", "lane", "cancellation_id"):
            for value in ("", "x" * 257, "😀" * 257):
                assert await is_refused(insert(open_store, store, **{name: value})), name
        for name in ("token", "owner"):
            for value in ("", "x" * 257):
                changes = {**RUNNING, name: value}
                assert await is_refused(insert(open_store, store, **changes)), name
        for name in ("id", "queue", "lane", "priority", "not_before", "payload", "state"):
            assert await is_refused(insert(open_store, store, **{name: None})), name
        for name, value in (
            ("priority", PRIORITY_LIMIT + 1),
            ("priority", -PRIORITY_LIMIT - 1),
            ("not_before", -1),
            ("not_before", INSTANT_LIMIT + 1),
            ("max_recoveries", -1),
            ("attempt_count", -1),
            ("recovery_count", -1),
            ("attempt_open", 2),
            ("hint", "maybe"),
            ("state", "paused"),
        ):
            assert await is_refused(insert(open_store, store, **{name: value})), name
        for window in (0, -1):
            changes = {"max_recoveries": 1, "recovery_window": window}
            assert await is_refused(insert(open_store, store, **changes))
        assert await is_refused(insert(open_store, store, recovery_window=5))
        for reason in ("", "r" * 201):
            changes = {**SETTLED, "outcome": "failed", "reason": reason}
            assert await is_refused(insert(open_store, store, **changes))
        assert await read_all(store) == []


@store_check("raw_sql")
async def the_database_itself_enforces_the_grammar_of_states(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        wrong: list[dict[str, Any]] = [
            # Fields that belong to other states.
            *({name: value} for name, value in RUNNING.items() if name not in ("state", "hint")),
            {"hint": None},
            {"outcome": "completed"},
            {"outcome": "failed", "reason": "r"},
            {"reason": "r"},
            {"settled_group": 0},
            {"settled_at": 5},
            # Running and completing: owner, token and lease, and no end yet.
            *(
                {**live, name: None}
                for live in (RUNNING, COMPLETING)
                for name in ("token", "owner", "lease_until")
            ),
            *(
                {**live, **more}
                for live in (RUNNING, COMPLETING)
                for more in ({"hint": "ready"}, {"settled_group": 0}, {"settled_at": 5})
            ),
            {**RUNNING, "lease_until": -1},
            {**RUNNING, "outcome": "completed"},
            {**RUNNING, "reason": "r"},
            {**COMPLETING, "outcome": None},
            # Settled: an outcome and its place in the feed, and no claim.
            *({**SETTLED, name: None} for name in ("outcome", "settled_group", "settled_at")),
            *(
                {**SETTLED, **more}
                for more in ({"owner": "o"}, {"lease_until": 5}, {"hint": "ready"})
            ),
            # Only failed and interrupted have a reason, and they always do.
            *(
                {**ended, "outcome": outcome, "reason": reason}
                for ended in (COMPLETING, SETTLED)
                for outcome, reason in (
                    ("completed", "r"),
                    ("cancelled", "r"),
                    ("outcome_unknown", "r"),
                    ("failed", None),
                    ("interrupted", None),
                    ("finished", None),
                )
            ),
        ]
        for changes in wrong:
            assert await is_refused(insert(open_store, store, **changes)), changes
        assert await read_all(store) == []


@store_check("raw_sql")
async def the_database_itself_keeps_what_is_unique_unique(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        await insert(open_store, store, id="a", queue="q", cancellation_id="c")
        await insert(open_store, store, id="b", queue="q", **RUNNING)
        await insert(open_store, store, id="z", queue="q", **SETTLED, cancellation_id="z")
        for changes in (
            {"id": "a"},
            {"id": "b"},
            {"id": "z"},
            {"cancellation_id": "c"},
            {"cancellation_id": "z"},
            {"queue": "q", **RUNNING, "token": "u"},
            {"queue": "q", **COMPLETING, "token": "u"},
        ):
            assert await is_refused(insert(open_store, store, **changes)), changes
        # Any number may wait or be settled, in one queue and without a cancellation.
        await insert(open_store, store, id="y", queue="q")
        await insert(open_store, store, id="x", queue="q", **SETTLED)
        await insert(open_store, store, id="w", queue="other", **COMPLETING)
        assert ids(await read_all(store)) == ["a", "b", "z", "y", "x", "w"]


@store_check("raw_sql")
async def a_running_job_in_every_state_survives_the_round_trip(open_store: StoreMaker) -> None:
    async with open_store() as (store, _):
        running = await start(store, Job("a", id="r"))
        completing = await start_completing(store, Job("b", id="c"))
        states = await open_store.execute(
            store, "select id, state, token, owner from {jobs} order by sequence"
        )
        assert [tuple(row) for row in states] == [
            ("r", "running", running.token, store.owner),
            ("c", "completing", completing.token, store.owner),
        ]
