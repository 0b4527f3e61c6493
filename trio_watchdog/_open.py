"""What a ``database`` argument means. Loads a store's module only when it is asked for."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import AsyncGenerator
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

        opening = open_borrowed_store(
            database, project=project, payload_limit=payload_limit, **options
        )
    else:
        opening = _open_named(
            os.fspath(database), project=project, payload_limit=payload_limit, **options
        )
    async with opening as store:
        yield store


def _open_named(name: str, **options: Any) -> Any:
    from . import _sqlite

    if name.startswith(("postgresql:", "postgres:")):
        from ._postgres import open_postgres_store

        return open_postgres_store(name, **options)
    if name.startswith("sqlite:"):
        name = name.removeprefix("sqlite:")
    elif "://" in name:
        scheme = name.partition("://")[0]
        raise ValueError(
            f"database has the scheme {scheme!r}; give sqlite:PATH, a path, or a postgresql:// URL"
        )
    if name == ":memory:":
        return _sqlite.open_memory_store(**options)
    if not name:
        raise ValueError("database is empty; give sqlite:PATH, a path, or a postgresql:// URL")
    return _sqlite.open_file_store(Path(name), **options)
