"""Where the time of one no-op job goes: ``python -m benchmarks.profile_job [--jobs N] [--json F]``.

A drain with one lane and one with 32, on SQLite (synchronous FULL) and on PostgreSQL, in
microseconds per job:

wall          from the first job to the last, by the clock on the wall
exchanges     of that, while an exchange with the database was under way; the rest is the runtime
              between two of them. With many lanes handlers run during an exchange as well.
statements    inside of the exchanges, by name: SQLite's own time, or the server's (execution only)
commit        SQLite: `begin` and `commit` with their fsync. PostgreSQL: writing and syncing the
              log, as the server counts it
hand-over     SQLite: from the loop to the store's thread and back. PostgreSQL: all of a trip that
              is neither execution nor log: protocol, socket, parsing of values, and waiting
python        of operations and rules, inside of the exchanges
CPU           of the event loop's thread and of the store's, whatever the wall says

With ``--functions N`` the loop's thread is profiled and its N dearest functions are listed; the
profiler makes everything slower, so the table is then not to be read. This looks into private
parts of the package, and is mended when they change.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import json
import pstats
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import trio

from trio_watchdog import Job, RunningJob, open_watchdog
from trio_watchdog._exchange import Exchange

from .harness import Databases, databases

LANE = "bench"


class Times:
    """Seconds and calls by name, while ``is_on``."""

    def __init__(self) -> None:
        self.is_on = False
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: defaultdict[str, int] = defaultdict(int)

    def add(self, name: str, seconds: float) -> None:
        if self.is_on:
            self.seconds[name] += seconds
            self.calls[name] += 1

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def watched_exchanges(times: Times) -> contextlib.AbstractContextManager[None]:
    def make(original: Any) -> Any:
        async def exchange(self: Exchange) -> None:
            with times.timed("exchanges"):
                await original(self)

        return exchange

    return replaced(Exchange, "_exchange", make)


# -- SQLite ---------------------------------------------------------------------------------------


class TimedCursor:
    """A cursor whose statements are timed by their text; SQLite works in `fetchall` too."""

    def __init__(self, cursor: Any, times: Times) -> None:
        self._cursor = cursor
        self._times = times
        self._text = ""

    def execute(self, text: str, parameters: Any = ()) -> TimedCursor:
        self._text = text
        with self._times.timed(text):
            self._cursor.execute(text, parameters)
        return self

    def fetchall(self) -> Any:
        start = time.perf_counter()
        try:
            return self._cursor.fetchall()
        finally:
            if self._times.is_on:
                self._times.seconds[self._text] += time.perf_counter() - start

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cursor, name)


@contextmanager
def watched_sqlite(times: Times) -> Iterator[None]:
    from trio_watchdog import _sqlite

    def make_init(original: Any) -> Any:
        def init(self: Any, *args: Any, **options: Any) -> None:
            original(self, *args, **options)
            self._cursor = TimedCursor(self._cursor, times)

        return init

    def make_perform(original: Any) -> Any:
        def perform(self: Any, asked: Any) -> Any:
            cpu = time.thread_time()
            with times.timed("perform"):
                answer = original(self, asked)
            times.add("store CPU", time.thread_time() - cpu)
            return answer

        return perform

    with (
        replaced(_sqlite.Engine, "__init__", make_init),
        replaced(_sqlite.FileStore, "_perform", make_perform),
    ):
        yield


def sqlite_layers(times: Times) -> dict[str, float]:
    """Seconds by layer."""
    names = names_of_statements("sqlite")
    statements: defaultdict[str, float] = defaultdict(float)
    commit = 0.0
    for text, seconds in times.seconds.items():
        if text in ("begin", "begin immediate", "commit"):
            commit += seconds
        elif text in names:
            statements[f"statement: {names[text]}"] += seconds
    perform = times.seconds["perform"]
    return {
        **dict(sorted(statements.items(), key=lambda item: -item[1])),
        "commit": commit,
        "python of operations": perform - commit - sum(statements.values()),
        "hand-over to the thread and back": times.seconds["exchanges"] - perform,
        "CPU of the store's thread": times.seconds["store CPU"],
    }


def names_of_statements(dialect: str) -> dict[str, str]:
    from trio_watchdog import _statements

    renderer = _statements.Dialect(
        dialect,  # type: ignore[arg-type]
        "" if dialect == "sqlite" else _statements.DEFAULT_SCHEMA,
        clock_in_sql=dialect == "postgres",
    )
    found = (value for value in vars(_statements).values())
    statements = [value for value in found if isinstance(value, _statements.Statement)]
    return {renderer.text(statement): statement.name for statement in statements}


# -- PostgreSQL -----------------------------------------------------------------------------------


@contextmanager
def watched_postgres(times: Times) -> Iterator[None]:
    from trio_watchdog import _postgres

    def make(original: Any) -> Any:
        async def step(self: Any, *args: Any, **options: Any) -> Any:
            with times.timed("trips"):
                return await original(self, *args, **options)

        return step

    with replaced(_postgres.Session, "step", make):
        yield


class ServerTimes:
    """What the server says about one database."""

    def __init__(self, made: Databases, database: str) -> None:
        import psycopg

        self.name = database.partition("?")[0].rpartition("/")[2]
        self.admin = psycopg.connect(made.admin, autocommit=True)
        self.admin.execute("create extension if not exists pg_stat_statements")
        self.admin.execute(f"alter database {self.name} set pg_stat_statements.track = 'top'")
        self.admin.execute("alter system set track_wal_io_timing = on")
        self.admin.execute("select pg_reload_conf()")

    def reset(self) -> None:
        self.admin.execute("select pg_stat_statements_reset()")
        self._log = self._log_seconds()

    def _log_seconds(self) -> float:
        row = self.admin.execute(
            "select coalesce(sum(write_time + fsync_time), 0) from pg_stat_io"
            " where object = 'wal' and backend_type = 'client backend'"
        ).fetchone()
        assert row is not None
        return float(row[0]) / 1000

    def layers(self, times: Times) -> dict[str, float]:
        """Seconds by layer, and how often each statement ran."""
        time.sleep(1.2)  # backends report at most once a second
        rows = self.admin.execute(
            "select query, sum(total_exec_time) / 1000, sum(calls) from pg_stat_statements s"
            " join pg_database d on d.oid = s.dbid where datname = %s group by 1",
            (self.name,),
        ).fetchall()
        names = {squeezed(text): name for text, name in names_of_statements("postgres").items()}
        statements: defaultdict[str, float] = defaultdict(float)
        for query, seconds, calls in rows:
            name = names.get(squeezed(query), " ".join(query.split())[:40])
            statements[f"statement: {name}"] += float(seconds)
            times.calls[name] += int(calls)
        log = self._log_seconds() - self._log
        trips = times.seconds["trips"]
        return {
            **dict(sorted(statements.items(), key=lambda item: -item[1])),
            "commit (writing and syncing the log)": log,
            "protocol, values, waiting": trips - log - sum(statements.values()),
            "python of operations": times.seconds["exchanges"] - trips,
        }


def squeezed(text: str) -> str:
    """A statement without what the server or the driver write differently."""
    import re

    text = re.sub(r"%\([a-z_]+\)s|\$\d+|'[^']*'|\b\d+\b", "?", text)
    return " ".join(text.split())


# -- the drain ------------------------------------------------------------------------------------


async def drain(database: str, lanes: int, jobs: int, times: Times, reset: Any) -> dict[str, float]:
    """Wall and CPU of the jobs after the warm-up, in seconds."""
    ran = 0
    warm = max(100, jobs // 10)
    marks: dict[str, float] = {}
    done = trio.Event()

    async def handler(job: RunningJob) -> None:
        nonlocal ran
        ran += 1
        if ran == warm:
            reset()
            times.is_on = True
            marks["wall"], marks["cpu"] = time.perf_counter(), time.thread_time()
        elif ran == warm + jobs:
            times.is_on = False
            marks["wall"] = time.perf_counter() - marks["wall"]
            marks["cpu"] = time.thread_time() - marks["cpu"]
            done.set()

    async with open_watchdog(database, grace=1) as watchdog:
        # Some more, so that all lanes are busy until the end.
        await watchdog.enqueue_many(Job(LANE, {"number": i}) for i in range(warm + jobs + lanes))
        await watchdog.start_lane(LANE, handler, workers=lanes)
        await done.wait()
        await watchdog.wait_idle()
    return marks


def measured(made: Databases, store: str, lanes: int, jobs: int, functions: int) -> dict[str, Any]:
    """One profile: microseconds per job by layer, and calls per job."""
    times = Times()
    database = made.make(store)  # type: ignore[arg-type]
    server = None
    profile = cProfile.Profile() if functions else None
    with contextlib.ExitStack() as stack:
        stack.enter_context(watched_exchanges(times))
        if store == "sqlite":
            stack.enter_context(watched_sqlite(times))
        else:
            stack.enter_context(watched_postgres(times))
            server = ServerTimes(made, database)
        reset = (lambda: None) if server is None else server.reset
        if profile is not None:
            profile.enable()
        marks = trio.run(drain, database, lanes, jobs, times, reset)
        if profile is not None:
            profile.disable()
    layers = sqlite_layers(times) if server is None else server.layers(times)
    everything = {
        "wall": marks["wall"],
        "exchanges": times.seconds["exchanges"],
        **{f"  {name}": seconds for name, seconds in layers.items() if "CPU" not in name},
        "runtime between exchanges": marks["wall"] - times.seconds["exchanges"],
        "CPU of the loop's thread": marks["cpu"],
        **{name: seconds for name, seconds in layers.items() if "CPU" in name},
    }
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(functions)
    made.drop(database)
    return {
        "store": store,
        "lanes": lanes,
        "jobs": jobs,
        "exchanges_per_job": times.calls["exchanges"] / jobs,
        "us_per_job": {name: seconds / jobs * 1e6 for name, seconds in everything.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile_job")
    parser.add_argument("--jobs", type=int, default=3000)
    parser.add_argument("--on", choices=("sqlite", "postgres"))
    parser.add_argument("--lanes", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--functions", type=int, default=0, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    profiles = []
    with databases() as made:
        for store in ("sqlite", "postgres"):
            if options.on not in (None, store):
                continue
            for lanes in options.lanes:
                profile = measured(made, store, lanes, options.jobs, options.functions)
                profiles.append(profile)
                rate = 1e6 / profile["us_per_job"]["wall"]
                print(
                    f"{store}, {lanes} lane{'s' * (lanes > 1)}: {rate:,.0f} jobs/s,"
                    f" {profile['exchanges_per_job']:.2f} exchanges per job; us per job:"
                )
                for name, microseconds in profile["us_per_job"].items():
                    if microseconds >= 0.5:
                        print(f"  {name:44} {microseconds:8.1f}")
                print(flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(profiles, indent=1) + "\n")


if __name__ == "__main__":
    main()
