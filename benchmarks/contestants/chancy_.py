"""chancy: the executor for asyncio, with eager polling."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from chancy import Chancy, Job, Queue, Worker, job

from . import LANE, Contestant, Ran, clone_postgres

_ran: list[Ran] = []


@job(queue=LANE)
async def noop(*, number: int) -> None:
    _ran[-1](number)


class Chancy_(Contestant):
    notes = (
        "writes results down once a second, in batches",
        "has no serial key: a queue with concurrency=1, which holds within one worker only",
    )
    waiting = "chancy_jobs where state = 'pending'"
    unsettled = ("chancy_jobs where state in ('pending', 'running', 'retrying')",)

    def __init__(self, database: str, keys: int = 0) -> None:
        super().__init__(database, keys)
        log = logging.getLogger("chancy")
        log.setLevel(logging.WARNING)
        self.chancy = Chancy(database, log=log)

    async def create(self) -> None:
        async with self.chancy:
            await self.chancy.migrate()

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        async with self.chancy:
            yield

    def job(self, number: int) -> Job:
        made = noop.job.with_kwargs(number=number)
        key = self.key(number)
        return made if key is None else made.with_queue(key)

    async def enqueue(self, number: int) -> None:
        await self.chancy.push(self.job(number))

    async def enqueue_many(self, numbers: Sequence[int]) -> None:
        async for _ in self.chancy.push_many([self.job(number) for number in numbers]):
            pass

    async def fill(self, count: int) -> None:
        await self.enqueue(-1)
        clone_postgres(self.database, "chancy_jobs", count - 1, "state = 'pending'", id="uuidv7()")

    @asynccontextmanager
    async def working(self, lanes: int, ran: Ran) -> AsyncIterator[None]:
        _ran.append(ran)
        for name in self.all_keys or [LANE]:
            queue = Queue(
                name,
                concurrency=1 if self.keys else lanes,
                executor=Chancy.Executor.Async,
                polling_interval=1,
                eager_polling=True,
            )
            await self.chancy.declare(queue, upsert=True)
        async with Worker(self.chancy, register_signal_handlers=False):
            yield
        _ran.pop()
