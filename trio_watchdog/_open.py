"""What a ``database`` argument means. Loads a store's module only when it is asked for."""

from __future__ import annotations

import inspect
import os
import sqlite3
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from ._model import check_integer
from ._payload import PAYLOAD_LIMIT
from ._store import Project, Store

Database = str | os.PathLike[str] | sqlite3.Connection | Store
"""``"sqlite:PATH"``, ``"sqlite::memory:"``, a path, a ``postgresql://`` URL, a connection, or a
store that the caller has opened."""

PAYLOAD_LIMIT_MAX = 512 * 1024 * 1024
"""The largest payload limit that both databases can hold."""


@asynccontextmanager
async def open_store(
    database: Database,
    *,
    project: Project | None = None,
    payload_limit: int = PAYLOAD_LIMIT,
    **options: Any,
) -> AsyncGenerator[Store]:
    """The store that ``database`` names; ``options`` are those of its kind.

    SQLite files take ``synchronous="full"`` (default: each commit survives a power failure) or
    ``"normal"`` (the last commits before a power failure may be lost, never the file).
    """
    check_integer(payload_limit, "payload_limit", 1, PAYLOAD_LIMIT_MAX)
    if isinstance(database, Store):
        # It stays the caller's, and so do its options.
        yield database
        return
    if isinstance(database, sqlite3.Connection):
        from ._sqlite import open_borrowed_store

        what, opens, first = "a sqlite3 connection", open_borrowed_store, (database,)
    else:
        what, opens, first = _named(os.fspath(database))
    known = inspect.signature(opens).parameters
    for option in options:
        if option not in known or known[option].kind is not inspect.Parameter.KEYWORD_ONLY:
            raise TypeError(f"{option!r} is no option of {what}")
    async with opens(*first, project=project, payload_limit=payload_limit, **options) as store:
        yield store


def _named(name: str) -> tuple[str, Callable[..., Any], tuple[Any, ...]]:
    """What kind of database has that name, what opens it, and with which arguments first."""
    from . import _sqlite

    if name.startswith(("postgresql:", "postgres:")):
        from ._postgres import open_postgres_store

        return "a PostgreSQL database", open_postgres_store, (name,)
    if name.startswith("sqlite://"):
        # Elsewhere three slashes begin a relative path, and four an absolute one.
        raise ValueError(
            "database is no URL with slashes; give sqlite:PATH, such as sqlite:jobs.db or"
            " sqlite:/var/lib/jobs.db"
        )
    if name.startswith("sqlite:"):
        name = name.removeprefix("sqlite:")
    elif "://" in name and not name.startswith("file:"):
        scheme = name.partition("://")[0]
        raise ValueError(
            f"database has the scheme {scheme!r}; give sqlite:PATH, a path, or a postgresql:// URL"
        )
    if name.startswith("file:"):
        raise ValueError(
            "database begins with 'file:', and is no URI; give sqlite:PATH, a path, or"
            " sqlite::memory: for one in memory"
        )
    if name == ":memory:":
        return "a database in memory", _sqlite.open_memory_store, ()
    if not name:
        raise ValueError("database is empty; give sqlite:PATH, a path, or a postgresql:// URL")
    return "a SQLite file", _sqlite.open_file_store, (Path(name),)
