"""The application's own transaction: the same operations on the caller's connection.

Nothing here begins, commits or rolls back what the caller has begun. `transactional` runs whole
operations; `enqueue_statement` gives one statement to any other driver.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from attrs import frozen

from . import _operations as operations
from . import _statements as sql
from ._errors import InvalidJob, StoreInvalid
from ._identity import fresh_id
from ._model import Admission, CancellationResult, Job, QueueHead, check_job
from ._operations import Effects, Operation
from ._payload import PAYLOAD_LIMIT, check_payload_size
from ._wishes import Cancel, Enqueue

if TYPE_CHECKING:
    import psycopg

    from ._borrowed_postgres import AsyncPostgresTransaction, PostgresTransaction

T = TypeVar("T")

Paramstyle = Literal["named", "qmark", "format", "pyformat", "numeric", "numeric_dollar"]


@frozen
class Statement:
    """One SQL statement and its parameters, in the paramstyle that was asked for."""

    sql: str
    parameters: Mapping[str, Any] | tuple[Any, ...]


def enqueue_statement(
    job: Job,
    dialect: Literal["sqlite", "postgres"],
    *,
    paramstyle: Paramstyle | None = None,
    schema: str = sql.DEFAULT_SCHEMA,
    payload_limit: int = PAYLOAD_LIMIT,
) -> Statement:
    """A statement that admits the job inside whatever transaction executes it.

    It returns one row, the job's id and sequence, when the job was admitted, and none when its id
    is there already; no error tells a conflict from a duplicate, as `Client.enqueue` does. On
    PostgreSQL it also notifies the lanes, which happens when the transaction commits.

    ``paramstyle`` is by default what sqlite3 (``"named"``) and psycopg (``"pyformat"``) take;
    ``"numeric_dollar"`` is asyncpg's. ``schema`` is for PostgreSQL.
    """
    check_payload_size(check_job(job).encoded, payload_limit)
    if dialect not in ("sqlite", "postgres"):
        raise ValueError(f"dialect is {dialect!r}; 'sqlite' or 'postgres' are allowed")
    names = [column.split() for column in sql.INSERT.columns.split(", ")]
    spelled = ", ".join(
        f"cast(:{name} as {'integer' if kind == 'bigint' and dialect == 'sqlite' else kind})"
        f" as {name}"
        for name, kind in names
    )
    rendering = sql.Dialect(dialect, schema, clock_in_sql=True)
    text = rendering.plain(sql.INSERT, f"(select 0 as ord, {spelled})")
    if dialect == "postgres":
        notify = f"pg_notify('{sql.channel(schema)}', '')"
        text = (
            f"with inserted as ({text}), told as (select {notify} from inserted limit 1)\n"
            "select inserted.id, inserted.sequence from inserted left join told on true"
        )
    values = dict(zip([name for name, _ in names], operations.insertion(job), strict=True))
    style = paramstyle or ("named" if dialect == "sqlite" else "pyformat")
    return _spelled(text, values, style)


def _spelled(text: str, values: Mapping[str, Any], style: str) -> Statement:
    if style == "named":
        return Statement(text, values)
    if style == "pyformat":
        return Statement(sql.NAMED.sub(r"%(\1)s", text), values)
    order: list[str] = []

    def positional(match: Any) -> str:
        order.append(match[1])
        return {"qmark": "?", "format": "%s"}.get(style, "")

    def numbered(match: Any) -> str:
        if match[1] not in order:
            order.append(match[1])
        return f"{'$' if style == 'numeric_dollar' else ':'}{order.index(match[1]) + 1}"

    if style in ("qmark", "format"):
        text = sql.NAMED.sub(positional, text)
    elif style in ("numeric", "numeric_dollar"):
        text = sql.NAMED.sub(numbered, text)
    else:
        raise ValueError(
            f"paramstyle is {style!r}; named, qmark, format, pyformat, numeric and"
            " numeric_dollar are allowed"
        )
    return Statement(text, tuple(values[name] for name in order))


# -- SQLite ---------------------------------------------------------------------------------------


class SQLiteTransaction:
    """Operations inside the transaction of a `sqlite3.Connection`. Plain calls."""

    def __init__(self, connection: sqlite3.Connection, *, payload_limit: int) -> None:
        from ._sqlite import Engine, HostClock

        self._connection = connection
        # Neither admission nor cancellation looks at a lease, so any host clock does.
        self._engine = Engine(connection, HostClock(), payload_limit=payload_limit)

    def enqueue(self, job: Job) -> Admission:
        """Admit the job when the caller's transaction commits. Raises `JobConflict`."""
        answers = self._run(lambda effects: operations.enqueue([Enqueue(check_job(job))], effects))
        if isinstance(answers[0], Exception):
            raise answers[0]
        return answers[0]

    def cancel(
        self, id: str, *, cancellation_id: str | None = None, only_if_queued: bool = False
    ) -> CancellationResult:
        """Ask that a job stop, when the caller's transaction commits."""
        chosen = fresh_id() if cancellation_id is None else cancellation_id
        wish = Cancel(id, chosen, only_if_queued)
        return self._run(lambda effects: operations.cancel_one(wish, effects))

    def read_queue_head(self, queue: str) -> QueueHead:
        """The queue's head as the caller's transaction sees it."""
        return self._run(lambda _: operations.queue_head(queue))

    def _run(self, operation: Callable[[Effects], Operation[T]]) -> T:
        from ._sqlite import tell_touched, translated

        with translated("running inside the caller's transaction"), self._inside():
            effects = Effects(self._engine.payload_limit)
            answer = self._engine.run(operation(effects), self._engine.clocks())
        if effects.concern_others:
            tell_touched(self._connection)
        return answer

    @contextmanager
    def _inside(self) -> Generator[None]:
        from ._sqlite import refuse_other_text

        connection = self._connection
        # Each time, for the owner may change it; and before anything is begun.
        refuse_other_text(connection)
        if not connection.in_transaction:
            if connection.isolation_level is None or getattr(connection, "autocommit", -1) is True:
                raise StoreInvalid(
                    "the connection commits by itself and no transaction is open;"
                    " execute BEGIN first"
                )
            # What sqlite3 would do before the first change, but a lock that is taken at once
            # waits for another writer, and a later upgrade would fail.
            connection.execute("begin immediate")
        yield


# -- any of them ----------------------------------------------------------------------------------


@overload
def transactional(
    connection: sqlite3.Connection, *, payload_limit: int = ...
) -> SQLiteTransaction: ...
@overload
def transactional(
    connection: psycopg.Connection[Any], *, schema: str = ..., payload_limit: int = ...
) -> PostgresTransaction: ...
@overload
def transactional(
    connection: psycopg.AsyncConnection[Any], *, schema: str = ..., payload_limit: int = ...
) -> AsyncPostgresTransaction: ...


def transactional(
    connection: Any, *, schema: str = sql.DEFAULT_SCHEMA, payload_limit: int = PAYLOAD_LIMIT
) -> Any:
    """``enqueue``, ``cancel`` and ``read_queue_head`` inside the caller's open transaction.

    Nothing is visible to others until the caller commits, everything is undone when it rolls
    back, and lanes are woken after the commit. Takes a `sqlite3.Connection` or a psycopg
    connection; the methods are plain calls on a synchronous connection and awaited on an
    asynchronous one. The schema must exist: open the database once with `open_watchdog` or
    `open_client`.
    """
    if isinstance(connection, sqlite3.Connection):
        return SQLiteTransaction(connection, payload_limit=payload_limit)
    if type(connection).__module__.partition(".")[0] == "psycopg" or any(
        base.__module__.partition(".")[0] == "psycopg" for base in type(connection).__mro__
    ):
        from ._borrowed_postgres import postgres_transaction

        return postgres_transaction(connection, schema=schema, payload_limit=payload_limit)
    raise InvalidJob(
        f"connection is of type {type(connection).__name__}; a sqlite3 or psycopg connection is"
        " needed (for other drivers see enqueue_statement)"
    )
