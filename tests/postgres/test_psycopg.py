from __future__ import annotations

import datetime
import decimal
import gc
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
import trio
import trio.testing
from psycopg.pq import TransactionStatus
from psycopg.rows import dict_row
from psycopg.waiting import Wait

import trio_watchdog._psycopg
from tests.postgres.proxy import Direction, Proxy, open_proxy
from tests.postgres.server import PostgresServer
from trio_watchdog._psycopg import BUSY_SECONDS, TrioConnection

Connection = TrioConnection[Any]

# Seconds in which a cancelled statement is over on a healthy server. On an idle machine it takes a
# hundredth of one; what it must not need is WIND_UP_SECONDS, which are many here.
PROMPT = 20.0


@pytest.fixture(autouse=True)
def long_wind_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trio_watchdog._psycopg, "WIND_UP_SECONDS", 60.0)


@pytest.fixture(scope="module")
def module_database(postgres_url: str) -> Iterator[str]:
    name = f"test_{secrets.token_hex(6)}"
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(f"create database {name}".encode())
        yield urlsplit(postgres_url)._replace(path=f"/{name}").geturl()
        connection.execute(f"drop database {name} with (force)".encode())


@pytest.fixture
def postgres_database(module_database: str) -> Iterator[str]:
    """One for all tests, emptied after each, since making one takes longer than most of them."""
    yield module_database
    with psycopg.connect(module_database, autocommit=True) as connection:
        connection.execute(
            "select pg_terminate_backend(pid, 10000) from pg_stat_activity"
            " where datname = current_database() and pid <> pg_backend_pid()"
        )
        connection.execute("drop schema public cascade")
        connection.execute("create schema public")


@asynccontextmanager
async def connected(url: str, **kwargs: Any) -> AsyncIterator[Connection]:
    connection: Connection = await TrioConnection.connect(url, **kwargs)
    try:
        yield connection
    finally:
        await connection.close()


@pytest.fixture
async def connection(postgres_database: str) -> AsyncIterator[Connection]:
    async with connected(postgres_database, autocommit=True) as connection:
        yield connection


@pytest.fixture
async def other(postgres_database: str) -> AsyncIterator[Connection]:
    """A second session, for looking at the first one."""
    async with connected(postgres_database, autocommit=True) as connection:
        yield connection


@pytest.fixture
async def proxy(postgres_database: str) -> AsyncIterator[Proxy]:
    async with open_proxy(postgres_database) as proxy:
        yield proxy


@pytest.fixture
async def table(other: Connection) -> None:
    await other.execute("create table t (n int primary key)")


async def value(connection: Connection, query: str, *parameters: object) -> Any:
    row = await (await connection.execute(query, parameters)).fetchone()
    return row[0] if row else None


async def numbers(connection: Connection) -> list[int]:
    cursor = await connection.execute("select n from t order by n")
    return [n for (n,) in await cursor.fetchall()]


async def until(other: Connection, condition: str, *parameters: object) -> None:
    """Wait until a condition holds in the eyes of the server."""
    with trio.fail_after(60):
        # The server has no event that one could wait for instead.
        while not await value(other, f"select {condition}", *parameters):  # noqa: ASYNC110
            await trio.sleep(0.005)


async def until_running(other: Connection, text: str) -> None:
    await until(
        other,
        "exists (select from pg_stat_activity where state = 'active' and pid <> pg_backend_pid()"
        " and query like %s)",
        text,
    )


async def is_running(other: Connection, text: str) -> bool:
    return bool(
        await value(
            other,
            "select count(*) from pg_stat_activity where state = 'active'"
            " and pid <> pg_backend_pid() and query like %s",
            text,
        )
    )


async def cancel_when(
    condition: Callable[[], Awaitable[object]], action: Callable[[], Awaitable[object]]
) -> float:
    """Cancel the action once the condition is reached; the seconds it took to be over."""
    async with trio.open_nursery() as nursery:
        over = trio.Event()

        async def act() -> None:
            with scope:
                await action()
            over.set()

        scope = trio.CancelScope()
        nursery.start_soon(act)
        await condition()
        started = trio.current_time()
        scope.cancel()
        await over.wait()
        took = trio.current_time() - started
    assert scope.cancelled_caught
    return took


# Everyday use


async def test_values_travel_both_ways(connection: Connection) -> None:
    sent = (
        42,
        "d\u00e9j\u00e0 vu",
        None,
        True,
        b"\x00\xff",
        decimal.Decimal("1.50"),
        datetime.datetime(2024, 2, 29, 12, tzinfo=datetime.UTC),
        [1, 2, 3],
    )
    cursor = await connection.execute(
        "select %s::int8, %s::text, %s::int, %s::bool, %s::bytea, %s::numeric,"
        " %s::timestamptz, %s::int[]",
        sent,
    )
    assert await cursor.fetchone() == sent


async def test_a_query_is_a_checkpoint(connection: Connection) -> None:
    with trio.testing.assert_checkpoints():
        await connection.execute("select 1")


async def test_factories_and_prepared_statements_are_psycopgs(postgres_database: str) -> None:
    async with connected(
        postgres_database, row_factory=dict_row, prepare_threshold=0
    ) as connection:
        for _ in range(3):
            cursor = await connection.execute("select 1 as a, 2 as b")
            assert await cursor.fetchall() == [{"a": 1, "b": 2}]
        assert await (
            await connection.execute("select count(*) from pg_prepared_statements", prepare=False)
        ).fetchone() == {"count": 1}


async def test_a_server_cursor_fetches_in_portions(connection: Connection) -> None:
    async with connection.transaction():
        async with connection.cursor("portions") as cursor:
            await cursor.execute("select generate_series(1, 1000)")
            found: list[int] = []
            while rows := await cursor.fetchmany(300):
                found += [n for (n,) in rows]
            assert found == list(range(1, 1001))


async def test_a_transaction_commits(
    connection: Connection, other: Connection, table: None
) -> None:
    async with connection.transaction():
        await connection.execute("insert into t values (1)")
        assert await numbers(other) == []
    assert await numbers(other) == [1]


async def test_an_exception_rolls_a_transaction_back(connection: Connection, table: None) -> None:
    async def fail() -> None:
        async with connection.transaction():
            await connection.execute("insert into t values (1)")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    assert await numbers(connection) == []


async def test_an_inner_transaction_is_a_savepoint(connection: Connection, table: None) -> None:
    async def insert(*values: int) -> None:
        async with connection.transaction():
            for n in values:
                await connection.execute("insert into t values (%s)", (n,))

    async with connection.transaction():
        await insert(1)
        with pytest.raises(psycopg.errors.UniqueViolation):
            await insert(2, 1)
        await insert(3)
    assert await numbers(connection) == [1, 3]


async def test_leaving_a_connection_commits_and_closes(
    postgres_database: str, other: Connection, table: None
) -> None:
    async with await TrioConnection.connect(postgres_database) as connection:
        await connection.execute("insert into t values (1)")
    assert connection.closed
    assert not connection.broken
    assert await numbers(other) == [1]


async def test_executemany_sends_more_than_the_socket_takes(
    connection: Connection, table: None
) -> None:
    rows = [(n, "x" * 2000) for n in range(5000)]
    await connection.execute("alter table t add column filler text")
    async with connection.cursor() as cursor:
        await cursor.executemany("insert into t values (%s, %s) returning n", rows, returning=True)
        returned = [await cursor.fetchone()]
        while cursor.nextset():
            returned.append(await cursor.fetchone())
    assert returned == [(n,) for n, _ in rows]


async def test_a_connection_that_cannot_write_reads(proxy: Proxy, other: Connection) -> None:
    """Otherwise both sides might wait for the other to take what it sends."""
    async with connected(proxy.url, autocommit=True) as connection:
        await connection.execute("listen bell")
        heard = trio.Event()
        connection.add_notify_handler(lambda notify: heard.set())
        proxy.stop("questions")
        async with trio.open_nursery() as nursery, connection.cursor() as cursor:
            nursery.start_soon(cursor.executemany, "select %s", [("x" * 10**6,)] * 20)
            await trio.testing.wait_all_tasks_blocked(0.05)
            await other.execute("notify bell")
            with trio.fail_after(10):
                await heard.wait()
            proxy.forward()


@pytest.fixture
def no_collection() -> Iterator[None]:
    """No garbage is collected: going through what all tests have left takes a while."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("work", ["executemany", "copy in", "copy out"])
async def test_a_connection_that_never_waits_lets_other_tasks_run(
    connection: Connection, table: None, work: str, no_collection: None
) -> None:
    longest = 0.0

    async def watch() -> None:
        # The thread's own time, so that a busy machine does not count.
        nonlocal longest
        while True:
            before = time.thread_time()
            try:
                await trio.lowlevel.checkpoint()
            finally:
                longest = max(longest, time.thread_time() - before)

    async with trio.open_nursery() as nursery, connection.cursor() as cursor:
        nursery.start_soon(watch)
        if work == "executemany":
            await cursor.executemany("insert into t values (%s)", [(n,) for n in range(10_000)])
        elif work == "copy in":
            async with cursor.copy("copy t from stdin") as copy:
                for n in range(1000):
                    await copy.write("".join(f"{m}\n" for m in range(n * 200, n * 200 + 200)))
        else:
            # A long row makes libpq's buffer large, and then all the short ones are in it.
            rows = "select repeat('x', 8000000) union all select 'y' from generate_series(1, 9999)"
            async with cursor.copy(f"copy ({rows}) to stdout") as copy:
                async for _ in copy:
                    sum(range(5000))  # what one does with a row
        nursery.cancel_scope.cancel()
    assert longest < 8 * BUSY_SECONDS


async def test_a_pipeline_shares_one_round_trip(postgres_database: str) -> None:
    async with open_proxy(postgres_database) as proxy:
        async with connected(proxy.url, autocommit=True) as connection:
            proxy.delay = 0.05
            started = trio.current_time()
            async with connection.pipeline():
                cursors = [await connection.execute("select %s::int", (n,)) for n in range(200)]
            took = trio.current_time() - started
            assert [await cursor.fetchone() for cursor in cursors] == [(n,) for n in range(200)]
    # There and back, and as much again for the session's first use of a type; not 200 times.
    assert took < 100 * 2 * proxy.delay


async def test_an_error_in_a_pipeline_spoils_the_rest_and_not_the_connection(
    connection: Connection, table: None
) -> None:
    async def send() -> None:
        async with connection.pipeline():
            await connection.execute("insert into t values (1)")
            await connection.execute("select 1 / 0")
            await connection.execute("insert into t values (2)")

    with pytest.raises(psycopg.errors.DivisionByZero):
        await send()
    assert await numbers(connection) == []  # the pipeline up to its Sync is one transaction
    async with connection.pipeline() as pipeline:
        await connection.execute("insert into t values (3)")
        await pipeline.sync()
        assert await numbers(connection) == [3]


async def test_a_transaction_fits_into_a_pipeline(connection: Connection, table: None) -> None:
    async def insert(*values: int) -> None:
        async with connection.transaction():
            for n in values:
                await connection.execute("insert into t values (%s)", (n,))

    async with connection.pipeline():
        with pytest.raises(psycopg.errors.UniqueViolation):
            await insert(1, 1)
        await insert(2)
    assert await numbers(connection) == [2]


async def test_copy_goes_both_ways(connection: Connection, table: None) -> None:
    async with connection.cursor() as cursor:
        async with cursor.copy("copy t from stdin") as copy:
            for n in range(10_000):
                await copy.write_row((n,))
        async with cursor.copy("copy t to stdout") as copy:
            copy.set_types(["int4"])
            assert [row async for row in copy.rows()] == [(n,) for n in range(10_000)]


# Notifications


async def test_a_notification_reaches_a_listening_session(
    connection: Connection, other: Connection
) -> None:
    await connection.execute("listen bell")
    async with trio.open_nursery() as nursery:
        received: list[psycopg.Notify] = []

        async def listen() -> None:
            received.extend(await connection.wait_notifies())

        nursery.start_soon(listen)
        await trio.testing.wait_all_tasks_blocked()
        await other.execute("notify bell, 'ding'")
    assert [(n.channel, n.payload, n.pid) for n in received] == [
        ("bell", "ding", other.info.backend_pid)
    ]


async def test_notifications_that_come_beside_an_answer_are_kept(
    connection: Connection, other: Connection
) -> None:
    await connection.execute("listen bell")
    await other.execute("notify bell, 'one'")
    await other.execute("notify bell, 'two'")
    await connection.execute("select 1")
    assert [n.payload for n in await connection.wait_notifies()] == ["one", "two"]


async def test_notifies_ends_by_count_and_by_time(
    connection: Connection, other: Connection
) -> None:
    await connection.execute("listen bell")
    for n in range(5):
        await other.execute("select pg_notify('bell', %s)", (str(n),))
    assert [n.payload async for n in connection.notifies(stop_after=3)] == ["0", "1", "2"]
    await connection.execute("select 1")  # the server sends what is left before it answers
    assert [n.payload async for n in connection.notifies(timeout=0)] == ["3", "4"]
    assert [n async for n in connection.notifies(timeout=0.01)] == []


async def test_the_body_of_notifies_may_use_the_connection_and_break_off(
    connection: Connection, other: Connection
) -> None:
    await connection.execute("listen bell")
    for n in range(3):
        await other.execute("select pg_notify('bell', %s)", (str(n),))
    async with aclosing(connection.notifies()) as notifies:
        async for notify in notifies:
            assert await value(connection, "select %s::text", notify.payload) == "0"
            break
    assert [n.payload for n in await connection.wait_notifies()] == ["1", "2"]


async def test_a_cancelled_wait_for_notifications_loses_none(
    connection: Connection, other: Connection
) -> None:
    await connection.execute("listen bell")
    pid = connection.info.backend_pid
    with trio.move_on_after(0.01):
        await connection.wait_notifies()
    await other.execute("notify bell")
    assert len(await connection.wait_notifies()) == 1
    assert connection.info.backend_pid == pid


# Cancellation


async def test_a_cancelled_query_is_cancelled_on_the_server(
    connection: Connection, other: Connection
) -> None:
    took = await cancel_when(
        lambda: until_running(other, "%pg_sleep(60)%"),
        lambda: connection.execute("select pg_sleep(60)"),
    )
    assert took < PROMPT
    assert not await is_running(other, "%pg_sleep(60)%")
    assert connection.info.transaction_status == TransactionStatus.IDLE
    assert await value(connection, "select 1") == 1


async def test_with_a_libpq_that_can_only_block_a_cancelled_query_costs_the_connection(
    connection: Connection, other: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    def has_cancel_safe(check: bool = False) -> bool:
        raise psycopg.NotSupportedError("libpq too old")

    monkeypatch.setattr(psycopg.capabilities, "has_cancel_safe", has_cancel_safe)
    took = await cancel_when(
        lambda: until_running(other, "%pg_sleep(60)%"),
        lambda: connection.execute("select pg_sleep(60)"),
    )
    assert took < PROMPT
    assert connection.closed


async def test_nothing_is_sent_for_a_task_that_is_cancelled_already(
    connection: Connection, other: Connection, table: None
) -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        await connection.execute("insert into t values (1)")
    assert scope.cancelled_caught
    assert await numbers(other) == []


async def test_nothing_more_is_sent_in_a_pipeline_either(
    connection: Connection, other: Connection, table: None
) -> None:
    with trio.CancelScope() as scope:
        async with connection.pipeline():
            await connection.execute("insert into t values (1)")
            scope.cancel()
            await connection.execute("insert into t values (2)")
    assert scope.cancelled_caught
    assert await numbers(other) == [1]
    assert await numbers(connection) == [1]


async def test_a_result_at_hand_is_not_lost_to_a_cancellation(connection: Connection) -> None:
    result = None
    with trio.CancelScope() as scope:

        def step() -> Iterator[Any]:
            scope.cancel()
            return 7
            yield

        await trio.sleep(2 * BUSY_SECONDS)  # so that it gives way to other tasks
        result = await connection.wait(step())
    assert result == 7


async def test_a_result_that_beats_the_cancel_request_is_not_thrown_away(
    connection: Connection, other: Connection, table: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancel_safe = connection.cancel_safe

    async def cancel_late(**kwargs: Any) -> None:
        await other.execute("select pg_advisory_unlock(1)")
        await until(
            other,
            "state = 'idle' from pg_stat_activity where pid = %s",
            connection.info.backend_pid,
        )
        await cancel_safe(**kwargs)

    monkeypatch.setattr(connection, "cancel_safe", cancel_late)
    await other.execute("select pg_advisory_lock(1)")
    query = "insert into t select 7 from (select pg_advisory_xact_lock(1)) as l returning n"
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:

            async def cancel() -> None:
                await until_running(other, "insert into t%")
                scope.cancel()

            nursery.start_soon(cancel)
            assert await value(connection, query) == 7
    assert await numbers(connection) == [7]


@pytest.mark.parametrize("autocommit", [True, False])
async def test_cancel_while_waiting_for_a_lock(
    postgres_database: str, other: Connection, table: None, autocommit: bool
) -> None:
    async with connected(postgres_database, autocommit=autocommit) as connection:
        await other.execute("insert into t values (1)")
        async with other.transaction():
            await other.execute("update t set n = 2")
            async with connected(postgres_database, autocommit=True) as third:
                took = await cancel_when(
                    lambda: until_running(third, "delete%"),
                    lambda: connection.execute("delete from t"),
                )
        assert took < PROMPT
        if not autocommit:
            # What the caller's own transaction block or rollback() then sees to.
            assert connection.info.transaction_status == TransactionStatus.INERROR
            await connection.rollback()
        assert await numbers(connection) == [2]


async def test_cancel_in_a_transaction_rolls_it_back(
    connection: Connection, other: Connection, table: None
) -> None:
    async def work() -> None:
        async with connection.transaction():
            await connection.execute("insert into t values (1)")
            await connection.execute("select pg_sleep(60)")

    assert await cancel_when(lambda: until_running(other, "%pg_sleep(60)%"), work) < PROMPT
    assert connection.info.transaction_status == TransactionStatus.IDLE
    assert await numbers(connection) == []


async def test_cancel_between_statements_rolls_back_inner_and_outer_transaction(
    connection: Connection, table: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing runs that one would have to cancel, and ROLLBACK is better left alone.
    monkeypatch.delattr(TrioConnection, "cancel_safe")
    with trio.CancelScope() as scope:
        async with connection.transaction():
            await connection.execute("insert into t values (1)")
            async with connection.transaction():
                await connection.execute("insert into t values (2)")
                scope.cancel()
                await trio.lowlevel.checkpoint()
    assert connection.info.transaction_status == TransactionStatus.IDLE
    async with connection.transaction():  # nothing of the old nesting is left
        assert await numbers(connection) == []


async def test_a_body_that_is_done_is_committed_even_if_cancelled_meanwhile(
    connection: Connection, other: Connection, table: None
) -> None:
    with trio.CancelScope() as scope:
        async with connection.transaction():
            await connection.execute("insert into t values (1)")
            scope.cancel()
    assert await numbers(other) == [1]


async def test_a_commit_that_takes_too_long_is_cancelled_and_rolled_back(
    connection: Connection, other: Connection, table: None
) -> None:
    await other.execute(
        "create function nap() returns trigger language plpgsql as"
        " $$ begin perform pg_sleep(60); return null; end $$"
    )
    await other.execute(
        "create constraint trigger nap after insert on t deferrable initially deferred"
        " for each row execute function nap()"
    )

    async def work() -> None:
        async with connection.transaction():
            await connection.execute("insert into t values (1)")

    took = await cancel_when(lambda: until_running(other, "COMMIT"), work)
    assert took < PROMPT
    assert connection.info.transaction_status == TransactionStatus.IDLE
    assert await numbers(connection) == []


async def test_cancel_at_every_moment_of_a_transaction(
    connection: Connection, other: Connection, table: None
) -> None:
    """All of it or nothing, and the next one works: wherever the cancellation strikes."""
    n = done = 0
    while done < 20:
        is_done = False
        with trio.move_on_after(n * 0.00002):
            async with connection.transaction():
                await connection.execute("insert into t values (%s)", (2 * n,))
                await connection.execute("insert into t values (%s)", (2 * n + 1,))
            is_done = True
        assert not connection.closed
        assert connection.info.transaction_status == TransactionStatus.IDLE
        found = await value(other, "select count(*) from t where n / 2 = %s", n)
        assert found == (2 if is_done else 0)
        done += is_done
        n += 1
    assert n > 20  # some were cancelled


@pytest.mark.parametrize("is_transaction", [True, False])
async def test_cancel_at_every_moment_of_a_pipeline(
    connection: Connection, other: Connection, table: None, is_transaction: bool
) -> None:
    n = done = 0
    while done < 20:
        is_done = False
        with trio.move_on_after(n * 0.00002):
            async with connection.pipeline():
                async with connection.transaction() if is_transaction else nullcontext():
                    await connection.execute("insert into t values (%s)", (2 * n,))
                    await connection.execute("insert into t values (%s)", (2 * n + 1,))
            is_done = True
        assert await value(connection, "select 1") == 1
        found = await value(other, "select count(*) from t where n / 2 = %s", n)
        if is_done:
            assert found == 2
        elif is_transaction:
            assert found == 0
        # Otherwise each statement that was sent stands for itself.
        done += is_done
        n += 1
    assert n > 20


async def test_a_cancelled_pipeline_gives_the_connection_back(
    connection: Connection, other: Connection
) -> None:
    async def work() -> None:
        async with connection.pipeline():
            for _ in range(3):
                await connection.execute("select pg_sleep(60)")

    took = await cancel_when(lambda: until_running(other, "%pg_sleep(60)%"), work)
    assert took < PROMPT
    assert await value(connection, "select 1") == 1


async def test_a_cancelled_fetch_in_a_pipeline_gives_the_connection_back(
    connection: Connection, other: Connection
) -> None:
    async def work() -> None:
        async with connection.pipeline():
            cursor = await connection.execute("select pg_sleep(60)")
            await connection.execute("select 1")
            await cursor.fetchone()

    took = await cancel_when(lambda: until_running(other, "%pg_sleep(60)%"), work)
    assert took < PROMPT
    assert await value(connection, "select 1") == 1


async def test_a_cancelled_executemany_gives_the_connection_back(
    connection: Connection, other: Connection
) -> None:
    async def work() -> None:
        async with connection.cursor() as cursor:
            await cursor.executemany("select pg_sleep(%s)", [(60,)] * 5)

    took = await cancel_when(lambda: until_running(other, "%pg_sleep(%"), work)
    assert took < PROMPT
    assert await value(connection, "select 1") == 1


async def test_a_step_of_several_statements_is_cancelled_as_a_whole(
    postgres_database: str, other: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first cancel request may find nothing yet, or only the BEGIN."""
    async with connected(postgres_database, autocommit=True) as connection:
        requests = 0
        cancel_safe = connection.cancel_safe

        async def lose_the_first(**kwargs: Any) -> None:
            nonlocal requests
            requests += 1
            if requests > 1:
                await cancel_safe(**kwargs)

        monkeypatch.setattr(connection, "cancel_safe", lose_the_first)
        took = await cancel_when(
            lambda: until_running(other, "%pg_sleep(60)%"),
            lambda: connection.execute("select pg_sleep(60)"),
        )
        # More if the machine was busy: it asks until the statement is over.
        assert requests >= 2
        assert took < PROMPT
        assert await value(connection, "select 1") == 1


async def test_a_stream_left_half_way_gives_the_connection_back(connection: Connection) -> None:
    stream = connection.cursor().stream("select generate_series(1, 10000000)")
    async with aclosing(stream):
        async for row in stream:
            assert row == (1,)
            break
    with trio.fail_after(PROMPT):
        assert await value(connection, "select 1") == 1


@pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning")
async def test_a_stream_forgotten_half_way_gives_the_connection_back(
    connection: Connection,
) -> None:
    async for row in connection.cursor().stream("select generate_series(1, 10000000)"):
        assert row == (1,)
        break
    # From another task, since one that still seems to use a connection is refused.
    with trio.fail_after(PROMPT):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(value, connection, "select 1")
    assert await value(connection, "select 1") == 1


async def test_a_cancelled_stream_gives_the_connection_back(
    connection: Connection, other: Connection
) -> None:
    cursor = connection.cursor()

    async def work() -> None:
        stream = cursor.stream("select n, pg_sleep(n) from generate_series(0, 60, 30) as n")
        async with aclosing(stream):
            async for _ in stream:
                pass

    assert await cancel_when(lambda: until_running(other, "%pg_sleep(n)%"), work) < PROMPT
    assert await value(connection, "select 1") == 1
    assert not await is_running(other, "%pg_sleep(n)%")


async def test_a_stream_cancelled_between_two_rows_gives_the_connection_back(
    connection: Connection,
) -> None:
    cursor = connection.cursor()
    with trio.CancelScope() as scope:
        stream = cursor.stream("select generate_series(1, 10000000)")
        async with aclosing(stream):
            async for _ in stream:
                scope.cancel()
    assert scope.cancelled_caught
    assert await value(connection, "select 1") == 1


@pytest.mark.parametrize("lines", [1, 10**6])
async def test_a_cancelled_copy_to_the_server_copies_nothing(
    connection: Connection, table: None, caplog: pytest.LogCaptureFixture, lines: int
) -> None:
    """Few lines meet their cancellation when the block is left, many when they are written."""
    with trio.CancelScope() as scope:
        async with connection.cursor() as cursor, cursor.copy("copy t from stdin") as copy:
            await copy.write("1\n")
            scope.cancel()
            await copy.write("2\n" * lines)
    assert scope.cancelled_caught
    assert caplog.text == ""
    assert await numbers(connection) == []


async def test_a_cancelled_copy_from_the_server_gives_the_connection_back(
    connection: Connection, other: Connection
) -> None:
    async def work() -> None:
        async with connection.cursor() as cursor:
            query = "copy (select pg_sleep(n) from generate_series(0, 60, 30) as n) to stdout"
            async with cursor.copy(query) as copy:
                async for _ in copy:
                    pass

    assert await cancel_when(lambda: until_running(other, "%pg_sleep(n)%"), work) < PROMPT
    assert await value(connection, "select 1") == 1


async def test_a_cancelled_copy_that_execute_was_given_by_mistake_closes_the_connection(
    connection: Connection, other: Connection, table: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libpq never comes to an end of such a COPY, so we must not wait for it."""
    async with connected(other.info.dsn, password=other.info.password) as holder:
        await holder.execute("lock table t")

        async def unlock_instead(**kwargs: Any) -> None:
            await holder.rollback()

        monkeypatch.setattr(connection, "cancel_safe", unlock_instead)
        took = await cancel_when(
            lambda: until_running(other, "copy t%"),
            lambda: connection.execute("copy t from stdin"),
        )
    assert took < PROMPT
    assert connection.closed


# Silence


@pytest.fixture
def short_wind_up(monkeypatch: pytest.MonkeyPatch) -> float:
    """The same bound, sooner."""
    monkeypatch.setattr(trio_watchdog._psycopg, "WIND_UP_SECONDS", 1.0)
    return 1.0


@pytest.mark.parametrize("directions", [("questions", "answers"), ("questions",), ("answers",)])
async def test_a_silent_server_cannot_keep_a_cancelled_query(
    proxy: Proxy, directions: tuple[Direction, ...], short_wind_up: float
) -> None:
    async with connected(proxy.url, autocommit=True) as connection:
        proxy.stop(*directions)
        started = trio.current_time()
        with trio.move_on_after(0.1) as scope:
            await connection.execute("select 1")
        assert scope.cancelled_caught
        assert short_wind_up < trio.current_time() - started < 0.1 + short_wind_up + PROMPT
        assert connection.closed
        with pytest.raises(psycopg.OperationalError, match="the connection is closed"):
            await connection.execute("select 1")


async def test_silence_within_a_block_is_bounded_once_and_not_per_level(
    postgres_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Long, so that another one for a further level would not be taken for a busy machine.
    wind_up = 5.0
    monkeypatch.setattr(trio_watchdog._psycopg, "WIND_UP_SECONDS", wind_up)

    async def is_bounded(moment: str) -> None:
        async with (
            open_proxy(postgres_database) as proxy,
            connected(proxy.url, autocommit=True) as connection,
        ):
            with trio.CancelScope() as scope:

                def fall_silent(*directions: Direction) -> None:
                    proxy.stop(*directions)
                    # Only now, for what comes before is to be done.
                    scope.deadline = trio.current_time() + 0.5

                async with connection.transaction(), connection.transaction():
                    if moment == "pipeline":
                        async with connection.pipeline():
                            await connection.execute("select 1")
                            fall_silent()
                    elif moment == "commit":
                        fall_silent("answers")
                    else:
                        fall_silent()
                        await connection.execute("select 1")
            assert scope.cancelled_caught
            assert trio.current_time() - scope.deadline < 2 * wind_up
            assert connection.closed

    async with trio.open_nursery() as nursery:
        for moment in ("statement", "commit", "pipeline"):
            nursery.start_soon(is_bounded, moment)


async def test_a_server_that_only_refuses_the_cancel_request_loses_the_connection(
    proxy: Proxy, other: Connection
) -> None:
    async with connected(proxy.url, autocommit=True) as connection:
        await proxy.refuse()
        took = await cancel_when(
            lambda: until_running(other, "%pg_sleep(60)%"),
            lambda: connection.execute("select pg_sleep(60)"),
        )
        assert took < PROMPT
        assert connection.closed


async def test_a_frozen_server_is_bounded_and_usable_again_when_thawed(
    start_server: Callable[..., PostgresServer], short_wind_up: float
) -> None:
    server = await trio.to_thread.run_sync(start_server)
    async with connected(server.url, autocommit=True) as connection:
        server.freeze()
        started = trio.current_time()
        with trio.move_on_after(0.1) as scope:
            await connection.execute("select 1")
        assert scope.cancelled_caught
        assert trio.current_time() - started < 0.1 + short_wind_up + PROMPT
        assert connection.closed
    server.thaw()
    async with connected(server.url) as connection:
        assert await value(connection, "select 1") == 1


async def test_what_was_committed_survives_a_killed_server(
    start_server: Callable[..., PostgresServer],
) -> None:
    server = await trio.to_thread.run_sync(start_server)
    async with connected(server.url, autocommit=True) as connection:
        await connection.execute("create table t as select 1 as n")
        await trio.to_thread.run_sync(server.stop, "kill")
        with pytest.raises(psycopg.OperationalError):
            await connection.execute("select 1")
        assert connection.closed
    await trio.to_thread.run_sync(server.start)
    async with connected(server.url) as connection:
        assert await numbers(connection) == [1]


async def test_cancel_safe_ends_in_its_time(proxy: Proxy) -> None:
    async with connected(proxy.url) as connection:
        proxy.stop()
        with pytest.raises(psycopg.errors.CancellationTimeout):
            await connection.cancel_safe(timeout=0.1)
        assert not connection.closed


async def test_a_connection_that_is_cut_raises(proxy: Proxy, other: Connection) -> None:
    async with connected(proxy.url, autocommit=True) as connection:
        async with trio.open_nursery() as nursery:

            async def cut() -> None:
                await until_running(other, "%pg_sleep(60)%")
                proxy.cut()

            nursery.start_soon(cut)
            with pytest.raises(psycopg.OperationalError):
                await connection.execute("select pg_sleep(60)")
        assert connection.closed
        assert connection.broken


async def test_a_server_that_stops_answering_in_the_middle_of_much_data_is_bounded(
    proxy: Proxy, short_wind_up: float
) -> None:
    async with connected(proxy.url, autocommit=True) as connection:
        proxy.stop()
        with trio.move_on_after(0.1) as scope:
            async with connection.cursor() as cursor:
                # More than all the buffers on the way take: it waits to write.
                await cursor.executemany("select %s", [("x" * 1_000_000,)] * 40)
        assert scope.cancelled_caught
        assert connection.closed


async def test_an_interrupt_in_the_middle_of_an_answer_closes_the_connection(
    connection: Connection, other: Connection
) -> None:
    """As Ctrl-C may: nobody knows how far the generator came."""

    def interrupt(notify: psycopg.Notify) -> None:
        raise KeyboardInterrupt

    await connection.execute("listen bell")
    connection.add_notify_handler(interrupt)
    await other.execute("notify bell")
    with pytest.raises(KeyboardInterrupt):
        await connection.execute("select 1")
    assert connection.closed


# Sharing and closing


async def test_two_tasks_take_turns(connection: Connection) -> None:
    results: list[tuple[int, int]] = []

    async def ask(n: int) -> None:
        for m in range(20):
            answer = await value(connection, "select %s::int from pg_sleep(0)", n * 100 + m)
            results.append((n, answer - n * 100))

    async with trio.open_nursery() as nursery:
        for n in range(2):
            nursery.start_soon(ask, n)
    for n in range(2):
        assert [m for who, m in results if who == n] == list(range(20))
    # Neither had to wait for the other to be done with everything.
    assert {who for who, _ in results[:4]} == {0, 1}


async def test_a_task_waiting_for_its_turn_leaves_at_once_when_cancelled(
    connection: Connection, other: Connection
) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(connection.execute, "select pg_sleep(60)")
        await until_running(other, "%pg_sleep(60)%")
        with trio.move_on_after(0.01) as scope:
            await connection.execute("select 1")
        assert scope.cancelled_caught
        # The other one has not been waited for.
        assert await is_running(other, "%pg_sleep(60)%")
        nursery.cancel_scope.cancel()
    assert await value(connection, "select 1") == 1


async def test_a_transaction_whose_end_cannot_be_sent_closes_the_connection(
    connection: Connection, other: Connection, table: None
) -> None:
    """Another task has the connection, and a cancelled one does not wait for it."""
    async with trio.open_nursery() as nursery:

        async def ask() -> None:
            with pytest.raises(psycopg.OperationalError):
                await connection.execute("select pg_sleep(60)")

        with trio.CancelScope() as scope:
            async with connection.transaction():
                await connection.execute("insert into t values (1)")
                nursery.start_soon(ask)
                await until_running(other, "%pg_sleep(60)%")
                scope.cancel()
        assert scope.cancelled_caught
    assert connection.closed


async def test_a_pipeline_whose_end_cannot_be_sent_closes_the_connection(
    connection: Connection, other: Connection
) -> None:
    async with trio.open_nursery() as nursery:

        async def fetch(cursor: psycopg.AsyncCursor[Any]) -> None:
            with pytest.raises(psycopg.OperationalError):
                await cursor.fetchone()

        with trio.CancelScope() as scope:
            async with connection.pipeline():
                nursery.start_soon(fetch, await connection.execute("select pg_sleep(60)"))
                await trio.testing.wait_all_tasks_blocked()  # the statement runs without it, too
                await until_running(other, "%pg_sleep(60)%")
                scope.cancel()
        assert scope.cancelled_caught
    assert connection.closed


async def test_an_empty_pipeline_ends_even_if_another_task_has_the_connection(
    connection: Connection,
) -> None:
    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as scope:
            async with connection.pipeline():
                nursery.start_soon(connection.wait_notifies)
                await trio.testing.wait_all_tasks_blocked()
                scope.cancel()
        assert scope.cancelled_caught
        nursery.cancel_scope.cancel()
    assert await value(connection, "select 1") == 1


async def test_using_a_connection_within_its_own_stream_is_an_error_and_no_deadlock(
    connection: Connection,
) -> None:
    async with aclosing(connection.cursor().stream("select 1 union all select 2")) as stream:
        async for _ in stream:
            with pytest.raises(RuntimeError, match="already"):
                await connection.execute("select 1")
    assert await value(connection, "select 1") == 1


@pytest.mark.parametrize("use", ["query", "notifications", "writing"])
async def test_closing_wakes_the_task_that_waits(proxy: Proxy, use: str) -> None:
    async with connected(proxy.url, autocommit=True) as waiting:
        uses: dict[str, Callable[[], Awaitable[object]]] = {
            "query": lambda: waiting.execute("select pg_sleep(60)"),
            "notifications": waiting.wait_notifies,
            "writing": lambda: waiting.cursor().executemany("select %s", [("x" * 10**6,)] * 40),
        }

        async def wait(message: str | None = None) -> None:
            with pytest.raises(psycopg.OperationalError, match=message):
                await uses[use]()

        with trio.fail_after(PROMPT):
            async with trio.open_nursery() as nursery:
                if use == "writing":
                    proxy.stop()
                nursery.start_soon(wait, "the connection is closed")
                await trio.testing.wait_all_tasks_blocked(0.05)
                nursery.start_soon(wait)  # this one waits for its turn
                await trio.testing.wait_all_tasks_blocked(0.01)
                await waiting.close()


async def test_a_step_that_gives_way_notices_that_the_connection_was_closed(
    connection: Connection,
) -> None:
    """The number of the socket might be that of another one when it continues."""

    def step() -> Iterator[Any]:
        for _ in range(10):
            time.sleep(2 * BUSY_SECONDS)  # so that it does give way
            yield Wait.RW

    async with trio.open_nursery() as nursery:
        nursery.start_soon(connection.close)
        with pytest.raises(psycopg.OperationalError, match="the connection is closed"):
            await connection.wait(step())


# Connecting


async def test_a_unix_socket_is_an_address(start_server: Callable[..., PostgresServer]) -> None:
    server = await trio.to_thread.run_sync(start_server)
    async with connected(server.socket_url) as connection:
        assert await value(connection, "select inet_server_addr()") is None


async def test_a_refused_port_says_so(proxy: Proxy) -> None:
    await proxy.refuse()
    with pytest.raises(psycopg.OperationalError, match=rf"{proxy.port}.*refused"):
        await TrioConnection.connect(proxy.url)


async def test_a_server_that_never_answers_costs_the_connect_timeout(proxy: Proxy) -> None:
    proxy.stop()
    started = trio.current_time()
    with pytest.raises(psycopg.errors.ConnectionTimeout, match=str(proxy.port)):
        await TrioConnection.connect(proxy.url, connect_timeout=2)
    assert 2 <= trio.current_time() - started < 2 + PROMPT


async def test_a_cancelled_connect_leaves_no_socket(proxy: Proxy) -> None:
    proxy.stop()
    before = len(os.listdir("/proc/self/fd"))

    async def is_held() -> None:
        with trio.fail_after(PROMPT):
            await proxy.holds("questions")

    # By then the proxy has both its sockets, too.
    await cancel_when(is_held, lambda: TrioConnection.connect(proxy.url))
    proxy.cut()
    await trio.testing.wait_all_tasks_blocked(0.01)
    assert len(os.listdir("/proc/self/fd")) <= before


async def test_cancel_at_every_moment_of_connecting(postgres_database: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    n = done = 0
    while done < 5:
        with trio.move_on_after(n * 0.0002):
            connection: Connection = await TrioConnection.connect(postgres_database)
            await connection.close()
            done += 1
        assert len(os.listdir("/proc/self/fd")) <= before
        n += 1
    assert n > 5


async def test_the_first_living_host_is_taken(proxy: Proxy, postgres_database: str) -> None:
    parts = urlsplit(postgres_database)
    await proxy.refuse()
    credentials, at, address = parts.netloc.rpartition("@")
    hosts = f"{credentials}{at}127.0.0.1:{proxy.port},{address}"
    async with connected(parts._replace(netloc=hosts).geturl()) as connection:
        assert connection.info.port == (parts.port or 5432)


async def test_every_dead_host_is_named(proxy: Proxy) -> None:
    await proxy.refuse()
    with pytest.raises(psycopg.OperationalError) as caught:
        await TrioConnection.connect(f"postgresql://127.0.0.1:{proxy.port},127.0.0.1:1/nowhere")
    assert f"port {proxy.port}" in str(caught.value)
    assert "port 1 " in str(caught.value)


async def test_a_host_name_is_looked_up_off_the_loop(postgres_database: str) -> None:
    parts = urlsplit(postgres_database)
    credentials, at, address = parts.netloc.rpartition("@")
    if not address.startswith("127.0.0.1"):
        pytest.skip("the given server is elsewhere")
    named = parts._replace(netloc=f"{credentials}{at}{address.replace('127.0.0.1', 'localhost')}")
    async with connected(named.geturl()) as connection:
        assert connection.info.hostaddr == "127.0.0.1"
    with pytest.raises(psycopg.OperationalError, match=r"nowhere\.invalid|not known"):
        await TrioConnection.connect("postgresql://nowhere.invalid/db")


async def test_a_slow_name_server_costs_the_connect_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release = threading.Event()
    monkeypatch.setattr(
        trio_watchdog._psycopg, "conninfo_attempts", lambda params: release.wait(20)
    )
    try:
        with pytest.raises(psycopg.errors.ConnectionTimeout, match=r"slow\.example"):
            await TrioConnection.connect("postgresql://slow.example/db", connect_timeout=2)
    finally:
        release.set()


@pytest.mark.parametrize("wanted", ["read-write", "primary", "prefer-standby"])
async def test_a_primary_passes_for_the_session_attributes(
    postgres_database: str, wanted: str
) -> None:
    async with connected(postgres_database, target_session_attrs=wanted) as connection:
        assert await value(connection, "select pg_is_in_recovery()") is False


async def test_a_primary_is_no_standby(postgres_database: str) -> None:
    with pytest.raises(psycopg.OperationalError, match="hot standby"):
        await TrioConnection.connect(postgres_database, target_session_attrs="standby")


async def test_an_unknown_database_is_named(postgres_database: str) -> None:
    with pytest.raises(psycopg.OperationalError, match='"no_such_database" does not exist'):
        await TrioConnection.connect(postgres_database, dbname="no_such_database")


async def test_a_bad_password_is_named(start_server: Callable[..., PostgresServer]) -> None:
    server = await trio.to_thread.run_sync(start_server)
    with pytest.raises(psycopg.OperationalError, match='authentication failed for user "postgres"'):
        await TrioConnection.connect(server.url, password="wrong")


async def test_vanished_peers_are_noticed_by_default(postgres_database: str) -> None:
    async with connected(postgres_database) as connection:
        parameters = connection.info.get_parameters()
    assert parameters["tcp_user_timeout"] == "30000"
    assert parameters["keepalives_idle"] == "20"
    async with connected(postgres_database, tcp_user_timeout=7000) as connection:
        assert connection.info.get_parameters()["tcp_user_timeout"] == "7000"


# Importing


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    root = Path(trio_watchdog._psycopg.__file__).parent.parent
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])},
        timeout=60,
    )


QUERY = """
import sys, trio
{first}
from trio_watchdog._psycopg import TrioConnection
{last}
async def main():
    async with await TrioConnection.connect(sys.argv[1]) as connection:
        async with connection.transaction():
            print(await (await connection.execute("select 42")).fetchone())
        with trio.move_on_after(0.1):
            await connection.execute("select pg_sleep(60)")
        await connection.rollback()
{run}
"""


@pytest.mark.parametrize(
    ("first", "last", "run"),
    [
        ("", "assert 'trio_asyncio' not in sys.modules", "trio.run(main)"),
        ("import trio_asyncio", "", "trio.run(main)"),
        ("", "import trio_asyncio", "trio.run(main)"),
        ("import trio_asyncio", "", "trio_asyncio.run(main)"),
        ("", "import trio_asyncio", "trio_asyncio.run(main)"),
    ],
)
def test_trio_asyncio_may_be_imported_before_or_after_or_not(
    postgres_database: str, first: str, last: str, run: str
) -> None:
    done = run_python(QUERY.format(first=first, last=last, run=run), postgres_database)
    assert (done.stdout, done.returncode) == ("(42,)\n", 0), done.stderr


@pytest.mark.parametrize("version", ["3.1.20", "3.4.0", "4.0.0.dev1"])
def test_an_untested_psycopg_is_refused_by_name(version: str) -> None:
    done = run_python(
        f"import psycopg; psycopg.__version__ = {version!r}; import trio_watchdog._psycopg"
    )
    assert done.returncode == 1
    assert f"ImportError: psycopg {version} is installed" in done.stderr
    assert "3.2 and 3.3" in done.stderr


def test_a_missing_psycopg_is_told_how_to_come() -> None:
    done = run_python("import sys; sys.modules['psycopg'] = None; import trio_watchdog._psycopg")
    assert done.returncode == 1
    assert "pip install 'trio-watchdog[postgres]'" in done.stderr
