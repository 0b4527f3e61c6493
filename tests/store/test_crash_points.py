"""Die before each statement and after each commit of every operation: all old, or all new.

Where an operation takes several steps, each a transaction of its own, every step is done or not
done, whatever comes next can go on from there, and asking again completes it.
"""

from __future__ import annotations

import shutil
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import trio
from attrs import evolve, frozen

from tests.kinds import Find
from tests.postgres.makers import PostgresMaker
from tests.store.makers import KnownMaker
from trio_watchdog import _operations as operations
from trio_watchdog import _wishes as w
from trio_watchdog._errors import StoreInvalid, StoreUnavailable
from trio_watchdog._model import Job, Outcome, QueueTransition, Recovery, RetryPolicy
from trio_watchdog._postgres import PostgresStore
from trio_watchdog._rules import Settle
from trio_watchdog._sqlite import Engine, prepare
from trio_watchdog._store import Store
from trio_watchdog._trip import trip
from trio_watchdog._wishes import Wish
from trio_watchdog.testing import DurableClock, broken_invariants, check_invariants

Perform = Callable[[Sequence[Wish[Any]]], Awaitable[Sequence[Any]]]

LEASE = 60_000
DONE = Settle(Outcome.COMPLETED)

# -- a connection that dies -----------------------------------------------------------------------


class Died(BaseException):
    """The end of the process, as far as the engine can tell."""


class Mortal(sqlite3.Connection):
    """Counts statements, and calls `fate` before the one that it is told to."""

    countdown: int | None = None
    statements: int = 0
    fate: Callable[[], None] = staticmethod(lambda: None)

    def cursor(self, *args: Any) -> Any:
        return super().cursor(MortalCursor)

    def before_statement(self) -> None:
        self.statements += 1
        if self.countdown is not None:
            self.countdown -= 1
            if self.countdown < 0:
                self.countdown = None
                self.fate()


class MortalCursor(sqlite3.Cursor):
    """The only way in which the engine executes anything."""

    connection: Mortal

    def execute(self, *args: Any) -> Any:
        self.connection.before_statement()
        return super().execute(*args)


def dump(connection: sqlite3.Connection) -> dict[str, list[Any]]:
    """Everything that is in the tables, but for the number that the next settlement will get."""
    cursor = connection.cursor()
    cursor.row_factory = None
    tables = {
        table: cursor.execute(f"select * from watchdog_{table} order by 1").fetchall()
        for table in ("jobs", "meta", "readers")
    }
    tables["meta"] = [row for row in tables["meta"] if row[0] != "settle_group"]
    tables["projected"] = cursor.execute("select * from projected").fetchall()
    return tables


# -- what is asked, and of which table ------------------------------------------------------------


@frozen
class Case:
    """One exchange, and what asking again says after its answer was lost."""

    name: str
    asked: tuple[Wish[Any], ...]
    again: tuple[Any, ...]
    """The statuses, or values, of the replay."""
    repeated: tuple[Wish[Any], ...] | None = None
    """What is asked the second time, if it differs."""
    damage: str | None = None
    """What somebody has done to the table beforehand."""


async def populate(perform: Perform, clock: DurableClock) -> None:
    """A table with a job in every situation. Tokens are ``t`` and the job's id."""

    async def do(*asked: Wish[Any]) -> None:
        for answer in await perform(asked):
            assert not isinstance(answer, Exception), answer

    async def run(id: str, lane: str, recovery: Recovery | None = None, lease: int = LEASE) -> None:
        await do(w.Enqueue(Job(lane, id=id, queue=f"q {id}", recovery=recovery)))
        await do(w.Claim(lane, f"t {id}", "owner", lease))

    await run("settled", "s")
    await do(w.Decide("settled", "t settled", DONE))
    clock.advance(1)
    await run("running", "a")
    await do(
        w.EnqueueMany(
            [Job("b", id="behind", queue="q running"), Job("b", id="behind too", queue="q running")]
        )
    )
    # So that what is behind is known to be blocked.
    await do(w.Claim("b", "t", "owner", LEASE))
    await run("cancelling", "c")
    await do(w.Cancel("cancelling", "c cancelling"))
    await run("completing", "d")
    await do(w.Decide("completing", "t completing", DONE, has_hook=True))
    await run("orphan", "e", lease=1)
    await do(w.Decide("orphan", "t orphan", DONE, has_hook=True))
    await run("gone", "f", Recovery(1), lease=1)
    await run("gone for good", "g", lease=1)
    await run("reserved", "h")
    await do(w.ReserveAttempt("reserved", "t reserved", RetryPolicy(1)))
    await do(w.Enqueue(Job("i", id="cancelled", queue="q i")))
    await do(w.Enqueue(Job("i", id="after the cancelled", queue="q i")))
    await do(w.Cancel("cancelled", "c cancelled"))
    await do(w.EnqueueMany([Job("k", id=f"k{n}", queue="q k", priority=n % 2) for n in range(4)]))
    await do(w.Enqueue(Job("l", id="deferred", not_before=clock.instant(1))))
    await do(w.ProtectSettled("reader", f"{2**40}.1"))
    clock.advance(1)


SELECT = """with numbers(n) as (values (1), (2), (3))
    select 'x' as lane, 's' || n as id from numbers"""

EXPORTED = (
    *("imported", "q new", "x", 3, 0, 1, None, "queued", None, None, None),
    *(2, 1, 5, "c imported", None, None, "null"),
)

CASES = (
    Case("enqueue", (w.Enqueue(Job("x", {"n": 1}, id="new")),), ("duplicate",)),
    Case("enqueue, blocked", (w.Enqueue(Job("x", id="new", queue="q running")),), ("duplicate",)),
    Case(
        "enqueue many",
        (w.EnqueueMany([Job("x", id=f"new {n}", queue="q new") for n in range(5)]),),
        (["duplicate"] * 5,),
    ),
    Case("enqueue from a select", (w.EnqueueSelect(SELECT, ()),), (["duplicate"] * 3,)),
    Case(
        "claim",
        (w.Claim("k", "t new", "owner", LEASE),),
        ("k1",),
        (w.Claim("k", "t new", "owner", LEASE, again=True),),
    ),
    Case(
        "claim of what is due by now",
        (w.Claim("l", "t new", "owner", LEASE),),
        ("deferred",),
        (w.Claim("l", "t new", "owner", LEASE, again=True),),
    ),
    Case(
        "claim of any lane",
        (w.Claim(None, "t new", "owner", LEASE, without=("k",)),),
        ("deferred",),
        (w.Claim(None, "t new", "owner", LEASE, without=("k",), again=True),),
    ),
    Case("renew", (w.Renew("running", "t running", 2 * LEASE),), ("held",)),
    Case(
        "renew many",
        (w.Renew("running", "t running", LEASE), w.Renew("completing", "t completing", LEASE)),
        ("held", "held"),
    ),
    Case(
        "reserve attempt",
        (w.ReserveAttempt("running", "t running", RetryPolicy(3)),),
        ("reserved",),
    ),
    Case("retry", (w.RetryJob("running", "t running", RetryPolicy(3)),), ("conflict",)),
    Case("retry at once", (w.RetryJob("running", "t running"),), ("conflict",)),
    Case("last retry", (w.RetryJob("running", "t running", RetryPolicy(1)),), ("conflict",)),
    Case(
        "last retry with a hook",
        (w.RetryJob("running", "t running", RetryPolicy(1), has_hook=True),),
        ("conflict",),
    ),
    Case("hand off", (w.HandOff("running", "t running"),), ("conflict",)),
    Case("decide", (w.Decide("running", "t running", DONE),), ("replayed",)),
    Case(
        "decide with a hook",
        (w.Decide("running", "t running", DONE, has_hook=True),),
        ("replayed",),
    ),
    Case("decide, cancelled", (w.Decide("cancelling", "t cancelling", DONE),), ("replayed",)),
    Case("finish completing", (w.FinishCompleting("completing", "t completing"),), ("replayed",)),
    Case("take completing", (w.TakeCompleting("t new", "owner", LEASE),), (None,)),
    Case("cancel, queued", (w.Cancel("k0", "c new"),), ("replayed",)),
    Case("cancel, running", (w.Cancel("running", "c new"),), ("replayed",)),
    Case("settle cancelled", (w.SettleCancelled(),), ([],)),
    Case("fail lane", (w.FailLane("a", "broken"),), (0,)),
    Case("fail lane, queued", (w.FailLane("k", "broken"),), (0,)),
    Case("purge queue", (w.PurgeQueue("q running"),), (0,)),
    Case("reconcile, recovery", (w.Reconcile("gone", "t gone"),), ("untouched",)),
    Case("reconcile, settled", (w.Reconcile("gone for good", "t gone for good"),), ("untouched",)),
    Case("prune", (w.Prune(2**62),), (0,)),
    Case("protect settled", (w.ProtectSettled("another", None),), (None,)),
    Case("release settled", (w.ReleaseSettled("reader"),), (False,)),
    Case(
        "repair lost",
        (w.RepairLost("q k"),),
        (0,),
        damage="update {jobs} set hint = 'lowered' where queue = 'q k'",
    ),
    Case("import", (w.Import([EXPORTED]),), (0,)),
    Case("remove", (w.Remove(["k0", "k1", "behind", "completing", "running"]),), (0,)),
    Case(
        "a busy exchange",
        (
            w.Decide("running", "t running", DONE),
            w.FinishCompleting("completing", "t completing"),
            w.Claim("b", "t new", "owner", LEASE),
            w.Enqueue(Job("x", id="new")),
            w.Cancel("k0", "c new"),
        ),
        ("replayed", "replayed", "behind", "duplicate", "replayed"),
        (
            w.Decide("running", "t running", DONE),
            w.FinishCompleting("completing", "t completing"),
            w.Claim("b", "t new", "owner", LEASE, again=True),
            w.Enqueue(Job("x", id="new")),
            w.Cancel("k0", "c new"),
        ),
    ),
)

# Reads have nothing to leave half done.
UNTOUCHED = operations.READS


def test_every_operation_that_writes_is_among_the_cases() -> None:
    named = {type(wish) for case in CASES for wish in case.asked}
    assert set(operations.OPERATIONS) - UNTOUCHED - named == set()


def gist(answer: Any) -> Any:
    """The part of an answer that says what happened."""
    if isinstance(answer, w.Claimed):
        return None if answer.job is None else answer.job.id
    if isinstance(answer, list):
        return [gist(each) for each in answer]
    if hasattr(answer, "jobs"):
        return len(answer.jobs)
    return getattr(answer, "status", answer)


# -- the kinds of store ---------------------------------------------------------------------------


class World(ABC):
    """A populated database, how to come back to it, and how to die in it."""

    share: int = 1
    """Of so many points of each case one is tried, not the same ones everywhere."""

    @abstractmethod
    async def restore(self, case: Case) -> None:
        """Back to the populated state, and to what the case wants of it."""

    @abstractmethod
    async def perform(self, asked: Sequence[Wish[Any]]) -> Sequence[Any]:
        """Answers."""

    @abstractmethod
    async def dump(self) -> Any:
        """Everything that is in the tables."""

    @abstractmethod
    async def broken(self) -> list[str]:
        """What must never be true of the tables, and is."""

    @abstractmethod
    async def states(self, case: Case) -> list[Any]:
        """What is in the tables at each point where one may die, in order; at last, all new."""

    @abstractmethod
    async def die(self, point: int, case: Case) -> list[Any]:
        """Die at that point. What is left, seen in every way there is; then it is usable again."""


@frozen(eq=False)
class SQLiteWorld(World):
    """One transaction for everything, so there is one state before its end and one after."""

    connection: Mortal
    engine: Engine
    clock: DurableClock
    path: Path | None
    saved: bytes

    async def restore(self, case: Case) -> None:
        restore(self, case)

    async def perform(self, asked: Sequence[Wish[Any]]) -> Sequence[Any]:
        return self.engine.perform(asked)[0]

    async def dump(self) -> Any:
        return dump(self.connection)

    async def broken(self) -> list[str]:
        return broken_invariants(self.connection)

    async def states(self, case: Case) -> list[Any]:
        old, new, statements = outcomes(self, case)
        if self.path is not None:
            with TemporaryDirectory() as folder:
                assert what_is_on_disk(self.path, Path(folder) / "new") == new
        return [old] * statements + [new]

    async def die(self, point: int, case: Case) -> list[Any]:
        left: list[Any] = []

        def die() -> None:
            if self.path is not None:
                with TemporaryDirectory() as folder:
                    left.append(what_is_on_disk(self.path, Path(folder) / "left"))
            raise Died

        self.connection.fate = die
        self.connection.countdown = point
        with suppress(Died):
            self.engine.perform(case.asked)
        self.connection.countdown = None
        assert not self.connection.in_transaction
        # In memory what is left is what the rollback left; on disk what another process finds.
        left.append(dump(self.connection))
        return left


class PostgresWorld(World):
    """Steps are transactions; the server ends our session before a statement or after a commit."""

    share = 3

    def __init__(self, maker: PostgresMaker, store: Store, clock: DurableClock) -> None:
        assert isinstance(store, PostgresStore)
        self.maker = maker
        self.store = store
        self.clock = clock
        self.countdown = -1
        self.blow = END
        self.pid = 0
        """Whom the server has thrown out."""
        self.seen: list[Any] | None = None

    async def save(self) -> None:
        projected = self.table("jobs_projected")
        await self.maker.execute(self.store, f"create table {projected} (n int)")
        await populate(self.perform, self.clock)
        for table in ("jobs", "readers"):
            name = self.table(table)
            await self.maker.execute(self.store, f"create table {name}_saved as table {name}")

    async def forget(self) -> None:
        tables = ("jobs_saved", "readers_saved", "jobs_projected")
        names = ", ".join(map(self.table, tables))
        await self.maker.execute(self.store, f"drop table {names}")

    def table(self, name: str) -> str:
        return self.store.dialect.table(name)

    async def project(self, _: QueueTransition, connection: Any) -> None:
        await connection.execute(f"insert into {self.table('jobs_projected')} values (1)")

    async def restore(self, case: Case) -> None:
        self.countdown = -1
        for table in ("jobs", "readers", "recheck", "jobs_projected"):
            await self.maker.execute(self.store, f"delete from {self.table(table)}")
        for table in ("jobs", "readers"):
            name = self.table(table)
            overriding = "overriding system value" if table == "jobs" else ""
            await self.maker.execute(
                self.store, f"insert into {name} {overriding} select * from {name}_saved"
            )
        if case.damage is not None:
            await self.maker.execute(self.store, case.damage)

    async def perform(self, asked: Sequence[Wish[Any]]) -> Sequence[Any]:
        answers = await self.store.submit(*asked)
        for place, wish in enumerate(asked):
            # A claim may be told to look again, as lanes do.
            while isinstance(answers[place], w.Claimed) and answers[place].more:
                if answers[place].job is not None or self.pid:
                    break
                (answers[place],) = await self.store.submit(wish)
        return answers

    async def dump(self) -> Any:
        rows = await self.maker.rows(self.store)
        for row in rows:
            # Numbers of rows and of transactions are used up by what is rolled back, too.
            del row["sequence"]
            row["settled_group"] = row["settled_group"] is not None
        others = [
            await self.maker.execute(self.store, f"select * from {self.table(table)} order by 1")
            for table in ("readers", "recheck", "jobs_projected")
        ]
        return {"jobs": rows, "projected": others.pop(), "others": others}

    async def broken(self) -> list[str]:
        return await self.maker.broken(self.store)

    async def states(self, case: Case) -> list[Any]:
        self.seen = [await self.dump()]
        await self.perform(case.asked)
        seen, self.seen = self.seen, None
        return seen

    async def die(self, point: int, case: Case) -> list[Any]:
        self.countdown, self.pid = point, 0
        with suppress(StoreUnavailable):
            await self.perform(case.asked)
        assert self.pid
        # It was told of its end before the server had cleared up.
        alive = f"select from pg_stat_activity where pid = {self.pid}"
        while await self.maker.execute(self.store, alive):  # noqa: ASYNC110 (nothing tells)
            await trio.sleep(0.001)
        self.pid = 0
        return [await self.dump()]

    async def trip(
        self, connection: Any, prepared: Any, statements: Sequence[tuple[str, Any]]
    ) -> Any:
        """Stands in for `_trip.trip`, through which everything goes."""
        if self.seen is not None:
            state = self.seen[-1]
            results = await trip(connection, prepared, statements)
            self.seen += [state] * (len(statements) - 1) + [await self.dump()]
            # Once more: the answer may be lost, too.
            self.seen.append(self.seen[-1])
            return results
        if 0 <= self.countdown <= len(statements):
            point, self.countdown = self.countdown, -1
            self.pid = connection.pgconn.backend_pid if self.blow == END else 0
            if point == len(statements):
                await trip(connection, prepared, statements)
                statements = []
            return await trip(
                connection, prepared, [*statements[:point], (self.blow, {}), *statements[point:]]
            )
        self.countdown -= len(statements) + 1
        return await trip(connection, prepared, statements)


END = "select pg_terminate_backend(pg_backend_pid())"


def project(_: QueueTransition, connection: sqlite3.Connection) -> None:
    """Writes of the application's own, in the same transaction."""
    # Not through the mortal cursor: what the application does is not the engine's to repair.
    sqlite3.Connection.cursor(connection).execute("insert into projected values (1)")


def opened(kind: str, path: Path | None) -> Mortal:
    """A connection of one of the kinds."""
    options: dict[str, Any] = {"factory": Mortal, "check_same_thread": False}
    if kind != "borrowed":
        options["isolation_level"] = None
    connection = sqlite3.connect(":memory:" if path is None else path, **options)
    if path is not None:
        connection.execute("pragma journal_mode = wal")
        connection.execute("pragma synchronous = off")
    return connection


@asynccontextmanager
async def sqlite_world(kind: str, folder: Path) -> AsyncGenerator[SQLiteWorld]:
    """A fresh, populated database of one kind."""
    path = folder / "jobs.db" if kind == "file" else None
    with closing(opened(kind, path)) as connection:
        clock = DurableClock()
        prepare(connection, kind)
        connection.execute("create table projected (n integer)")
        connection.commit()
        engine = Engine(connection, clock, project)

        async def perform(asked: Sequence[Wish[Any]]) -> Sequence[Any]:
            return engine.perform(asked)[0]

        await populate(perform, clock)
        check_invariants(connection)
        saved = bytearray(connection.serialize())
        # A database in memory cannot have a write-ahead log; these bytes say that there is none.
        saved[18:20] = b"\1\1"
        yield SQLiteWorld(connection, engine, clock, path, bytes(saved))


def restore(here: SQLiteWorld, case: Case | None = None) -> None:
    """Back to the populated state."""
    here.connection.countdown = None
    with closing(sqlite3.connect(":memory:")) as source:
        source.deserialize(here.saved)
        source.backup(here.connection)
    if case is not None and case.damage is not None:
        here.connection.execute(case.damage.format(jobs="watchdog_jobs"))
        here.connection.commit()


KINDS = ("memory", "borrowed", "file")


@pytest.fixture(params=KINDS)
async def here(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[SQLiteWorld]:
    async with sqlite_world(request.param, tmp_path) as world:
        yield world


@asynccontextmanager
async def postgres_world(maker: PostgresMaker, *, projects: bool) -> AsyncGenerator[PostgresWorld]:
    """The same on a server; with a projector an operation is one transaction of several trips."""

    async def project(transition: QueueTransition, connection: Any) -> None:
        await world.project(transition, connection)

    async with maker._open(DurableClock(), project=project if projects else None) as (store, clock):
        world = PostgresWorld(maker, store, clock)
        await world.save()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("trio_watchdog._postgres.trip", world.trip)
            yield world
        await world.forget()


WORLDS: dict[str, Callable[[Find, Path], AbstractAsyncContextManager[World]]] = {
    **{kind: lambda _, folder, kind=kind: sqlite_world(kind, folder) for kind in KINDS},
    "postgres": lambda find, _: postgres_world(find("maker_of")("postgres"), projects=False),
    "postgres with a projector": lambda find, _: postgres_world(
        find("maker_of")("postgres"), projects=True
    ),
}


def outcomes(here: SQLiteWorld, case: Case) -> tuple[Any, Any, int]:
    """The state before, the state after, and how many statements lie between."""
    restore(here, case)
    old = dump(here.connection)
    here.connection.statements = 0
    answers, _ = here.engine.perform(case.asked)
    for answer in answers:
        assert not isinstance(answer, Exception), answer
    statements = here.connection.statements
    return old, dump(here.connection), statements


@pytest.mark.parametrize("kind", WORLDS)
async def test_a_process_that_dies_leaves_all_old_or_all_new(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    async with WORLDS[kind](request.getfixturevalue, tmp_path) as here:
        for number, case in enumerate(CASES):
            await here.restore(case)
            states = await here.states(case)
            old, new = states[0], states[-1]
            assert old != new, f"{case.name} does nothing"
            assert len(states) >= 3
            points = range(number % here.share, len(states) - 1, here.share)
            for point in points:
                state = states[point]
                where = f"{case.name}, at point {point}"
                await here.restore(case)
                for left in await here.die(point, case):
                    assert left == state, f"{where}: half done"
                if case.damage is None:
                    assert await here.broken() == [], where
                # And whoever comes next can do it, or finds it done.
                asked = case.asked if left == old else case.repeated or case.asked
                answers = [gist(answer) for answer in await here.perform(asked)]
                first = await first_answers(case)
                if left == old:
                    assert answers == first, where
                elif left == new:
                    assert answers == list(case.again), where
                else:
                    for answer, *possible in zip(answers, first, case.again, strict=True):
                        assert answer in possible, where
                assert await here.dump() == new, where


@pytest.mark.parametrize("kind", WORLDS)
async def test_after_the_commit_it_is_done_and_a_replay_is_harmless(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    async with WORLDS[kind](request.getfixturevalue, tmp_path) as here:
        for case in CASES:
            await here.restore(case)
            new = (await here.states(case))[-1]
            assert await here.broken() == [], case.name
            answers = await here.perform(case.repeated or case.asked)
            assert tuple(gist(answer) for answer in answers) == case.again, case.name
            again = await here.dump()
            assert again["jobs"] == new["jobs"], case.name
            assert again["projected"] == new["projected"], "the replay was told as a change"
            assert await here.broken() == [], case.name


FIRST: dict[str, list[Any]] = {}


async def first_answers(case: Case) -> list[Any]:
    """What the exchange says when it is done for the first time."""
    if case.name not in FIRST:
        async with sqlite_world("memory", Path()) as fresh:
            await fresh.restore(case)
            FIRST[case.name] = [gist(answer) for answer in await fresh.perform(case.asked)]
    return FIRST[case.name]


def what_is_on_disk(path: Path, folder: Path) -> Any:
    """What a process finds that opens the files as they are at this moment."""
    folder.mkdir()
    for name in (path.name, f"{path.name}-wal"):
        if (path.parent / name).exists():
            shutil.copy(path.parent / name, folder / name)
    with closing(sqlite3.connect(folder / path.name)) as connection:
        prepare(connection, "what is left")
        assert connection.execute("pragma integrity_check").fetchall() == [("ok",)]
        return dump(connection)


@pytest.mark.parametrize("error", [sqlite3.OperationalError, MemoryError])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_a_statement_that_fails_undoes_what_was_before_it(
    case: Case, here: SQLiteWorld, error: type[Exception]
) -> None:
    old, new, statements = outcomes(here, case)
    for point in range(statements):
        restore(here, case)

        def fail() -> None:
            raise error("disk I/O error")

        here.connection.fate = fail
        here.connection.countdown = point
        if error is sqlite3.OperationalError:
            # Nothing is retried in here: whether to, and when, is the caller's affair.
            with pytest.raises(StoreUnavailable, match="disk I/O error"):
                here.engine.perform(case.asked)
            assert dump(here.connection) == old
            here.engine.perform(case.asked)
            assert dump(here.connection) == new
        else:
            # An error that is nobody's fault in particular: each wish alone.
            answers, _ = here.engine.perform(case.asked)
            state = dump(here.connection)
            if len(case.asked) == 1:
                assert isinstance(answers[0], MemoryError)
                assert state == old
            else:
                assert not any(isinstance(answer, Exception) for answer in answers)
                assert len(state["jobs"]) == len(new["jobs"])
        assert not here.connection.in_transaction
        if case.damage is None:
            check_invariants(here.connection)


async def test_a_rollback_that_fails_too_leaves_the_store_usable(here: SQLiteWorld) -> None:
    restore(here)
    old = dump(here.connection)

    def fail() -> None:
        # As when the disk is full: SQLite has rolled back by itself.
        here.connection.rollback()
        raise sqlite3.OperationalError("database or disk is full")

    here.connection.fate = fail
    here.connection.countdown = 2
    with pytest.raises(StoreUnavailable, match="full"):
        here.engine.perform([w.Enqueue(Job("x"))])
    assert dump(here.connection) == old
    answers, _ = here.engine.perform([w.Enqueue(Job("x"))])
    assert answers[0].status == "queued"


async def test_a_commit_that_is_refused_leaves_all_old(here: SQLiteWorld) -> None:
    for case in CASES:
        old, _, statements = outcomes(here, case)
        restore(here, case)

        def fail() -> None:
            raise sqlite3.OperationalError("database is locked")

        here.connection.fate = fail
        here.connection.countdown = statements - 1
        with pytest.raises(StoreUnavailable):
            here.engine.perform(case.asked)
        assert dump(here.connection) == old


def test_the_schema_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    for kind in KINDS:
        path = tmp_path / "schema.db" if kind == "file" else None
        statements = 0
        point = 0
        while statements == 0:
            if path is not None:
                for file in tmp_path.iterdir():
                    file.unlink()
            with closing(opened(kind, path)) as connection:

                def die() -> None:
                    raise Died

                connection.fate = die
                connection.statements = 0
                connection.countdown = point
                try:
                    prepare(connection, kind)
                except Died:
                    connection.rollback()
                    tables = connection.execute("select count(*) from sqlite_master").fetchone()
                    assert tables in ((0,), (whole(),)), f"{tables} before statement {point}"
                else:
                    statements = connection.statements
                connection.countdown = None
                prepare(connection, kind)
                assert connection.execute("select count(*) from sqlite_master").fetchone() == (
                    whole(),
                )
            point += 1
        assert point > 2


def whole() -> int:
    """Tables and indexes of the whole schema."""
    with closing(sqlite3.connect(":memory:")) as connection:
        prepare(connection, "memory")
        (count,) = connection.execute("select count(*) from sqlite_master").fetchone()
        return count


def without_hints(state: Any) -> Any:
    """Who met a lock does without it, and so cannot tell whether a job is blocked: it may look."""
    jobs = [{**row, "hint": row["hint"] is not None} for row in state["jobs"]]
    return {**state, "jobs": jobs}


@pytest.mark.parametrize("projects", [False, True])
async def test_a_statement_that_the_server_refuses_is_undone_or_tried_again(
    maker_of: Callable[[str], KnownMaker], projects: bool
) -> None:
    maker = maker_of("postgres")
    assert isinstance(maker, PostgresMaker)
    async with postgres_world(maker, projects=projects) as here:
        for number, case in enumerate(CASES):
            # Lost races, a lock that is held, a server without memory, a cancelled statement.
            state = ("40001", "40P01", "55P03", "53200", "57014")[number % 5]
            here.blow = f"do $$ begin raise exception using errcode = '{state}'; end $$"
            await here.restore(case)
            states = [without_hints(state) for state in await here.states(case)]
            first = await first_answers(case)
            for point in range(number % 3, len(states) - 1, 3):
                where = f"{case.name}, {state} at point {point}"
                await here.restore(case)
                here.countdown = point
                try:
                    answers = await here.perform(case.asked)
                except StoreUnavailable:
                    answers = None
                here.countdown = -1
                left = without_hints(await here.dump())
                if answers is not None and not any(isinstance(a, Exception) for a in answers):
                    # By its own second try; or the answer was lost after all was done.
                    assert left == states[-1], where
                    continue
                if len(case.asked) == 1:
                    assert left in states, where
                if case.damage is None:
                    assert await here.broken() == [], where
                again = await here.perform(case.repeated or case.asked)
                for answer, *possible in zip(again, first, case.again, strict=True):
                    assert gist(answer) in possible, where
                assert without_hints(await here.dump()) == states[-1], where


def test_cases_are_different() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert evolve(CASES[0], name="x") != CASES[0]
    assert issubclass(StoreInvalid, Exception)
