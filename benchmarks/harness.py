"""Runs the works: one measurement at a time, contestants in turn, round after round."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.postgres.server import PostgresServer

from .contestants import CONTESTANTS
from .works import Entry, Store, Work

ROOT = Path(__file__).parent.parent

SERVER = {
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    # The rest is PostgreSQL's default, but for room enough that a million waiting rows are not
    # read from disk, and no checkpoint in the middle of a measurement: one precedes each.
    "shared_buffers": "512MB",
    "max_wal_size": "4GB",
    "max_connections": "200",
    "shared_preload_libraries": "pg_stat_statements",
    "pg_stat_statements.track": "none",
}

CHILD_SECONDS = 600.0
"""A measurement that takes longer hangs."""


@dataclass
class Outcome:
    """What came of one entry in all rounds."""

    work: Work
    entry: Entry
    values: dict[str, list[float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    about: list[str] = field(default_factory=list)
    """What one must know of the contestant."""
    paces: list[dict[str, float]] = field(default_factory=list)
    """How fast the machine was right before each round."""
    error: str | None = None

    def chosen(self, key: str) -> list[float]:
        """The values of the rounds that count for a metric."""
        values = self.values.get(key, [])
        (rounds,) = [metric.rounds for metric in self.work.metrics if metric.key == key]
        match rounds:
            case "first":
                return values[:1]
            case "later":
                return values[1:] or values
            case "all":
                return values

    def figure(self, key: str) -> float | None:
        """The median of those."""
        values = self.chosen(key)
        return statistics.median(values) if values else None


class Databases:
    """Empty databases on demand: files in one folder, and databases of one server."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server: PostgresServer | None = None
        self._made = 0

    @property
    def admin(self) -> str:
        if self.server is None:
            self.server = PostgresServer(**SERVER)
            self.server.start()
        return self.server.socket_url

    def make(self, store: Store) -> str:
        self._made += 1
        name = f"bench_{self._made}"
        if store == "sqlite":
            folder = self.folder / name
            folder.mkdir()
            return str(folder / "jobs.db")
        self._execute(f"create database {name}")
        return self.admin.replace("/postgres?", f"/{name}?")

    def drop(self, database: str) -> None:
        if database.startswith("postgresql:"):
            name = database.partition("?")[0].rpartition("/")[2]
            self._execute(f"drop database {name} with (force)")
        else:
            shutil.rmtree(Path(database).parent, ignore_errors=True)

    def calm(self, store: Store) -> None:
        """Write out what earlier measurements have left behind."""
        if store == "postgres":
            self._execute("checkpoint")

    def _execute(self, sql: str) -> None:
        import psycopg

        with psycopg.connect(self.admin, autocommit=True) as connection:
            connection.execute(sql)

    def __enter__(self) -> Databases:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.server is not None:
            # A backend may end while the server looks for it; its guard then ends the rest.
            with contextlib.suppress(psutil.NoSuchProcess):
                self.server.close()


@contextmanager
def databases() -> Iterator[Databases]:
    with tempfile.TemporaryDirectory(prefix="watchdog-bench-") as folder:
        with Databases(Path(folder)) as made:
            yield made


class Runner:
    """Takes measurements."""

    def __init__(self, made: Databases, say: Callable[[str], None]) -> None:
        self.databases = made
        self.say = say

    def work(self, work: Work, rounds: int) -> list[Outcome]:
        """All rounds of one work."""
        outcomes = [Outcome(work, entry, notes=list(entry.notes)) for entry in work.entries]
        kept: dict[str, str] = {}
        try:
            for outcome in outcomes:
                self._check_installed(outcome)
                if outcome.error is None and outcome.entry.prepare is not None:
                    self._prepare(outcome, kept)
            for turn in range(min(rounds, work.rounds or rounds)):
                # Nobody always follows the same one.
                first = turn % len(outcomes)
                for outcome in outcomes[first:] + outcomes[:first]:
                    if outcome.error is None:
                        self._round(outcome, kept)
        finally:
            for database in kept.values():
                self.databases.drop(database)
        return outcomes

    def _check_installed(self, outcome: Outcome) -> None:
        name = outcome.entry.contestant
        if name is not None and CONTESTANTS[outcome.work.store][name].version is None:
            outcome.error = "not installed"

    def _prepare(self, outcome: Outcome, kept: dict[str, str]) -> None:
        entry = outcome.entry
        assert entry.prepare is not None
        database = kept[entry.label] = self.databases.make(outcome.work.store)
        self.say(f"{outcome.work.store} {outcome.work.name}: preparing {entry.label}")
        with self._reported(outcome):
            self._child(outcome.work.store, entry, entry.prepare_measure, database, entry.prepare)

    def _round(self, outcome: Outcome, kept: dict[str, str]) -> None:
        work, entry = outcome.work, outcome.entry
        self.say(f"{work.store} {work.name}: {entry.label}")
        database = kept.get(entry.label) or self.databases.make(work.store)
        outcome.paces.append(pace(self.databases.folder))
        try:
            with self._reported(outcome):
                answer = self._child(work.store, entry, entry.measure, database, entry.options)
                for name, value in answer["values"].items():
                    outcome.values.setdefault(name, []).append(value)
                outcome.notes += [n for n in answer["notes"] if n not in outcome.notes]
                outcome.about = answer["about"]
        finally:
            if entry.label not in kept:
                self.databases.drop(database)

    @contextmanager
    def _reported(self, outcome: Outcome) -> Iterator[None]:
        try:
            yield
        except MeasurementFailed as error:
            outcome.error = str(error)
            self.say(f"FAILED: {outcome.entry.label}: {error.details}")

    def _child(
        self, store: Store, entry: Entry, measure: str, database: str, options: dict[str, Any]
    ) -> Any:
        self.databases.calm(store)
        result = self.databases.folder / f"result-{time.monotonic_ns()}.json"
        if measure == "idle" and store == "postgres":
            options = {**options, "admin": self.databases.admin}
        spec = {
            "store": store,
            "contestant": entry.contestant,
            "measure": measure,
            "database": database,
            "options": options,
            "result": str(result),
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.child", json.dumps(spec)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=CHILD_SECONDS)
        except subprocess.TimeoutExpired:
            raise MeasurementFailed(f"hung for {CHILD_SECONDS:g} s", "") from None
        finally:
            # Its own children too.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.returncode or not result.exists():
            text = output.decode(errors="replace").strip()
            errors = re.findall(r"^[ |]*([A-Za-z_][\w.]*: .*)$", text, re.MULTILINE)
            raise MeasurementFailed(errors[-1] if errors else "no result", text[-3000:])
        answer = json.loads(result.read_text())
        for path in self.databases.folder.glob(f"{result.name}*"):
            path.unlink()
        return answer


class MeasurementFailed(Exception):
    def __init__(self, message: str, details: str) -> None:
        super().__init__(message)
        self.details = details


# -- surroundings ---------------------------------------------------------------------------------


def surroundings(folder: Path) -> dict[str, Any]:
    """What the figures depend on besides the code."""
    return {
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "system": f"{platform.system()} {platform.release()}",
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "fsync_us": fsync_cost(folder),
    }


def fsync_cost(folder: Path, times: int = 100) -> float:
    """Median microseconds of writing and syncing one page: what a durable commit cannot beat."""
    costs = []
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        for _ in range(times):
            file.seek(0)
            file.write(os.urandom(4096))
            file.flush()
            start = time.perf_counter()
            os.fdatasync(file.fileno())
            costs.append((time.perf_counter() - start) * 1e6)
    return statistics.median(costs)


def pace(folder: Path) -> dict[str, float]:
    """What the disk and the processor are worth at this moment, whoever else uses them."""
    start = time.perf_counter()
    sum(range(1_000_000))
    cpu = (time.perf_counter() - start) * 1e6
    return {"fsync_us": fsync_cost(folder, 20), "cpu_us": cpu}
