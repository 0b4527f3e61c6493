"""PostgreSQL stores, as the store checks want them."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Literal

import psycopg
import trio
from psycopg import sql as compose

from tests.store.makers import KnownMaker
from trio_watchdog import _statements as sql
from trio_watchdog._model import QueueTransition
from trio_watchdog._payload import PAYLOAD_LIMIT
from trio_watchdog._postgres import PostgresStore, open_postgres_store
from trio_watchdog._store import Project, Store
from trio_watchdog.testing import DurableClock

Mode = Literal["session", "pooler"]
"""``session``: prepared statements and LISTEN. ``pooler``: what works behind a transaction pooler,
where nothing of a session outlives its transaction."""

TABLES = ("jobs", "recheck", "readers")

_NAMED = re.compile(r"(?<!:):([a-z_]+)")


def instants(clock: DurableClock) -> Mapping[str, int]:
    """The clock as `open_postgres_store` takes it."""
    return {"now": clock.now(), "lease_now": clock.lease_now()}


class BlockingCursor:
    """An asynchronous cursor, for use from a thread of Trio's."""

    def __init__(self, cursor: psycopg.AsyncCursor[Any]) -> None:
        self._cursor = cursor

    def execute(self, text: str) -> None:
        trio.from_thread.run(self._cursor.execute, text.encode())

    def fetchall(self) -> list[Any]:
        return trio.from_thread.run(self._cursor.fetchall)


class BlockingConnection:
    """The connection of a projector as those of SQLite stores know it."""

    def __init__(self, connection: psycopg.AsyncConnection[Any]) -> None:
        self._connection = connection

    def cursor(self) -> BlockingCursor:
        return BlockingCursor(self._connection.cursor())


def adapted_projector(project: Project) -> Project:
    """On PostgreSQL projectors are asynchronous; the checks bring one that is not."""

    async def adapted(transition: QueueTransition, connection: Any) -> None:
        await trio.to_thread.run_sync(project, transition, BlockingConnection(connection))

    return adapted  # type: ignore[return-value]


class PostgresMaker(KnownMaker):
    """Stores in one database, each in a schema that is emptied between two of them."""

    def __init__(self, url: str, mode: Mode) -> None:
        self.url = url
        self.options: dict[str, bool] = {
            "listen": mode == "session",
            "prepare": mode == "session",
        }
        self._mode = mode
        self._free: list[str] = []
        self._made = 0
        self._clocks: dict[Store, DurableClock] = {}
        self._hand: psycopg.Connection[Any] | None = None

    def __call__(
        self, *, project: Project | None = None, payload_limit: int = PAYLOAD_LIMIT
    ) -> AbstractAsyncContextManager[tuple[Store, DurableClock]]:
        adapted = None if project is None else adapted_projector(project)
        return self._open(DurableClock(), project=adapted, payload_limit=payload_limit)

    @asynccontextmanager
    async def _open(
        self, clock: DurableClock, **options: Any
    ) -> AsyncGenerator[tuple[Store, DurableClock]]:
        schema = self._free.pop() if self._free else self._fresh_name()
        async with self._opened(schema, clock, **options) as store:
            yield store, clock
        self._empty(schema)
        self._free.append(schema)

    def _fresh_name(self) -> str:
        self._made += 1
        return f"checks_{self._mode}_{self._made}"

    @asynccontextmanager
    async def _opened(
        self, schema: str, clock: DurableClock, **options: Any
    ) -> AsyncGenerator[Store]:
        async with open_postgres_store(
            self.url, schema=schema, clock=lambda: instants(clock), **self.options, **options
        ) as store:
            self._clocks[store] = clock
            try:
                yield store
            finally:
                del self._clocks[store]

    def _empty(self, schema: str) -> None:
        dialect = sql.Dialect("postgres", schema)
        tables = ", ".join(dialect.table(name) for name in TABLES)
        self.hand.execute(f"truncate {tables} restart identity".encode())
        self.hand.execute("drop table if exists projected")

    @property
    def hand(self) -> psycopg.Connection[Any]:
        """A connection for what is done by hand."""
        if self._hand is None or self._hand.closed:
            self._hand = psycopg.connect(self.url, autocommit=True)
        return self._hand

    async def look_after(self, store: Store) -> None:
        assert isinstance(store, PostgresStore)
        await store._look_at_notes()

    def close(self) -> None:
        if self._hand is not None:
            self._hand.close()

    def beside(self, store: Store) -> AbstractAsyncContextManager[Store]:
        assert isinstance(store, PostgresStore)
        return self._opened(store.dialect.schema, self._clocks[store])

    async def execute(
        self, store: Store, sql: str, parameters: Mapping[str, Any] | None = None
    ) -> list[tuple[Any, ...]]:
        assert isinstance(store, PostgresStore)
        text = _NAMED.sub(r"%(\1)s", sql.replace("{jobs}", store.dialect.table("jobs")))
        cursor = self.hand.execute(text.encode(), parameters)
        return cursor.fetchall() if cursor.description else []

    async def break_rows(
        self, store: Store, sql: str, parameters: Mapping[str, Any] | None = None
    ) -> None:
        assert isinstance(store, PostgresStore)
        schema = store.dialect.schema
        # The schema is spoilt by it, so it is not used again.
        for (name,) in self.hand.execute(
            "select conname from pg_constraint where contype in ('c', 'n')"
            " and conrelid = to_regclass(%s)",
            (store.dialect.table("jobs"),),
        ).fetchall():
            self.hand.execute(
                compose.SQL("alter table {} drop constraint {}").format(
                    compose.Identifier(schema, "jobs"), compose.Identifier(name)
                )
            )
        await self.execute(store, sql, parameters)
