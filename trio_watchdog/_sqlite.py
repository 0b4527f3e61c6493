"""SQLite: one writer at a time, so every operation is a function run whole.

`Engine` runs wishes in one transaction on one connection, synchronously. Around it stand two
stores: `FileStore` runs it on a thread of its own and lets many tasks share a transaction, and
`InlineStore` runs it on the event loop, for databases in memory and for connections that the
caller owns (a task that waits for a thread looks idle to `trio.testing.MockClock`).
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sqlite3
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, Protocol, TypeVar, cast

import outcome
import trio

from . import _operations as operations
from . import _statements as sql
from ._errors import (
    SettlementRejected,
    StoreInvalid,
    StoreUnavailable,
    WatchdogError,
)
from ._exchange import Exchange
from ._identity import fresh_token
from ._model import QueueTransition
from ._operations import Call, Effects, Operation, Row
from ._owners import OwnerLock
from ._payload import PAYLOAD_LIMIT
from ._rows import settled_job
from ._sqlite_file import (
    FileSystem,
    Place,
    advice,
    file_system,
    file_vitals,
    make_file,
    refuse_network,
)
from ._store import ELSEWHERE, Change, Project, Renewer, Store, Vital, refuse_fork
from ._wishes import EnqueueSelect, ReadOwners, Wish

T = TypeVar("T")

OLDEST_SQLITE = (3, 35, 0)
"""RETURNING and MATERIALIZED came with it."""

BUSY_TIMEOUT = 1.0
"""Seconds that one attempt waits for another process's transaction; callers try again."""

CHANGE_INTERVAL = 0.15
"""Seconds between two looks at whether the file has changed: a `stat`, no query."""

LOG_LIMIT = 4 * 1024 * 1024
"""Bytes of a write-ahead log that are left on the disk when nobody needs them."""

TIDY_INTERVAL = 5.0
"""Seconds between two attempts to give the room of a longer one back, while nothing happens."""

COMMIT_INTERVAL = 0.01
"""Seconds between two looks whether the caller has ended a transaction that used us."""

DIALECT = sql.Dialect("sqlite")

touched: dict[int, list[Callable[[], None]]] = {}
"""Stores on a caller's connection, by its ``id``: told when others changed jobs through it."""

Synchronous = Literal["full", "normal"]


class Clock(Protocol):
    """What judges due times and leases, in milliseconds since the epoch."""

    def now(self) -> int: ...
    def lease_now(self) -> int: ...


# -- clocks ---------------------------------------------------------------------------------------


class HostClock:
    """The host's clocks: wall time for due times, and for leases one that nobody can set.

    A lease must not end because an administrator or NTP stepped the wall clock, or because one
    process sees a wrong one. So leases are judged by the time since boot, which all processes of
    the host share, plus an offset that the first process after a boot wrote into the database
    and that makes it look like wall time.
    """

    def __init__(self) -> None:
        self.offset = 0

    def now(self) -> int:
        return time.time_ns() // 1_000_000

    def lease_now(self) -> int:
        return self.boot_now() + self.offset

    @staticmethod
    def boot_now() -> int:
        """Milliseconds since boot, suspended time included, where the system tells; else wall."""
        if hasattr(time, "CLOCK_BOOTTIME"):
            return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000
        return time.time_ns() // 1_000_000

    @staticmethod
    def boot_id() -> str:
        """What tells one boot of this host from another."""
        if not hasattr(time, "CLOCK_BOOTTIME"):
            return "wall"
        try:
            return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            return "unknown"


class TrioClock:
    """Trio's clock, for a database that no other process can see.

    Under `trio.testing.MockClock` leases, delays and deferred jobs then follow the test's time.
    """

    def __init__(self) -> None:
        self._offset = time.time() - trio.current_time()

    def now(self) -> int:
        return int((trio.current_time() + self._offset) * 1000)

    lease_now = now


# -- errors ---------------------------------------------------------------------------------------

_INVALID_CODES = {
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_SCHEMA,
    sqlite3.SQLITE_CONSTRAINT,
    sqlite3.SQLITE_MISMATCH,
    sqlite3.SQLITE_ERROR,
    sqlite3.SQLITE_TOOBIG,
    sqlite3.SQLITE_AUTH,
}


def store_error(error: sqlite3.Error, doing: str, path: Path | None = None) -> WatchdogError:
    """The project's error for one of sqlite3's: unavailable if waiting may help, else invalid.

    ``path`` of the database lets it say what to do.
    """
    code = getattr(error, "sqlite_errorcode", None)
    is_invalid = code is not None and (code & 0xFF) in _INVALID_CODES
    if isinstance(error, sqlite3.IntegrityError):
        is_invalid = True
    misuse = (sqlite3.ProgrammingError, sqlite3.InterfaceError, sqlite3.DataError)
    if isinstance(error, misuse) and code is None:
        is_invalid = True
    kind = StoreInvalid if is_invalid else StoreUnavailable
    wrapped = kind(f"SQLite, while {doing}: {error}{advice(error, path)}")
    wrapped.__cause__ = error
    return wrapped


@contextmanager
def translated(doing: str, path: Path | None = None) -> Generator[None]:
    """Raise sqlite3's errors as ours."""
    try:
        yield
    except sqlite3.Error as error:
        raise store_error(error, doing, path) from error


def _named(error: Exception, wish: Wish[Any]) -> Exception:
    """The error, with the job's id if it is that its row breaks the table's checks."""
    cause = error.__cause__
    id = getattr(wish, "id", None)
    is_nonsense = getattr(cause, "sqlite_errorcode", None) == sqlite3.SQLITE_CONSTRAINT_CHECK
    if id is None or not is_nonsense:
        return error
    named = StoreInvalid(
        f"the row of job {id!r} breaks the rules of its table, as after an edit by hand:"
        " `trio-watchdog doctor` tells how"
    )
    named.__cause__ = cause
    return named


# -- one connection -------------------------------------------------------------------------------


class Engine:
    """Answers wishes on one connection, blocking. Not for two threads at once."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        clock: Clock,
        project: Project | None = None,
        payload_limit: int = PAYLOAD_LIMIT,
        place: Place | None = None,
    ) -> None:
        self.connection = connection
        self.clock = clock
        self.project = project
        self.payload_limit = payload_limit
        self.place = place
        self._path = None if place is None else place.path
        self._pid = os.getpid()
        self._cursor = _plain_cursor(connection)
        self._data_version: int | None = None

    def perform(self, asked: Sequence[Wish[Any]]) -> tuple[list[Any], Effects]:
        """Answer all wishes in one transaction, or each in one of its own if that fails."""
        refuse_fork(self._pid)
        if self.place is not None:
            self.place.check()
        # The caller's SQL might end its transaction, and must not end that of others.
        is_apart = len(asked) > 1 and any(isinstance(wish, EnqueueSelect) for wish in asked)
        try:
            if not is_apart:
                return self._transaction(asked)
        except StoreUnavailable:
            raise
        except Exception as error:
            if len(asked) == 1:
                return [_named(error, asked[0])], Effects(self.payload_limit)
        # Or one of them failed and undid the others: each alone, so that it hurts only itself.
        answers: list[Any] = [None] * len(asked)
        effects = Effects(self.payload_limit)
        for _, positions in operations.plan(asked):
            for position in positions:
                try:
                    (answers[position],), effect = self.perform([asked[position]])
                except StoreUnavailable as error:
                    # What was committed before it must be told all the same.
                    answers[position] = error
                else:
                    effects.merge(effect)
        return answers, effects

    def _transaction(self, asked: Sequence[Wish[Any]]) -> tuple[list[Any], Effects]:
        is_read = all(type(wish) in operations.READS for wish in asked)
        if self.connection.in_transaction:
            raise StoreUnavailable("the connection is inside a transaction of its owner")
        with translated("beginning a transaction", self._path):
            # Immediate: a transaction that turns to writing later fails at once when another is
            # writing, whatever the timeout.
            self._cursor.execute("begin" if is_read else "begin immediate")
        try:
            with translated("executing", self._path):
                answers, effects = self.answer(asked)
                self._cursor.execute("commit")
        except BaseException:
            if self.connection.in_transaction:
                self.connection.rollback()
            raise
        return answers, effects

    def answer(self, asked: Sequence[Wish[Any]]) -> tuple[list[Any], Effects]:
        """Answer wishes inside the transaction that is open, and call the projector."""
        effects = Effects(self.payload_limit)
        clocks = self.clocks()
        answers: list[Any] = [None] * len(asked)
        for operation, positions in operations.plan(asked):
            results = self.run(operation([asked[p] for p in positions], effects), clocks)
            for position, result in zip(positions, results, strict=True):
                answers[position] = result
        if self.project is not None:
            self._tell(self.project, effects, clocks)
        return answers, effects

    def clocks(self) -> dict[str, int]:
        """The instants that judge one transaction."""
        return {"now": self.clock.now(), "lease_now": self.clock.lease_now()}

    def run(self, operation: Operation[T], clocks: Mapping[str, int]) -> T:
        """Drive one operation to its answer."""
        rows: Any = None
        while True:
            try:
                step = operation.send(rows)
            except StopIteration as stop:
                return cast("T", stop.value)
            if isinstance(step, Call):
                rows = self._execute(step, clocks)
            else:
                rows = [self._execute(call, clocks) for call in step]

    def _execute(self, call: Call, clocks: Mapping[str, int]) -> Any:
        if isinstance(call.statement, str):
            return self._selected(call.statement, call.parameters)
        text = DIALECT.text(call.statement)
        if not text:
            return []
        cursor = self._cursor.execute(
            text, {**clocks, **cast("Mapping[str, Any]", call.parameters)}
        )
        rows: list[Row] = cursor.fetchall()
        return [(cursor.rowcount,)] if call.statement.counts else rows

    def _selected(self, text: str, parameters: Any) -> list[dict[str, Any]]:
        """Rows of the caller's own SQL, which names its columns."""
        if isinstance(parameters, Mapping):
            # sqlite3 takes any other mapping for a sequence.
            parameters = dict(cast("Mapping[str, Any]", parameters))
        try:
            cursor = self._cursor.execute(text, parameters)
            rows = cursor.fetchall()
        except (TypeError, ValueError, OverflowError, sqlite3.Warning, sqlite3.Error) as error:
            is_text = str(error).startswith("Could not decode to UTF-8")
            if isinstance(error, sqlite3.Error) and not is_text:
                raise
            # Not SQLite but sqlite3 says so: of parameters, and of text that it cannot read.
            raise StoreInvalid(f"SQLite, while executing: {error}") from error
        if cursor.description is None:
            raise StoreInvalid(operations.NO_ROWS)
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in rows]

    def _tell(self, project: Project, effects: Effects, clocks: Mapping[str, int]) -> None:
        for queue, settled_id in effects.transitions:
            settled = None
            if settled_id is not None:
                rows = self._execute(operations.one(sql.READ, id=settled_id), clocks)
                # One that cannot be read settles like others, and cannot be told.
                with contextlib.suppress(StoreInvalid):
                    settled = settled_job(rows[0]) if rows else None
            head = self.run(operations.queue_head(queue), clocks)
            try:
                told = project(QueueTransition(queue, head, settled), self.connection)
                if told is not None:
                    if inspect.iscoroutine(told):
                        told.close()
                    raise TypeError(f"it returned {told!r:.80}; on SQLite it cannot be async")
            except Exception as error:
                raise SettlementRejected(
                    f"the projector refused a change of queue {queue!r}: {error}"
                ) from error

    def close(self) -> None:
        """Close the connection. A statement that has failed would keep it, and its files, open."""
        self._cursor.close()
        self.connection.close()

    def is_changed_elsewhere(self) -> bool:
        """Whether another connection has committed since the last time this was asked."""
        with translated("reading the data version", self._path):
            (version,) = self._cursor.execute("pragma data_version").fetchone()
        is_changed = version != self._data_version
        self._data_version = version
        return is_changed


# -- the schema -----------------------------------------------------------------------------------


def prepare(
    connection: sqlite3.Connection, name: str, *, path: Path | None = None, create: bool = True
) -> dict[str, Any]:
    """Create the schema when absent, check it when present; returns the meta table."""
    if sqlite3.sqlite_version_info < OLDEST_SQLITE:
        needed = ".".join(map(str, OLDEST_SQLITE))
        raise StoreInvalid(
            f"SQLite {sqlite3.sqlite_version} is too old; {needed} or newer is needed"
        )
    with translated(f"opening {name}", path):
        tables = _tables(connection)
        if not tables and not create:
            raise StoreInvalid(
                f"{name} has no tables of trio_watchdog; name another file, or let `trio-watchdog"
                " migrate`, or opening without create=False, make them"
            )
        if not tables:
            connection.execute("begin immediate")
            try:
                # Again under the lock: another process may have created it meanwhile.
                tables = _tables(connection)
                if not tables:
                    _create(connection)
                connection.execute("commit")
            except BaseException:
                connection.rollback()
                raise
            tables = _tables(connection)
        if "watchdog_meta" not in tables or "watchdog_jobs" not in tables:
            raise StoreInvalid(
                f"{name} has {sorted(tables)} but not all tables of trio_watchdog; it was made by"
                " something else: use another file"
            )
        meta = _meta(connection)
    version = meta.get("schema_version")
    if version != sql.SCHEMA_VERSION:
        advice = (
            "upgrade trio_watchdog"
            if isinstance(version, int) and version > sql.SCHEMA_VERSION
            else "move its unsettled jobs to a new file"
        )
        raise StoreInvalid(
            f"{name} has schema version {version!r}, and this trio_watchdog needs"
            f" {sql.SCHEMA_VERSION}: {advice}"
        )
    return meta


def _tables(connection: sqlite3.Connection) -> set[str]:
    rows = _plain_cursor(connection).execute(
        "select name from sqlite_master"
        " where type = 'table' and name like 'watchdog\\_%' escape '\\'"
    )
    return {row[0] for row in rows.fetchall()}


def _meta(connection: sqlite3.Connection) -> dict[str, Any]:
    return dict(_plain_cursor(connection).execute(DIALECT.text(sql.READ_META)).fetchall())


def _plain_cursor(connection: sqlite3.Connection) -> sqlite3.Cursor:
    """A cursor whose rows are tuples, whatever the caller's connection makes of rows."""
    cursor = connection.cursor()
    cursor.row_factory = None
    return cursor


def _create(connection: sqlite3.Connection) -> None:
    for statement in sql.CREATE_SCHEMA:
        text = DIALECT.text(statement)
        if text:
            connection.execute(text)
    for name, value in {"schema_version": sql.SCHEMA_VERSION, "settle_group": 0}.items():
        connection.execute(DIALECT.text(sql.WRITE_META), {"name": name, "value": value})


def set_host_clock(
    connection: sqlite3.Connection, clock: HostClock, *, read_only: bool = False
) -> None:
    """Agree with all processes of this boot on the offset of the lease clock."""
    boot_id = clock.boot_id()
    offset = 0 if boot_id == "wall" else clock.now() - clock.boot_now()
    fresh = {"boot_id": boot_id, "boot_offset": offset}
    with translated("agreeing on the clock"):
        meta = _meta(connection)
        if meta.get("boot_id") != boot_id and read_only:
            # What the first one to write will say.
            meta |= fresh
        elif meta.get("boot_id") != boot_id:
            connection.execute("begin immediate")
            try:
                meta = _meta(connection)
                if meta.get("boot_id") != boot_id:
                    meta |= fresh
                    for name in ("boot_id", "boot_offset"):
                        row = {"name": name, "value": meta[name]}
                        connection.execute(DIALECT.text(sql.WRITE_META), row)
                connection.execute("commit")
            except BaseException:
                connection.rollback()
                raise
    clock.offset = int(meta["boot_offset"])


# -- stores ---------------------------------------------------------------------------------------


class _SQLiteStore(Store):
    """What both stores share: telling about changes, and known-dead owners."""

    def __init__(
        self, engine: Engine, clock: Clock, owner_lock: OwnerLock | None, payload_limit: int
    ) -> None:
        super().__init__()
        self._engine = engine
        self.payload_limit = payload_limit
        self.clock = clock
        self.owner_lock = owner_lock
        self.owner = fresh_token() if owner_lock is None else owner_lock.owner

    def now(self) -> int | None:
        return self.clock.now()

    async def dead_owners(self) -> tuple[str, ...]:
        if self.owner_lock is None:
            return ()
        # The dead first, then the claims: one that claims and dies in between is found the next
        # time. The other way round its claim would not be seen, and its file be removed, which
        # alone tells that it is dead.
        dead = self.owner_lock.dead()
        owners: list[str] = await self.ask(ReadOwners())
        self.owner_lock.forget(dead.difference(owners))
        return tuple(owner for owner in owners if owner in dead)

    def _perform(self, asked: Sequence[Wish[Any]]) -> tuple[list[Any], Effects]:
        answers, effects = self._engine.perform(asked)
        if self.owner_lock is not None and effects.concern_others:
            # Before our own tasks hear of it: others have the longer way.
            self.owner_lock.ring_others(Change.of(effects).told())
        return answers, effects

    def _announce(self, effects: Effects) -> None:
        if effects.concern_others or effects.settled:
            self.report(Change.of(effects))


class InlineStore(_SQLiteStore):
    """A store on the event loop: each submission is a transaction, with no await inside."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        clock: Clock,
        owner_lock: OwnerLock | None,
        project: Project | None,
        payload_limit: int,
        place: Place | None = None,
    ) -> None:
        engine = Engine(connection, clock, project, payload_limit, place)
        super().__init__(engine, clock, owner_lock, payload_limit)
        self._touch: Callable[[], None] | None = None

    async def submit(self, *asked: Wish[Any]) -> list[Any]:
        await trio.lowlevel.checkpoint_if_cancelled()
        self.check_usable()
        answers, effects = self._perform(asked)
        self._announce(effects)
        if effects.concern_others:
            tell_touched(self._engine.connection, but=self._touch)
        await trio.lowlevel.cancel_shielded_checkpoint()
        return answers

    async def watch(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(self._watch_callers_transactions)
            if self.owner_lock is not None:
                await nursery.start(watch_file, self, self._is_changed, self.owner_lock, self._tidy)
            task_status.started()

    async def _watch_callers_transactions(self, task_status: trio.TaskStatus[None]) -> None:
        """Report commits that no other connection can see: those of the connection itself."""
        connection = self._engine.connection
        token = trio.lowlevel.current_trio_token()
        is_touched = trio.Event()

        def touch() -> None:
            # From any thread that uses the connection.
            token.run_sync_soon(set_touched, idempotent=True)

        def set_touched() -> None:
            is_touched.set()

        self._touch = touch
        touched.setdefault(id(connection), []).append(touch)
        try:
            task_status.started()
            while True:
                await is_touched.wait()
                is_touched = trio.Event()
                # sqlite3 has no hook for a commit.
                while connection.in_transaction:  # noqa: ASYNC110
                    await trio.sleep(COMMIT_INTERVAL)
                self.report(ELSEWHERE)
        finally:
            self._touch = None
            touched[id(connection)].remove(touch)
            if not touched[id(connection)]:
                del touched[id(connection)]

    async def vitals(self) -> list[Vital]:
        await trio.lowlevel.checkpoint()
        return file_vitals(self._engine.connection, self._engine.place, self.owner_lock)

    async def _is_changed(self) -> bool:
        return self._engine.is_changed_elsewhere()

    async def _tidy(self, *, is_idle: bool) -> None:
        # When to fold back the log of their connection is the caller's business.
        if self._engine.place is not None:
            self._engine.place.check()


def tell_touched(connection: sqlite3.Connection, *, but: Callable[[], None] | None = None) -> None:
    """Tell the stores on this connection, ``but`` one, that jobs were changed through it."""
    for touch in touched.get(id(connection), ()):
        if touch is not but:
            touch()


class FileStore(_SQLiteStore):
    """A store with a writer thread, whose transactions are shared by all tasks that wait."""

    def __init__(
        self,
        place: Place,
        connection: sqlite3.Connection,
        clock: Clock,
        owner_lock: OwnerLock,
        worker: Worker,
        connect: Callable[[], sqlite3.Connection],
        project: Project | None,
        payload_limit: int,
    ) -> None:
        engine = Engine(connection, clock, project, payload_limit, place)
        super().__init__(engine, clock, owner_lock, payload_limit)
        self.is_joint = True
        self.path = place.path
        self._place = place
        self._worker = worker
        self._connect = connect
        self._exchange = Exchange(self._exchanged)
        # Two connections of one process take turns here, for SQLite's own waiting is a poll.
        self._turn = threading.Lock()

    async def submit(self, *asked: Wish[Any]) -> list[Any]:
        # A fork has no worker thread, and would wait for it for ever.
        self.check_usable()
        return await self._exchange.submit(asked)

    async def _exchanged(self, asked: Sequence[Wish[Any]]) -> Sequence[Any]:
        # Once more, for those who waited while it was closed: the thread answers nobody then.
        self.check_usable()
        answers, effects = (await self._worker.run(self._perform, asked)).unwrap()
        self._announce(effects)
        return answers

    def _perform(self, asked: Sequence[Wish[Any]]) -> tuple[list[Any], Effects]:
        with self._turn:
            return super()._perform(asked)

    async def watch(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        assert self.owner_lock is not None
        await watch_file(self, self._is_changed, self.owner_lock, self._tidy, task_status)

    def close(self) -> None:
        """Close the connection."""
        self._engine.close()

    async def vitals(self) -> list[Vital]:
        # Reading every page takes long; on a connection of its own it is in nobody's way.
        return await trio.to_thread.run_sync(self._vitals)

    def _vitals(self) -> list[Vital]:
        with translated("examining the file", self.path):
            with contextlib.closing(self._connect()) as connection:
                return file_vitals(connection, self._place, self.owner_lock)

    async def _is_changed(self) -> bool:
        return (await self._worker.run(self._engine.is_changed_elsewhere)).unwrap()

    async def _tidy(self, *, is_idle: bool) -> None:
        self._place.check_all()
        if is_idle and self._place.log_size() > LOG_LIMIT:
            (await self._worker.run(truncate_log, self._engine.connection)).unwrap()

    def open_renewer(self) -> AbstractContextManager[Renewer]:
        return self._renewer()

    @contextmanager
    def _renewer(self) -> Generator[Renewer]:
        with translated("opening the renewal connection", self.path):
            connection = self._connect()
        with contextlib.closing(Engine(connection, self.clock, place=self._place)) as engine:

            def renew(claims: Sequence[Wish[Any]]) -> list[Any]:
                with self._turn:
                    answers, _ = engine.perform(claims)
                for answer in answers:
                    if isinstance(answer, Exception):
                        raise answer
                return answers

            yield renew


class Worker:
    """A thread that runs one function after another; cheaper per call than `trio.to_thread`."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[
            tuple[Callable[[], Any], trio.lowlevel.Task, trio.lowlevel.TrioToken] | None
        ] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    async def run(self, function: Callable[..., T], *args: Any) -> outcome.Outcome[T]:
        """What came of the call. Never abandoned: a cancellation waits until it has returned."""
        task = trio.lowlevel.current_task()
        token = trio.lowlevel.current_trio_token()
        self._calls.put((lambda: function(*args), task, token))
        return await trio.lowlevel.wait_task_rescheduled(lambda _: trio.lowlevel.Abort.FAILED)

    def stop(self) -> None:
        """Let the thread end after the calls that it has."""
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            function, task, token = call
            result = outcome.capture(function)
            # Nobody waits any more when the run has ended.
            with contextlib.suppress(trio.RunFinishedError):
                token.run_sync_soon(_deliver, task, result)
            del call, function, task, token, result


def _deliver(task: trio.lowlevel.Task, result: outcome.Outcome[Any]) -> None:
    trio.lowlevel.reschedule(task, outcome.Value(result))


def truncate_log(connection: sqlite3.Connection) -> None:
    """Give back the room of the write-ahead log, unless somebody reads or writes just now."""
    try:
        connection.execute("pragma busy_timeout = 0")
        connection.execute("pragma wal_checkpoint(truncate)").fetchone()
    except sqlite3.OperationalError:
        # Busy after all. The next time will do.
        pass
    finally:
        connection.execute(f"pragma busy_timeout = {BUSY_TIMEOUT * 1000:.0f}")


# -- changes made elsewhere -----------------------------------------------------------------------


async def watch_file(
    store: _SQLiteStore,
    is_changed: Callable[[], Any],
    owner_lock: OwnerLock,
    tidy: Callable[..., Awaitable[None]],
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Report `ELSEWHERE` when others have committed, or when an owner has died.

    Other stores ring a doorbell beside the file. Everybody else's commits, such as those of an
    application's own connection, show as a change of the file, which costs a `stat` to see; only
    then is the database asked whether it was somebody else's. ``tidy(is_idle=...)`` is called when
    the file has changed, and told now and then when it has not for a while.

    Raises `StoreInvalid` when the file is not there any more.
    """
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_watch_doorbell, store, owner_lock)
        seen: tuple[int, ...] | None = None
        again = True
        is_started = False
        tidy_at = trio.current_time() + TIDY_INTERVAL
        while True:
            stamp = owner_lock.stamp()
            if stamp != seen:
                tidy_at = trio.current_time() + TIDY_INTERVAL
            is_idle = trio.current_time() >= tidy_at
            if is_idle:
                tidy_at += TIDY_INTERVAL
            if stamp != seen or is_idle:
                # A file that was deleted or replaced has another stamp.
                await tidy(is_idle=is_idle)
            if stamp != seen or again:
                # Once more after each change: two commits within one tick of the file's clock
                # leave one stamp.
                again = stamp != seen
                seen = stamp
                try:
                    changed = await is_changed()
                except StoreUnavailable:
                    again = True
                else:
                    if changed and is_started:
                        store.report(ELSEWHERE)
                    if not is_started:
                        is_started = True
                        task_status.started()
            if owner_lock.has_newly_dead():
                store.report(ELSEWHERE)
            await trio.sleep(CHANGE_INTERVAL)


async def _watch_doorbell(store: _SQLiteStore, owner_lock: OwnerLock) -> None:
    while rings := await owner_lock.wait_rung():
        for told in rings:
            store.report(Change.heard(told))


# -- opening --------------------------------------------------------------------------------------


@asynccontextmanager
async def open_file_store(
    path: Path,
    *,
    synchronous: Synchronous = "full",
    project: Project | None = None,
    payload_limit: int = PAYLOAD_LIMIT,
    create: bool = True,
    read_only: bool = False,
    allow_network: bool = False,
    clock: Clock | None = None,
    file_system: FileSystem = file_system,
) -> AsyncGenerator[Store]:
    """A store on a file, created when absent.

    ``create=False`` refuses a file that is not there, or has no tables of ours. ``read_only`` does
    too, and leaves no trace: for those who only look. ``allow_network`` opens a file that other
    hosts may have open, too, which SQLite cannot bear.

    ``clock`` and ``file_system`` are for tests; all stores on a file must use the same clock.
    """
    if synchronous not in ("full", "normal"):
        raise ValueError(f"synchronous is {synchronous!r}; 'full' or 'normal' are allowed")

    # The renewal thread opens the file once more, whatever the working folder is by then.
    path = Path(os.getcwd()) / path
    may_create = create and not read_only

    def find() -> Place:
        try:
            if not allow_network:
                refuse_network(path, file_system(path))
            make_file(path, create=may_create)
            return Place(path)
        except OSError as error:
            # A name that is too long, for one.
            raise StoreUnavailable(f"{path} cannot be used: {error.strerror or error}") from error

    def connect() -> sqlite3.Connection:
        # Never creates: if the file is gone, nobody should go on with an empty one.
        return sqlite3.connect(
            f"{place.path.as_uri()}?mode=rw",
            uri=True,
            timeout=BUSY_TIMEOUT,
            isolation_level=None,
            check_same_thread=False,
        )

    def configure(connection: sqlite3.Connection) -> None:
        # Exact words: a pragma takes no parameters.
        if read_only:
            connection.execute("pragma query_only = on")
        else:
            connection.execute("pragma journal_mode = wal").fetchone()
            connection.execute(f"pragma journal_size_limit = {LOG_LIMIT}").fetchone()
            connection.execute(f"pragma synchronous = {synchronous}")

    def open_first() -> sqlite3.Connection:
        until = time.monotonic() + BUSY_TIMEOUT
        while True:
            try:
                return try_to_open()
            except StoreUnavailable as error:
                # Where to wait might be a deadlock, as on the way to WAL, SQLite refuses at once.
                code = getattr(error.__cause__, "sqlite_errorcode", 0) & 0xFF
                if code != sqlite3.SQLITE_BUSY or time.monotonic() >= until:
                    raise
            time.sleep(0.01)

    def try_to_open() -> sqlite3.Connection:
        with translated(f"opening {path}", path):
            connection = connect()
        try:
            if not may_create:
                # Before anything is changed in a file that may not be ours.
                prepare(connection, str(path), path=path, create=False)
            with translated(f"opening {path}", path):
                configure(connection)
            if may_create:
                prepare(connection, str(path), path=path)
            if clock is None:
                set_host_clock(connection, host_clock, read_only=read_only)
        except BaseException:
            connection.close()
            raise
        return connection

    def open_another() -> sqlite3.Connection:
        connection = connect()
        try:
            configure(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    host_clock = HostClock()
    worker = Worker(f"trio_watchdog {path.name}")
    try:
        place = (await worker.run(find)).unwrap()
        connection = (await worker.run(open_first)).unwrap()
        owner_lock = OwnerLock(path)
        store = FileStore(
            place,
            connection,
            clock or host_clock,
            owner_lock,
            worker,
            open_another,
            project,
            payload_limit,
        )
        try:
            # Who only looks owns nothing, and must not leave files of another user.
            with contextlib.nullcontext() if read_only else owner_lock:
                yield store
        finally:
            store.is_closed = True
            # Closing checkpoints the log; the worker ends its calls in order.
            await worker.run(store.close)
    finally:
        worker.stop()


@asynccontextmanager
async def open_memory_store(
    *,
    project: Project | None = None,
    payload_limit: int = PAYLOAD_LIMIT,
    clock: Clock | None = None,
) -> AsyncGenerator[Store]:
    """A store in memory, which ends with the block."""
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    with contextlib.closing(connection):
        async with open_borrowed_store(
            connection, project=project, payload_limit=payload_limit, clock=clock
        ) as store:
            yield store


@asynccontextmanager
async def open_borrowed_store(
    connection: sqlite3.Connection,
    *,
    project: Project | None = None,
    payload_limit: int = PAYLOAD_LIMIT,
    create: bool = True,
    allow_network: bool = False,
    clock: Clock | None = None,
) -> AsyncGenerator[Store]:
    """A store on a connection that stays the caller's, run on the event loop."""
    if getattr(connection, "autocommit", -1) is False:
        raise StoreInvalid(
            "the connection has autocommit=False, so it is always inside a transaction;"
            " open it with autocommit=True or with isolation_level"
        )
    if connection.in_transaction:
        raise StoreUnavailable("the connection is inside a transaction; end it first")
    refuse_other_text(connection)
    path = database_path(connection)
    if path is not None and not allow_network:
        refuse_network(path, file_system(path))
    prepare(connection, "the connection's database", path=path, create=create)
    with contextlib.ExitStack() as stack:
        owner_lock, place = None, None
        if path is not None:
            if clock is None:
                clock = HostClock()
                set_host_clock(connection, clock)
            owner_lock = stack.enter_context(OwnerLock(path))
            place = Place(path)
        clock = clock or TrioClock()
        store = InlineStore(connection, clock, owner_lock, project, payload_limit, place)
        try:
            yield store
        finally:
            store.is_closed = True


def refuse_other_text(connection: sqlite3.Connection) -> None:
    """Raise `StoreInvalid` if the caller's connection makes something else than str of text."""
    if _plain_cursor(connection).execute("select 'text'").fetchone() != ("text",):
        raise StoreInvalid(
            f"the connection's text_factory is {connection.text_factory!r}; text must come as str"
        )


def database_path(connection: sqlite3.Connection) -> Path | None:
    """The file of a connection's main database; None when it is in memory."""
    for _, name, file in _plain_cursor(connection).execute("pragma database_list").fetchall():
        if name == "main" and file:
            return Path(file)
    return None
