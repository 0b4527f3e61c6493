"""What the runtime's tests share: a watchdog over a store that can be made to fail.

They run in mock time that jumps when nothing happens, for the store in memory lives on the event
loop. Files with threads in them say ``IN_REAL_TIME = True``.
"""

from __future__ import annotations

import inspect
import logging
import math
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.store.makers import KnownMaker
from trio_watchdog import Watchdog, open_watchdog
from trio_watchdog._open import open_store
from trio_watchdog._store import Store
from trio_watchdog._wishes import Wish
from trio_watchdog.testing import DurableClock
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
def kind() -> str:
    """The kind of store; a test that is for all of them is parametrised with it."""
    return "memory"


@pytest.fixture
async def store(kind: str, maker_of: Callable[[str], KnownMaker]) -> AsyncGenerator[FaultyStore]:
    """A store, in memory unless a test wants others, whose time is Trio's, failing when told to."""
    if kind == "memory":
        async with open_store(":memory:") as inner:
            yield FaultyStore(inner)
        return
    maker = maker_of(kind)
    standstill = Standstill()
    clock = DurableClock(trio_clock=standstill.clock)
    async with AsyncExitStack() as stack:
        with standstill:
            inner, _ = await stack.enter_async_context(maker._open(clock))
        yield FaultyStore(TimelessStore(inner, maker, standstill))
        with standstill:
            await stack.aclose()


class Standstill:
    """Mock time does not jump inside of this block, which waits for a server or a thread."""

    def __init__(self) -> None:
        clock = trio.lowlevel.current_clock()
        assert isinstance(clock, MockClock)
        self.clock = clock
        self._depth = 0

    def __enter__(self) -> None:
        self._depth += 1
        self.clock.autojump_threshold = math.inf

    def __exit__(self, *exc_info: object) -> None:
        self._depth -= 1
        if not self._depth:
            self.clock.autojump_threshold = 0


class TimelessStore(FaultyStore):
    """A store whose work takes no mock time. It renews on the loop, and does not watch others."""

    def __init__(self, store: Store, maker: KnownMaker, standstill: Standstill) -> None:
        super().__init__(store)
        self._maker = maker
        self._standstill = standstill

    async def submit(self, *asked: Wish[Any]) -> list[Any]:
        with self._standstill:
            return await super().submit(*asked)

    async def dead_owners(self) -> tuple[str, ...]:
        with self._standstill:
            return await super().dead_owners()

    def open_renewer(self) -> None:
        return None

    async def watch(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        while True:
            await trio.sleep(5)
            with self._standstill:
                await self._maker.look_after(self.store)


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
