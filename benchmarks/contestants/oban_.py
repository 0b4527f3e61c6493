"""oban (Python): on uvloop, as its command runs it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from oban import Oban, schema, worker
from oban.job import Job

from . import LANE, Contestant, Ran, clone_postgres

_ran: list[Ran] = []


@worker(queue=LANE)
class Noop:
    async def process(self, job: Job) -> None:
        _ran[-1](job.args["number"])


class Oban_(Contestant):
    notes = (
        "writes results down in batches after the fact",
        "has no serial key in its free edition: a queue with limit 1, within one node only;"
        " each has a producer of its own, so 1,000 of them may run 1,000 jobs at a time",
    )
    uvloop = True
    waiting = "oban_jobs where state = 'available'"
    unsettled = ("oban_jobs where state in ('available', 'executing', 'scheduled', 'retryable')",)

    async def create(self) -> None:
        async with await Oban.create_pool(self.database) as pool:
            await schema.install(pool)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        async with await Oban.create_pool(self.database, min_size=2, max_size=20) as pool:
            self.pool = pool
            self.oban = Oban(pool=pool)
            yield

    def job(self, number: int) -> Job:
        return Noop.new({"number": number}, queue=self.key(number) or LANE)

    async def enqueue(self, number: int) -> None:
        await self.oban.enqueue(self.job(number))

    async def enqueue_many(self, numbers: Sequence[int]) -> None:
        await self.oban.enqueue_many([self.job(number) for number in numbers])

    async def fill(self, count: int) -> None:
        await self.enqueue(-1)
        clone_postgres(self.database, "oban_jobs", count - 1, "state = 'available'")

    @asynccontextmanager
    async def working(self, lanes: int, ran: Ran) -> AsyncIterator[None]:
        _ran.append(ran)
        outside = self.oban
        queues = dict.fromkeys(self.all_keys, 1) or {LANE: lanes}
        async with Oban(pool=self.pool, queues=queues) as self.oban:
            yield
        self.oban = outside
        _ran.pop()
