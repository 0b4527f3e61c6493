"""Processes that do everything at once, and a checker that looks at the table all the while."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import trio

from tests.postgres.stepping import LOST
from tests.postgres.stress import SCHEMA
from tests.process.harness import IS_FULL
from trio_watchdog import _wishes as w
from trio_watchdog._identity import fresh_token
from trio_watchdog._model import Outcome, SettledJob
from trio_watchdog._postgres import PostgresStore, open_postgres_store
from trio_watchdog._psycopg import TrioConnection
from trio_watchdog._rules import Settle
from trio_watchdog._statements import Dialect

PROCESSES = 3
SECONDS = 20.0 if IS_FULL else 6.0

DIALECT = Dialect("postgres", SCHEMA)
JOBS = DIALECT.table("jobs")
RECHECK = DIALECT.table("recheck")

DOUBLE = f"""select queue from {JOBS} where state in ('running', 'completing')
    group by queue having count(*) > 1"""


class Checker:
    """Looks for what must never be, and follows the settled feed."""

    def __init__(self, store: PostgresStore, connection: TrioConnection[Any]) -> None:
        self._store = store
        self._connection = connection
        self.looks = 0
        self.feed: list[str] = []
        self._cursor: str | None = None

    async def look(self) -> None:
        for query in (LOST.format(jobs=JOBS, recheck=RECHECK), DOUBLE):
            cursor = await self._connection.execute(query.encode())
            found = await cursor.fetchall()
            assert found == [], found
        await self.read_feed()
        self.looks += 1

    async def read_feed(self) -> None:
        while True:
            page = await self._store.read_settled(after=self._cursor)
            self.feed += [job.id for job in page.jobs]
            self._cursor = page.cursor
            if not page.jobs:
                return


async def drain(store: PostgresStore) -> None:
    """Bring everything to its end; claims that were abandoned, too."""
    with trio.fail_after(60):
        while True:
            await store._look_at_notes()
            await store.settle_cancelled()
            while (gone := await store.next_running_claim()) is not None:
                await store.reconcile(gone.id, gone.token)
            while (taken := await store.take_completing(fresh_token())) is not None:
                await store.finish_completing(taken.id, taken.token)
            wishes = [w.Claim(None, fresh_token(), store.owner, 60_000) for _ in range(5)]
            answers = await store.submit(*wishes)
            claimed = [answer.job for answer in answers if answer.job is not None]
            for job in claimed:
                await store.decide(job.id, job.token, Settle(Outcome.COMPLETED))
            if claimed:
                continue
            state = await store.wake_state()
            if not state.pending and state.next_wake_at is None:
                return
            await trio.sleep(0.02)


async def test_nothing_is_lost_and_nothing_runs_twice(postgres_database: str) -> None:
    await stress(postgres_database, PROCESSES, SECONDS)


async def stress(url: str, processes: int, seconds: float) -> dict[str, int]:
    async with open_postgres_store(url, schema=SCHEMA) as store:
        assert isinstance(store, PostgresStore)
        connection: TrioConnection[Any]
        connection = await TrioConnection.connect(url, autocommit=True, application_name="checker")
        # The checker's own connection must survive the cuts.
        async with open_postgres_store(
            f"{url}?application_name=checker", schema=SCHEMA
        ) as quiet_store:
            assert isinstance(quiet_store, PostgresStore)
            checker = Checker(quiet_store, connection)
            said = await watched(url, processes, seconds, checker)
            await drain(quiet_store)
            rows = await quiet_store.ask(w.ReadJobs(limit=100_000))
            with trio.fail_after(60):
                # It waits for every transaction of the server, whoever's it is.
                while len(checker.feed) < len(rows):
                    await checker.look()
        await connection.close()
    assert [line for line in said if line.startswith("trouble")] == []
    recorded = Counter(line.split()[1] for line in said if line.startswith("recorded"))
    assert [id for id, times in recorded.items() if times > 1] == []
    assert {type(job) for job in rows} <= {SettledJob}
    # A decision that was answered stands, and the feed has everything once.
    settled = {job.id: job for job in rows if isinstance(job, SettledJob)}
    assert all(settled[id].outcome in ("completed", "cancelled") for id in recorded)
    assert sorted(checker.feed) == sorted(settled)
    admitted = {line.split()[1] for line in said if line.startswith("admitted")}
    figures = {
        "looks": checker.looks,
        "admitted": len(admitted),
        "settled": len(settled),
        "recorded": len(recorded),
        "cancelled": sum(job.outcome == Outcome.CANCELLED for job in settled.values()),
        "failed": sum(job.outcome == Outcome.FAILED for job in settled.values()),
        "interrupted": sum(job.outcome == Outcome.INTERRUPTED for job in settled.values()),
        "recoveries": sum(job.recovery_count for job in settled.values()),
    }
    # It was at work, and looked at: far more on an idle machine.
    assert figures["looks"] > seconds / 2
    assert figures["settled"] > 2 * seconds
    return figures


async def watched(url: str, processes: int, seconds: float, checker: Checker) -> list[str]:
    """Run the processes while the checker looks; what they said."""
    said: list[str] = []
    root = Path(__file__).parents[2]
    running = processes

    async def run(seed: int) -> None:
        nonlocal running
        command = [sys.executable, "-m", "tests.postgres.stress", url, str(seed), str(seconds)]
        done = await trio.run_process(
            command, cwd=root, capture_stdout=True, capture_stderr=True, check=False
        )
        running -= 1
        assert done.returncode == 0, done.stderr.decode()
        said.extend(done.stdout.decode().splitlines())

    async with trio.open_nursery() as nursery:
        for seed in range(1, processes + 1):
            nursery.start_soon(run, seed)
        while running:
            await checker.look()
            await trio.sleep(0.05)
    return said


if __name__ == "__main__":
    figures = trio.run(stress, sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
    print(figures)  # noqa: T201
