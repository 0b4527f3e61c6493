"""akadze: for its bulk enqueue, the fastest of the field. It takes part in nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from akadze import Akadze
from akadze.schema import migrate

from . import Contestant, Ran


class Akadze_(Contestant):
    notes = ("its bulk enqueue checks no duplicates: `unique_key` is refused there",)
    waiting = "akadze.jobs where state = 'queued'"
    unsettled = ("akadze.jobs where state in ('queued', 'running')",)

    async def create(self) -> None:
        await migrate(self.database)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        self.app = Akadze(database_url=self.database)

        @self.app.task("noop")
        async def noop(number: int) -> None:
            pass

        self.noop = noop
        try:
            yield
        finally:
            await self.app.engine.dispose()

    async def enqueue(self, number: int) -> None:
        async with self.app.engine.begin() as connection:
            await self.noop.using(session=connection).enqueue(number=number)

    async def enqueue_many(self, numbers: Sequence[int]) -> None:
        async with self.app.engine.begin() as connection:
            jobs = [{"number": number} for number in numbers]
            await self.noop.using(session=connection).enqueue_many(jobs)

    def working(self, lanes: int, ran: Ran) -> AbstractAsyncContextManager[None]:
        raise NotImplementedError
