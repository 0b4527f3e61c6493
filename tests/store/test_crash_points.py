"""Die before each statement and after the commit of every operation: all old, or all new."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve, frozen

from trio_watchdog import _operations as operations
from trio_watchdog import _wishes as w
from trio_watchdog._errors import StoreInvalid, StoreUnavailable
from trio_watchdog._model import Job, Outcome, QueueTransition, Recovery, RetryPolicy
from trio_watchdog._rules import Settle
from trio_watchdog._sqlite import Engine, prepare
from trio_watchdog._wishes import Wish
from trio_watchdog.testing import DurableClock, check_invariants

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


def populate(engine: Engine, clock: DurableClock) -> None:
    """A table with a job in every situation. Tokens are ``t`` and the job's id."""

    def do(*asked: Wish[Any]) -> None:
        answers, _ = engine.perform(asked)
        for answer in answers:
            assert not isinstance(answer, Exception), answer

    def run(id: str, lane: str, recovery: Recovery | None = None, lease: int = LEASE) -> None:
        do(w.Enqueue(Job(lane, id=id, queue=f"q {id}", recovery=recovery)))
        do(w.Claim(lane, f"t {id}", "owner", lease))

    run("settled", "s")
    do(w.Decide("settled", "t settled", DONE))
    clock.advance(1)
    run("running", "a")
    do(
        w.EnqueueMany(
            [Job("b", id="behind", queue="q running"), Job("b", id="behind too", queue="q running")]
        )
    )
    # So that what is behind is known to be blocked.
    do(w.Claim("b", "t", "owner", LEASE))
    run("cancelling", "c")
    do(w.Cancel("cancelling", "c cancelling"))
    run("completing", "d")
    do(w.Decide("completing", "t completing", DONE, has_hook=True))
    run("orphan", "e", lease=1)
    do(w.Decide("orphan", "t orphan", DONE, has_hook=True))
    run("gone", "f", Recovery(1), lease=1)
    run("gone for good", "g", lease=1)
    run("reserved", "h")
    do(w.ReserveAttempt("reserved", "t reserved", RetryPolicy(1)))
    do(w.Enqueue(Job("i", id="cancelled", queue="q i")))
    do(w.Enqueue(Job("i", id="after the cancelled", queue="q i")))
    do(w.Cancel("cancelled", "c cancelled"))
    do(w.EnqueueMany([Job("k", id=f"k{n}", queue="q k", priority=n % 2) for n in range(4)]))
    do(w.Enqueue(Job("l", id="deferred", not_before=clock.instant(1))))
    do(w.ProtectSettled("reader", "1000.1"))
    clock.advance(1)


SELECT = "select 'x' as lane, 's' || value as id from json_each('[1,2,3]')"

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
        damage="update watchdog_jobs set hint = 'lowered' where queue = 'q k'",
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


@frozen
class World:
    """A populated database, and how to come back to it."""

    connection: Mortal
    engine: Engine
    clock: DurableClock
    path: Path | None
    saved: bytes


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


@contextmanager
def world(kind: str, folder: Path, saved: bytes | None = None) -> Iterator[World]:
    """A fresh, populated database of one kind."""
    path = folder / "jobs.db" if kind == "file" else None
    with closing(opened(kind, path)) as connection:
        clock = DurableClock()
        prepare(connection, kind)
        connection.execute("create table projected (n integer)")
        connection.commit()
        engine = Engine(connection, clock, project)
        populate(engine, clock)
        check_invariants(connection)
        saved = bytearray(connection.serialize())
        # A database in memory cannot have a write-ahead log; these bytes say that there is none.
        saved[18:20] = b"\1\1"
        yield World(connection, engine, clock, path, bytes(saved))


def restore(here: World, case: Case | None = None) -> None:
    """Back to the populated state."""
    here.connection.countdown = None
    with closing(sqlite3.connect(":memory:")) as source:
        source.deserialize(here.saved)
        source.backup(here.connection)
    if case is not None and case.damage is not None:
        here.connection.execute(case.damage)
        here.connection.commit()


KINDS = ("memory", "borrowed", "file")


@pytest.fixture(scope="module", params=KINDS)
def here(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    with world(request.param, tmp_path_factory.mktemp("crash")) as world_:
        yield world_


def outcomes(here: World, case: Case) -> tuple[Any, Any, int]:
    """The state before, the state after, and how many statements lie between."""
    restore(here, case)
    old = dump(here.connection)
    here.connection.statements = 0
    answers, _ = here.engine.perform(case.asked)
    for answer in answers:
        assert not isinstance(answer, Exception), answer
    statements = here.connection.statements
    return old, dump(here.connection), statements


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_process_that_dies_leaves_all_old_or_all_new(
    case: Case, here: World, tmp_path: Path
) -> None:
    old, new, statements = outcomes(here, case)
    assert old != new, "the case does nothing"
    assert statements >= 3
    for point in range(statements):
        restore(here, case)
        left: list[Any] = []

        def die(left: list[Any] = left, point: int = point) -> None:
            if here.path is not None:
                left.append(what_is_on_disk(here.path, tmp_path / f"{point}"))
            raise Died

        here.connection.fate = die
        here.connection.countdown = point
        with pytest.raises(Died):
            here.engine.perform(case.asked)
        # In memory what is left is what the rollback left; on disk what another process finds.
        left.append(dump(here.connection))
        assert all(state == old for state in left), f"half done before statement {point}"
        assert not here.connection.in_transaction
        # And whoever comes next can do it.
        answers, _ = here.engine.perform(case.asked)
        assert [gist(answer) for answer in answers] == first_answers(case)
        assert dump(here.connection) == new


def first_answers(case: Case) -> list[Any]:
    """What the exchange says when it is done for the first time."""
    with world("memory", Path()) as fresh:
        restore(fresh, case)
        answers, _ = fresh.engine.perform(case.asked)
        return [gist(answer) for answer in answers]


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


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_after_the_commit_it_is_done_and_a_replay_is_harmless(
    case: Case, here: World, tmp_path: Path
) -> None:
    _, new, _ = outcomes(here, case)
    if here.path is not None:
        assert what_is_on_disk(here.path, tmp_path / "committed") == new
    check_invariants(here.connection)
    answers, _ = here.engine.perform(case.repeated or case.asked)
    assert tuple(gist(answer) for answer in answers) == case.again
    again = dump(here.connection)
    assert again["jobs"] == new["jobs"]
    assert again["projected"] == new["projected"], "the replay was told as a change"
    check_invariants(here.connection)


@pytest.mark.parametrize("error", [sqlite3.OperationalError, MemoryError])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_statement_that_fails_undoes_what_was_before_it(
    case: Case, here: World, error: type[Exception]
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


def test_a_rollback_that_fails_too_leaves_the_store_usable(here: World) -> None:
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


def test_a_commit_that_is_refused_leaves_all_old(here: World) -> None:
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


def test_cases_are_different() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert evolve(CASES[0], name="x") != CASES[0]
    assert issubclass(StoreInvalid, Exception)
