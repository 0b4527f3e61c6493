"""What the runtime's tests share: a watchdog over a store that can be made to fail.

They run in mock time that jumps when nothing happens, for the store in memory lives on the event
loop. Files with threads in them say ``IN_REAL_TIME = True``.
"""

from __future__ import annotations

import inspect
import logging
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from trio_watchdog import Watchdog, open_watchdog
from trio_watchdog._open import open_store
from trio_watchdog.testing._faulty import FaultyStore

Open = Callable[..., AbstractAsyncContextManager[Watchdog]]

HERE = Path(__file__).parent


def run_in_mock_time(function: Any, *, clock: Any, instruments: Any) -> Any:
    assert clock is None
    clock = MockClock(autojump_threshold=0)
    return trio.run(function, clock=clock, instruments=instruments)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE not in item.path.parents or not isinstance(item, pytest.Function):
            continue
        if inspect.iscoroutinefunction(item.obj) and not hasattr(item.module, "IN_REAL_TIME"):
            item.add_marker(pytest.mark.trio(run=run_in_mock_time), append=False)


@pytest.fixture
async def store() -> AsyncGenerator[FaultyStore]:
    """A store in memory, whose time is Trio's, and which fails when told to."""
    async with open_store(":memory:") as inner:
        yield FaultyStore(inner)


@pytest.fixture
def open_it(store: FaultyStore) -> Open:
    """Opens a watchdog over that store; several may follow one another."""

    @asynccontextmanager
    async def opening(**options: Any) -> AsyncGenerator[Watchdog]:
        options = {"random": random.Random(7), **options}
        async with open_watchdog(store, **options) as watchdog:
            yield watchdog

    return opening


@pytest.fixture
def until() -> Callable[..., Awaitable[None]]:
    """Waits for a condition, looking every ``step`` seconds; fails after ``limit`` of them."""

    async def wait(condition: Callable[[], Any], *, step: float = 0.1, limit: float = 300) -> None:
        with trio.fail_after(limit):
            while not condition():  # noqa: ASYNC110 (there is nothing that tells)
                await trio.sleep(step)

    return wait


class Ends:
    """The log records of runs that ended."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def of(self, id: str) -> list[logging.LogRecord]:
        return [
            record
            for record in self._caplog.records
            if getattr(record, "job", None) == id and hasattr(record, "cause")
        ]

    def causes(self, id: str) -> list[str]:
        return [record.__dict__["cause"] for record in self.of(id)]


@pytest.fixture
def ends(caplog: pytest.LogCaptureFixture) -> Ends:
    caplog.set_level(logging.DEBUG, logger="trio_watchdog")
    return Ends(caplog)
