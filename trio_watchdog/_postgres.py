"""PostgreSQL: many processes and hosts, one contract.

Every step of an operation is a transaction of its own that travels as one pipeline together with
its COMMIT, so a process that freezes, or loses its server, holds no lock in between; what an
operation decides between two steps is guarded again by the next one's WHERE. Operations that
wait together take the same trips, and all the queue locks of a trip are taken by its first
statement, sorted. `_statements` tells why that is enough.

A trip that fails has done nothing, so the operations that shared it are sent apart, and one bad
row hurts only itself. What has to wait for somebody's open transaction does so outside of the
exchange, and asks again now and then, so that it delays nobody but itself.

A process has at most three connections: one for its lanes, one for everything that callers ask
and for LISTEN, and one, in a thread, for renewals, so that nothing ever stands in their way.
"""

from __future__ import annotations

import json
import logging
import random
import select
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    asynccontextmanager,
    closing,
    contextmanager,
    suppress,
)
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar, cast

import psycopg
import trio
from attrs import define
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import dict_row, tuple_row
from psycopg.types.json import set_json_loads

from . import _operations as operations
from . import _statements as sql
from . import _wishes as w
from ._calls import Call, Effects, Operation, many, one, promoted
from ._errors import (
    SettlementRejected,
    StoreInvalid,
    StoreUnavailable,
    WakeUnavailable,
    WatchdogError,
)
from ._exchange import Exchange
from ._identity import fresh_token
from ._model import QueueTransition, StoredJob
from ._operations import JSON_COLUMNS, NO_ROWS, Locked
from ._payload import PAYLOAD_LIMIT, decode_payload
from ._postgres_vitals import round_trip, server_vitals
from ._psycopg import TCP_DEFAULTS, TrioConnection
from ._psycopg_errors import is_lost_race, is_refusal, is_stale, store_error
from ._rows import Row
from ._store import ELSEWHERE, Change, Project, Renewer, Store, Vital
from ._trip import Prepared, trip
from ._wishes import Wish

if TYPE_CHECKING:
    from psycopg.abc import PQGen

T = TypeVar("T")

OLDEST_SERVER = 14
"""The oldest major version of PostgreSQL that is tested."""

EXCHANGE_SECONDS = 10.0
"""How long one trip may take; a server that is silent for longer counts as gone."""

WHOLE_SECONDS = 60.0
"""The same for admitting many jobs at once, or those that the caller's own SQL yields."""

LOCK_SECONDS = 0.25
"""How long a trip waits for a lock: time enough for any transaction of ours, and the others that
share the trip are not held up for long by an application's."""

SHARE = 16
"""Lanes' tasks whose wishes go together at least; of twice as many, half are worked on while the
server answers the other half. A commit costs as much as the statements of about so many."""

QUEUE_LOCKS = 256
"""Locks of queues that the admissions of one transaction may try: the server's table of locks is
shared by everybody, and has room for some thousands."""

HASTE_SECONDS = 0.05
"""The same for a wish that travels alone since it met a lock before."""

LOCKED_SECONDS = {True: 1.0, False: 5.0}
"""How long wishes (of lanes, of callers) are asked again while somebody's transaction holds what
they need, before it is an error. Lanes know better how long their claim lets them wait."""

LOCKED_PAUSE = 0.5
"""The longest pause between two such requests."""

CONNECT_SECONDS = 10
"""Default of ``connect_timeout``."""

CHECK_SECONDS = 5.0
"""A listener that heard nothing for so long asks whether its connection still works."""

NOTIFY_SECONDS = 0.01
"""Notifications of lanes are sent together, at most once in so many seconds."""

TOLD_AT_ONCE = 100
"""Notifications that are told one by one; more at once are any change."""

PARAMETER_LIMIT = 65535
"""Parameters that one statement may have: the protocol counts them in two bytes."""

TRIES = 4
"""Deadlocks and races for a queue are tried again at once, so many times in all."""

_LANES: frozenset[type[Wish[Any]]] = frozenset(
    {
        w.Claim,
        w.Decide,
        w.FinishCompleting,
        w.HandOff,
        w.Inspect,
        w.NextRunningClaim,
        w.Reconcile,
        w.Renew,
        w.ReserveAttempt,
        w.RetryJob,
        w.SettleCancelled,
        w.TakeCompleting,
    }
)
"""Wishes that lanes and their supervisor have; everything else is a caller's."""

_WHOLE: frozenset[type[Wish[Any]]] = frozenset({w.EnqueueMany, w.EnqueueSelect})
"""Wishes whose steps must be one transaction: all jobs or none."""

_TELLING: frozenset[type[Wish[Any]]] = frozenset(
    {
        w.Enqueue,
        w.EnqueueMany,
        w.EnqueueSelect,
        w.Cancel,
        w.FailLane,
        w.PurgeQueue,
        w.Import,
        w.Remove,
        w.RepairLost,
    }
)
"""Callers' wishes that others want to hear of, in the transaction itself."""

_SINGLE: frozenset[type[Wish[Any]]] = operations.READS | {
    w.Decide,
    w.Enqueue,
    w.FinishCompleting,
    w.PurgeQueue,
    w.Renew,
    w.TakeCompleting,
}
"""Wishes that have been fulfilled, if at all, by the end of their first trip."""

logger = logging.getLogger("trio_watchdog")


# -- one connection -------------------------------------------------------------------------------


class Session:
    """One connection, made when it is needed and made anew when it broke."""

    def __init__(self, conninfo: str, dialect: sql.Dialect, clock: Clock | None, prepare: bool):
        self._conninfo = conninfo
        self._dialect = dialect
        self._clock = clock
        # None: a pooler may give the next transaction another server, which knows nothing.
        self._prepared = Prepared() if prepare else None
        self._connection: TrioConnection[Row] | None = None
        self._lock = trio.Lock()
        self._wanted = 0
        self._listening = trio.CancelScope()

    @asynccontextmanager
    async def connected(self) -> AsyncGenerator[TrioConnection[Row]]:
        """The connection, for one user at a time. Translates psycopg's errors."""
        self._wanted += 1
        # The listener only waits; it resumes when nobody else wants the connection.
        self._listening.cancel()
        try:
            try:
                # At once if it is free, so that what follows is sent before other tasks run.
                self._lock.acquire_nowait()
            except trio.WouldBlock:
                await self._lock.acquire()
        finally:
            self._wanted -= 1
        try:
            if self._connection is None or _is_broken(self._connection):
                await self.close()
                self._connection = await self._connect()
            yield self._connection
        except psycopg.Error as error:
            raise store_error(error, "talking to the server") from error
        except OSError as error:
            raise StoreUnavailable(f"PostgreSQL, while connecting: {error}") from error
        finally:
            self._lock.release()

    async def _connect(self) -> TrioConnection[Row]:
        connection = await TrioConnection[Row].connect(
            self._conninfo, autocommit=True, prepare_threshold=None, row_factory=tuple_row
        )
        try:
            # For transactions that psycopg begins; a role's default may be stricter.
            await connection.set_isolation_level(psycopg.IsolationLevel.READ_COMMITTED)
            if self._prepared is not None:
                self._prepared = Prepared()
                await connection.execute(settings(is_local=False).encode())
        except BaseException:
            await connection.close()
            raise
        return connection

    async def step(
        self,
        calls: Sequence[Call],
        telling: Statement | None = None,
        *,
        is_hasty: bool = False,
    ) -> list[list[Row]]:
        """Execute the calls as one transaction, sent as one pipeline. Rows of each call.

        ``telling``: a notification to send with them. ``is_hasty``: do not wait for a lock that is
        not free soon.
        """
        # Shielded, for a transaction on its way must not lose its answer; but never for long.
        with in_time(shield=True):
            for tries_left in reversed(range(TRIES)):
                async with self.connected() as connection:
                    try:
                        return await self._stepped(connection, calls, telling, is_hasty)
                    except psycopg.Error as error:
                        if connection.closed:
                            raise
                        if error.sqlstate in _FORGETTING:
                            await connection.close()
                        else:
                            await connection.rollback()
                        if not tries_left or not is_lost_race(error):
                            raise
                await trio.sleep(jittered(0.01))
        raise AssertionError("unreachable")

    async def _stepped(
        self,
        connection: TrioConnection[Row],
        calls: Sequence[Call],
        telling: Statement | None,
        is_hasty: bool,
    ) -> list[list[Row]]:
        before: list[Statement] = []
        after: list[Statement] = []
        if self._prepared is None:
            # Who gives each transaction another server must see where one begins and ends.
            before += [(BEGIN, {}), (settings(is_local=True), {})]
        if is_hasty:
            before.append((HASTE, {}))
        if telling is not None:
            # Last: sending takes a lock of the whole database until COMMIT.
            after.append(telling)
        if self._prepared is None:
            after.append((COMMIT, {}))
        return await self.execute(connection, calls, before, after)

    async def begin(self, connection: TrioConnection[Row], *, is_hasty: bool) -> None:
        """Begin a transaction of several trips."""
        before: list[Statement] = [(BEGIN, {})]
        if self._prepared is None:
            before.append((settings(is_local=True), {}))
        if is_hasty:
            before.append((HASTE, {}))
        await self.execute(connection, [], before)

    async def execute(
        self,
        connection: TrioConnection[Row],
        calls: Sequence[Call],
        before: Sequence[Statement] = (),
        after: Sequence[Statement] = (),
    ) -> list[list[Row]]:
        """Execute the calls, in the transaction that is open or else in one of their own."""
        statements = list(before)
        executed: list[tuple[int, Call, int]] = []
        for index, call in enumerate(calls):
            text, parameters = self.rendered(call)
            if text:
                executed.append((index, call, len(statements)))
                statements.append((text, parameters))
        results = await trip(connection, self._prepared, [*statements, *after])
        rows: list[list[Row]] = [[] for _ in calls]
        for index, call, place in executed:
            is_count = cast("sql.Statement", call.statement).counts
            result = results[place]
            rows[index] = [(result.changed,)] if is_count else cast("list[Row]", result.rows)
        return rows

    def rendered(self, call: Call) -> Statement:
        """A call's text and parameters; with instants where the clock is not the server's."""
        parameters = cast("Mapping[str, Any]", call.parameters)
        if self._clock is not None:
            parameters = {**self._clock(), **parameters}
        return self._dialect.text(cast("sql.Statement", call.statement)), parameters

    async def listened(self, connection: TrioConnection[Row]) -> set[str]:
        """Wait for other sessions' notifications; says what they tell.

        Nothing: this is not the connection any more.
        Gives the connection up whenever somebody else wants it.
        """
        while True:
            async with self._lock:
                if connection is not self._connection or connection.closed:
                    return set()
                self._listening = trio.CancelScope()
                if self._wanted:
                    # Who came while we waited for our turn stands behind us now.
                    continue
                with self._listening:
                    notifications = await connection.wait_notifies()
                    pid = connection.pgconn.backend_pid
                    if told := {each.payload for each in notifications if each.pid != pid}:
                        return told

    async def close(self) -> None:
        """Close the connection if there is one."""
        if self._connection is not None:
            await self._connection.close()


def _is_broken(connection: TrioConnection[Row]) -> bool:
    """Whether a connection that nobody uses is closed, at this end or the other.

    What is sent on one that the other end has closed would be lost, and nobody could tell whether
    it had been executed.
    """
    if connection.closed:
        return True
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    try:
        # A few words may come before the end: a notice, or why the connection is closed.
        for _ in range(3):
            if not poll.poll(0):
                return False
            connection.pgconn.consume_input()
    except psycopg.OperationalError:
        return True
    return connection.closed


Clock = Callable[[], Mapping[str, int]]
"""Gives ``now`` and ``lease_now`` in tests; otherwise the server's clock judges everything."""

Statement = tuple[str, Mapping[str, Any]]

BEGIN = "begin isolation level read committed"
COMMIT = "commit"
NOTIFY = "select pg_notify(%(channel)s, %(told)s)"
HASTE = f"select set_config('lock_timeout', '{HASTE_SECONDS * 1000:.0f}', true)"


def notification(channel: str, told: str) -> Statement:
    """The statement that tells others, when the transaction commits."""
    return NOTIFY, {"channel": channel, "told": told}


_FORGETTING = ("0A000", "26000", "42P05")
"""SQLSTATEs that say that prepared statements are not what they were: prepare them anew."""


def settings(*, is_local: bool) -> str:
    """What our transactions need, whatever the role's defaults; for a session or a transaction."""
    milliseconds = {
        "lock_timeout": LOCK_SECONDS * 1000,
        # A process that freezes inside a transaction must not keep its locks.
        "idle_in_transaction_session_timeout": EXCHANGE_SECONDS * 1000,
    }
    values = {
        **{name: f"{value:.0f}" for name, value in milliseconds.items()},
        "default_transaction_isolation": "read committed",
        # With JSON as parameters the server would plan anew every time, for the same plan.
        "plan_cache_mode": "force_generic_plan",
        "jit": "off",
        # Every statement here looks up a few rows by an index, whatever yesterday's statistics
        # say, and mostly in its order.
        "enable_seqscan": "off",
        "enable_bitmapscan": "off",
        "enable_hashjoin": "off",
        "enable_mergejoin": "off",
    }
    calls = [
        f"set_config('{name}', '{value}', {str(is_local).lower()})"
        for name, value in values.items()
    ]
    return f"select {', '.join(calls)}"


@contextmanager
def in_time(*, shield: bool = False, seconds: float | None = None) -> Generator[None]:
    """The block ends within so many seconds (`EXCHANGE_SECONDS`), or with `StoreUnavailable`."""
    seconds = EXCHANGE_SECONDS if seconds is None else seconds
    deadline = trio.current_time() + seconds
    with trio.CancelScope(shield=shield, deadline=deadline) as scope:
        yield
    if scope.cancelled_caught:
        raise StoreUnavailable(f"PostgreSQL gave no answer within {seconds:g} s")


# -- many operations, one trip --------------------------------------------------------------------


@define(eq=False)
class _Progress:
    """An operation on its way, and what it wants from the next trip."""

    kind: operations.Kind
    positions: list[int]
    operation: Operation[list[Any]]
    tries_left: int
    is_apart: bool
    calls: Sequence[Call] = ()
    is_single: bool = False
    has_written: bool = False


class Trips:
    """Drives the operations that answer wishes, all at once, trip by trip."""

    def __init__(
        self,
        session: Session,
        asked: Sequence[Wish[Any]],
        effects: Effects,
        channel: str,
        *,
        is_hasty: bool,
    ) -> None:
        self._session = session
        self._asked = asked
        self._effects = effects
        self._channel = channel
        self._is_hasty = is_hasty
        self._answers: list[Any] = [None] * len(asked)
        self._together: list[_Progress] = []
        self._apart: list[_Progress] = []
        self._gone: Exception | None = None

    async def run(self) -> list[Any]:
        """The answers. Raises `StoreUnavailable` if the server answered nothing at all."""
        late: list[tuple[operations.Kind, list[int]]] = []
        # Reads see what the others wrote; so they go along only if all of that is in one trip.
        is_long = any(type(wish) not in _SINGLE for wish in self._asked)
        for kind, positions in operations.plan(self._asked):
            if is_long and type(self._asked[positions[0]]) in operations.READS:
                late.append((kind, positions))
            else:
                self._begin(kind, positions)
        await self._travel()
        for kind, positions in late:
            self._begin(kind, positions)
        await self._travel()
        if self._gone is not None and all(answer is self._gone for answer in self._answers):
            raise self._gone
        return self._answers

    async def _travel(self) -> None:
        while self._together or self._apart:
            if self._gone is not None:
                for progress in self._together + self._apart:
                    self._proceed(progress, error=self._gone)
                return
            travelling, self._together = self._together, []
            await self._trip(travelling or [self._apart.pop(0)])

    async def _trip(self, travelling: list[_Progress]) -> None:
        calls, places = merged([call for progress in travelling for call in progress.calls])
        telling = self._notification(travelling)
        try:
            results = await self._session.step(calls, telling, is_hasty=self._is_hasty)
        except WatchdogError as error:
            if not is_refusal(error):
                self._gone = error
            for progress in travelling:
                self._failed(progress, error, is_shared=len(travelling) > 1)
            return
        start = 0
        for progress in travelling:
            end = start + len(progress.calls)
            rows = [[] if place is None else results[place] for place in places[start:end]]
            progress.has_written = progress.has_written or any(map(_writes, progress.calls))
            self._proceed(progress, rows[0] if progress.is_single else rows)
            start = end

    def _notification(self, travelling: list[_Progress]) -> Statement | None:
        """What others are told in the trip itself, and so before it is known what it does."""
        effects = Effects(0)
        is_telling = False
        for progress in travelling:
            wishes = [self._asked[position] for position in progress.positions]
            if type(wishes[0]) not in _TELLING or not any(map(_writes, progress.calls)):
                continue
            is_telling = True
            for wish in wishes:
                if not isinstance(wish, w.Enqueue):
                    # What it will find nobody knows.
                    return notification(self._channel, "")
                effects.claimable(wish.job.lane, operations.due(wish.job))
        return notification(self._channel, Change.of(effects).told()) if is_telling else None

    def _begin(
        self,
        kind: operations.Kind,
        positions: list[int],
        tries_left: int = TRIES - 1,
        *,
        is_apart: bool = False,
    ) -> None:
        operation = kind([self._asked[position] for position in positions], self._effects)
        self._proceed(_Progress(kind, positions, operation, tries_left, is_apart))

    def _proceed(
        self, progress: _Progress, rows: Any = None, *, error: Exception | None = None
    ) -> None:
        """Let the operation go on, with rows or with an error, up to its next calls or its end."""
        operation = progress.operation
        try:
            step = operation.send(rows) if error is None else operation.throw(error)
        except StopIteration as stop:
            self._answer(progress, cast("list[Any]", stop.value))
        except Exception as raised:
            if len(progress.positions) > 1 and not progress.has_written and self._gone is None:
                # One row is to blame.
                self._separate(progress)
            else:
                self._answer(progress, [raised] * len(progress.positions))
        else:
            if self._gone is not None:
                operation.close()
                self._answer(progress, [self._gone] * len(progress.positions))
                return
            progress.is_single = isinstance(step, Call)
            progress.calls = (step,) if isinstance(step, Call) else step
            (self._apart if progress.is_apart else self._together).append(progress)

    def _answer(self, progress: _Progress, results: list[Any]) -> None:
        for position, result in zip(progress.positions, results, strict=True):
            self._answers[position] = result

    def _failed(self, progress: _Progress, error: WatchdogError, *, is_shared: bool) -> None:
        """What becomes of an operation whose trip has failed, so that nothing of it was done."""
        if self._gone is not None:
            self._proceed(progress, error=error)
        elif isinstance(error, Locked) and not progress.has_written:
            # Whoever asked asks again, each wish alone and outside of the exchange.
            progress.operation.close()
            self._answer(progress, [error] * len(progress.positions))
        elif len(progress.positions) > 1 and not progress.has_written:
            self._separate(progress)
        elif is_shared:
            progress.is_apart = True
            self._apart.append(progress)
        elif is_stale(error.__cause__) and progress.tries_left and not progress.has_written:
            self._separate(progress)
        else:
            self._proceed(progress, error=error)

    def _separate(self, progress: _Progress) -> None:
        """Start anew, each wish alone, so that it hurts only itself."""
        progress.operation.close()
        for position in progress.positions:
            self._begin(progress.kind, [position], progress.tries_left - 1, is_apart=True)


def _writes(call: Call) -> bool:
    return cast("sql.Statement", call.statement).writes


def merged(calls: Sequence[Call]) -> tuple[list[Call], list[int | None]]:
    """One trip's calls with all queue locks first, in one statement; and where each call went."""
    locks: list[Any] = []
    for call in calls:
        parameters = cast("Mapping[str, Any]", call.parameters)
        if call.statement is sql.LOCK_QUEUES:
            locks += json.loads(parameters["rows"])
        elif call.statement is sql.LOCK_QUEUE:
            locks.append((None, parameters["queue"]))
    trip: list[Call] = [many(sql.LOCK_QUEUES, locks)] if locks else []
    places: list[int | None] = []
    for call in calls:
        if call.statement is sql.LOCK_QUEUES or call.statement is sql.LOCK_QUEUE:
            places.append(None)
        else:
            places.append(len(trip))
            trip.append(call)
    return trip, places


class PostgresStore(Store):
    """A store on a PostgreSQL server."""

    def __init__(
        self,
        conninfo: str,
        *,
        schema: str,
        listen: bool,
        prepare: bool,
        clock: Clock | None,
        project: Project | None,
        payload_limit: int,
    ) -> None:
        super().__init__()
        self.payload_limit = payload_limit
        self.owner = fresh_token()
        self._conninfo = conninfo
        self._schema = schema
        self._channel = sql.channel(schema)
        self._listen = listen
        self._clock = clock
        self._project = project
        self.dialect = sql.Dialect("postgres", schema, clock_in_sql=clock is None)
        self._lanes = Session(conninfo, self.dialect, clock, prepare)
        self._callers = Session(conninfo, self.dialect, clock, prepare)
        self._lane_exchange = Exchange(lambda asked: self._perform(self._lanes, asked), share=SHARE)
        self._caller_exchange = Exchange(lambda asked: self._perform(self._callers, asked))
        self._must_notify = trio.Event()
        self._untold = Effects(0)
        """What lanes have changed and others have not been told."""
        self._is_watched = False
        self._offset: float | None = None

    async def submit(self, *asked: Wish[Any]) -> list[Any]:
        # A fork shares the sockets, and would talk into its parent's conversations.
        self.check_usable()
        is_lanes = any(type(wish) in _LANES for wish in asked)
        exchange = self._lane_exchange if is_lanes else self._caller_exchange
        answers = await exchange.submit(asked)
        if any(isinstance(answer, Locked) for answer in answers):
            await self._outwait_locks(asked, answers, is_lanes=is_lanes)
        if self._must_notify.is_set() and not self._is_watched:
            await self._send_notification()
        unavailable = [answer for answer in answers if isinstance(answer, StoreUnavailable)]
        is_read = all(type(wish) in operations.READS for wish in asked)
        if unavailable and (is_read or len(unavailable) == len(answers)):
            # Nothing is lost with the other answers, and one error is easier to act upon.
            raise unavailable[0]
        return answers

    async def _outwait_locks(
        self, asked: Sequence[Wish[Any]], answers: list[Any], *, is_lanes: bool
    ) -> None:
        """Ask again, each alone, what met somebody's lock, until it is free or it takes too long.

        Outside of the exchange, where it delays nobody. An exchange that met a lock has answered
        so for all its wishes; most of them find no lock now.
        """
        session = self._lanes if is_lanes else self._callers
        until = trio.current_time() + LOCKED_SECONDS[is_lanes]
        pause = HASTE_SECONDS / 10
        while True:
            locked = [i for i, answer in enumerate(answers) if isinstance(answer, Locked)]
            for index in locked:
                try:
                    (answers[index],) = await self._perform(session, [asked[index]], is_hasty=True)
                except WatchdogError as error:
                    answers[index] = error
            if trio.current_time() >= until or not any(isinstance(a, Locked) for a in answers):
                return
            # A cancellation must not take with it what has been answered.
            is_bound = not all(isinstance(answer, Locked) for answer in answers)
            with trio.CancelScope(shield=is_bound):
                await trio.sleep(jittered(pause))
            pause = min(2 * pause, LOCKED_PAUSE)

    def now(self) -> int | None:
        if self._clock is not None:
            return self._clock()["now"]
        if self._offset is None:
            return None
        return int((trio.current_time() + self._offset) * 1000)

    async def prepare(self, *, create: bool = True) -> None:
        """Create the schema when absent, check it when present."""
        with in_time():
            async with self._callers.connected() as connection:
                _check_server(connection)
                version = await self._schema_version(connection)
                if version is None and not create:
                    raise StoreInvalid(
                        f"schema {self._schema!r} is not in this database; name another one, or"
                        " let `trio-watchdog migrate`, or opening without create=False, make it"
                    )
                if version is None:
                    await self._create(connection)
                    version = await self._schema_version(connection)
                await self._read_clock(connection)
        if version != str(sql.SCHEMA_VERSION):
            is_newer = (
                version is not None and version.isdigit() and int(version) > sql.SCHEMA_VERSION
            )
            advice = "upgrade trio_watchdog" if is_newer else "give another schema name"
            raise StoreInvalid(
                f"schema {self._schema!r} has version {version!r}, and this trio_watchdog needs"
                f" {sql.SCHEMA_VERSION}: {advice}"
            )

    async def _schema_version(self, connection: TrioConnection[Row]) -> str | None:
        """The version of the schema that is there; None if there is nothing."""
        cursor = await connection.execute(
            "select coalesce(bool_or(c.relname = 'meta'), false), count(*) from pg_class c"
            " join pg_namespace n on n.oid = c.relnamespace where n.nspname = %s",
            (self._schema,),
        )
        row = await cursor.fetchone()
        assert row is not None
        is_ours, count = row
        if not is_ours:
            if count:
                raise StoreInvalid(
                    f"schema {self._schema!r} holds something else; give another schema name"
                )
            return None
        cursor = await connection.execute(self.dialect.text(sql.READ_META).encode())
        meta = dict(cast("list[tuple[str, str]]", await cursor.fetchall()))
        return meta.get("schema_version", "none")

    async def _create(self, connection: TrioConnection[Row]) -> None:
        async with connection.transaction():
            await connection.execute(f"set local lock_timeout = '{EXCHANGE_SECONDS:.0f}s'".encode())
            # Two processes that start together: the second finds it done.
            await connection.execute(
                "select pg_advisory_xact_lock(hashtextextended('trio_watchdog ' || %s, 0))",
                (self._schema,),
            )
            if await self._schema_version(connection) is not None:
                return
            quoted = self._schema.replace('"', '""')
            await connection.execute(f'create schema if not exists "{quoted}"'.encode())
            for statement in sql.CREATE_SCHEMA:
                await connection.execute(self.dialect.text(statement).encode())
            await connection.execute(
                self.dialect.text(sql.WRITE_META).encode(),
                {"name": "schema_version", "value": str(sql.SCHEMA_VERSION)},
            )

    async def vitals(self) -> list[Vital]:
        with in_time():
            async with self._callers.connected() as connection:
                vitals = await server_vitals(connection, self._schema)
                if self._listen:
                    async with self._lanes.connected() as sending:
                        vital, has_others = await round_trip(connection, sending)
                    vitals.append(vital)
                    if has_others:
                        # They were meant for `watch`.
                        self.report(ELSEWHERE)
        return vitals

    async def close(self) -> None:
        """Close the connections."""
        await self._lanes.close()
        await self._callers.close()

    # -- exchanges --------------------------------------------------------------------------------

    async def _perform(
        self, session: Session, asked: Sequence[Wish[Any]], *, is_hasty: bool = False
    ) -> list[Any]:
        # Once more, for those who waited while it was closed.
        self.check_usable()
        kinds = {type(wish) for wish in asked}
        is_whole = bool(kinds & _WHOLE) or (
            self._project is not None and not kinds <= operations.READS
        )
        effects = self._effects(is_hasty)
        try:
            if is_whole:
                return await self._in_transactions(session, asked, effects, is_hasty)
            trips = Trips(session, asked, effects, self._channel, is_hasty=is_hasty)
            return await trips.run()
        finally:
            # Also when the rest of it has failed.
            self._announce(effects)
            if effects.lanes and session is self._lanes and not is_whole:
                self._untold.merge(effects)
                self._must_notify.set()

    def _effects(self, is_hasty: bool) -> Effects:
        # Who met a lock once holds none while waiting for it again; nor while a projector works.
        may_lock = not is_hasty and self._project is None
        return Effects(self.payload_limit, QUEUE_LOCKS if may_lock else 0)

    async def _in_transactions(
        self, session: Session, asked: Sequence[Wish[Any]], effects: Effects, is_hasty: bool
    ) -> list[Any]:
        """One operation after the other, each with all its steps in one transaction."""
        answers: list[Any] = [None] * len(asked)
        waiting = [positions for _, positions in operations.plan(asked)]
        while waiting:
            positions = waiting.pop(0)
            wishes = [asked[position] for position in positions]
            try:
                results, effect = await self._whole(session, wishes, is_hasty)
            except Exception as error:
                is_gone = isinstance(error, StoreUnavailable) and not is_refusal(error)
                if is_gone:
                    if all(answer is None for answer in answers):
                        raise
                    positions += [each for rest in waiting for each in rest]
                    waiting.clear()
                elif len(positions) > 1 and not isinstance(error, Locked):
                    # Each alone, so that one hurts only itself.
                    waiting[:0] = [[position] for position in positions]
                    continue
                for position in positions:
                    answers[position] = error
                continue
            effects.merge(effect)
            for position, result in zip(positions, results, strict=True):
                answers[position] = result
        return answers

    async def _whole(
        self, session: Session, wishes: Sequence[Wish[Any]], is_hasty: bool
    ) -> tuple[list[Any], Effects]:
        kind = operations.OPERATIONS[type(wishes[0])]
        seconds = WHOLE_SECONDS if type(wishes[0]) in _WHOLE else None
        with in_time(shield=True, seconds=seconds):
            for tries_left in reversed(range(TRIES)):
                effects = self._effects(is_hasty)
                async with session.connected() as connection:
                    try:
                        await session.begin(connection, is_hasty=is_hasty)
                        results = await run(session, connection, kind(wishes, effects))
                        if self._project is not None:
                            await self._tell(session, connection, self._project, effects)
                        after: list[Statement] = [(COMMIT, {})]
                        if effects.concern_others:
                            told = Change.of(effects).told()
                            after.insert(0, notification(self._channel, told))
                        await session.execute(connection, [], after=after)
                    except BaseException as error:
                        await _undo(connection)
                        if not tries_left or not is_stale(error):
                            raise
                    else:
                        return results, effects
        raise AssertionError("unreachable")

    async def _tell(
        self,
        session: Session,
        connection: TrioConnection[Row],
        project: Project,
        effects: Effects,
    ) -> None:
        for queue, settled_id in effects.transitions:
            settled: StoredJob | None = None
            if settled_id is not None:
                reading = operations.read([w.Read(settled_id)], effects)
                # One that cannot be read settles like others, and cannot be told.
                with suppress(StoreInvalid):
                    (settled,) = await run(session, connection, reading)
            head = await run(session, connection, operations.queue_head(queue))
            try:
                transition = QueueTransition(queue, head, cast("Any", settled))
                told: Any = project(transition, connection)
                if isinstance(told, Awaitable):
                    await told
            except Exception as error:
                raise SettlementRejected(
                    f"the projector refused a change of queue {queue!r}: {error}"
                ) from error

    def _announce(self, effects: Effects) -> None:
        if effects.concern_others or effects.settled:
            self.report(Change.of(effects))

    # -- changes made elsewhere -------------------------------------------------------------------

    async def watch(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._notify)
                nursery.start_soon(self._look_after_notes)
                self._is_watched = True
                await self._keep_listening(task_status)
        finally:
            self._is_watched = False

    async def _keep_listening(self, task_status: trio.TaskStatus[None]) -> None:
        delay = 0.1
        is_started = False
        while True:
            try:
                connection = await self._begin_listening()
                if not is_started:
                    is_started = True
                    task_status.started()
                # Listening first, then reading the state: nothing falls in between.
                self.report(ELSEWHERE)
                delay = 0.1
                while await self._hear(connection):
                    pass
            except StoreUnavailable as error:
                trouble = WakeUnavailable(
                    "waking by notification is interrupted; changes made elsewhere are found by the"
                    f" poll until it works again: {error}"
                )
                trouble.__cause__ = error
                logger.warning("%s", trouble)
            await trio.sleep(jittered(delay))
            delay = min(delay * 2, 5.0)

    async def _begin_listening(self) -> TrioConnection[Row]:
        with in_time():
            async with self._callers.connected() as connection:
                if self._listen:
                    await connection.execute(f'listen "{self._channel}"'.encode())
                await self._read_clock(connection)
                return connection
        raise AssertionError("unreachable")

    async def _hear(self, connection: TrioConnection[Row]) -> bool:
        """Wait for one notification or check the connection; False: it has to be made anew."""
        with trio.move_on_after(CHECK_SECONDS):
            if not self._listen:
                await trio.sleep_forever()
            try:
                told = await self._callers.listened(connection)
            except psycopg.Error as error:
                raise store_error(error, "listening") from error
            for text in told if len(told) <= TOLD_AT_ONCE else ("",):
                self.report(Change.heard(text))
            return bool(told)
        # A half-open connection looks like silence.
        with in_time():
            async with self._callers.connected() as checked:
                if checked is not connection:
                    return False
                await self._read_clock(connection)
        return True

    async def _read_clock(self, connection: TrioConnection[Row]) -> None:
        cursor = await connection.execute("select extract(epoch from clock_timestamp())::float8")
        row = await cursor.fetchone()
        assert row is not None
        self._offset = row[0] - trio.current_time()

    async def _notify(self) -> None:
        """Send what lanes have to tell others, together."""
        while True:
            await self._must_notify.wait()
            await self._send_notification()
            await trio.sleep(NOTIFY_SECONDS)

    async def _send_notification(self) -> None:
        self._must_notify = trio.Event()
        untold, self._untold = self._untold, Effects(0)
        told = Change.of(untold).told()
        try:
            await self._callers.step([], notification(self._channel, told))
        except WatchdogError as error:
            # Only a hint: the others find it at their next poll, or hear it with the next one.
            self._untold.merge(untold)
            logger.debug("a notification was not sent: %s", error)

    async def _look_after_notes(self) -> None:
        while True:
            try:
                await self._look_at_notes()
            except WatchdogError as error:
                logger.debug("notes could not be looked at: %s", error)
            await trio.sleep(jittered(CHECK_SECONDS))

    async def _look_at_notes(self) -> None:
        """Raise heads that somebody's open transaction held when their queue became free."""
        _, _, raised = await self._callers.step(
            [one(sql.LOCK_NOTES), one(sql.DELETE_NOTES), one(sql.PROMOTE_NOTED)]
        )
        if raised:
            effects = Effects(0)
            promoted(raised, effects)
            self._untold.merge(effects)
            self._must_notify.set()
            self._announce(effects)

    # -- renewals ---------------------------------------------------------------------------------

    def open_renewer(self) -> AbstractContextManager[Renewer]:
        return self._renewer()

    @contextmanager
    def _renewer(self) -> Generator[Renewer]:
        """A connection of its own, good until its first error."""

        def renew(claims: Sequence[w.Renew]) -> list[w.Renewal]:
            try:
                return self._run_blocking(connection, operations.renew(claims, Effects(0)))
            except psycopg.Error as error:
                raise store_error(error, "renewing") from error

        try:
            connection = _Impatient.connect(
                self._conninfo, autocommit=True, prepare_threshold=None, row_factory=tuple_row
            )
        except psycopg.Error as error:
            raise store_error(error, "connecting") from error
        except OSError as error:
            raise StoreUnavailable(f"PostgreSQL, while connecting: {error}") from error
        with closing(connection):
            yield renew

    def _run_blocking(self, connection: psycopg.Connection[Row], operation: Operation[T]) -> T:
        rows: Any = None
        while True:
            try:
                step = operation.send(rows)
            except StopIteration as stop:
                return cast("T", stop.value)
            calls = [step] if isinstance(step, Call) else step
            # One round trip, or a slow network would cost a lease.
            with connection.pipeline():
                statements: list[Statement] = [(BEGIN, {}), (settings(is_local=True), {})]
                statements += [*map(self._lanes.rendered, calls), (COMMIT, {})]
                cursors = [
                    connection.execute(text.encode(), parameters or None)
                    for text, parameters in statements
                ]
            results = [cursor.fetchall() for cursor in cursors[2:-1]]
            rows = results[0] if isinstance(step, Call) else results


class _Impatient(psycopg.Connection[Row]):
    """A connection that gives up on a server that is silent for too long."""

    def wait(self, gen: PQGen[T], *args: Any, **kwargs: Any) -> T:
        return super().wait(_limited(self, gen), *args, **kwargs)


def _limited(connection: _Impatient, gen: PQGen[T]) -> PQGen[T]:
    deadline = monotonic() + EXCHANGE_SECONDS
    try:
        want = next(gen)
        while True:
            ready = yield want
            if not ready and monotonic() > deadline:
                # psycopg would try to end the pipeline in order, on a connection that is stuck.
                connection.pgconn.finish()
                raise psycopg.OperationalError(f"no answer within {EXCHANGE_SECONDS:g} s")
            want = gen.send(ready)
    except StopIteration as stop:
        result: T = stop.value
        return result


def jittered(seconds: float) -> float:
    """Between half of it and all of it, so that processes do not march in step."""
    return seconds * random.uniform(0.5, 1)  # noqa: S311 - nobody gains by guessing it


async def _undo(connection: TrioConnection[Row]) -> None:
    """Leave no transaction open, or else no connection."""
    if connection.closed:
        return
    with trio.CancelScope(shield=True, deadline=trio.current_time() + 5):
        try:
            await connection.rollback()
        except psycopg.Error:
            # The caller's SQL was a COPY, and the server waits for the rest of it.
            await connection.close()


async def run(session: Session, connection: TrioConnection[Row], operation: Operation[T]) -> T:
    """Drive one operation inside the transaction that is open on the connection."""
    rows: Any = None
    while True:
        try:
            step = operation.send(rows)
        except StopIteration as stop:
            return cast("T", stop.value)
        if not isinstance(step, Call):
            rows = await session.execute(connection, step)
        elif isinstance(step.statement, str):
            rows = await _selected(connection, step.statement, step.parameters)
        else:
            (rows,) = await session.execute(connection, [step])


class _Json(str):
    """What a column of JSON holds, to be told from other text."""

    __slots__ = ()


def _json(value: bytes | str) -> _Json:
    return _Json(value if isinstance(value, str) else value.decode())


async def _selected(
    connection: TrioConnection[Row], text: str, parameters: Any
) -> list[dict[str, Any]]:
    """Rows of the caller's own SQL, which names its columns."""
    if "\0" in text:
        # libpq would execute what is in front of it.
        raise StoreInvalid("the SQL has a NUL character")
    if len(parameters) > PARAMETER_LIMIT:
        # To psycopg it looks like a connection that cannot send.
        raise StoreInvalid(
            f"the SQL has {len(parameters)} parameters; {PARAMETER_LIMIT} are allowed"
        )
    async with connection.cursor(row_factory=dict_row) as cursor:
        set_json_loads(_json, cursor)
        try:
            await cursor.execute(text.encode(), parameters or None)
            rows = [] if cursor.description is None else await cursor.fetchall()
        except (TypeError, ValueError, OverflowError) as error:
            # What Python says of parameters that cannot be sent and values that it cannot hold.
            raise StoreInvalid(f"PostgreSQL, while executing: {error}") from error
        if cursor.description is None:
            raise StoreInvalid(NO_ROWS)
        if cursor.nextset():
            raise StoreInvalid("the SQL is more than one statement; one is allowed")
        return [{name: _decoded(name, value) for name, value in row.items()} for row in rows]


def _decoded(name: str, value: Any) -> Any:
    """A column's value with its JSON decoded, except where the operation does so."""
    if isinstance(value, list):
        return [_decoded("", each) for each in cast("list[Any]", value)]
    if isinstance(value, _Json) and name not in JSON_COLUMNS:
        return decode_payload(value)
    return value


# -- opening --------------------------------------------------------------------------------------


@asynccontextmanager
async def open_postgres_store(
    conninfo: str,
    *,
    schema: str = sql.DEFAULT_SCHEMA,
    listen: bool = True,
    prepare: bool = True,
    create: bool = True,
    read_only: bool = False,
    clock: Clock | None = None,
    project: Project | None = None,
    payload_limit: int = PAYLOAD_LIMIT,
) -> AsyncGenerator[Store]:
    """A store in a schema of a PostgreSQL database, created when absent.

    ``create=False``, or ``read_only``, refuses a database that has no such schema.
    Behind a pooler that gives each transaction a server of its own, use ``listen=False`` and
    ``prepare=False``.
    """
    if not 1 <= len(schema.encode()) <= 63 or "\0" in schema:
        raise ValueError(f"schema is {schema!r:.80}; 1 to 63 bytes are allowed")
    store = PostgresStore(
        _completed(conninfo),
        schema=schema,
        listen=listen,
        prepare=prepare,
        clock=clock,
        project=project,
        payload_limit=payload_limit,
    )
    try:
        await store.prepare(create=create and not read_only)
        yield store
    finally:
        store.is_closed = True
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 5):
            await store.close()


def _completed(conninfo: str) -> str:
    defaults: dict[str, Any] = {
        "connect_timeout": CONNECT_SECONDS,
        "application_name": "trio_watchdog",
        **TCP_DEFAULTS,
    }
    parameters: Mapping[str, Any] | None = None
    with suppress(psycopg.Error, UnicodeError):
        parameters = conninfo_to_dict(conninfo)
    if parameters is None:
        # Without the original error, which may quote a part of the password.
        raise ValueError(
            "database is no valid postgresql:// URL; in its user and password all characters but"
            " letters, digits and -._~ are to be percent-encoded"
        )
    return make_conninfo("", **{**defaults, **parameters, "client_encoding": "UTF8"})


def _check_server(connection: TrioConnection[Row]) -> None:
    major = connection.pgconn.server_version // 10000
    if major < OLDEST_SERVER:
        raise StoreInvalid(f"the server is PostgreSQL {major}; {OLDEST_SERVER} or newer is needed")
    encoding = connection.pgconn.parameter_status(b"server_encoding")
    if encoding not in (b"UTF8", None):
        raise StoreInvalid(
            f"the database has the encoding {encoding.decode()}; UTF8 is needed: create one with"
            " ENCODING 'UTF8' TEMPLATE template0"
        )
