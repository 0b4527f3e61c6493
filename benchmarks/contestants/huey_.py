"""huey on SQLite: a consumer with threads, full fsync, and no results kept."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio.to_thread
from huey import SqliteHuey

from . import Contestant, Ran, clone_sqlite

POLL = 0.05
"""Seconds between two looks of an idle worker; the default grows from 0.1 to 10."""


class Huey_(Contestant):
    notes = (
        "a claim deletes the job, so there is nothing to settle, and a crash loses it",
        f"its idle workers poll, here every {POLL * 1000:.0f} ms",
        "has no bulk enqueue",
    )
    waiting = "task where true"
    unsettled = ("task where true",)

    def __init__(self, database: str, keys: int = 0) -> None:
        super().__init__(database, keys)
        logging.getLogger("huey").setLevel(logging.WARNING)
        self.huey = SqliteHuey(filename=database, fsync=True, results=False, timeout=60)
        self.ran: Ran = lambda number: None

        @self.huey.task(name="noop")
        def noop(number: int) -> None:
            self.ran(number)

        self.noop = noop

    async def create(self) -> None:
        """Done on construction."""

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        yield

    async def enqueue(self, number: int) -> None:
        self.noop(number)

    async def enqueue_many(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.noop(number)

    async def fill(self, count: int) -> None:
        self.noop(-1)
        clone_sqlite(self.database, "task", count - 1)

    @asynccontextmanager
    async def working(self, lanes: int, ran: Ran) -> AsyncIterator[None]:
        self.ran = ran
        consumer = self.huey.create_consumer(
            workers=lanes, periodic=False, initial_delay=POLL, max_delay=POLL
        )
        consumer.start()
        try:
            yield
        finally:
            await anyio.to_thread.run_sync(lambda: consumer.stop(graceful=True))
