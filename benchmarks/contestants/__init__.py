"""Who takes part, and what every contestant must be able to do.

A contestant is used as its own documentation recommends for speed, with durability on. What it
cannot do, or does at a lower price, is said in its ``notes``, which are printed beside its figures.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import ClassVar, cast

Ran = Callable[[int], None]
"""What a handler does: note the number of its job and the instant. Any thread may call it."""

LANE = "bench"


class Contestant(ABC):
    """One job runner on one database."""

    notes: ClassVar[tuple[str, ...]] = ()
    backend: ClassVar[str] = "asyncio"
    uvloop: ClassVar[bool] = False
    waiting: ClassVar[str]
    """The jobs that wait, as a table and a condition."""
    unsettled: ClassVar[tuple[str, ...]]
    """The jobs that wait, run, or whose end is not written down yet; likewise."""

    def __init__(self, database: str, keys: int = 0) -> None:
        self.database = database
        self.keys = keys
        """Jobs are spread over so many serial keys; 0: they have none."""

        self.variant = ""
        """Another way to use it, where one is measured too."""

    def key(self, number: int) -> str | None:
        return f"key-{number % self.keys}" if self.keys else None

    @property
    def all_keys(self) -> list[str]:
        return [f"key-{i}" for i in range(self.keys)]

    @abstractmethod
    async def create(self) -> None:
        """Make the schema in an empty database."""

    @abstractmethod
    def opened(self) -> AbstractAsyncContextManager[None]:
        """Inside, jobs can be enqueued."""

    @abstractmethod
    async def enqueue(self, number: int) -> None:
        """One job, durable on return."""

    @abstractmethod
    async def enqueue_many(self, numbers: Sequence[int]) -> None:
        """Many jobs, as fast as the documented interface allows."""

    @abstractmethod
    def working(self, lanes: int, ran: Ran) -> AbstractAsyncContextManager[None]:
        """Inside (and inside of `opened`), a worker runs up to ``lanes`` jobs at a time."""

    async def fill(self, count: int) -> None:
        """Let ``count`` jobs wait. Not timed."""
        for start in range(0, count, 5000):
            await self.enqueue_many([-1] * min(5000, count - start))


def clone_postgres(url: str, table: str, count: int, where: str = "true", **overrides: str) -> None:
    """Copy one row of a table ``count`` times; ``overrides`` are columns given by SQL.

    In SQL, for a million jobs through an interface that takes them one by one would need hours.
    ``n`` is the number of the copy.
    """
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        columns = [
            name
            for (name,) in connection.execute(
                "select attname from pg_attribute where attrelid = %s::regclass and attnum > 0"
                " and not attisdropped and attidentity = '' and attgenerated = ''"
                " and attname not in (select column_name from information_schema.columns"
                "  where format('%%I.%%I', table_schema, table_name)::regclass = %s::regclass"
                "  and column_default like 'nextval%%')",
                (table, table),
            )
        ]
        values = [overrides.get(name, f"j.{name}") for name in columns]
        connection.execute(
            f"insert into {table} ({', '.join(columns)}) select {', '.join(values)}"
            f" from (select * from {table} where {where} limit 1) j,"
            f" generate_series(1, {count}) n"
        )
        connection.execute(f"vacuum analyze {table}")


def clone_sqlite(path: str, table: str, count: int, where: str = "true", **overrides: str) -> None:
    """The same for SQLite; the integer primary key is left to the database.

    No `analyze`: PostgreSQL gathers statistics by itself, SQLite only when told, and few tell it.
    """
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        described = connection.execute(f"pragma table_info({table})").fetchall()
        columns = [
            name
            for _, name, kind, _, _, is_key in described
            if not (is_key and kind.lower() == "integer")
        ]
        values = [overrides.get(name, f"j.{name}") for name in columns]
        connection.execute("pragma synchronous = off")
        connection.execute("pragma cache_size = -200000")
        connection.execute(
            f"with recursive n(n) as (select 1 union all select n + 1 from n where n < {count})"
            f" insert into {table} ({', '.join(columns)}) select {', '.join(values)}"
            f" from (select * from {table} where {where} limit 1) j, n"
        )
        connection.execute("pragma wal_checkpoint(truncate)").fetchall()
    finally:
        connection.close()


@dataclass(frozen=True)
class Place:
    """Where a contestant is found, known without importing it."""

    distribution: str
    module: str
    cls: str

    @property
    def version(self) -> str | None:
        """The installed version; None if there is none."""
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            is_ours = self.module == "ours"
            return "of this checkout" if is_ours else None


OURS = "trio_watchdog"
CONTESTANTS = {
    "postgres": {
        OURS: Place("trio-watchdog", "ours", "OursOnPostgres"),
        "procrastinate": Place("procrastinate", "procrastinate_", "Procrastinate"),
        "pgqueuer": Place("pgqueuer", "pgqueuer_", "PgQueuer_"),
        "chancy": Place("chancy", "chancy_", "Chancy_"),
        "oban": Place("oban", "oban_", "Oban_"),
        "akadze": Place("akadze", "akadze_", "Akadze_"),
    },
    "sqlite": {
        OURS: Place("trio-watchdog", "ours", "OursOnSQLite"),
        "huey": Place("huey", "huey_", "Huey_"),
        "dbos": Place("dbos", "dbos_", "Dbos"),
    },
}

ONLY_ENQUEUE = ("akadze",)


def load(store: str, name: str) -> type[Contestant]:
    """The contestant's class; imports it."""
    place = CONTESTANTS[store][name]
    module = importlib.import_module(f"benchmarks.contestants.{place.module}")
    return cast("type[Contestant]", getattr(module, place.cls))
