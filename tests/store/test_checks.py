"""Every promise of a store, on every store."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.kinds import KINDS
from tests.store.makers import KnownMaker
from trio_watchdog.testing import STORE_CHECKS, StoreCheck, missing_capabilities

CASES = [
    (check, kind)
    for check in STORE_CHECKS
    for kind in KINDS
    if check.__name__ not in KINDS[kind].spared
]


@pytest.mark.parametrize(
    ("check", "kind"), CASES, ids=[f"{check.__name__}-{kind}" for check, kind in CASES]
)
async def test_store(check: StoreCheck, kind: str, maker_of: Callable[[str], KnownMaker]) -> None:
    open_store = maker_of(kind)
    if missing := missing_capabilities(check, open_store):
        pytest.skip(f"needs {', '.join(missing)}")
    await check(open_store)


def test_names_of_checks_are_sentences_and_unique() -> None:
    names = [check.__name__ for check in STORE_CHECKS]
    assert len(set(names)) == len(names) > 100
    assert [name for name in names if name.count("_") < 3] == []
    assert set(names) >= frozenset[str]().union(*(kind.spared for kind in KINDS.values()))


@pytest.mark.parametrize("kind", KINDS)
def test_our_own_stores_lack_nothing_that_a_check_needs(
    kind: str, maker_of: Callable[[str], KnownMaker]
) -> None:
    maker = maker_of(kind)
    assert [c.__name__ for c in STORE_CHECKS if missing_capabilities(c, maker)] == []
