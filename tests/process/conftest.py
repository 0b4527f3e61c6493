"""A database of each kind, with room for processes around it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from tests.process.harness import World, open_world


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database of one kind and of the other."""
    if request.param == "sqlite":
        return f"sqlite:{tmp_path / 'jobs.db'}"
    url: str = request.getfixturevalue("postgres_database")
    return url


@pytest.fixture
async def world(database: str, tmp_path: Path) -> AsyncGenerator[World]:
    async with open_world(database, tmp_path) as world:
        yield world


@pytest.fixture
async def sqlite_world(tmp_path: Path) -> AsyncGenerator[World]:
    async with open_world(f"sqlite:{tmp_path / 'jobs.db'}", tmp_path) as world:
        yield world


@pytest.fixture
async def postgres_world(postgres_database: str, tmp_path: Path) -> AsyncGenerator[World]:
    async with open_world(postgres_database, tmp_path) as world:
        yield world
