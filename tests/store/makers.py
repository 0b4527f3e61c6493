"""Stores on SQLite, as the checks and the longer suites want them."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from pathlib import Path
from typing import Any

from trio_watchdog._open import open_store
from trio_watchdog._payload import PAYLOAD_LIMIT
from trio_watchdog._sqlite import FileStore, InlineStore
from trio_watchdog._store import Project, Store
from trio_watchdog.testing import (
    Capability,
    DurableClock,
    FaultyStore,
    StoreMaker,
    broken_invariants,
    broken_rows,
)
from trio_watchdog.testing._invariants import _COLUMNS as COLUMNS


class KnownMaker(StoreMaker):
    """Makes stores into which tests can look."""

    can: frozenset[Capability] = frozenset({"beside", "step", "raw_sql"})

    has_one_writer: bool = False
    """Operations that share an exchange run one after the other, each as a whole."""

    async def rows(self, store: Store) -> list[dict[str, Any]]:
        """All that is in the table of jobs."""
        rows = await self.execute(store, f"select {COLUMNS} from {{jobs}} order by sequence")
        return [dict(zip(COLUMNS.split(", "), row, strict=True)) for row in rows]

    async def broken(self, store: Store) -> list[str]:
        """What must never be true of the table, and is."""
        return broken_rows(await self.rows(store))

    async def look_after(self, store: Store) -> None:
        """What the store's `watch` does besides watching, once."""

    def close(self) -> None:
        """Leave nothing open."""


class SQLiteMaker(KnownMaker):
    """What the kinds have in common."""

    has_one_writer = True

    async def broken(self, store: Store) -> list[str]:
        return broken_invariants(store)

    def __call__(
        self, *, project: Project | None = None, payload_limit: int = PAYLOAD_LIMIT
    ) -> AbstractAsyncContextManager[tuple[Store, DurableClock]]:
        return self._open(DurableClock(), project=project, payload_limit=payload_limit)

    def _open(
        self, clock: DurableClock, **options: Any
    ) -> AbstractAsyncContextManager[tuple[Store, DurableClock]]:
        raise NotImplementedError

    def beside(self, store: Store) -> AbstractAsyncContextManager[Store]:
        assert isinstance(store, InlineStore)
        return open_store(store._engine.connection, clock=store.clock)

    async def execute(
        self, store: Store, sql: str, parameters: Mapping[str, Any] | None = None
    ) -> list[tuple[Any, ...]]:
        return self._execute(store, sql, parameters)

    async def break_rows(
        self, store: Store, sql: str, parameters: Mapping[str, Any] | None = None
    ) -> None:
        self._execute(store, sql, parameters, unchecked=True)

    def _execute(
        self,
        store: Store,
        sql: str,
        parameters: Mapping[str, Any] | None,
        *,
        unchecked: bool = False,
    ) -> list[tuple[Any, ...]]:
        assert isinstance(store, InlineStore)
        return execute(store._engine.connection, sql, parameters, unchecked=unchecked)


def execute(
    connection: sqlite3.Connection,
    sql: str,
    parameters: Mapping[str, Any] | None = None,
    *,
    unchecked: bool = False,
) -> list[tuple[Any, ...]]:
    """Rows of one statement by hand, committed."""
    cursor = connection.cursor()
    cursor.row_factory = None
    cursor.execute(f"pragma ignore_check_constraints = {int(unchecked)}")
    try:
        rows = cursor.execute(sql.replace("{jobs}", "watchdog_jobs"), parameters or {}).fetchall()
        connection.commit()
    finally:
        connection.rollback()
        cursor.execute("pragma ignore_check_constraints = 0")
    return rows


class MemoryMaker(SQLiteMaker):
    """A database in memory, which the store opens itself."""

    @asynccontextmanager
    async def _open(
        self, clock: DurableClock, **options: Any
    ) -> AsyncGenerator[tuple[Store, DurableClock]]:
        async with open_store("sqlite::memory:", clock=clock, **options) as store:
            yield store, clock


class FileMaker(SQLiteMaker):
    """A file with a writer thread; further stores are connections of their own."""

    @asynccontextmanager
    async def _open(
        self, clock: DurableClock, **options: Any
    ) -> AsyncGenerator[tuple[Store, DurableClock]]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "jobs.db"
            async with open_store(path, clock=clock, synchronous="normal", **options) as store:
                yield store, clock

    def beside(self, store: Store) -> AbstractAsyncContextManager[Store]:
        assert isinstance(store, FileStore)
        return open_store(store.path, clock=store.clock, synchronous="normal")

    def _execute(
        self,
        store: Store,
        sql: str,
        parameters: Mapping[str, Any] | None,
        *,
        unchecked: bool = False,
    ) -> list[tuple[Any, ...]]:
        assert isinstance(store, FileStore)
        with closing(sqlite3.connect(store.path, isolation_level=None)) as connection:
            return execute(connection, sql, parameters, unchecked=unchecked)


class BorrowedMemoryMaker(SQLiteMaker):
    """The caller's connection to memory, in sqlite3's default mode and with rows of its own."""

    @asynccontextmanager
    async def _open(
        self, clock: DurableClock, **options: Any
    ) -> AsyncGenerator[tuple[Store, DurableClock]]:
        with closing(sqlite3.connect(":memory:")) as connection:
            connection.row_factory = dictionary
            async with open_store(connection, clock=clock, **options) as store:
                yield store, clock


class BorrowedFileMaker(SQLiteMaker):
    """The caller's connection to a file; further stores have connections of their own."""

    @asynccontextmanager
    async def _open(
        self, clock: DurableClock, **options: Any
    ) -> AsyncGenerator[tuple[Store, DurableClock]]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "jobs.db"
            with closing(connect(path)) as connection:
                async with open_store(connection, clock=clock, **options) as store:
                    yield store, clock

    @asynccontextmanager
    async def beside(self, store: Store) -> AsyncGenerator[Store]:
        assert isinstance(store, InlineStore)
        (_, _, path), *_ = execute(store._engine.connection, "pragma database_list")
        with closing(connect(path)) as connection:
            async with open_store(connection, clock=store.clock) as other:
                yield other


def connect(path: str | Path) -> sqlite3.Connection:
    """An application's connection."""
    connection = sqlite3.connect(path)
    connection.row_factory = sqlite3.Row
    connection.execute("pragma journal_mode = wal")
    connection.execute("pragma synchronous = off")
    return connection


def dictionary(cursor: sqlite3.Cursor, row: tuple[Any, ...]) -> dict[str, Any]:
    """A row factory of the kind that applications like."""
    return {column[0]: value for column, value in zip(cursor.description, row, strict=True)}


class FaultyMaker(MemoryMaker):
    """A faulty store that was not told to fail is the store behind it, in everything."""

    @asynccontextmanager
    async def _open(
        self, clock: DurableClock, **options: Any
    ) -> AsyncGenerator[tuple[Store, DurableClock]]:
        async with super()._open(clock, **options) as (store, _):
            yield FaultyStore(store), clock

    def beside(self, store: Store) -> AbstractAsyncContextManager[Store]:
        assert isinstance(store, FaultyStore)
        return super().beside(store.store)

    def _execute(self, store: Store, *args: Any, **options: Any) -> list[tuple[Any, ...]]:
        assert isinstance(store, FaultyStore)
        return super()._execute(store.store, *args, **options)
