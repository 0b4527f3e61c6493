"""A server for whoever asks for one, and stores of every kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from tests.postgres.fixtures import (
    postgres_database,
    postgres_url,
    quick_database,
    start_server,
)

if TYPE_CHECKING:
    from tests.store.makers import KnownMaker

__all__ = ["postgres_database", "postgres_url", "quick_database", "start_server"]

# Before they are imported: the test kit's asserts are shown as those of tests are.
pytest.register_assert_rewrite("trio_watchdog.testing", "tests.store.makers")


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
