"""A database of each kind, with room for processes around it."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from tests.postgres.server import PostgresServer
from tests.process.harness import Kind, OpenWorld, World, open_world


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database of one kind and of the other."""
    if request.param == "sqlite":
        return f"sqlite:{tmp_path / 'jobs.db'}"
    url: str = request.getfixturevalue("postgres_database")
    return url


@pytest.fixture
def open_worlds(
    tmp_path: Path,
    make_database: Callable[[], str],
    start_server: Callable[..., PostgresServer],
) -> OpenWorld:
    """Opens as many worlds as a test wants, each with a database and a folder of its own."""
    numbers = itertools.count()

    @asynccontextmanager
    async def opening(kind: Kind) -> AsyncGenerator[World]:
        # Short, for there will be sockets in it.
        folder = tmp_path / f"{next(numbers)}"
        folder.mkdir()
        server = None
        if kind == "sqlite":
            url = f"sqlite:{folder / 'jobs.db'}"
        elif kind == "postgres":
            url = await trio.to_thread.run_sync(make_database)
        else:
            server = await trio.to_thread.run_sync(start_server)
            url = server.url
        async with open_world(url, folder) as world:
            world.server = server
            yield world

    return opening


@pytest.fixture(params=["sqlite", "postgres"])
async def world(request: pytest.FixtureRequest, open_worlds: OpenWorld) -> AsyncGenerator[World]:
    """On the one and then on the other, for tests that want no company."""
    async with open_worlds(request.param) as world:
        yield world
