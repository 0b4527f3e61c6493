"""The application's own transaction on a psycopg connection, synchronous or asynchronous."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import psycopg
from psycopg.rows import tuple_row

from . import _operations as operations
from . import _statements as sql
from ._errors import StoreInvalid
from ._identity import fresh_id
from ._model import Admission, CancellationResult, Job, QueueHead, check_job
from ._operations import Call, Effects, Operation
from ._psycopg_errors import store_error
from ._wishes import Cancel, Enqueue

T = TypeVar("T")

Begin = Callable[[Effects], Operation[T]]


def postgres_transaction(connection: Any, *, schema: str, payload_limit: int) -> Any:
    """The operations for a psycopg connection of either colour."""
    is_async = isinstance(connection, psycopg.AsyncConnection)
    kind = AsyncPostgresTransaction if is_async else PostgresTransaction
    return kind(connection, schema=schema, payload_limit=payload_limit)


class _Common:
    def __init__(self, connection: Any, *, schema: str, payload_limit: int) -> None:
        self._connection = connection
        self._dialect = sql.Dialect("postgres", schema, clock_in_sql=True)
        self._channel = sql.channel(schema)
        self._payload_limit = payload_limit

    def _check(self) -> None:
        status = self._connection.info.transaction_status
        if self._connection.autocommit and status == psycopg.pq.TransactionStatus.IDLE:
            raise StoreInvalid(
                "the connection commits by itself and no transaction is open;"
                " use connection.transaction()"
            )

    def _rendered(self, call: Call) -> tuple[bytes, Any]:
        return self._dialect.text(cast("sql.Statement", call.statement)).encode(), call.parameters

    @staticmethod
    def _has_rows(call: Call) -> bool:
        return not cast("sql.Statement", call.statement).counts


def _enqueue(job: Job) -> Begin[list[Any]]:
    wish = Enqueue(check_job(job))
    return lambda effects: operations.enqueue([wish], effects)


def _cancel(
    id: str, cancellation_id: str | None, only_if_queued: bool
) -> Begin[CancellationResult]:
    chosen = fresh_id() if cancellation_id is None else cancellation_id
    wish = Cancel(id, chosen, only_if_queued)
    return lambda effects: operations.cancel_one(wish, effects)


def _admission(answers: list[Any]) -> Admission:
    if isinstance(answers[0], Exception):
        raise answers[0]
    return answers[0]


class PostgresTransaction(_Common):
    """Operations inside the transaction of a `psycopg.Connection`. Plain calls.

    An error of the database leaves the transaction failed, as PostgreSQL has it; `JobConflict`
    and refusals do not.
    """

    def enqueue(self, job: Job) -> Admission:
        """Admit the job when the caller's transaction commits. Raises `JobConflict`."""
        return _admission(self._run(_enqueue(job)))

    def cancel(
        self, id: str, *, cancellation_id: str | None = None, only_if_queued: bool = False
    ) -> CancellationResult:
        """Ask that a job stop, when the caller's transaction commits."""
        return self._run(_cancel(id, cancellation_id, only_if_queued))

    def read_queue_head(self, queue: str) -> QueueHead:
        """The queue's head as the caller's transaction sees it."""
        return self._run(lambda _: operations.queue_head(queue))

    def _run(self, begin: Begin[T]) -> T:
        self._check()
        effects = Effects(self._payload_limit)
        operation = begin(effects)
        rows: Any = None
        try:
            with self._connection.cursor(row_factory=tuple_row) as cursor:
                while True:
                    try:
                        step = operation.send(rows)
                    except StopIteration as stop:
                        if effects.concern_others:
                            cursor.execute(sql.NOTIFY, (self._channel,))
                        return cast("T", stop.value)
                    call = cast("Call", step)
                    cursor.execute(*self._rendered(call))
                    rows = cursor.fetchall() if self._has_rows(call) else [(cursor.rowcount,)]
        except psycopg.Error as error:
            raise store_error(error, "running inside the caller's transaction") from error


class AsyncPostgresTransaction(_Common):
    """Operations inside the transaction of a `psycopg.AsyncConnection`, awaited.

    For psycopg's own, which waits with asyncio, and for `trio_watchdog.lowlevel.TrioConnection`.
    """

    async def enqueue(self, job: Job) -> Admission:
        """Admit the job when the caller's transaction commits. Raises `JobConflict`."""
        return _admission(await self._run(_enqueue(job)))

    async def cancel(
        self, id: str, *, cancellation_id: str | None = None, only_if_queued: bool = False
    ) -> CancellationResult:
        """Ask that a job stop, when the caller's transaction commits."""
        return await self._run(_cancel(id, cancellation_id, only_if_queued))

    async def read_queue_head(self, queue: str) -> QueueHead:
        """The queue's head as the caller's transaction sees it."""
        return await self._run(lambda _: operations.queue_head(queue))

    async def _run(self, begin: Begin[T]) -> T:
        self._check()
        effects = Effects(self._payload_limit)
        operation = begin(effects)
        rows: Any = None
        try:
            async with self._connection.cursor(row_factory=tuple_row) as cursor:
                while True:
                    try:
                        step = operation.send(rows)
                    except StopIteration as stop:
                        if effects.concern_others:
                            await cursor.execute(sql.NOTIFY, (self._channel,))
                        return cast("T", stop.value)
                    call = cast("Call", step)
                    await cursor.execute(*self._rendered(call))
                    rows = await cursor.fetchall() if self._has_rows(call) else [(cursor.rowcount,)]
        except psycopg.Error as error:
            raise store_error(error, "running inside the caller's transaction") from error
