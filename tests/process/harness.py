"""Starts workers, watches what they write, sends them signals, and judges the ledger.

`worker.py` says what the ledger is. Times here are nanoseconds since boot unless said otherwise.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from pathlib import Path
from typing import Any, Literal, TypeVar

import psycopg
import trio
from attrs import define, field, frozen

from tests.postgres.server import PostgresServer
from trio_watchdog import Client, Job, open_client
from trio_watchdog.testing import broken_rows, check_invariants

T = TypeVar("T")

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

PATIENCE = 60.0
"""Seconds to wait for what has to happen. Long, for the machine may be busy; nothing waits for it
to pass."""

LEASE = 4.0
HEARTBEAT = 0.3
"""A worker that stands still for three seconds keeps its claims."""

ALONE: dict[str, Any] = {"lease": 5.0, "heartbeat": 0.3, "margin": 1.5}
"""For a worker that is to lose its claims by its own clock: it stops so long before the end of its
lease. In earnest that is three seconds of thirty; a tenth of a short lease is less than what a busy
machine takes for the way from a deadline to the line in the ledger."""

STALL = 10.0
"""Seconds that a busy machine may add to what takes no time; for limits, which nothing waits for.
"""

IS_FULL = os.environ.get("WATCHDOG_TEST_FULL", "0") not in ("", "0")
"""Full size, as a release wants it, instead of what is enough for every day."""

SECOND = 10**9

JOB_COLUMNS = (
    "sequence, id, queue, lane, priority, not_before, max_recoveries, recovery_window, state,"
    " hint, token, owner, lease_until, attempt_count, attempt_open, recovery_count,"
    " window_began_at, cancellation_id, outcome, reason, settled_group, settled_at, payload"
)


def now() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


# -- the ledger, read ------------------------------------------------------------------------------


@frozen
class Line:
    """One line of the ledger."""

    at: int
    kind: str
    worker: str
    pid: int
    job: str | None = None
    queue: str | None = None
    token: str | None = None
    facts: dict[str, Any] = field(factory=dict[str, Any])

    @classmethod
    def parse(cls, text: bytes) -> Line:
        data = json.loads(text)
        known = {name: data.pop(name, None) for name in ("job", "queue", "token")}
        place = {name: data.pop(name) for name in ("at", "kind", "worker", "pid")}
        return cls(**place, **known, facts=data)

    def fits(self, **wanted: Any) -> bool:
        return all(
            (getattr(self, name) if hasattr(self, name) else self.facts.get(name)) == value
            for name, value in wanted.items()
        )


@define
class Execution:
    """One run of a handler, as its lines tell it."""

    begin: Line
    end: Line | None = None
    beats: list[int] = field(factory=list[int])

    @property
    def job(self) -> str:
        assert self.begin.job is not None
        return self.begin.job

    @property
    def queue(self) -> str:
        assert self.begin.queue is not None
        return self.begin.queue

    @property
    def worker(self) -> str:
        return self.begin.worker

    @property
    def reason(self) -> str | None:
        assert self.end is not None, f"{self.job} has not ended"
        return self.end.facts["reason"]


class Tail:
    """Reads a growing file of lines, from where it stopped the last time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def fresh(self) -> Iterator[bytes]:
        """The lines that have come since."""
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            for text in file:
                if not text.endswith(b"\n"):
                    # Half of it is there so far; the other half would not be a line.
                    break
                self._offset += len(text)
                yield text


class Ledger:
    """What was written so far; also written to, for what the test itself does."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "ledger"
        self._lines: list[Line] = []
        self._by_kind = defaultdict[str, list[Line]](list)
        self._tail = Tail(self.path)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._file = os.open(self.path, flags)

    def note(self, kind: str, pid: int = 0, **facts: Any) -> int:
        """Write a line in the name of the test; returns its time."""
        at = now()
        line = {"at": at, "kind": kind, "worker": "test", "pid": pid, **facts}
        os.write(self._file, json.dumps(line).encode() + b"\n")
        return at

    def close(self) -> None:
        os.close(self._file)

    def lines(self, kind: str | None = None, **wanted: Any) -> list[Line]:
        """All lines of this kind, with these facts."""
        for text in self._tail.fresh():
            line = Line.parse(text)
            self._lines.append(line)
            self._by_kind[line.kind].append(line)
        lines = self._lines if kind is None else self._by_kind[kind]
        return [line for line in lines if line.fits(**wanted)] if wanted else lines

    def executions(self, **wanted: Any) -> list[Execution]:
        """Runs of handlers, by their begin."""
        found: dict[str | None, Execution] = {}
        for line in self.lines():
            if line.facts.get("hook"):
                continue
            if line.kind == "begin":
                assert line.token not in found, f"token {line.token} began twice"
                found[line.token] = Execution(line)
            elif line.kind == "end":
                found[line.token].end = line
            elif line.kind == "beat":
                found[line.token].beats.append(line.at)
        executions = [e for e in found.values() if e.begin.fits(**wanted)]
        return sorted(executions, key=lambda e: e.begin.at)


# -- what must be true of a ledger -----------------------------------------------------------------


CUT = ("lease_lost", "cancellation", "lane_failed", "timeout")
"""Reasons for which a handler is cancelled, other than a planned stop."""


def overlaps(ledger: Ledger, voided: Mapping[str, int] | None = None) -> list[str]:
    """Executions of one queue that were at work at the same time.

    An execution is at work from its begin to its end. If its process was killed it may have been
    at work until the kill, which is noted just before it is sent. If its process was frozen, it
    was at work until the freeze, noted when the process stood still. What a frozen process would
    have done next it does when it is thawed, if it stood between waking up and its next checkpoint:
    so one beat after the thaw is no overlap, and a second one is. That next step may also be the
    begin of a handler, see `is_stillborn`. ``voided``: jobs whose claims were taken from them while
    they ran, by `fail_lane`, and the earliest moment of it; until then they were at work.
    """
    voided = voided or {}
    frozen, thawed, killed = (moments(ledger, kind) for kind in ("freeze", "thaw", "kill"))
    problems: list[str] = []
    queues = defaultdict[str, list[tuple[int, int, str]]](list)
    for execution in ledger.executions():
        begin, end = execution.begin, execution.end
        name = f"{execution.job} in {execution.worker} ({begin.token})"
        if is_stillborn(execution, thawed[begin.pid]):
            continue
        # The next kill of this number: over hours the system gives a number to another process.
        until = next((at for at in killed[begin.pid] if at > begin.at), None)
        if end is not None:
            until = end.at
        if until is None:
            problems.append(f"{name} has no end, and was not killed")
            continue
        freezes = [at for at in frozen[begin.pid] if begin.at < at < until]
        # Cancelled before the freeze, and the end not written yet, is as good as lost in it.
        if freezes and (end is None or end.facts["reason"] in CUT):
            if sum(beat > freezes[-1] for beat in execution.beats) > 1:
                problems.append(f"{name} worked on after it was thawed")
            until = freezes[-1]
        until = min(until, voided.get(execution.job, until))
        if begin.at < until:
            queues[execution.queue].append((begin.at, until, name))
    for queue, intervals in queues.items():
        intervals.sort()
        for (_, until, first), (begin_at, _, second) in itertools.pairwise(intervals):
            if begin_at < until:
                problems.append(
                    f"queue {queue}: {second} began {(until - begin_at) / 1e6:.3f} ms before the"
                    f" end of {first}"
                )
    return problems


def moments(ledger: Ledger, kind: str) -> defaultdict[int, list[int]]:
    """When something was done to a process, by its number."""
    found = defaultdict[int, list[int]](list)
    for line in ledger.lines(kind):
        found[line.pid].append(line.at)
    return found


def is_stillborn(execution: Execution, thawed: Iterable[int]) -> bool:
    """Whether a thawed process began it, on a claim that was lost while it stood still.

    Nothing lies between the answer that lets a handler begin and its begin; if the process is
    frozen just there, the handler begins, and ends at its first checkpoint.
    """
    begin, end = execution.begin, execution.end
    return (
        end is not None
        and end.facts["reason"] == "lease_lost"
        and len(execution.beats) <= 1
        and any(at < begin.at < at + SECOND for at in thawed)
    )


def out_of_order(ledger: Ledger, rows: Iterable[dict[str, Any]]) -> list[str]:
    """Executions that began before one of a job that goes first. All jobs were there before."""
    ranks = {row["id"]: (-row["priority"], row["sequence"]) for row in rows}
    last: dict[str, Execution] = {}
    problems: list[str] = []
    for execution in ledger.executions():
        before = last.get(execution.queue)
        if before is not None and ranks[execution.job] < ranks[before.job]:
            problems.append(f"queue {execution.queue}: {before.job} before {execution.job}")
        last[execution.queue] = execution
    return problems


# -- workers ---------------------------------------------------------------------------------------


class Worker:
    """A process that works on lanes."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path, ledger: Ledger):
        self.name = name
        self.process = process
        self._log = log
        self._ledger = ledger
        self._owner: str | None = None

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> int:
        """SIGKILL; returns when it was sent, once the process is gone."""
        at = self._ledger.note("kill", self.pid)
        self.process.kill()
        self.process.wait(PATIENCE)
        return at

    def freeze(self) -> int:
        """SIGSTOP; returns when the process stood still."""
        self.process.send_signal(signal.SIGSTOP)
        end = time.monotonic() + PATIENCE
        while self._state() != "T":
            assert time.monotonic() < end, f"{self.name} does not stop"
            time.sleep(0.001)
        return self._ledger.note("freeze", self.pid)

    def thaw(self) -> int:
        at = self._ledger.note("thaw", self.pid)
        self.process.send_signal(signal.SIGCONT)
        return at

    def terminate(self) -> int:
        """SIGTERM."""
        at = self._ledger.note("terminate", self.pid)
        self.process.send_signal(signal.SIGTERM)
        return at

    def _state(self) -> str:
        stat = Path(f"/proc/{self.pid}/stat").read_text()
        return stat[stat.rindex(")") + 2]


# -- the world -------------------------------------------------------------------------------------


class World:
    """One database, one ledger, and the processes that share them."""

    def __init__(self, url: str, folder: Path, client: Client) -> None:
        self.url = url
        self.folder = folder
        self.client = client
        self.ledger = Ledger(folder)
        self.workers: list[Worker] = []
        self.server: PostgresServer | None = None
        """Where this world has one for itself."""
        self._connection: psycopg.Connection[Any] | None = None

    @property
    def is_sqlite(self) -> bool:
        return self.url.startswith("sqlite:")

    @property
    def path(self) -> Path:
        """The database's file."""
        return Path(self.url.removeprefix("sqlite:"))

    # -- processes --------------------------------------------------------------------------------

    def launch(
        self,
        name: str = "a",
        *,
        lanes: Sequence[dict[str, Any]] | None = None,
        command: Sequence[str] = (str(HERE / "worker.py"),),
        lease: float = LEASE,
        heartbeat: float = HEARTBEAT,
        **config: Any,
    ) -> Worker:
        """Start a worker, and do not wait for it. ``config`` is more of `worker.Config`."""
        config = {
            "name": name,
            "database": self.url,
            "folder": str(self.folder),
            "lanes": [{"name": None}] if lanes is None else list(lanes),
            **config,
        }
        config["options"] = {"lease": lease, "heartbeat": heartbeat, **config.get("options", {})}
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"PYTHONPATH": path, "WORKER_CONFIG": json.dumps(config)}
        log = self.folder / f"{name}.log"
        with open(log, "ab") as output:
            process = subprocess.Popen(
                [sys.executable, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=HERE,
                env=environment,
            )
        worker = Worker(name, process, log, self.ledger)
        self.workers.append(worker)
        return worker

    async def start(self, name: str = "a", **config: Any) -> Worker:
        """Start a worker, and wait until its lanes have started."""
        worker = self.launch(name, **config)
        await self.ready(worker)
        return worker

    async def ready(self, *workers: Worker) -> None:
        for worker in workers:
            await self.line("ready", pid=worker.pid)

    async def ended(self, worker: Worker) -> int:
        """The exit code, once the process has ended by itself."""
        await self.until(lambda: not worker.is_running, f"{worker.name} has not ended")
        return worker.process.returncode

    def freeze(self, worker: Worker) -> int:
        """SIGSTOP while the process is not in the middle of a transaction.

        Frozen there, it would keep an SQLite file locked against everybody until it is thawed: one
        writer at a time is what SQLite is.
        """
        while True:
            at = worker.freeze()
            if not self.is_sqlite or self._is_writable():
                return at
            worker.thaw()
            time.sleep(0.05)

    def _is_writable(self) -> bool:
        with contextlib.closing(sqlite3.connect(self.path, timeout=0.2)) as connection:
            try:
                connection.execute("begin immediate")
            except sqlite3.OperationalError:
                return False
            connection.rollback()
        return True

    def close(self) -> None:
        for worker in self.workers:
            worker.process.kill()
            worker.process.wait(PATIENCE)
        self.ledger.close()
        if self._connection is not None:
            self._connection.close()

    # -- gates ------------------------------------------------------------------------------------

    def open(self, gate: str, worker: str | None = None) -> None:
        """Let jobs go on that wait at the gate: in all workers, or in one."""
        (self.folder / (gate if worker is None else f"{gate}.{worker}")).touch()

    # -- waiting ----------------------------------------------------------------------------------

    async def until(
        self, condition: Callable[[], T], complaint: str | Callable[[], str] = "in vain"
    ) -> T:
        """What the condition gives, once it is true."""
        end = time.monotonic() + PATIENCE
        while not (value := condition()):
            if time.monotonic() > end:
                text = complaint if isinstance(complaint, str) else complaint()
                raise AssertionError(f"{text}\n{self.story()}")
            await trio.sleep(0.005)
        return value

    async def line(self, kind: str, count: int = 1, **wanted: Any) -> Line:
        """The line of the ledger, the ``count``-th of its kind, once it is there."""
        lines = await self.until(
            lambda: self.ledger.lines(kind, **wanted)[count - 1 :],
            f"no line {kind!r} with {wanted}",
        )
        return lines[0]

    async def lives_until(self, id: str, at: float) -> None:
        """Return when a job has shown life after this time."""

        def lives() -> bool:
            last = next((b for b in reversed(self.ledger.lines("beat")) if b.job == id), None)
            return last is not None and last.at > at

        await self.until(lives, f"{id} shows no life")

    async def renewed(self, id: str) -> None:
        """Return when the lease of a running job has been extended."""
        before = self.job(id)

        def is_renewed() -> bool:
            row = self.job(id)
            assert row["token"] == before["token"], f"{id} is lost\n{self.story()}"
            return row["lease_until"] > before["lease_until"]

        await self.until(is_renewed, f"{id} is not renewed")

    async def settled(self, *ids: str, seconds: float = PATIENCE) -> None:
        """Return when these jobs are settled, or else all."""
        which = f" and id in ({', '.join(repr(id) for id in ids)})" if ids else ""
        end = time.monotonic() + seconds
        while rows := self.rows(f"select id, state from {{jobs}} where state <> 'settled'{which}"):
            assert time.monotonic() < end, f"{rows[:5]} of {len(rows)} not settled\n{self.story()}"
            await trio.sleep(0.05)

    def story(self) -> str:
        """For people who want to know why a test failed."""
        lines = [line for line in self.ledger.lines() if line.kind != "beat"]
        parts = ["last lines of the ledger:", *map(str, lines[-30:])]
        for worker in self.workers:
            state = "runs" if worker.is_running else f"exit code {worker.process.returncode}"
            parts += [f"log of {worker.name} ({worker.pid}, {state}):", worker.log[-2000:]]
        return "\n".join(parts)

    # -- jobs -------------------------------------------------------------------------------------

    async def enqueue(self, id: str, *steps: Any, hook: Sequence[Any] = (), **fields: Any) -> None:
        """Admit a job that does these steps, in the lane ``work`` unless another is given."""
        fields = {"queue": id, "lane": "work", **fields}
        lane = fields.pop("lane")
        payload = {"steps": list(steps), "hook": list(hook)}
        await self.client.enqueue(Job(lane, payload, id=id, **fields))

    def rows(self, text: str) -> list[Any]:
        """What a query gives, asked beside the product. ``{jobs}`` is the table."""
        if self.is_sqlite:
            with contextlib.closing(sqlite3.connect(self.path)) as connection:
                return connection.execute(text.format(jobs="watchdog_jobs")).fetchall()
        query = text.format(jobs="trio_watchdog.jobs").encode()
        if self._connection is not None:
            with contextlib.suppress(psycopg.OperationalError):  # the server was away
                return self._connection.execute(query).fetchall()
            self._connection.close()
        self._connection = psycopg.connect(self.url, autocommit=True)
        return self._connection.execute(query).fetchall()

    def jobs(self) -> dict[str, dict[str, Any]]:
        """The table, by id."""
        names = JOB_COLUMNS.split(", ")
        rows = self.rows(f"select {JOB_COLUMNS} from {{jobs}} order by sequence")
        return {row["id"]: row for row in (dict(zip(names, row, strict=True)) for row in rows)}

    def job(self, id: str) -> dict[str, Any]:
        return self.jobs()[id]

    def lease_until(self, id: str) -> int:
        """When the job's lease ends by the database, in nanoseconds since boot."""
        lease_until = self.job(id)["lease_until"]
        if self.is_sqlite:
            with contextlib.closing(sqlite3.connect(self.path)) as connection:
                (offset,) = connection.execute(
                    "select value from watchdog_meta where name = 'boot_offset'"
                ).fetchone()
            return (lease_until - offset) * 1_000_000
        # The server's clock is this host's. In this order, for a pause between the two looks must
        # not make the lease longer than it is.
        at = now()
        return lease_until * 1_000_000 - time.time_ns() + at

    # -- the verdict ------------------------------------------------------------------------------

    def check(self, *, is_done: bool = True) -> dict[str, dict[str, Any]]:
        """Nothing lost, nothing run by two at once, all in order; returns the jobs."""
        jobs = self.jobs()
        problems = overlaps(self.ledger)
        if self.is_sqlite:
            check_invariants(self.path)
        elif is_done:
            problems += broken_rows(jobs.values())
        if is_done:
            problems += [
                f"{id} is {row['state']}" for id, row in jobs.items() if row["state"] != "settled"
            ]
        assert not problems, "\n".join([*problems[:20], self.story()])
        return jobs


@contextlib.asynccontextmanager
async def open_world(url: str, folder: Path) -> AsyncGenerator[World]:
    async with open_client(url) as client:
        world = World(url, folder, client)
        try:
            yield world
        finally:
            world.close()


Kind = Literal["sqlite", "postgres", "server"]
"""``server``: a PostgreSQL server for this world alone, to do to it what one likes."""

OpenWorld = Callable[[Kind], contextlib.AbstractAsyncContextManager[World]]

Test = Callable[..., Awaitable[None]]


class Runs:
    """A test that is several runs, all at the same time, each in a world of its own.

    Most of a run is waiting: for processes to start, and for leases to end.
    """

    def __init__(self, *runs: tuple[str, Kind, Callable[[World], Awaitable[None]]]) -> None:
        self.runs = runs

    async def together(self, open_worlds: OpenWorld) -> None:
        try:
            async with trio.open_nursery() as nursery:
                for label, kind, run in self.runs:
                    nursery.start_soon(self._one, label, open_worlds(kind), run)
        except BaseExceptionGroup as group:
            # What comes of the others when one has failed is no news.
            raise first_of(group) from None

    async def _one(
        self,
        label: str,
        opening: contextlib.AbstractAsyncContextManager[World],
        run: Callable[[World], Awaitable[None]],
    ) -> None:
        try:
            async with opening as world:
                await run(world)
        except BaseException as error:
            error.add_note(f"in the run {label}")
            raise


def first_of(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def on(*kinds: Kind, **cases: Mapping[str, Any]) -> Callable[[Test], Runs]:
    """Run this on these kinds of database, in each of these cases.

    Its first argument is a world; ``cases`` are further ones, with a name for each value.
    """

    def decorate(test: Test) -> Runs:
        runs: list[tuple[str, Kind, Callable[[World], Awaitable[None]]]] = []
        for kind in kinds:
            for named in itertools.product(*(case.items() for case in cases.values())):
                label = f"{test.__name__}[{'-'.join([kind, *(name for name, _ in named)])}]"
                values = dict(zip(cases, (value for _, value in named), strict=True))
                runs.append((label, kind, functools.partial(test, **values)))
        return Runs(*runs)

    return decorate


def at_once(*tests: Runs) -> Callable[[OpenWorld], Awaitable[None]]:
    """Make one test of these."""

    async def together(open_worlds: OpenWorld) -> None:
        await Runs(*(run for test in tests for run in test.runs)).together(open_worlds)

    return together


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Nobody else writes to an SQLite file meanwhile."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("pragma busy_timeout = 60000")
        connection.execute("begin immediate")
        yield
        connection.execute("rollback")
