"""The settled feed is exact: each job once, whoever settles, however long it takes them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.lowlevel

from tests.postgres.fixtures import emptied
from trio_watchdog import _wishes as w
from trio_watchdog._identity import fresh_token
from trio_watchdog._model import Job, Outcome
from trio_watchdog._postgres import open_postgres_store
from trio_watchdog._psycopg import TrioConnection
from trio_watchdog._rules import Settle
from trio_watchdog._store import Store

SCHEMA = "feed"
COMPLETED = Settle(Outcome.COMPLETED)


@pytest.fixture
async def store(quick_database: str) -> AsyncIterator[Store]:
    with emptied(quick_database, f"{SCHEMA}.jobs", f"{SCHEMA}.readers"):
        async with open_postgres_store(quick_database, schema=SCHEMA) as store:
            yield store


class Reader:
    """Pages through the feed from where it was."""

    def __init__(self, store: Store, limit: int = 7, lane: str | None = None) -> None:
        self._store = store
        self._limit = limit
        self._lane = lane
        self._cursor: str | None = None
        self.seen: list[str] = []

    async def read(self) -> list[str]:
        """What is new."""
        new: list[str] = []
        while True:
            page = await self._store.read_settled(self._limit, self._cursor, self._lane)
            self._cursor = page.cursor
            if not page.jobs:
                self.seen += new
                return new
            new += [job.id for job in page.jobs]

    async def until(self, count: int) -> None:
        """Read until so many have been seen: somebody else's transaction may hold the feed up."""
        with trio.fail_after(60):
            while len(self.seen) < count:
                await self.read()


async def settle(store: Store, *ids: str, lane: str = "l") -> None:
    """Settle these jobs in one transaction."""
    await store.submit(*[w.Enqueue(Job(lane, id=id)) for id in ids])
    tokens = [fresh_token() for _ in ids]
    claims = [w.Claim(lane, token, store.owner, 60_000) for token in tokens]
    jobs = [answer.job for answer in await store.submit(*claims)]
    await store.submit(*[w.Decide(job.id, job.token, COMPLETED) for job in jobs])


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[TrioConnection[Any]]:
    connection: TrioConnection[Any] = await TrioConnection.connect(url)
    async with connection:
        yield connection


async def settle_slowly(connection: TrioConnection[Any], id: str) -> None:
    """What an operation does, in a transaction that is left open."""
    await connection.execute(
        f"update {SCHEMA}.jobs set state = 'settled', hint = null, outcome = 'completed',"
        " settled_group = cast(cast(pg_current_xact_id() as text) as bigint), settled_at = 1"
        " where id = %s".encode(),
        (id,),
    )


async def test_a_transaction_that_began_earlier_and_commits_later_is_not_passed_over(
    store: Store, quick_database: str
) -> None:
    reader = Reader(store)
    await store.enqueue(Job("other", id="slow"))
    async with connected(quick_database) as slow:
        await settle_slowly(slow, "slow")
        await settle(store, "quick", "quick too")
        # Their transaction has the higher number, and so they wait for the other.
        assert await reader.read() == []
        assert (await store.read("quick")).state == "settled"  # type: ignore[union-attr]
        await slow.commit()
    await reader.until(3)
    assert reader.seen == ["slow", "quick", "quick too"]


async def test_a_transaction_that_is_rolled_back_leaves_no_gap(
    store: Store, quick_database: str
) -> None:
    reader = Reader(store)
    await store.enqueue(Job("other", id="slow"))
    async with connected(quick_database) as slow:
        await settle_slowly(slow, "slow")
        await settle(store, "quick")
        await slow.rollback()
    await reader.until(1)
    await settle(store, "next")
    await reader.until(2)
    assert reader.seen == ["quick", "next"]


async def test_a_foreign_transaction_delays_the_feed_and_loses_nothing(
    store: Store, quick_database: str
) -> None:
    reader = Reader(store)
    async with connected(quick_database) as foreign:
        # It has nothing to do with jobs, but the server cannot know that.
        await foreign.execute("create temporary table foreign_table ()")
        await settle(store, "A")
        assert await reader.read() == []
        await foreign.rollback()
    await reader.until(1)
    assert reader.seen == ["A"]
    async with connected(quick_database) as foreign:
        # One that only reads delays nothing.
        await foreign.execute("select count(*) from pg_class")
        await settle(store, "B")
        await reader.until(2)


async def test_a_page_may_end_within_a_transaction(store: Store) -> None:
    ids = [f"{n:02}" for n in range(20)]
    await settle(store, *ids)
    for limit in (1, 3, 19, 20, 256):
        reader = Reader(store, limit)
        await reader.until(20)
        assert await reader.read() == []
        assert reader.seen == ids


async def test_readers_of_a_lane_see_what_is_theirs(store: Store) -> None:
    for n in range(6):
        await settle(store, f"{n}", lane=f"l{n % 2}")
    readers = [Reader(store, 2, f"l{n}") for n in range(2)]
    for reader in readers:
        await reader.until(3)
    assert [reader.seen for reader in readers] == [["0", "2", "4"], ["1", "3", "5"]]


async def test_each_job_is_seen_once_while_many_settle_purge_and_prune(
    store: Store, quick_database: str
) -> None:
    lot = random.Random(1)
    reader, slow_reader = Reader(store), Reader(store, 3)
    settled: list[str] = []
    pruned = 0
    is_over = False

    async def write(number: int) -> None:
        async with open_postgres_store(quick_database, schema=SCHEMA) as own:
            for turn in range(12):
                ids = [f"{number}.{turn}.{n}" for n in range(lot.randint(1, 5))]
                await settle(own, *ids, lane=f"l{number}")
                settled.extend(ids)
                # Jobs that come and go leave no trace in it.
                await own.enqueue(Job(f"l{number}", id=f"purged {number}.{turn}", queue="purged"))
                await own.purge_queue("purged")

    async def write_slowly() -> None:
        async with connected(quick_database) as connection:
            for turn in range(10):
                await store.enqueue(Job("slow", id=f"slow {turn}"))
                await settle_slowly(connection, f"slow {turn}")
                await trio.sleep(lot.random() * 0.1)
                if lot.random() < 0.7:
                    await connection.commit()
                    settled.append(f"slow {turn}")
                else:
                    await connection.rollback()

    async def read() -> None:
        while not is_over:
            await reader.read()
            await trio.lowlevel.checkpoint()

    async def prune() -> None:
        # Only what the slow reader has seen goes: it asked for that.
        nonlocal pruned
        while not is_over:
            await slow_reader.read()
            await store.ask(w.ProtectSettled("slow", slow_reader._cursor))
            pruned += await store.ask(w.Prune(2**62, limit=10))
            await trio.sleep(0.02)

    await store.ask(w.ProtectSettled("slow", None))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        nursery.start_soon(prune)
        async with trio.open_nursery() as writers:
            for number in range(3):
                writers.start_soon(write, number)
            writers.start_soon(write_slowly)
        is_over = True
    await slow_reader.until(len(settled))
    assert pruned > 0
    assert Counter(slow_reader.seen) == Counter(settled)
    # Who asked for no protection sees nothing twice all the same.
    await reader.read()
    assert max(Counter(reader.seen).values()) == 1
    assert set(reader.seen) <= set(settled)
