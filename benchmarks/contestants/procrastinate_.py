"""procrastinate: one asynchronous worker with so many concurrent jobs, woken by LISTEN/NOTIFY."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import groupby

import procrastinate

from . import Contestant, Ran, clone_postgres


class Procrastinate(Contestant):
    notes = ("its serial key is `lock`",)
    waiting = "procrastinate_jobs where status = 'todo'"
    unsettled = ("procrastinate_jobs where status in ('todo', 'doing')",)

    def __init__(self, database: str, keys: int = 0) -> None:
        super().__init__(database, keys)
        connector = procrastinate.PsycopgConnector(conninfo=database, min_size=2, max_size=20)
        self.app = procrastinate.App(connector=connector)
        self.ran: Ran = lambda number: None

        @self.app.task(name="noop")
        async def noop(number: int) -> None:
            self.ran(number)

        self.noop = noop

    async def create(self) -> None:
        async with self.app.open_async():
            await self.app.schema_manager.apply_schema_async()

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        async with self.app.open_async():
            yield

    async def enqueue(self, number: int) -> None:
        await self.noop.configure(lock=self.key(number)).defer_async(number=number)

    async def enqueue_many(self, numbers: Sequence[int]) -> None:
        ordered = sorted(numbers, key=lambda number: self.key(number) or "")
        for key, group in groupby(ordered, key=self.key):
            rows = [{"number": number} for number in group]
            await self.noop.configure(lock=key).batch_defer_async(*rows)

    async def fill(self, count: int) -> None:
        await self.enqueue(-1)
        clone_postgres(self.database, "procrastinate_jobs", count - 1, "status = 'todo'")

    @asynccontextmanager
    async def working(self, lanes: int, ran: Ran) -> AsyncIterator[None]:
        self.ran = ran
        worker = self.app.run_worker_async(concurrency=lanes, install_signal_handlers=False)
        task = asyncio.create_task(worker)
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
