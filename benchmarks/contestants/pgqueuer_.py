"""pgqueuer: on asyncpg and uvloop, with its own autovacuum settings, as its tuning guide says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import asyncpg
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries

from . import LANE, Contestant, Ran, clone_postgres

VARIANTS = {"defaults": (10, None), "no limit": (32, None)}
"""Its batch size and greatest concurrency; both run as many jobs at a time as they can fetch."""


class PgQueuer_(Contestant):
    notes = (
        "deletes settled jobs and logs them, in batches after the fact",
        "its least concurrency is 2 (max_concurrent_tasks must be twice the batch size)",
        "its serial key is an entrypoint with concurrency_limit=1",
    )
    uvloop = True
    waiting = "pgqueuer where status = 'queued'"
    unsettled = ("pgqueuer where status in ('queued', 'picked')",)
    queries: Queries

    async def create(self) -> None:
        connection = await asyncpg.connect(self.database)
        queries = Queries(AsyncpgDriver(connection))
        await queries.install()
        await queries.optimize_autovacuum()
        await connection.close()

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        connection = await asyncpg.connect(self.database)
        self.queries = Queries(AsyncpgDriver(connection))
        try:
            yield
        finally:
            await connection.close()

    async def enqueue(self, number: int) -> None:
        await self.queries.enqueue(self.key(number) or LANE, str(number).encode())

    async def enqueue_many(self, numbers: Sequence[int]) -> None:
        entrypoints = [self.key(number) or LANE for number in numbers]
        payloads: list[bytes | None] = [str(number).encode() for number in numbers]
        await self.queries.enqueue(entrypoints, payloads, [0] * len(numbers))

    async def fill(self, count: int) -> None:
        await self.enqueue(-1)
        clone_postgres(self.database, "pgqueuer", count - 1, "status = 'queued'")

    @asynccontextmanager
    async def working(self, lanes: int, ran: Ran) -> AsyncIterator[None]:
        connection = await asyncpg.connect(self.database)
        worker = PgQueuer(AsyncpgDriver(connection))

        async def noop(job: Job) -> None:
            assert job.payload is not None
            ran(int(job.payload))

        for entrypoint in self.all_keys or [LANE]:
            worker.entrypoint(entrypoint, concurrency_limit=1 if self.keys else 0)(noop)
        batch = max(1, lanes // 2)
        batch, limit = VARIANTS.get(self.variant, (batch, 2 * batch))
        task = asyncio.create_task(worker.run(batch_size=batch, max_concurrent_tasks=limit))
        try:
            yield
        finally:
            worker.shutdown.set()
            await task
            await connection.close()
