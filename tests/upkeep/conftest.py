"""A database of each kind, and a way to do to its rows what no operation does."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from tests.process.conftest import database

__all__ = ["database"]

ByHand = Callable[..., None]


def execute(database: str, text: str) -> None:
    """One statement on ``{jobs}``, with none of the database's checks in its way."""
    if database.startswith("sqlite:"):
        with closing(sqlite3.connect(database.removeprefix("sqlite:"))) as connection:
            connection.execute("pragma ignore_check_constraints = on")
            connection.execute(text.replace("{jobs}", "watchdog_jobs"))
            connection.commit()
        return
    with psycopg.connect(database, autocommit=True) as connection:
        names = connection.execute(
            "select conname from pg_constraint where contype in ('c', 'n')"
            " and conrelid = 'trio_watchdog.jobs'::regclass and conname !~ 'sequence'"
        ).fetchall()
        for (name,) in names:
            connection.execute(f"alter table trio_watchdog.jobs drop constraint {name}".encode())
        connection.execute(text.replace("{jobs}", "trio_watchdog.jobs").encode())


@pytest.fixture
def by_hand(database: str) -> ByHand:
    """Changes rows of the database, bypassing its checks."""
    return lambda text: execute(database, text)


@pytest.fixture
def empty_file(tmp_path: Path) -> str:
    return f"sqlite:{tmp_path / 'other.db'}"
