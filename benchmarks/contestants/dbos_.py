"""DBOS on SQLite: a workflow per job, started from a queue."""

from __future__ import annotations

import logging
import sqlite3
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio.to_thread

from . import LANE, Contestant, Ran

IS_REPLACED = sqlite3.sqlite_version_info < (3, 42) and sys.version_info >= (3, 12)
"""It asks SQLite for sub-second time in a way that came with 3.42, and does not start without."""

if IS_REPLACED:
    import pysqlite3

    # Before SQLAlchemy looks, and for the whole process: two SQLite libraries in one process undo
    # each other's locks.
    sys.modules["sqlite3"] = pysqlite3
    sys.modules["sqlite3.dbapi2"] = pysqlite3.dbapi2

from dbos import DBOS, DBOSClient, DBOSConfig  # noqa: E402

POLL = 0.05
"""Seconds between two looks at the queue; the default is 1."""

_ran: list[Ran] = []


@DBOS.workflow(name="noop")
def noop(number: int) -> None:
    _ran[-1](number)


class Dbos(Contestant):
    notes = (
        "keeps SQLite's rollback journal; synchronous is FULL there too",
        f"its queue is polled, here every {POLL * 1000:.0f} ms",
        "has no bulk enqueue",
        "its serial key is a partition with partition_concurrency=1",
        *(
            [f"runs on SQLite {pysqlite3.sqlite_version} of pysqlite3-binary, for it needs 3.42"]
            if IS_REPLACED
            else []
        ),
    )
    waiting = "workflow_status where status = 'ENQUEUED'"
    unsettled = ("workflow_status where status in ('ENQUEUED', 'PENDING')",)

    def __init__(self, database: str, keys: int = 0) -> None:
        super().__init__(database, keys)
        self.url = f"sqlite:///{database}"
        self.is_launched = False

    def launch(self, lanes: int) -> None:
        config: DBOSConfig = {
            "name": "bench",
            "system_database_url": self.url,
            "log_level": "ERROR",
            "application_version": "1",
            "max_executor_threads": max(lanes, 4),
        }
        DBOS(config=config)
        DBOS.launch()
        DBOS.register_queue(
            LANE,
            worker_concurrency=lanes,
            partition_concurrency=1 if self.keys else None,
            polling_interval_sec=POLL,
        )

    async def create(self) -> None:
        logging.getLogger("dbos").setLevel(logging.ERROR)

        def create() -> None:
            self.launch(1)
            DBOS.destroy()

        await anyio.to_thread.run_sync(create)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        self.client = await anyio.to_thread.run_sync(
            lambda: DBOSClient(system_database_url=self.url, application_name="bench")
        )
        try:
            yield
        finally:
            self.client.destroy()

    def put(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            if self.is_launched:
                DBOS.enqueue_workflow(LANE, noop, number)
                continue
            options = {"queue_name": LANE, "workflow_name": "noop", "app_version": "1"}
            if self.keys:
                options["queue_partition_key"] = self.key(number)
            self.client.enqueue(options, number)

    async def enqueue(self, number: int) -> None:
        await anyio.to_thread.run_sync(self.put, [number])

    async def enqueue_many(self, numbers: Sequence[int]) -> None:
        await anyio.to_thread.run_sync(self.put, numbers)

    @asynccontextmanager
    async def working(self, lanes: int, ran: Ran) -> AsyncIterator[None]:
        _ran.append(ran)
        await anyio.to_thread.run_sync(self.launch, lanes)
        self.is_launched = True
        try:
            yield
        finally:
            self.is_launched = False
            await anyio.to_thread.run_sync(DBOS.destroy)
