"""The kinds of store. Whoever adds one adds a line, and every suite that is for all runs on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest
from attrs import frozen

from tests.postgres.makers import PostgresMaker
from tests.store.makers import (
    BorrowedFileMaker,
    BorrowedMemoryMaker,
    FaultyMaker,
    FileMaker,
    KnownMaker,
    MemoryMaker,
)

T = TypeVar("T")

Find = Callable[[str], Any]
"""Gives a fixture by its name."""


@frozen
class Kind:
    """How stores of a kind are made, and how much of each suite they get."""

    make: Callable[[Find], KnownMaker]
    is_itself: bool = False
    """Not another one in other clothes: it gets the long suites, too."""
    share: int = 1
    """Of so many points or examples of a long suite one is tried, since each costs more here."""
    spared: frozenset[str] = frozenset()
    """Store checks that ask for what it does not promise."""


KINDS: dict[str, Kind] = {
    "memory": Kind(lambda find: MemoryMaker(), is_itself=True),
    "file": Kind(lambda find: FileMaker(), is_itself=True, share=2),
    "borrowed-memory": Kind(lambda find: BorrowedMemoryMaker()),
    "borrowed-file": Kind(lambda find: BorrowedFileMaker()),
    "faulty": Kind(lambda find: FaultyMaker()),
    "postgres": Kind(
        lambda find: PostgresMaker(find("quick_database"), "session"), is_itself=True, share=5
    ),
    "pooled-postgres": Kind(
        lambda find: PostgresMaker(find("quick_database"), "pooler"),
        # Behind a pooler there are no notifications: the runtime polls.
        spared=frozenset({"what_another_store_does_is_reported"}),
    ),
}

THEMSELVES = [name for name, kind in KINDS.items() if kind.is_itself]


def points(name: str, values: Iterable[T], *kinds: str) -> pytest.MarkDecorator:
    """Parametrise with ``kind`` and a point of a long suite; ``kinds``: only on these."""
    cases = [
        (kind, value)
        for kind in kinds or THEMSELVES
        # From the middle: at the ends less is going on.
        for value in list(values)[KINDS[kind].share // 2 :: KINDS[kind].share]
    ]
    return pytest.mark.parametrize(("kind", name), cases)
