"""A server for whoever asks for one, and stores of every kind."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from tests.postgres.fixtures import (
    make_database,
    postgres_database,
    postgres_url,
    quick_database,
    start_server,
)

if TYPE_CHECKING:
    from tests.store.makers import KnownMaker

__all__ = ["make_database", "postgres_database", "postgres_url", "quick_database", "start_server"]

# Before they are imported: the test kit's asserts are shown as those of tests are.
pytest.register_assert_rewrite("trio_watchdog.testing", "tests.store.makers")

BYTECODE = pytest.StashKey[tempfile.TemporaryDirectory[str]]()


def pytest_configure(config: pytest.Config) -> None:
    # Where bytecode is not to be kept, each of the hundreds of processes that the tests start would
    # compile the package anew.
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", None) and "PYTHONPYCACHEPREFIX" not in os.environ:
        config.stash[BYTECODE] = tempfile.TemporaryDirectory(prefix="watchdog-bytecode-")
        os.environ["PYTHONPYCACHEPREFIX"] = config.stash[BYTECODE].name


def pytest_unconfigure(config: pytest.Config) -> None:
    if folder := config.stash.get(BYTECODE, None):
        folder.cleanup()


@pytest.fixture(scope="session")
def maker_of(request: pytest.FixtureRequest) -> Iterator[Callable[[str], KnownMaker]]:
    """The maker of a kind of store, made when it is first asked for: not all need a server."""
    from tests.kinds import KINDS

    makers: dict[str, KnownMaker] = {}
    with ExitStack() as stack:

        def maker_of(kind: str) -> KnownMaker:
            if kind not in makers:
                makers[kind] = KINDS[kind].make(request.getfixturevalue)
                stack.callback(makers[kind].close)
            return makers[kind]

        yield maker_of
