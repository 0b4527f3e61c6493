"""What a soak does to one store: jobs, cancellations, and everything that may go wrong."""

from __future__ import annotations

import functools
import random
import signal
import sqlite3
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import psycopg
import trio

from tests.postgres.server import PostgresServer
from tests.process.harness import SECOND, Line, Tail, Worker, World, now, open_world
from tests.soak.check import Report, contradictions, report
from tests.soak.terms import (
    AHEAD,
    BEHIND,
    HEARTBEAT,
    LEASE,
    RETENTION,
    RIGHT,
    TRY_LATER,
)
from trio_watchdog import Job, Recovery, StoreUnavailable
from trio_watchdog.testing import broken_rows, check_invariants

T = TypeVar("T")

QUEUES = 12
"""Queues that jobs share. Half of the jobs have one of these, and the others nobody to wait for."""

FAMILIES = 3
"""Queues of the children that jobs admit."""

BACKLOG = 300
"""Unsettled jobs at which the load waits: a slow machine makes the soak smaller, not longer."""

VICTIMS = ("b", "c")
"""Workers that are killed, and drained. The other one, "a", lives through everything, so that its
memory can be judged."""

SETTLE_SECONDS = 120.0
"""For what is left when the load ends. Some seconds suffice where a core is free."""

DRAIN_SECONDS = 60.0

KEPT_SECONDS = 180.0
"""How long a settled job beyond `RETENTION` may stay: until it is old enough, a worker prunes, and
the workers that prune have drained."""

LANES = ("trio", "hook", "asyncio", "thread", "family", "limited")

ALWAYS = 1000
"""Attempts. More than there will be."""

EXPECTED = {
    "none": "completed",
    "complete": "completed",
    "fail": "failed",
    "cancel": "cancelled",
    "unknown": "outcome_unknown",
    "retry": "completed",
    "raise": "completed",
}


class Soak:
    """One store under load."""

    def __init__(
        self, world: World, server: PostgresServer | None, dice: random.Random, rate: float
    ):
        self.world = world
        self.server = server
        self.ledger = world.ledger
        self.client = world.client
        self.dice = dice
        self.rate = rate
        self.problems: list[str] = []
        self._workers: dict[str, Worker] = {}
        self._starts = 0
        self._said = Said(self.ledger.path)
        self._unsettled: set[str] = set()
        self._waiting: dict[str, str] = {}
        """Admitted, and not read as settled: what can be cancelled. By id, with its queue."""
        self._is_read = trio.Event()
        self._is_over = False

    async def run(self, seconds: float) -> Report:
        """Load and chaos for so long, then quiet, then the verdict in ``problems``."""
        await self._prepare()
        async with trio.open_nursery() as reading:
            reading.start_soon(self._read_settled)
            for slot in ("a", *VICTIMS):
                self._launch(slot)
            with trio.move_on_after(seconds):
                async with trio.open_nursery() as nursery:
                    for task in (
                        self._admit,
                        self._cancel,
                        self._fail_lanes,
                        self._purge_queues,
                        self._disturb,
                        self._disturb_server,
                    ):
                        nursery.start_soon(task)
            for slot in self._workers:
                await self._set_clock(slot, RIGHT)
            await self._settled()
            for slot in self._workers:
                await self._drain(slot)
            self._is_over = True
            with trio.move_on_after(SETTLE_SECONDS):
                await self._is_read.wait()
            reading.cancel_scope.cancel()
        return await trio.to_thread.run_sync(self._judge)

    async def _prepare(self) -> None:
        create = "create table soak_effects (id text primary key)"
        url = self.world.url
        opened: Any = (
            sqlite3.connect(self.world.path) if self.world.is_sqlite else psycopg.connect(url)
        )
        with closing(opened) as connection:
            connection.execute(create)
            connection.commit()
        await self.client.protect_settled("soak")

    def _judge(self) -> Report:
        name = "SQLite" if self.world.is_sqlite else "PostgreSQL"
        self.problems += contradictions(self.ledger)
        rows = self.world.jobs()
        self.problems += [
            f"{id} is {row['state']}" for id, row in rows.items() if not row["outcome"]
        ]
        if len(rows) > (limit := RETENTION.keep + self.rate * KEPT_SECONDS):
            self.problems.append(f"{len(rows)} rows are kept; {limit:g} are allowed")
        if self.world.is_sqlite:
            try:
                check_invariants(self.world.path)
            except AssertionError as error:
                self.problems.append(str(error))
        else:
            self.problems += broken_rows(rows.values())
        for worker in self.world.workers:
            for line in worker.log.splitlines():
                if "This must not happen" in line:
                    self.problems.append(f"{worker.name} says: {line}")
        return report(name, self.ledger, len(rows))

    # -- patience ---------------------------------------------------------------------------------

    async def _patiently(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask until there is an answer: the server may be away for longer than a client waits."""
        while True:
            try:
                return await ask()
            except StoreUnavailable:
                await trio.sleep(0.2)

    # -- the load ---------------------------------------------------------------------------------

    async def _admit(self) -> None:
        """Enqueue jobs at random, one or a few at a time, and one of them twice now and then."""
        for number in range(10**9):
            await trio.sleep(self.dice.expovariate(self.rate))
            await until(lambda: len(self._unsettled) <= BACKLOG)
            count = self.dice.choice((2, 3, 5)) if self.dice.random() < 0.05 else 1
            jobs = [self._draw(f"job{number}-{place}") for place in range(count)]
            for job in jobs:
                self._ask_for(job)
            if count == 1:
                enqueue = functools.partial(self.client.enqueue, jobs[0])
                admissions = [await self._patiently(enqueue)]
                # In a queue of its own, for from the others it may have been purged meanwhile.
                if jobs[0].queue == jobs[0].id and self.dice.random() < 0.1:
                    again = await self._patiently(enqueue)
                    if again.status != "duplicate":
                        self.problems.append(f"{jobs[0].id} was admitted twice")
            else:
                enqueue_many = functools.partial(self.client.enqueue_many, jobs)
                admissions = await self._patiently(enqueue_many)
            for admission in admissions:
                job = admission.job
                self.ledger.note("admitted", job=job.id, queue=job.queue, sequence=job.sequence)
                if job.id in self._unsettled:
                    self._waiting[job.id] = job.queue

    def _draw(self, id: str) -> Job:
        dice = self.dice
        lane = dice.choices(LANES, (8, 4, 4, 4, 2, 3))[0]
        ending = dice.choices(
            ("none", "complete", "fail", "cancel", "unknown", "retry", "raise"),
            (50, 15, 5, 3, 3, 8, 4),
        )[0]
        # Mostly short; some as long as a lease and more.
        work = dice.choices(
            (0.0, dice.uniform(0.0, 0.2), dice.uniform(0.2, 1.0), dice.uniform(3.0, 6.0)),
            (10, 60, 26, 4),
        )[0]
        payload: dict[str, Any] = {"work": round(work, 3), "end": ending}
        if ending in ("retry", "raise"):
            payload["times"] = dice.randint(1, 3)
        if lane == "hook":
            payload["hook"] = [["beat", round(dice.uniform(0.0, 0.1), 3)]]
            payload["hook_fails"] = dice.random() < 0.05
        if lane == "family":
            payload["child"] = f"children{dice.randrange(FAMILIES)}"
            payload["rolls_back"] = dice.random() < 0.2
        if lane == "limited":
            payload |= {"work": round(min(work, 0.2), 3), "end": "none"}
            payload["colour"] = dice.choice(("trio", "asyncio", "thread"))
            payload["swallows"] = dice.random() < 0.3
            payload["retries"] = dice.random() < 0.6
            times = dice.choices(
                (0, 1, 2, ALWAYS), (4, 3, 2, 1) if payload["retries"] else (4, 0, 0, 4)
            )
            payload["overruns"] = times[0]
        recovery = dice.choices((Recovery(1000), Recovery(1), None), (8, 1, 1))[0]
        queue = f"queue{dice.randrange(QUEUES)}" if dice.random() < 0.5 else None
        if lane != "limited" and dice.random() < 0.06:
            # Long enough to be lost more than once, and to outlive a window. Nobody waits for it.
            recovery = Recovery(dice.choice((1, 2)), window=dice.choice((1.0, 6.0)))
            # Once is enough, for the end waits for it.
            payload |= {"work": round(dice.uniform(6.0, 14.0), 3), "end": "complete"}
            queue = None
        due = None
        if dice.random() < 0.1:
            due = datetime.now(UTC) + timedelta(seconds=dice.uniform(0.1, 2.0))
        return Job(
            lane,
            payload,
            id=id,
            queue=queue,
            priority=dice.choices((0, dice.randint(-3, 3)), (3, 1))[0],
            not_before=due,
            recovery=recovery,
        )

    def _ask_for(self, job: Job) -> None:
        facts: dict[str, Any] = {}
        if job.not_before is not None and self.server is not None:
            facts["due"] = int(job.not_before.timestamp() * SECOND) - time.time_ns() + now()
        is_hopeless = job.payload.get("overruns") == ALWAYS
        self._unsettled.add(job.id)
        self.ledger.note(
            "asked",
            job=job.id,
            queue=job.queue,
            lane=job.lane,
            expects="failed" if is_hopeless else EXPECTED[job.payload["end"]],
            recoveries=None if job.recovery is None else job.recovery.max_recoveries,
            window=None if job.recovery is None else job.recovery.window,
            **facts,
        )

    async def _cancel(self) -> None:
        """Cancel a job now and then, whatever it does."""
        while True:
            await trio.sleep(self.dice.expovariate(self.rate / 15))
            if self._waiting:
                id = self.dice.choice(tuple(self._waiting))
                only_if_queued = self.dice.random() < 0.2
                cancel = functools.partial(self.client.cancel, id, only_if_queued=only_if_queued)
                result = await self._patiently(cancel)
                outcome = None if result.outcome is None else result.outcome.value
                self.ledger.note("cancel", job=id, status=result.status, outcome=outcome)

    async def _fail_lanes(self) -> None:
        """Fail all that is in a lane now and then; the reason tells which call it was."""
        for number in range(10**9):
            await trio.sleep(self.dice.expovariate(self.rate / 120))
            known = {"lane": self.dice.choice(LANES), "reason": f"lane failed by call {number}"}
            self.ledger.note("failing", **known)
            more = True
            while more:
                failure = await self._patiently(
                    functools.partial(self.client.fail_lane, known["lane"], known["reason"])
                )
                more = failure.more
                ids = [job.id for job in failure.jobs]
                self.ledger.note("lane_failed", **known, jobs=ids, more=more)

    async def _purge_queues(self) -> None:
        """Delete what waits in a queue now and then."""
        families = [f"children{number}" for number in range(FAMILIES)]
        while True:
            await trio.sleep(self.dice.expovariate(self.rate / 45))
            # One where somebody waits, as a rule. The queue of a single job is not worth it.
            shared = [queue for id, queue in self._waiting.items() if queue != id]
            queue = self.dice.choice(families + shared)
            waiting = [id for id, other in self._waiting.items() if other == queue]
            self.ledger.note("purging", queue=queue)
            count = await self._patiently(functools.partial(self.client.purge_queue, queue))
            self.ledger.note("purged", queue=queue, count=count)
            for id in waiting:
                if await self._patiently(functools.partial(self.client.read, id)) is None:
                    self._unsettled.discard(id)
                    self._waiting.pop(id, None)

    async def _read_settled(self) -> None:
        """Write the settled feed down, and let go of what is written."""
        cursor = None
        while True:
            was_over = self._is_over
            page = await self._patiently(functools.partial(self.client.read_settled, after=cursor))
            for job in page.jobs:
                self._unsettled.discard(job.id)
                self._waiting.pop(job.id, None)
                self.ledger.note(
                    "settled",
                    job=job.id,
                    queue=job.queue,
                    sequence=job.sequence,
                    priority=job.priority,
                    outcome=job.outcome.value,
                    reason=job.reason,
                    attempt_count=job.attempt_count,
                    recovery_count=job.recovery_count,
                    cancellation=job.cancellation_id,
                )
            if page.jobs:
                cursor = page.cursor
                protect = functools.partial(self.client.protect_settled, "soak", cursor)
                await self._patiently(protect)
            elif was_over and not self._unsettled & self.world.jobs().keys():
                # What is not in the table was cut off by the end, and never admitted.
                self._is_read.set()
                return
            await trio.sleep(0.2)

    # -- workers ----------------------------------------------------------------------------------

    def _launch(self, slot: str) -> None:
        self._starts += 1
        self._workers[slot] = self.world.launch(
            f"{slot}{self._starts}",
            lanes=[],
            command=("-m", "tests.soak.worker"),
            lease=LEASE,
            heartbeat=HEARTBEAT,
            options={"grace": 10.0, "poll": 2.0},
        )

    async def _ready_worker(self, slot: str) -> Worker | None:
        """The worker, once it has started its lanes; None if it has ended instead."""
        while (worker := self._workers[slot]).pid not in self._said.by("ready"):
            if not worker.is_running and not self._restart(slot):
                return None
            await trio.sleep(0.05)
        return worker

    def _restart(self, slot: str) -> bool:
        """Start a worker again that has ended by itself; says whether that was all right.

        It is, when it came while the server was away, and asks to be started later.
        """
        worker = self._workers[slot]
        code = worker.process.returncode
        is_fine = code == TRY_LATER and worker.pid not in self._said.by("ready")
        if not is_fine:
            self.problems.append(f"{worker.name} ended by itself ({code}):\n{tail(worker)}")
        self._launch(slot)
        return is_fine

    async def _disturb(self) -> None:
        """One disturbance of a worker after the other."""
        acts = (self._kill, self._freeze, self._drain_and_restart, self._step_clock)
        while True:
            await trio.sleep(self.dice.uniform(1.0, 4.0))
            for slot, worker in list(self._workers.items()):
                if not worker.is_running:
                    self._restart(slot)
            (act,) = self.dice.choices(acts, (4, 3, 2, 2))
            # To its end, which comes soon: what follows finds all workers at work.
            with trio.CancelScope(shield=True):
                await act()

    async def _kill(self) -> None:
        slot = self.dice.choice(VICTIMS)
        self._workers[slot].kill()
        await trio.sleep(self.dice.choice((0.0, self.dice.uniform(0.0, 2.0))))
        self._launch(slot)

    async def _freeze(self) -> None:
        """Stop a worker for longer than its leases; some are killed in their sleep."""
        slot = self.dice.choice(("a", *VICTIMS))
        worker = await self._ready_worker(slot)
        if worker is None:
            return
        self.world.freeze(worker)
        await trio.sleep(LEASE + self.dice.uniform(0.5, 2.0))
        if slot in VICTIMS and self.dice.random() < 0.2:
            worker.kill()
            self._launch(slot)
        else:
            worker.thaw()

    async def _drain_and_restart(self) -> None:
        slot = self.dice.choice(VICTIMS)
        if await self._ready_worker(slot) is not None:
            # By then it has something to drain.
            await trio.sleep(self.dice.uniform(0.5, 2.0))
        await self._drain(slot, is_hurried=self.dice.random() < 0.5)
        self._launch(slot)

    async def _drain(self, slot: str, *, is_hurried: bool = False) -> None:
        """SIGTERM, and the worker's own end."""
        worker = await self._ready_worker(slot)
        if worker is None:
            return
        worker.terminate()
        if is_hurried:
            # The second one interrupts, and what runs is handed off.
            await until(lambda: worker.pid in self._said.by("draining") or not worker.is_running)
            worker.terminate()
        with trio.move_on_after(DRAIN_SECONDS):
            await until(lambda: not worker.is_running)
            code = worker.process.returncode
            # The second signal may find the work done, and the process on its way out.
            if code and not (is_hurried and code == -signal.SIGTERM):
                self.problems.append(f"{worker.name} drained and gave {code}:\n{tail(worker)}")
            return
        self.problems.append(
            f"{worker.name} has not drained in {DRAIN_SECONDS:g} s:\n{tail(worker)}"
        )
        worker.kill()

    async def _step_clock(self) -> None:
        await self._set_clock(
            self.dice.choice(("a", *VICTIMS)), self.dice.choice((RIGHT, AHEAD, BEHIND))
        )

    async def _set_clock(self, slot: str, number: signal.Signals) -> None:
        worker = await self._ready_worker(slot)
        if worker is not None:
            worker.process.send_signal(number)

    # -- the server -------------------------------------------------------------------------------

    async def _disturb_server(self) -> None:
        """Kill the server, restart it, or have it away for some seconds."""
        if self.server is None:
            return
        while True:
            await trio.sleep(self.dice.uniform(8.0, 20.0))
            mode, away = self.dice.choice(
                (
                    ("kill", 0.0),
                    ("fast", 0.0),
                    ("immediate", self.dice.uniform(0.0, 2.0)),
                    ("fast", LEASE + self.dice.uniform(-2.0, 2.0)),
                )
            )
            self.ledger.note("stop", mode=mode, away=away)
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(self.server.stop, mode)
                await trio.sleep(away)
                await trio.to_thread.run_sync(self.server.start)
            self.ledger.note("start")

    # -- the end ----------------------------------------------------------------------------------

    async def _settled(self) -> None:
        """Wait until nothing is left to do."""
        query = "select id from {jobs} where state <> 'settled'"
        with trio.move_on_after(SETTLE_SECONDS):
            await until(lambda: not self.world.rows(query))
            return
        left = [id for (id,) in self.world.rows(query)]
        self.problems.append(f"{len(left)} jobs are not settled after {SETTLE_SECONDS:g} s")
        for id in left[:5]:
            why = await self._patiently(functools.partial(self.client.explain, id))
            self.problems.append(f"{id}: {why}")


async def until(is_so: Callable[[], bool]) -> None:
    """Return when it is so."""
    while not is_so():  # noqa: ASYNC110 - it is other processes that make it so
        await trio.sleep(0.05)


def tail(worker: Worker) -> str:
    return worker.log[-2000:]


class Said:
    """Which workers have said that they are ready, or that they drain."""

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path)
        self._pids: dict[str, set[int]] = {"ready": set(), "draining": set()}

    def by(self, kind: str) -> set[int]:
        """The processes that have written a line of this kind."""
        for text in self._tail.fresh():
            # Few lines are worth their parsing.
            if b'"ready"' in text or b'"draining"' in text:
                line = Line.parse(text)
                self._pids.get(line.kind, set()).add(line.pid)
        return self._pids[kind]


@asynccontextmanager
async def open_soak(
    store: str, folder: Path, dice: random.Random, rate: float
) -> AsyncGenerator[Soak]:
    """A soak of one store in this folder, with a server of its own if it needs one."""
    if store == "sqlite":
        async with open_world(f"sqlite:{folder / 'jobs.db'}", folder) as world:
            yield Soak(world, None, dice, rate)
        return
    server = PostgresServer()
    try:
        await trio.to_thread.run_sync(server.start)
        async with open_world(server.url, folder) as world:
            yield Soak(world, server, dice, rate)
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(server.close)
