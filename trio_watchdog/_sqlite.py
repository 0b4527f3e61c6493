"""SQLite: one writer at a time, so every operation is a function run whole.

`Engine` runs wishes in one transaction on one connection, synchronously. Around it stand two
stores: `FileStore` runs it on a thread of its own and lets many tasks share a transaction, and
`InlineStore` runs it on the event loop, for databases in memory and for connections that the
caller owns (a task that waits for a thread looks idle to `trio.testing.MockClock`).
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
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
from ._store import ELSEWHERE, Change, Project, Renewer, Store, Vital
from ._wishes import ReadOwners, Wish

T = TypeVar("T")

OLDEST_SQLITE = (3, 35, 0)
"""RETURNING and MATERIALIZED came with it."""

BUSY_TIMEOUT = 1.0
"""Seconds that one attempt waits for another process's transaction; callers try again."""

CHANGE_INTERVAL = 0.05
"""Seconds between two looks at whether the file has changed: a `stat`, no query."""

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
}


def store_error(error: sqlite3.Error, doing: str) -> WatchdogError:
    """The project's error for one of sqlite3's: unavailable if waiting may help, else invalid."""
    code = getattr(error, "sqlite_errorcode", None)
    is_invalid = code is not None and (code & 0xFF) in _INVALID_CODES
    if isinstance(error, sqlite3.IntegrityError):
        is_invalid = True
    if isinstance(error, (sqlite3.ProgrammingError, sqlite3.InterfaceError)) and code is None:
        is_invalid = True
    kind = StoreInvalid if is_invalid else StoreUnavailable
    wrapped = kind(f"SQLite, while {doing}: {error}")
    wrapped.__cause__ = error
    return wrapped


@contextmanager
def translated(doing: str) -> Generator[None]:
    """Raise sqlite3's errors as ours."""
    try:
        yield
    except sqlite3.Error as error:
        raise store_error(error, doing) from error


# -- one connection -------------------------------------------------------------------------------


class Engine:
    """Answers wishes on one connection, blocking. Not for two threads at once."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        clock: Clock,
        project: Project | None = None,
        payload_limit: int = PAYLOAD_LIMIT,
    ) -> None:
        self.connection = connection
        self.clock = clock
        self.project = project
        self.payload_limit = payload_limit
        self._pid = os.getpid()
        self._cursor = _plain_cursor(connection)
        self._data_version: int | None = None

    def perform(self, asked: Sequence[Wish[Any]]) -> tuple[list[Any], Effects]:
        """Answer all wishes in one transaction, or each in one of its own if that fails."""
        if os.getpid() != self._pid:
            raise StoreUnavailable(
                f"this store was opened by process {self._pid} and cannot be used in its"
                f" fork {os.getpid()}; open one there"
            )
        try:
            return self._transaction(asked)
        except StoreUnavailable:
            raise
        except Exception as error:
            if len(asked) == 1:
                return [error], Effects(self.payload_limit)
        # One of them failed and undid the others: each alone, so that it hurts only itself.
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
        with translated("beginning a transaction"):
            # Immediate: a transaction that turns to writing later fails at once when another is
            # writing, whatever the timeout.
            self._cursor.execute("begin" if is_read else "begin immediate")
        try:
            with translated("executing"):
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
            cursor = self._cursor.execute(call.statement, call.parameters)
            names = [column[0] for column in cursor.description or ()]
            return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
        text = DIALECT.text(call.statement)
        if not text:
            return []
        cursor = self._cursor.execute(
            text, {**clocks, **cast("Mapping[str, Any]", call.parameters)}
        )
        rows: list[Row] = cursor.fetchall()
        return [(cursor.rowcount,)] if call.statement.counts else rows

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
                project(QueueTransition(queue, head, settled), self.connection)
            except Exception as error:
                raise SettlementRejected(
                    f"the projector refused a change of queue {queue!r}: {error}"
                ) from error

    def is_changed_elsewhere(self) -> bool:
        """Whether another connection has committed since the last time this was asked."""
        with translated("reading the data version"):
            (version,) = self._cursor.execute("pragma data_version").fetchone()
        is_changed = version != self._data_version
        self._data_version = version
        return is_changed


# -- the schema -----------------------------------------------------------------------------------


def prepare(connection: sqlite3.Connection, name: str) -> dict[str, Any]:
    """Create the schema when absent, check it when present; returns the meta table."""
    if sqlite3.sqlite_version_info < OLDEST_SQLITE:
        needed = ".".join(map(str, OLDEST_SQLITE))
        raise StoreInvalid(
            f"SQLite {sqlite3.sqlite_version} is too old; {needed} or newer is needed"
        )
    with translated(f"opening {name}"):
        tables = _tables(connection)
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


def set_host_clock(connection: sqlite3.Connection, clock: HostClock) -> None:
    """Agree with all processes of this boot on the offset of the lease clock."""
    boot_id = clock.boot_id()
    with translated("agreeing on the clock"):
        meta = _meta(connection)
        if meta.get("boot_id") != boot_id:
            connection.execute("begin immediate")
            try:
                meta = _meta(connection)
                if meta.get("boot_id") != boot_id:
                    offset = 0 if boot_id == "wall" else clock.now() - clock.boot_now()
                    meta |= {"boot_id": boot_id, "boot_offset": offset}
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

    def __init__(self, clock: Clock, owner_lock: OwnerLock | None, payload_limit: int) -> None:
        super().__init__()
        self.payload_limit = payload_limit
        self.clock = clock
        self.owner_lock = owner_lock
        self.owner = fresh_token() if owner_lock is None else owner_lock.owner

    def now(self) -> int | None:
        return self.clock.now()

    async def vitals(self) -> list[Vital]:
        return await self._on_engine(file_vitals)

    async def _on_engine(self, function: Callable[[Engine], T]) -> T:
        """Call the function with the engine, where the engine lives."""
        raise NotImplementedError

    async def dead_owners(self) -> tuple[str, ...]:
        if self.owner_lock is None:
            return ()
        owners: list[str] = await self.ask(ReadOwners())
        return self.owner_lock.dead(owners)

    def _announce(self, effects: Effects) -> None:
        if self.owner_lock is not None and effects.concern_others:
            self.owner_lock.ring_others()
        if effects.concern_others or effects.settled:
            self.report(
                Change(
                    effects.lanes,
                    effects.cancelled,
                    frozenset(effects.claims),
                    frozenset(effects.settled),
                )
            )


class InlineStore(_SQLiteStore):
    """A store on the event loop: each submission is a transaction, with no await inside."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        clock: Clock,
        owner_lock: OwnerLock | None,
        project: Project | None,
        payload_limit: int,
    ) -> None:
        super().__init__(clock, owner_lock, payload_limit)
        self._engine = Engine(connection, clock, project, payload_limit)
        self._touch: Callable[[], None] | None = None

    async def submit(self, *asked: Wish[Any]) -> list[Any]:
        await trio.lowlevel.checkpoint_if_cancelled()
        answers, effects = self._engine.perform(asked)
        self._announce(effects)
        if effects.concern_others:
            tell_touched(self._engine.connection, but=self._touch)
        await trio.lowlevel.cancel_shielded_checkpoint()
        return answers

    async def watch(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(self._watch_callers_transactions)
            if self.owner_lock is not None:
                await nursery.start(watch_file, self, self._is_changed, self.owner_lock)
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

    async def _on_engine(self, function: Callable[[Engine], T]) -> T:
        await trio.lowlevel.checkpoint()
        return function(self._engine)

    async def _is_changed(self) -> bool:
        return self._engine.is_changed_elsewhere()


def tell_touched(connection: sqlite3.Connection, *, but: Callable[[], None] | None = None) -> None:
    """Tell the stores on this connection, ``but`` one, that jobs were changed through it."""
    for touch in touched.get(id(connection), ()):
        if touch is not but:
            touch()


class FileStore(_SQLiteStore):
    """A store with a writer thread, whose transactions are shared by all tasks that wait."""

    def __init__(
        self,
        path: Path,
        connection: sqlite3.Connection,
        clock: Clock,
        owner_lock: OwnerLock,
        worker: Worker,
        connect: Callable[[], sqlite3.Connection],
        project: Project | None,
        payload_limit: int,
    ) -> None:
        super().__init__(clock, owner_lock, payload_limit)
        self.path = path
        self._worker = worker
        self._connect = connect
        self._engine = Engine(connection, clock, project, payload_limit)
        self._exchange = Exchange(self._exchanged)
        # Two connections of one process take turns here, for SQLite's own waiting is a poll.
        self._turn = threading.Lock()

    async def submit(self, *asked: Wish[Any]) -> list[Any]:
        return await self._exchange.submit(asked)

    async def _exchanged(self, asked: Sequence[Wish[Any]]) -> Sequence[Any]:
        answers, effects = (await self._worker.run(self._perform, asked)).unwrap()
        self._announce(effects)
        return answers

    def _perform(self, asked: Sequence[Wish[Any]]) -> tuple[list[Any], Effects]:
        with self._turn:
            return self._engine.perform(asked)

    async def watch(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        assert self.owner_lock is not None
        await watch_file(self, self._is_changed, self.owner_lock, task_status)

    async def _on_engine(self, function: Callable[[Engine], T]) -> T:
        return (await self._worker.run(function, self._engine)).unwrap()

    async def _is_changed(self) -> bool:
        return await self._on_engine(Engine.is_changed_elsewhere)

    def open_renewer(self) -> AbstractContextManager[Renewer]:
        return self._renewer()

    @contextmanager
    def _renewer(self) -> Generator[Renewer]:
        with translated("opening the renewal connection"):
            connection = self._connect()
        with contextlib.closing(connection):
            engine = Engine(connection, self.clock)

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


# -- health ---------------------------------------------------------------------------------------

WAL_WARNING = 256 * 1024 * 1024
"""Bytes of a write-ahead log that has not been folded back: somebody's reader keeps it."""


def file_vitals(engine: Engine) -> list[Vital]:
    """The health of a database file."""
    connection = engine.connection
    vitals: list[Vital] = []
    with translated("examining the file"):
        (answer,) = connection.execute("pragma quick_check(10)").fetchone()
        vitals.append(
            ("ok", "file", "the structure of the file is sound")
            if answer == "ok"
            else ("fault", "file", f"the file is damaged: {answer}")
        )
        (mode,) = connection.execute("pragma journal_mode").fetchone()
        path = database_path(connection)
    if path is None:
        return vitals
    if mode != "wal":
        vitals.append(("warning", "file", f"journal_mode is {mode}; wal is what is tested"))
    try:
        size = os.stat(f"{path}-wal").st_size
    except FileNotFoundError:
        size = 0
    megabytes = f"the write-ahead log has {size / 2**20:.1f} MiB"
    if size > WAL_WARNING:
        hint = "a transaction that stays open somewhere keeps it from being folded back"
        vitals.append(("warning", "log", f"{megabytes}: {hint}"))
    else:
        vitals.append(("ok", "log", megabytes))
    return vitals


# -- changes made elsewhere -----------------------------------------------------------------------


async def watch_file(
    store: _SQLiteStore,
    is_changed: Callable[[], Any],
    owner_lock: OwnerLock,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Report `ELSEWHERE` when others have committed, or when an owner has died.

    Other stores ring a doorbell beside the file. Everybody else's commits, such as those of an
    application's own connection, show as a change of the file, which costs a `stat` to see; only
    then is the database asked whether it was somebody else's.
    """
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_watch_doorbell, store, owner_lock)
        seen: tuple[int, ...] | None = None
        again = True
        is_started = False
        while True:
            stamp = owner_lock.stamp()
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
    while await owner_lock.wait_rung():
        store.report(ELSEWHERE)


# -- opening --------------------------------------------------------------------------------------


@asynccontextmanager
async def open_file_store(
    path: Path,
    *,
    synchronous: Synchronous = "full",
    project: Project | None = None,
    payload_limit: int = PAYLOAD_LIMIT,
    clock: Clock | None = None,
) -> AsyncGenerator[Store]:
    """A store on a file, created when absent. A ``clock`` is for tests: all must use the same."""
    if synchronous not in ("full", "normal"):
        raise ValueError(f"synchronous is {synchronous!r}; 'full' or 'normal' are allowed")

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(
            path, timeout=BUSY_TIMEOUT, isolation_level=None, check_same_thread=False
        )
        try:
            # Exact words: a pragma takes no parameters.
            connection.execute("pragma journal_mode = wal").fetchone()
            connection.execute(f"pragma synchronous = {synchronous}")
        except BaseException:
            connection.close()
            raise
        return connection

    # The renewal thread opens the file once more, whatever the working folder is by then.
    path = Path(os.getcwd()) / path

    def open_connection() -> sqlite3.Connection:
        if path.is_dir():
            raise StoreUnavailable(f"{path} is a folder; give the path of a file in it")
        if not path.parent.is_dir():
            raise StoreUnavailable(f"{path.parent} does not exist; create the folder first")
        with translated(f"opening {path}"):
            connection = connect()
        try:
            prepare(connection, str(path))
            if clock is None:
                set_host_clock(connection, host_clock)
        except BaseException:
            connection.close()
            raise
        return connection

    host_clock = HostClock()
    worker = Worker(f"trio_watchdog {path.name}")
    try:
        connection = (await worker.run(open_connection)).unwrap()
        try:
            with OwnerLock(path) as owner_lock:
                store = FileStore(
                    path,
                    connection,
                    clock or host_clock,
                    owner_lock,
                    worker,
                    connect,
                    project,
                    payload_limit,
                )
                yield store
        finally:
            # Closing checkpoints the log; the worker ends its calls in order.
            await worker.run(connection.close)
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
    if _plain_cursor(connection).execute("select 'text'").fetchone() != ("text",):
        raise StoreInvalid(
            f"the connection's text_factory is {connection.text_factory!r}; text must come as str"
        )
    path = database_path(connection)
    prepare(connection, "the connection's database")
    if path is None:
        yield InlineStore(connection, clock or TrioClock(), None, project, payload_limit)
        return
    if clock is None:
        clock = HostClock()
        set_host_clock(connection, clock)
    with OwnerLock(path) as owner_lock:
        yield InlineStore(connection, clock, owner_lock, project, payload_limit)


def database_path(connection: sqlite3.Connection) -> Path | None:
    """The file of a connection's main database; None when it is in memory."""
    for _, name, file in _plain_cursor(connection).execute("pragma database_list").fetchall():
        if name == "main" and file:
            return Path(file)
    return None
