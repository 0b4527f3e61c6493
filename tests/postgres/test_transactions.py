"""The application's own transaction: its jobs are there if it commits, and hold up nobody."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import psycopg
import pytest
import trio
from psycopg import sql as compose

from tests.postgres.fixtures import emptied
from trio_watchdog import _wishes as w
from trio_watchdog._borrowed import enqueue_statement, transactional
from trio_watchdog._errors import InvalidJob, JobConflict, StoreInvalid, StoreUnavailable
from trio_watchdog._model import Job, Outcome
from trio_watchdog._postgres import LOCK_SECONDS, PostgresStore, open_postgres_store
from trio_watchdog._psycopg import TrioConnection
from trio_watchdog._rules import Settle
from trio_watchdog._store import Change, Store

SCHEMA = "transactions"
COMPLETED = Settle(Outcome.COMPLETED)

# Notifications and short transactions take milliseconds; this machine may be busy.
SOON = 10.0


@pytest.fixture
async def store(quick_database: str) -> AsyncIterator[Store]:
    with emptied(quick_database, f"{SCHEMA}.jobs", f"{SCHEMA}.recheck"):
        async with open_postgres_store(quick_database, schema=SCHEMA) as store:
            yield store


@pytest.fixture
def application(quick_database: str, store: Store) -> Iterator[psycopg.Connection[Any]]:
    with contextlib.closing(psycopg.connect(quick_database)) as connection:
        yield connection


async def ids(store: Store) -> list[str]:
    return [job.id for job in (await store.ask(w.ReadJobs()))[::-1]]


class Ear:
    """Hears what a store that is watched reports."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._heard = trio.Event()
        self.count = 0

    def __call__(self, change: Change) -> None:
        self.count += 1
        self._heard.set()

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[Ear]:
        async with trio.open_nursery() as nursery:
            await nursery.start(self._store.watch)
            self._store.on_change.append(self)
            yield self
            nursery.cancel_scope.cancel()

    async def hears(self, action: Callable[[], object]) -> float:
        """Seconds from the end of the action until it was heard of."""
        self._heard = trio.Event()
        action()
        began_at = trio.current_time()
        with trio.fail_after(SOON):
            await self._heard.wait()
        return trio.current_time() - began_at


# -- on a synchronous connection ------------------------------------------------------------------


async def test_a_job_is_there_when_its_transaction_commits(
    store: Store, application: psycopg.Connection[Any]
) -> None:
    transaction = transactional(application, schema=SCHEMA)
    job = Job("l", {"to": "ada"}, id="J", queue="q")
    assert transaction.enqueue(job).status == "queued"
    assert transaction.enqueue(job).status == "duplicate"
    head = transaction.read_queue_head("q")
    assert (head.state, head.job_id, head.cancellation_requested) == ("queued", "J", False)
    assert transaction.cancel("J", cancellation_id="c").status == "recorded"
    assert transaction.cancel("J", cancellation_id="c").status == "replayed"
    assert transaction.cancel("J").status == "conflict"
    assert transaction.cancel("K").status == "missing"
    assert transaction.read_queue_head("q").cancellation_requested
    assert await ids(store) == []
    application.commit()
    assert await ids(store) == ["J"]
    assert await store.settle_cancelled() == ["J"]


async def test_everything_is_undone_when_it_rolls_back(
    store: Store, application: psycopg.Connection[Any]
) -> None:
    await store.enqueue(Job("l", id="A", queue="q"))
    transaction = transactional(application, schema=SCHEMA)
    transaction.enqueue(Job("l", id="B", queue="q"))
    transaction.cancel("A")
    application.rollback()
    assert await ids(store) == ["A"]
    assert await store.settle_cancelled() == []
    # A savepoint that is rolled back takes its jobs with it, and its notification.
    with application.transaction():
        transaction.enqueue(Job("l", id="C"))
        with contextlib.suppress(ZeroDivisionError), application.transaction():
            transaction.enqueue(Job("l", id="D"))
            raise ZeroDivisionError
    assert await ids(store) == ["A", "C"]


async def test_refusals_leave_the_transaction_as_it_was(
    store: Store, application: psycopg.Connection[Any]
) -> None:
    transaction = transactional(application, schema=SCHEMA, payload_limit=100)
    transaction.enqueue(Job("l", 1, id="J"))
    with pytest.raises(JobConflict, match="'J' is already there with another payload"):
        transaction.enqueue(Job("l", 2, id="J"))
    with pytest.raises(InvalidJob, match="over the limit of 100"):
        transaction.enqueue(Job("l", "x" * 100))
    application.commit()
    assert await ids(store) == ["J"]


async def test_lanes_are_woken_after_the_commit_and_not_before(
    store: Store, application: psycopg.Connection[Any]
) -> None:
    async with Ear(store).listening() as ear:
        transaction = transactional(application, schema=SCHEMA)
        for action in (
            lambda: transaction.enqueue(Job("l", id="J")),
            lambda: transaction.cancel("J"),
        ):
            action()
            await trio.sleep(0.05)
            count = ear.count
            await ear.hears(application.commit)
            assert ear.count == count + 1
        # A statement for other drivers does so by itself.
        statement = enqueue_statement(Job("l"), "postgres", schema=SCHEMA)
        application.execute(statement.sql.encode(), statement.parameters)
        await ear.hears(application.commit)


def test_a_connection_that_commits_by_itself_is_refused(quick_database: str) -> None:
    with psycopg.connect(quick_database, autocommit=True) as connection:
        transaction = transactional(connection, schema=SCHEMA)
        with pytest.raises(StoreInvalid, match="commits by itself"):
            transaction.enqueue(Job("l"))


def test_a_schema_that_is_not_there_says_what_to_do(quick_database: str) -> None:
    with psycopg.connect(quick_database) as connection:
        transaction = transactional(connection, schema="nowhere")
        with pytest.raises(StoreInvalid, match="open the database once with open_client"):
            transaction.enqueue(Job("l"))


# -- on asynchronous ones -------------------------------------------------------------------------


async def steps(connection: psycopg.AsyncConnection[Any]) -> list[str]:
    """The same on either kind of asynchronous connection."""
    transaction = transactional(connection, schema=SCHEMA)
    said = [(await transaction.enqueue(Job("l", id=id, queue="q"))).status for id in "AA"]
    said.append((await transaction.cancel("A", cancellation_id="c")).status)
    said.append((await transaction.read_queue_head("q")).state)
    await connection.commit()
    await transaction.enqueue(Job("l", id="B", queue="q"))
    await connection.rollback()
    return said


SAID = ["queued", "duplicate", "recorded", "queued"]


async def test_asyncios_connection_is_as_good(store: Store, quick_database: str) -> None:
    async def main() -> list[str]:
        connection = await psycopg.AsyncConnection.connect(quick_database)
        async with connection:
            return await steps(connection)

    assert await trio.to_thread.run_sync(asyncio.run, main()) == SAID
    assert await ids(store) == ["A"]


async def test_trios_connection_is_as_good(store: Store, quick_database: str) -> None:
    connection: TrioConnection[Any] = await TrioConnection.connect(quick_database)
    async with connection:
        assert await steps(connection) == SAID
    assert await ids(store) == ["A"]


# -- by any other driver --------------------------------------------------------------------------


async def test_a_statement_admits_a_job_in_any_paramstyle(
    store: Store, application: psycopg.Connection[Any]
) -> None:
    job = Job("l", {"text": "50 % of \u00fc:x?"}, id="J", queue="q")
    for style in (None, "pyformat", "format"):
        statement = enqueue_statement(job, "postgres", schema=SCHEMA, paramstyle=style)
        cursor = application.execute(statement.sql.encode(), statement.parameters)
        rows = cursor.fetchall()
        # Once; then it is there already.
        assert [row[0] for row in rows] == (["J"] if style is None else [])
    application.commit()
    stored = await store.read("J")
    assert stored is not None
    assert (stored.payload, stored.queue) == (job.payload, "q")


async def test_a_numbered_statement_is_what_a_server_prepares(
    store: Store, application: psycopg.Connection[Any]
) -> None:
    job = Job("l", {"a": 1}, id="J", priority=3)
    statement = enqueue_statement(job, "postgres", schema=SCHEMA, paramstyle="numeric_dollar")
    assert isinstance(statement.parameters, tuple)
    application.execute(b"prepare admission as " + statement.sql.encode())
    literals = compose.SQL(", ").join(map(compose.Literal, statement.parameters))
    execute = compose.SQL("execute admission ({})").format(literals)
    assert [row[0] for row in application.execute(execute).fetchall()] == ["J"]
    application.commit()
    assert (await store.enqueue(job)).status == "duplicate"
    claimed = await store.claim("l", "t")
    assert claimed.job is not None


async def test_a_named_statement_has_nothing_that_could_be_taken_for_a_name(store: Store) -> None:
    # As SQLAlchemy's text() reads it.
    statement = enqueue_statement(Job("l"), "postgres", schema="a:b %s", paramstyle="named")
    assert isinstance(statement.parameters, dict)
    assert "%" not in statement.sql
    assert "::" not in statement.sql
    names = {word.split()[0].rstrip(")") for word in statement.sql.split(":")[1:]}
    assert names == set(statement.parameters)


# -- that stay open -------------------------------------------------------------------------------


async def test_a_transaction_that_admitted_a_job_and_stays_open_holds_up_nobody(
    store: Store, application: psycopg.Connection[Any]
) -> None:
    await store.enqueue(Job("l", id="A", queue="q"))
    running = (await store.claim("l", "t")).job
    assert running is not None
    transaction = transactional(application, schema=SCHEMA)
    transaction.enqueue(Job("l", id="H", queue="q", priority=9))
    transaction.enqueue(Job("l", id="own"))
    with trio.fail_after(SOON):
        # In the same queue: admission, the end of the job before it, and the next one's start.
        assert (await store.enqueue(Job("l", id="B", queue="q"))).status == "queued"
        assert (await store.decide("A", "t", COMPLETED)).status == "recorded"
        claimed = await store.claim("l", "u")
        assert claimed.job is not None
        assert claimed.job.id == "B"
        assert (await store.renew("B", "u")).status == "held"
        # And in others.
        await store.enqueue(Job("l", id="C"))
        assert (await store.claim("l", "v")).job is not None
    application.commit()
    assert (await store.decide("B", "u", COMPLETED)).status == "recorded"
    assert {(await store.claim("l", f"w{n}")).job is not None for n in range(2)} == {True}


async def test_a_duplicate_waits_for_an_open_transaction_and_others_do_not(
    store: Store, application: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trio_watchdog._postgres.LOCKED_SECONDS", {True: 60.0, False: 60.0})
    transaction = transactional(application, schema=SCHEMA)
    transaction.enqueue(Job("l", 1, id="J"))
    transaction.enqueue(Job("l", 1, id="K"))
    answers: dict[str, Any] = {}
    committed_at = 0.0

    async def enqueue(name: str, job: Job) -> None:
        try:
            answers[name] = (await store.enqueue(job)).status
        except JobConflict:
            answers[name] = "conflict"

    async with trio.open_nursery() as nursery:
        nursery.start_soon(enqueue, "same", Job("l", 1, id="J"))
        nursery.start_soon(enqueue, "other", Job("l", 2, id="K"))
        waits: list[float] = []
        for n in range(40):
            began_at = trio.current_time()
            await enqueue(f"free {n}", Job("l"))
            waits.append(trio.current_time() - began_at)
            await trio.sleep(0.02)
        # Once in the exchange that meets the lock first, then for moments only.
        assert max(waits) < SOON
        assert sorted(waits)[20] < LOCK_SECONDS
        assert set(answers) == {f"free {n}" for n in range(40)}
        application.commit()
        committed_at = trio.current_time()
    assert trio.current_time() < committed_at + SOON
    assert (answers["same"], answers["other"]) == ("duplicate", "conflict")


async def test_a_duplicate_of_what_is_rolled_back_is_admitted(
    store: Store, application: psycopg.Connection[Any]
) -> None:
    transactional(application, schema=SCHEMA).enqueue(Job("l", 1, id="J"))
    async with trio.open_nursery() as nursery:

        async def admit() -> None:
            assert (await store.enqueue(Job("l", 2, id="J"))).status == "queued"

        nursery.start_soon(admit)
        await trio.sleep(0.6)
        application.rollback()


async def test_who_waits_for_an_open_transaction_can_be_cancelled(
    store: Store, application: psycopg.Connection[Any]
) -> None:
    transactional(application, schema=SCHEMA).enqueue(Job("l", id="J"))
    with trio.move_on_after(0.8) as scope:
        await store.enqueue(Job("l", id="J"))
    assert scope.cancelled_caught
    application.rollback()
    assert await ids(store) == []


async def test_an_open_transaction_that_does_not_end_is_said_to_be_in_the_way(
    store: Store, application: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trio_watchdog._postgres.LOCKED_SECONDS", {True: 0.2, False: 0.2})
    await store.enqueue(Job("l", id="A"))
    transaction = transactional(application, schema=SCHEMA)
    transaction.enqueue(Job("l", id="J"))
    transaction.cancel("A")
    for wish in (w.Enqueue(Job("l", id="J")), w.Cancel("A", "c")):
        with pytest.raises(StoreUnavailable, match="lock timeout"):
            await store.ask(wish)
    # In one exchange with others: they are answered.
    answers = await store.submit(
        w.Enqueue(Job("l", id="B")), w.Cancel("A", "c"), w.Enqueue(Job("l", id="J")), w.Read("A")
    )
    assert [type(answer).__name__ for answer in answers] == [
        *("Admission", "Locked", "Locked", "QueuedJob")
    ]


async def test_an_open_cancellation_of_a_running_job_does_not_cost_its_claim(
    store: Store, application: psycopg.Connection[Any]
) -> None:
    assert isinstance(store, PostgresStore)
    await store.enqueue(Job("l", id="A", queue="q"))
    await store.enqueue(Job("l", id="B"))
    await store.claim("l", "t")
    await store.claim("l", "u")
    transactional(application, schema=SCHEMA).cancel("A")
    with store.open_renewer() as renew:
        wishes = [w.Renew("A", "t", 1000), w.Renew("B", "u", 1000)]
        answers = await trio.to_thread.run_sync(renew, wishes)
        assert [answer.status for answer in answers] == ["locked", "held"]
        # What the handler decided is written down as soon as the row is free.
        async with trio.open_nursery() as nursery:

            async def decide() -> None:
                recorded = await store.decide("A", "t", COMPLETED)
                assert recorded.settle == Settle(Outcome.CANCELLED)

            nursery.start_soon(decide)
            await trio.sleep(0.3)
            # And meanwhile other lanes are served.
            with trio.fail_after(SOON):
                assert (await store.decide("B", "u", COMPLETED)).status == "recorded"
            application.commit()
