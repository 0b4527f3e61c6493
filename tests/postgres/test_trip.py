"""Several statements, one transaction, one trip."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest
import trio
from psycopg.pq import PipelineStatus, TransactionStatus

from trio_watchdog._psycopg import TrioConnection
from trio_watchdog._trip import Numbered, Prepared, trip

Statements = list[tuple[str, dict[str, Any]]]

INSERT = "insert into t values (%(n)s, %(text)s) returning n, text"
COUNT: Statements = [("select count(*) from t", {})]


@pytest.fixture
async def connection(quick_database: str) -> AsyncIterator[TrioConnection[Any]]:
    connection: TrioConnection[Any]
    connection = await TrioConnection.connect(quick_database, autocommit=True)
    async with connection:
        await connection.execute(
            "create temp table t (n int unique deferrable initially deferred, text text)"
        )
        yield connection


@pytest.fixture(params=["prepared", "not prepared"])
def prepared(request: pytest.FixtureRequest) -> Prepared | None:
    return Prepared() if request.param == "prepared" else None


def is_at_rest(connection: TrioConnection[Any]) -> bool:
    return (
        connection.pgconn.pipeline_status == PipelineStatus.OFF
        and connection.info.transaction_status == TransactionStatus.IDLE
    )


async def test_rows_and_counts_of_each_statement_come_back_in_order(
    connection: TrioConnection[Any], prepared: Prepared | None
) -> None:
    for start in (0, 10):
        results = await trip(
            connection,
            prepared,
            [
                (INSERT, {"n": start, "text": "\u00fc \U0001f600 %s $1"}),
                ("update t set text = null where n = %(n)s", {"n": -1}),
                (INSERT, {"n": start + 1, "text": None}),
                ("select true, 1.5::float8, %(n)s::bigint, n from t order by n", {"n": 2**60}),
                ("delete from t where n >= %(n)s", {"n": start}),
            ],
        )
        assert [result.rows for result in results] == [
            [(start, "\u00fc \U0001f600 %s $1")],
            [],
            [(start + 1, None)],
            [(True, 1.5, 2**60, start), (True, 1.5, 2**60, start + 1)],
            [],
        ]
        assert [result.changed for result in results] == [1, 0, 1, 2, 2]
    assert prepared is None or len(prepared.names) == 4


async def test_a_statement_that_fails_undoes_all_of_them(
    connection: TrioConnection[Any], prepared: Prepared | None
) -> None:
    ok, wrong = (INSERT, {"n": 1, "text": "x"}), ("select 1 / %(n)s::int", {"n": 0})
    for statements in ([ok, wrong, ok], [wrong], [ok, ok, wrong]):
        with pytest.raises(psycopg.errors.DivisionByZero):
            await trip(connection, prepared, statements)
        assert is_at_rest(connection)
        assert (await trip(connection, prepared, COUNT))[0].rows == [(0,)]
    # What failed at first may go well later.
    assert (await trip(connection, prepared, [("select 1 / %(n)s::int", {"n": 1})]))[0].rows == [
        (1,)
    ]


async def test_a_commit_that_fails_is_an_error(
    connection: TrioConnection[Any], prepared: Prepared | None
) -> None:
    # The constraint is looked at by the commit, after all statements have been answered.
    twice: Statements = [(INSERT, {"n": 1, "text": "x"}), (INSERT, {"n": 1, "text": "y"})]
    for statements in (twice, [("begin", {}), *twice, ("commit", {})]):
        with pytest.raises(psycopg.errors.UniqueViolation):
            await trip(connection, prepared, statements)
        assert is_at_rest(connection)
        assert (await trip(connection, prepared, COUNT))[0].rows == [(0,)]


async def test_a_parameter_that_is_missing_sends_nothing(
    connection: TrioConnection[Any], prepared: Prepared | None
) -> None:
    with pytest.raises(KeyError):
        await trip(connection, prepared, [(INSERT, {"n": 1, "text": "x"}), (INSERT, {"n": 2})])
    assert is_at_rest(connection)
    assert (await trip(connection, prepared, COUNT))[0].rows == [(0,)]


async def test_an_open_transaction_stays_open(
    connection: TrioConnection[Any], prepared: Prepared | None
) -> None:
    await trip(connection, prepared, [("begin", {}), (INSERT, {"n": 1, "text": "x"})])
    assert connection.info.transaction_status == TransactionStatus.INTRANS
    assert (await trip(connection, prepared, COUNT))[0].rows == [(1,)]
    await connection.rollback()
    assert (await trip(connection, prepared, COUNT))[0].rows == [(0,)]


async def test_much_goes_both_ways(
    connection: TrioConnection[Any], prepared: Prepared | None
) -> None:
    text = "x" * 1_000_000
    statements: Statements = [("select %(text)s::text", {"text": text})] * 12
    results = await trip(connection, prepared, statements)
    assert [result.rows for result in results] == [[(text,)]] * 12


async def test_a_cancelled_trip_is_undone_or_done_as_a_whole(
    connection: TrioConnection[Any], prepared: Prepared | None
) -> None:
    with trio.move_on_after(0.1) as scope:
        await trip(
            connection,
            prepared,
            [(INSERT, {"n": 1, "text": "x"}), ("select pg_sleep(30)", {}), COUNT[0]],
        )
    assert scope.cancelled_caught
    assert is_at_rest(connection)
    assert (await trip(connection, prepared, COUNT))[0].rows == [(0,)]


async def test_notifications_that_come_along_are_kept(
    connection: TrioConnection[Any], prepared: Prepared | None
) -> None:
    await connection.execute("listen bell")
    await trip(connection, prepared, [("select pg_notify('bell', 'x')", {}), COUNT[0]])
    with trio.fail_after(20):
        assert [n.payload for n in await connection.wait_notifies()] == ["x"]


async def test_a_lost_connection_is_an_error(
    connection: TrioConnection[Any], prepared: Prepared | None
) -> None:
    with pytest.raises(psycopg.OperationalError):
        await trip(
            connection, prepared, [("select pg_terminate_backend(pg_backend_pid())", {}), COUNT[0]]
        )
    assert connection.closed


def test_numbers_are_given_once_to_each_name() -> None:
    numbered = Numbered.of("select %(a)s, %(b)s, %(a)s::text, '%'")
    assert numbered.text == b"select $1, $2, $1::text, '%'"
    assert numbered.names == ("a", "b")
