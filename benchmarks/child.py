"""One measurement, in a process of its own: ``python -m benchmarks.child SPEC``.

SPEC is JSON: ``store``, ``contestant``, ``measure`` (a function of `MEASURES`), ``database``,
``options`` and ``result``, the file to which the answer goes: ``values`` and ``notes``.

All instants are of the system's monotonic clock, which all processes share. What runs inside a
handler is one append to a list. The first tenth of the jobs is warm-up and is not counted, and a
drain has ended when the database holds no unsettled job any more, not when the last handler ran.
"""

from __future__ import annotations

import importlib
import json
import logging
import random
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from . import bare, flat
from .contestants import Contestant, load

SETTLE_SECONDS = 30.0
"""How long after the last handler a contestant may take to write everything down."""


class Recorder:
    """What ran when."""

    def __init__(self) -> None:
        self.events: list[tuple[int, int]] = []

    def __call__(self, number: int) -> None:
        self.events.append((number, time.monotonic_ns()))


class Probe:
    """Looks into the database from outside of the contestant, on a connection of its own."""

    def __init__(self, store: str, database: str) -> None:
        if store == "postgres":
            import psycopg

            self.connection: Any = psycopg.connect(database, autocommit=True)
        else:
            # Not the one at the top of this file: a contestant may have brought another.
            sqlite = importlib.import_module("sqlite3")
            self.connection = sqlite.connect(database, isolation_level=None, timeout=60)

    def count(self, *conditions: str) -> int:
        """How many rows there are of these tables under these conditions."""
        counts = " + ".join(f"(select count(*) from {condition})" for condition in conditions)
        return int(self.connection.execute(f"select {counts}").fetchone()[0])

    def is_any(self, *conditions: str) -> bool:
        exists = " or ".join(f"exists (select 1 from {condition})" for condition in conditions)
        return bool(self.connection.execute(f"select {exists}").fetchone()[0])


class Bench:
    """What a measure works with."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.store: str = spec["store"]
        self.database: str = spec["database"]
        self.options: dict[str, Any] = spec["options"]
        self.notes: list[str] = []
        self.contestant: Contestant = load(self.store, spec["contestant"])(
            self.database, self.options.get("keys", 0)
        )
        self.contestant.variant = self.options.get("variant", "")

    async def create(self) -> Probe:
        await self.contestant.create()
        return Probe(self.store, self.database)

    def process(self, measure: str, name: str, **options: Any) -> Process:
        """Another process of the same contestant on the same database."""
        result = f"{self.spec['result']}.{name}"
        spec = {**self.spec, "measure": measure, "result": result}
        return Process({**spec, "options": {**self.options, **options}})


class Process:
    """A child of a measurement: says ``ready``, waits for ``go`` and for ``stop``."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.result = Path(spec["result"])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.child", json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def is_told(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("a process of the measurement ended early")

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def ended(self) -> Any:
        if self.process.wait(120):
            raise RuntimeError("a process of the measurement failed")
        return json.loads(self.result.read_text())


# -- arithmetic -----------------------------------------------------------------------------------


def rate(instants: Sequence[int], end: int | None = None) -> float:
    """Jobs per second from the end of the warm-up to ``end``, or to the last one."""
    instants = sorted(instants)
    warm = max(1, len(instants) // 10)
    if len(instants) - warm < 1:
        return 0.0
    until = instants[-1] if end is None else end
    return (len(instants) - warm) / (max(1, until - instants[warm - 1]) / 1e9)


def delays(called: dict[int, tuple[int, int]], ran: dict[int, int]) -> dict[str, float]:
    """Milliseconds from the call of enqueue, and from its return, to the start of the handler."""
    from_call = sorted((ran[i] - at) / 1e6 for i, (at, _) in called.items() if i in ran)
    from_return = sorted((ran[i] - at) / 1e6 for i, (_, at) in called.items() if i in ran)
    return {
        "p50": statistics.median(from_call),
        "p95": from_call[int(len(from_call) * 0.95)],
        "p50_after_return": statistics.median(from_return),
    }


def check_once(bench: Bench, events: Sequence[tuple[int, int]], expected: int | None) -> None:
    """Each job ran exactly once; when cut short, none twice. Order is told, not enforced."""
    numbers = [number for number, _ in events]
    if len(set(numbers)) != len(numbers):
        raise AssertionError(f"{len(numbers) - len(set(numbers))} jobs ran twice")
    if expected is not None and sorted(numbers) != list(range(expected)):
        raise AssertionError(f"{len(numbers)} jobs ran, {expected} were enqueued")
    last: dict[str | None, int] = {}
    swapped = 0
    for number, _ in events:
        key = bench.contestant.key(number)
        if key is not None:
            swapped += number < last.get(key, -1)
            last[key] = max(number, last.get(key, -1))
    if swapped:
        bench.notes.append(f"order of a key broken {swapped} times")


async def until(condition: Callable[[], bool], seconds: float, interval: float = 0.005) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        await anyio.sleep(interval)
    return True


# -- measures -------------------------------------------------------------------------------------


async def enqueue(bench: Bench) -> dict[str, float]:
    """Jobs per second, one by one and in bulk, with nobody working."""
    one, bulk, cap = (bench.options[name] for name in ("one", "bulk", "cap"))
    probe = await bench.create()
    contestant = bench.contestant
    values: dict[str, float] = {}
    async with contestant.opened():
        instants: list[int] = []
        deadline = time.monotonic() + cap
        while len(instants) < one and time.monotonic() < deadline:
            await contestant.enqueue(len(instants))
            instants.append(time.monotonic_ns())
        values["one"] = rate(instants)
        await contestant.enqueue_many(range(100))  # warm-up
        start = time.monotonic()
        await contestant.enqueue_many(range(bulk))
        values["bulk"] = bulk / (time.monotonic() - start)
    waiting = probe.count(contestant.waiting)
    expected = len(instants) + 100 + bulk
    assert waiting == expected, f"{waiting} jobs wait, {expected} were enqueued"
    return values


async def drain(bench: Bench) -> dict[str, float]:
    """Jobs per second with ``lanes`` at a time."""
    count, lanes, cap = (bench.options[name] for name in ("count", "lanes", "cap"))
    probe = await bench.create()
    contestant, recorder = bench.contestant, Recorder()
    async with contestant.opened():
        await contestant.enqueue_many(range(count))
        async with contestant.working(lanes, recorder):
            done = await until(lambda: len(recorder.events) >= count, cap)
            if done:
                done = await until(
                    lambda: not probe.is_any(*contestant.unsettled), SETTLE_SECONDS, 0.002
                )
                assert done, "not all jobs were settled"
            end = time.monotonic_ns()
            left = 0 if done else probe.count(*contestant.unsettled)
    check_once(bench, recorder.events, count if done else None)
    instants = [at for _, at in recorder.events]
    if done:
        return {"rate": rate(instants, end)}
    return {"rate": cut_short(bench, instants, count, count - left, end)}


def cut_short(bench: Bench, instants: Sequence[int], count: int, settled: int, end: int) -> float:
    """The rate of what was not finished: of what ran, or of what was settled if that is less."""
    cap = bench.options["cap"]
    bench.notes.append(f"stopped after {cap:g} s with {settled:,} of {count:,} settled")
    if len(instants) < 20:
        return len(instants) / cap
    if cap < 5:  # too short for those that write results down once a second
        return rate(instants)
    return min(rate(instants), settled / ((end - min(instants)) / 1e9))


async def fill(bench: Bench) -> dict[str, float]:
    """Prepare a database in which ``level`` jobs wait."""
    await bench.create()
    async with bench.contestant.opened():
        await bench.contestant.fill(bench.options["level"])
    return {}


async def waiting(bench: Bench) -> dict[str, float]:
    """Jobs per second while many more wait, taken from those that wait."""
    count, level, lanes, cap = (bench.options[name] for name in ("count", "level", "lanes", "cap"))
    contestant, recorder = bench.contestant, Recorder()
    probe = Probe(bench.store, bench.database)
    async with contestant.opened():
        missing = level - probe.count(contestant.waiting)
        if missing > 0:  # what the last round took
            await contestant.enqueue_many([-1] * missing)
        async with contestant.working(lanes, recorder):
            done = await until(lambda: len(recorder.events) >= count, cap)
            end = time.monotonic_ns()
            settled = level - probe.count(*contestant.unsettled)
    instants = [at for _, at in recorder.events][:count]
    if done:
        return {"rate": rate(instants)}
    return {"rate": cut_short(bench, instants, count, settled, end)}


async def pick_up(bench: Bench) -> dict[str, float]:
    """Milliseconds from enqueue to handler, with an idle worker in this and another process."""
    await bench.create()
    samples, lanes = bench.options["samples"], bench.options["lanes"]
    contestant, recorder = bench.contestant, Recorder()
    values: dict[str, float] = {}
    async with contestant.opened():
        producer = bench.process("produce", "producer", first=samples)
        try:
            await anyio.to_thread.run_sync(producer.is_told)
            async with contestant.working(lanes, recorder):
                called = await produce_jobs(contestant, 0, samples)
                assert await until(lambda: len(recorder.events) >= samples, 30)
                ran = {number: at for number, at in recorder.events if number >= 0}
                values |= {f"same_{name}": v for name, v in delays(called, ran).items()}
                producer.tell("go")
                answer = await anyio.to_thread.run_sync(producer.ended)
                called = {int(i): (a, b) for i, (a, b) in answer["values"]["called"].items()}
                total = 2 * samples
                assert await until(lambda: len(recorder.events) >= total, 30)
                ran = {number: at for number, at in recorder.events if number >= samples}
                values |= {f"other_{name}": v for name, v in delays(called, ran).items()}
        finally:
            producer.process.kill()
    check_once(bench, recorder.events, 2 * samples)
    return values


async def produce_jobs(
    contestant: Contestant, first: int, samples: int
) -> dict[int, tuple[int, int]]:
    """Enqueue one job at a time, with random pauses in which the worker becomes idle again."""
    called: dict[int, tuple[int, int]] = {}
    await anyio.sleep(0.3)
    for number in range(first, first + samples):
        await anyio.sleep(random.uniform(0.04, 0.09))
        at = time.monotonic_ns()
        await contestant.enqueue(number)
        called[number] = (at, time.monotonic_ns())
    await anyio.sleep(0.1)
    # The first ones are warm-up.
    return {i: instants for i, instants in called.items() if i >= first + samples // 10}


async def produce(bench: Bench) -> dict[str, Any]:
    """The other process of `pick_up`."""
    async with bench.contestant.opened():
        print("ready", flush=True)
        await anyio.to_thread.run_sync(sys.stdin.readline)
        first, samples = bench.options["first"], bench.options["samples"]
        return {"called": await produce_jobs(bench.contestant, first, samples)}


async def crew(bench: Bench) -> dict[str, float]:
    """Jobs per second of several processes together."""
    count, processes, cap = (bench.options[name] for name in ("count", "processes", "cap"))
    probe = await bench.create()
    contestant = bench.contestant
    async with contestant.opened():
        await contestant.enqueue_many(range(count))
    workers = [bench.process("serve", str(i)) for i in range(processes)]
    try:
        for worker in workers:
            await anyio.to_thread.run_sync(worker.is_told)
        for worker in workers:
            worker.tell("go")
        done = await until(lambda: not probe.is_any(*contestant.unsettled), cap, 0.01)
        end = time.monotonic_ns()
        for worker in workers:
            worker.tell("stop")
        answers = [await anyio.to_thread.run_sync(worker.ended) for worker in workers]
    finally:
        for worker in workers:
            worker.process.kill()
    lists = [sorted((at, n) for n, at in answer["values"]["events"]) for answer in answers]
    events = sorted(event for events in lists for event in events)
    check_once(bench, [(number, at) for at, number in events], count if done else None)
    if not done:
        bench.notes.append(f"stopped after {cap:g} s with {len(events):,} of {count:,}")
        end = events[-1][0]
    # From when all of them are at work.
    start = max(events[len(events) // 10][0], *(events[0][0] for events in lists if events), 0)
    counted = sum(at > start for at, _ in events)
    shares = ", ".join(f"{len(events):,}" for events in lists)
    bench.notes.append(f"jobs per process: {shares}")
    return {"rate": counted / ((end - start) / 1e9)}


async def serve(bench: Bench) -> dict[str, Any]:
    """One process of `crew`."""
    recorder = Recorder()
    async with bench.contestant.opened():
        print("ready", flush=True)
        await anyio.to_thread.run_sync(sys.stdin.readline)
        async with bench.contestant.working(bench.options["lanes"], recorder):
            await anyio.to_thread.run_sync(sys.stdin.readline)
    return {"events": recorder.events}


async def idle(bench: Bench) -> dict[str, float]:
    """What a worker with nothing to do costs in a minute."""
    await bench.create()
    seconds, lanes = bench.options["seconds"], bench.options["lanes"]
    async with statement_counter(bench) as count:
        async with bench.contestant.opened(), bench.contestant.working(lanes, Recorder()):
            await anyio.sleep(min(5.0, seconds))
            statements, cpu, start = count(), time.process_time(), time.monotonic()
            await anyio.sleep(seconds)
            minutes = (time.monotonic() - start) / 60
            cpu = time.process_time() - cpu
            statements = count() - statements
    return {
        "cpu": cpu / minutes,
        "core": cpu / minutes / 60 * 100,
        "statements": statements / minutes,
    }


_traced = [0]


def trace_sqlite() -> None:
    """Let every connection made from now on count its statements."""
    sqlite = importlib.import_module("sqlite3")
    connect = sqlite.connect

    def counting(*args: Any, **options: Any) -> Any:
        connection = connect(*args, **options)

        def count(statement: str) -> None:
            _traced[0] += 1

        connection.set_trace_callback(count)
        return connection

    sqlite.connect = sqlite.dbapi2.connect = counting


@asynccontextmanager
async def statement_counter(bench: Bench) -> AsyncIterator[Callable[[], int]]:
    if bench.store == "sqlite":
        yield lambda: _traced[0]
        return
    import psycopg

    name = psycopg.conninfo.conninfo_to_dict(bench.database)["dbname"]
    with psycopg.connect(bench.options["admin"], autocommit=True) as admin:
        admin.execute("create extension if not exists pg_stat_statements")
        admin.execute(f"alter database {name} set pg_stat_statements.track = 'top'")

        def count() -> int:
            row = admin.execute(
                "select coalesce(sum(calls), 0) from pg_stat_statements s"
                " join pg_database d on d.oid = s.dbid where datname = %s",
                (name,),
            ).fetchone()
            assert row is not None
            return int(row[0])

        yield count


MEASURES = {
    function.__name__: function
    for function in (
        enqueue,
        drain,
        fill,
        waiting,
        pick_up,
        produce,
        crew,
        serve,
        idle,
        flat.flat_fill,
        flat.flat,
        flat.hold,
    )
}


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    spec = json.loads(sys.argv[1])
    if spec["measure"] in bare.MEASURES:
        values = bare.MEASURES[spec["measure"]](spec["database"], **spec["options"])
        notes: list[str] = []
        about: tuple[str, ...] = ()
    else:
        bench = Bench(spec)
        if spec["measure"] == "idle" and spec["store"] == "sqlite":
            trace_sqlite()
        values = anyio.run(
            MEASURES[spec["measure"]],
            bench,
            backend=bench.contestant.backend,
            backend_options={"use_uvloop": True} if bench.contestant.uvloop else {},
        )
        notes, about = bench.notes, bench.contestant.notes
    answer = {"values": values, "notes": notes, "about": about}
    Path(spec["result"]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
