"""One process of the stress test: `python -m tests.postgres.stress URL SEED SECONDS`.

Everything that a store can do and some of what applications do, at random and all at once, with
pauses between statements, transactions held open and rolled back, and connections cut off. Each
line of its output is something that was answered: `admitted`, `recorded` or `trouble`, and what.
"""

from __future__ import annotations

import contextlib
import random
import sys
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import psycopg
import trio

from trio_watchdog import _wishes as w
from trio_watchdog._borrowed import transactional
from trio_watchdog._calls import Call
from trio_watchdog._errors import JobConflict, StoreUnavailable
from trio_watchdog._identity import fresh_token
from trio_watchdog._model import Job, Outcome, Recovery, RetryPolicy, RunningJob, to_instant
from trio_watchdog._postgres import PostgresStore, Session, open_postgres_store
from trio_watchdog._psycopg import TrioConnection
from trio_watchdog._rules import Settle
from trio_watchdog._trip import trip

SCHEMA = "stress"
QUEUES = 5
LANES = ("l0", "l1", "l2")
LEASE = 700
COMPLETED = Settle(Outcome.COMPLETED)
POLICY = RetryPolicy(3, delay=0.05, factor=1.0)


class PausingSession(Session):
    """A session that sends one statement at a time, and takes its time between them."""

    def __init__(self, *args: Any, lot: random.Random) -> None:
        super().__init__(*args, prepare=False)
        self._lot = lot

    async def execute(
        self,
        connection: TrioConnection[Any],
        calls: Sequence[Call],
        before: Sequence[tuple[str, Mapping[str, Any]]] = (),
        after: Sequence[tuple[str, Mapping[str, Any]]] = (),
    ) -> list[list[Any]]:
        if before:
            await trip(connection, None, before)
        rows: list[list[Any]] = []
        for call in calls:
            rows += await super().execute(connection, [call])
            if self._lot.random() < 0.3:
                await trio.sleep(self._lot.random() * 0.03)
        if after:
            await trip(connection, None, after)
        return rows


class Chaos:
    """What the tasks of one process share."""

    def __init__(self, url: str, store: PostgresStore, lot: random.Random, seed: int) -> None:
        self.url = url
        self.store = store
        self.lot = lot
        self.seed = seed
        self.count = 0
        self.ids: list[str] = []
        self.held: list[RunningJob] = []

    def say(self, what: str, about: object) -> None:
        print(what, about)  # noqa: T201

    def job(self) -> Job:
        lot = self.lot
        self.count += 1
        clock = self.store.now()
        assert clock is not None
        return Job(
            lot.choice(LANES),
            queue=f"q{lot.randrange(QUEUES)}",
            id=f"{self.seed}.{self.count}",
            priority=lot.randint(-1, 1),
            not_before=to_instant(clock + lot.randrange(300)) if lot.random() < 0.2 else None,
            recovery=Recovery(2) if lot.random() < 0.5 else None,
        )

    def some_id(self) -> str:
        return self.lot.choice(self.ids[-60:]) if self.ids else "none"

    # What a store is asked.

    async def enqueue(self) -> None:
        jobs = [self.job() for _ in range(self.lot.randint(1, 4))]
        for answer in await self.store.submit(*map(w.Enqueue, jobs)):
            if isinstance(answer, Exception):
                raise answer
            self.ids.append(answer.job.id)
            self.say("admitted", answer.job.id)

    async def enqueue_again(self) -> None:
        with contextlib.suppress(JobConflict):
            await self.store.enqueue(Job(self.lot.choice(LANES), id=self.some_id()))

    async def claim(self) -> None:
        lanes = [self.lot.choice((*LANES, None)) for _ in range(self.lot.randint(1, 3))]
        wishes = [w.Claim(lane, fresh_token(), self.store.owner, LEASE) for lane in lanes]
        for answer in await self.store.submit(*wishes):
            if not isinstance(answer, Exception) and answer.job is not None:
                self.held.append(answer.job)

    def take(self) -> RunningJob | None:
        return self.held.pop(self.lot.randrange(len(self.held))) if self.held else None

    async def end(self) -> None:
        """Bring runs to an end, in one exchange with the next claim."""
        lot = self.lot
        asked: list[w.Wish[Any]] = []
        for _ in range(lot.randint(1, 3)):
            job = self.take()
            if job is None:
                break
            choice = lot.random()
            if choice < 0.5:
                asked.append(w.Decide(job.id, job.token, COMPLETED))
            elif choice < 0.6:
                asked.append(w.RetryJob(job.id, job.token, POLICY))
            elif choice < 0.7:
                asked.append(w.RetryJob(job.id, job.token))
            elif choice < 0.8:
                asked.append(w.HandOff(job.id, job.token))
            elif choice < 0.9:
                asked.append(w.Decide(job.id, job.token, COMPLETED, has_hook=True))
            # Else nobody hears of it any more.
        if not asked:
            return
        claim = w.Claim(lot.choice(LANES), fresh_token(), self.store.owner, LEASE)
        *answers, claimed = await self.store.submit(*asked, claim)
        if not isinstance(claimed, Exception) and claimed.job is not None:
            self.held.append(claimed.job)
        for wish, answer in zip(asked, answers, strict=True):
            if not isinstance(wish, w.Decide) or getattr(answer, "status", "") != "recorded":
                continue
            self.say("recorded", wish.id)
            if wish.has_hook and lot.random() < 0.8:
                await self.store.finish_completing(wish.id, wish.token)

    async def renew(self) -> None:
        wishes = [w.Renew(job.id, job.token, LEASE) for job in self.held[:5]]
        if wishes:
            await self.store.submit(*wishes)

    async def reserve(self) -> None:
        job = self.take()
        if job is not None:
            self.held.append(job)
            await self.store.reserve_attempt(job.id, job.token, RetryPolicy(4))

    async def cancel(self) -> None:
        await self.store.cancel(self.some_id(), fresh_token())

    async def supervise(self) -> None:
        await self.store.settle_cancelled(self.lot.choice((None, *LANES)))
        gone = await self.store.next_running_claim()
        if gone is not None:
            await self.store.reconcile(gone.id, gone.token)
        taken = await self.store.take_completing(fresh_token(), lease=LEASE)
        if taken is not None and self.lot.random() < 0.9:
            await self.store.finish_completing(taken.id, taken.token)
        await self.store.wake_state()

    async def look_at_notes(self) -> None:
        await self.store._look_at_notes()

    async def fail_lane(self) -> None:
        await self.store.fail_lane(self.lot.choice(LANES), "because")

    async def purge(self) -> None:
        await self.store.purge_queue(f"q{self.lot.randrange(QUEUES)}")

    # What an application does.

    async def be_a_user(self) -> None:
        lot = self.lot
        connection: TrioConnection[Any] = await TrioConnection.connect(self.url)
        try:
            transaction = transactional(connection, schema=SCHEMA)
            admitted: list[str] = []
            for _ in range(lot.randint(1, 3)):
                if lot.random() < 0.5:
                    job = self.job()
                    with contextlib.suppress(JobConflict):
                        await transaction.enqueue(job)
                        admitted.append(job.id)
                        self.ids.append(job.id)
                else:
                    await transaction.cancel(self.some_id(), cancellation_id=fresh_token())
            await trio.sleep(lot.random() * 0.3)
            choice = lot.random()
            if choice < 0.6:
                await connection.commit()
                for id in admitted:
                    self.say("admitted", id)
            elif choice < 0.9:
                await connection.rollback()
            # Else the connection is lost with everything in it.
        finally:
            await connection.close()

    async def cut(self) -> None:
        """Somewhere a connection breaks."""
        connection: TrioConnection[Any]
        connection = await TrioConnection.connect(self.url, autocommit=True)
        try:
            await connection.execute(
                "select pg_terminate_backend(pid) from (select pid from pg_stat_activity where"
                " datname = current_database() and pid <> pg_backend_pid()"
                " and application_name <> 'checker' order by random() limit 1) victim"
            )
        finally:
            await connection.close()


async def work(chaos: Chaos, deadline: float) -> None:
    actions: dict[Callable[[], Awaitable[None]], float] = {
        chaos.enqueue: 14,
        chaos.enqueue_again: 2,
        chaos.claim: 14,
        chaos.end: 40,
        chaos.renew: 8,
        chaos.reserve: 4,
        chaos.cancel: 4,
        chaos.supervise: 8,
        chaos.look_at_notes: 4,
        chaos.fail_lane: 0.03,
        chaos.purge: 0.1,
        chaos.be_a_user: 8,
        chaos.cut: 1,
    }
    names, weights = list(actions), list(actions.values())
    while trio.current_time() < deadline:
        (action,) = chaos.lot.choices(names, weights)
        try:
            with trio.fail_after(20):
                await action()
        except (StoreUnavailable, psycopg.OperationalError):
            pass
        except Exception as error:
            chaos.say("trouble", f"{action.__name__}: {error!r} {error.__cause__!r}")


async def main(url: str, seed: int, seconds: float) -> None:
    lot = random.Random(seed)
    async with trio.open_nursery() as nursery:
        deadline = trio.current_time() + seconds
        for number in range(3):
            nursery.start_soon(run_store, url, lot, seed * 10 + number, number, deadline)


async def run_store(url: str, lot: random.Random, seed: int, number: int, deadline: float) -> None:
    async with AsyncExitStack() as stack:
        while True:
            try:
                store = await stack.enter_async_context(open_postgres_store(url, schema=SCHEMA))
                break
            except StoreUnavailable:
                # Somebody's chaos has cut the connection that was being opened.
                await trio.sleep(0.01)
        # Two that pause between statements, one as it really is.
        assert isinstance(store, PostgresStore)
        if number:
            await store.close()
            for name in ("_lanes", "_callers"):
                session = PausingSession(store._conninfo, store.dialect, None, lot=lot)
                setattr(store, name, session)
        chaos = Chaos(url, store, lot, seed)
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(work, chaos, deadline)


if __name__ == "__main__":
    # Connections are meant to get lost here.
    warnings.simplefilter("ignore", ResourceWarning)
    trio.run(main, sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
