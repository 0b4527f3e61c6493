"""Every promise of a store, on every store."""

from __future__ import annotations

import pytest

from tests.store.makers import MAKERS
from trio_watchdog.testing import STORE_CHECKS, StoreCheck, missing_capabilities


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
async def test_store(check: StoreCheck, maker: str) -> None:
    open_store = MAKERS[maker]
    if missing := missing_capabilities(check, open_store):
        pytest.skip(f"needs {', '.join(missing)}")
    await check(open_store)


def test_names_of_checks_are_sentences_and_unique() -> None:
    names = [check.__name__ for check in STORE_CHECKS]
    assert len(set(names)) == len(names) > 100
    assert [name for name in names if name.count("_") < 3] == []


def test_sqlite_stores_are_spared_no_check() -> None:
    for maker in MAKERS.values():
        assert [c.__name__ for c in STORE_CHECKS if missing_capabilities(c, maker)] == []
