"""Every promise of a store, on PostgreSQL."""

from __future__ import annotations

from typing import get_args

import pytest

from tests.postgres.makers import Mode, PostgresMaker
from trio_watchdog.testing import STORE_CHECKS, StoreCheck, missing_capabilities

# Behind a pooler there are no notifications: the runtime polls instead (see test_connections).
NEED_NOTIFICATIONS = {"what_another_store_does_is_reported"}

CASES = [
    (check, mode)
    for check in STORE_CHECKS
    for mode in get_args(Mode)
    if not (mode == "pooler" and check.__name__ in NEED_NOTIFICATIONS)
]


@pytest.fixture(scope="module")
def makers(quick_database: str) -> dict[str, PostgresMaker]:
    return {mode: PostgresMaker(quick_database, mode) for mode in get_args(Mode)}


@pytest.mark.parametrize(
    ("check", "mode"), CASES, ids=[f"{check.__name__}-{mode}" for check, mode in CASES]
)
async def test_store(check: StoreCheck, mode: Mode, makers: dict[str, PostgresMaker]) -> None:
    await check(makers[mode])


def test_postgres_stores_are_spared_no_check(makers: dict[str, PostgresMaker]) -> None:
    for maker in makers.values():
        assert [c.__name__ for c in STORE_CHECKS if missing_capabilities(c, maker)] == []
    names = {check.__name__ for check in STORE_CHECKS}
    assert names >= NEED_NOTIFICATIONS
