"""A server for the tests: the one named in WATCHDOG_TEST_POSTGRES, or a fresh one."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import psycopg
import pytest

from tests.postgres.server import PostgresServer


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """The URL of a running server, as a superuser. Shared: do not stop it, do not fill it."""
    if url := os.environ.get("WATCHDOG_TEST_POSTGRES"):
        yield url
        return
    # Nobody kills this one, so what it has written need not survive that.
    with PostgresServer(fsync="off") as server:
        yield server.url


@pytest.fixture
def make_database(postgres_url: str) -> Iterator[Callable[[], str]]:
    """Gives URLs of empty databases, dropped afterwards with whoever is still connected."""
    names: list[str] = []

    def make() -> str:
        name = f"test_{secrets.token_hex(6)}"
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute(f"create database {name}".encode())
        names.append(name)
        return urlsplit(postgres_url)._replace(path=f"/{name}").geturl()

    yield make
    if names:
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            for name in names:
                connection.execute(f"drop database {name} with (force)".encode())


@pytest.fixture
def postgres_database(make_database: Callable[[], str]) -> str:
    """The URL of an empty database."""
    return make_database()


@pytest.fixture(scope="session")
def quick_database(postgres_url: str) -> Iterator[str]:
    """A database for all tests, each with a schema of its own; a crash may cost it a little."""
    name = f"test_{secrets.token_hex(6)}"
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(f"create database {name}".encode())
        connection.execute(f"alter database {name} set synchronous_commit = off".encode())
        try:
            yield urlsplit(postgres_url)._replace(path=f"/{name}").geturl()
        finally:
            connection.execute(f"drop database {name} with (force)".encode())


@contextmanager
def emptied(url: str, *tables: str) -> Iterator[None]:
    """Empty these tables at the end, for the next test of a database that several share."""
    yield
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"truncate {', '.join(tables)}".encode())


@pytest.fixture
def start_server() -> Iterator[Callable[..., PostgresServer]]:
    """Start a server of one's own, to stop, freeze or kill: `start_server(fsync="off")`."""
    servers: list[PostgresServer] = []

    def start(**settings: str) -> PostgresServer:
        server = PostgresServer(**settings)
        servers.append(server)
        server.start()
        return server

    yield start
    for server in servers:
        server.close()
