"""This project."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from trio_watchdog import Client, Job, RunningJob, open_client, open_watchdog

from . import LANE, Contestant, Ran, clone_postgres, clone_sqlite


class Ours(Contestant):
    backend = "trio"
    client: Client

    def job(self, number: int, lane: str = LANE) -> Job:
        return Job(lane, {"number": number}, queue=self.key(number))

    async def create(self) -> None:
        async with open_client(self.database):
            pass

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        async with open_client(self.database) as self.client:
            yield

    async def enqueue(self, number: int) -> None:
        await self.client.enqueue(self.job(number))

    async def enqueue_many(self, numbers: Sequence[int]) -> None:
        await self.client.enqueue_many(self.job(number) for number in numbers)

    @asynccontextmanager
    async def working(self, lanes: int, ran: Ran, lane: str = LANE) -> AsyncIterator[None]:
        async def handler(job: RunningJob) -> None:
            ran(job.payload["number"])

        outside = self.client
        # A job that a measurement cuts off need not be waited for.
        async with open_watchdog(self.database, grace=1.0) as watchdog:
            await watchdog.start_lane(lane, handler, workers=lanes)
            # Who enqueues in the process that works does so through the watchdog.
            self.client = watchdog
            try:
                yield
            finally:
                self.client = outside


class OursOnPostgres(Ours):
    table = "trio_watchdog.jobs"
    waiting = f"{table} where state = 'queued'"
    # Two conditions, for which there are indexes.
    unsettled = (waiting, f"{table} where state in ('running', 'completing')")

    def clone(self, count: int, where: str = "state = 'queued'", queue: str | None = None) -> None:
        """Copy one of the jobs, with fresh ids, and queues of their own unless one is named."""
        mark = uuid.uuid4().hex
        fresh = f"'{mark}-' || n"
        clone_postgres(self.database, self.table, count, where, id=fresh, queue=queue or fresh)

    async def fill(self, count: int) -> None:
        await self.enqueue(-1)
        self.clone(count - 1)


class OursOnSQLite(Ours):
    table = "watchdog_jobs"
    waiting = f"{table} where state = 'queued'"
    unsettled = (waiting, f"{table} where state in ('running', 'completing')")

    def clone(self, count: int, where: str = "state = 'queued'", queue: str | None = None) -> None:
        """Copy one of the jobs, with fresh ids, and queues of their own unless one is named."""
        mark = uuid.uuid4().hex
        fresh = f"'{mark}-' || n"
        clone_sqlite(self.database, self.table, count, where, id=fresh, queue=queue or fresh)

    async def fill(self, count: int) -> None:
        await self.enqueue(-1)
        self.clone(count - 1)
