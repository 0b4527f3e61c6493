"""psycopg on Trio, without asyncio.

psycopg keeps its protocol apart from its waiting. Whatever talks to the server is a generator that
yields «this socket, readable» (or writable, or either) and is sent what the socket was ready for;
one method of the connection, `wait`, drives them all. psycopg's `AsyncConnection` waits with
asyncio, `TrioConnection` waits with Trio, and all the rest (cursors, transactions, pipelines, COPY,
types) is psycopg's.

The hard part is cancellation. A statement that is merely cut off leaves a server still at work, and
an answer under way that nobody expects. So when a step is cancelled:

1. If it ends something (COMMIT, ROLLBACK, leaving a pipeline) it is short, and half of it is worth
   nothing: it first gets `PATIENCE_SECONDS` to finish.
2. The server is asked to stop, over a second connection, as the protocol wants it.
3. The step is driven on until its answer is there: mostly «canceling statement», sometimes the
   result, which was faster.
4. If `WIND_UP_SECONDS` were not enough, the connection is closed: the server may have gone silent.

So a step ends in one of three ways. It completes, its result is returned, and the cancellation is
felt at the next checkpoint. Or it raises `trio.Cancelled`, the statement has had no effect, and the
connection works on as after any failed statement. Or it raises `trio.Cancelled`, the connection is
closed, and whether there was an effect is unknown. Nothing is left half way.
"""
# The version is looked at before anything is taken from the inside of psycopg.
# ruff: noqa: E402

from __future__ import annotations

import logging
import math
import select
from collections import deque
from contextlib import asynccontextmanager, contextmanager, suppress
from time import monotonic
from typing import TYPE_CHECKING, Any

import trio
from trio.lowlevel import wait_readable, wait_writable

try:
    import psycopg
except ImportError as error:
    raise ImportError(
        f"PostgreSQL needs psycopg: pip install 'trio-watchdog[postgres]' ({error})"
    ) from error

TESTED = ("3.2", "3.3")
"""The minor versions of psycopg that this module was written for and tested with."""

if ".".join(psycopg.__version__.split(".")[:2]) not in TESTED:
    raise ImportError(
        f"psycopg {psycopg.__version__} is installed, but trio_watchdog builds on internals of"
        f" psycopg and is tested with {' and '.join(TESTED)} only:"
        " pip install 'trio-watchdog[postgres]' installs one of these"
    )

from psycopg import Notify, capabilities, errors, generators
from psycopg.adapt import AdaptersMap
from psycopg.conninfo import (
    conninfo_attempts,
    conninfo_to_dict,
    make_conninfo,
    timeout_from_conninfo,
)
from psycopg.pq import ExecStatus, PGresult, TransactionStatus
from psycopg.rows import Row
from psycopg.waiting import Ready, Wait

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
    from typing import Self

    from psycopg import AsyncCursor, AsyncPipeline, AsyncTransaction
    from psycopg.abc import RV, AdaptContext, ConnParam, PQGen, PQGenConn
    from psycopg.pq.abc import PGconn
    from psycopg.rows import AsyncRowFactory

WIND_UP_SECONDS = 5.0
"""How long a cancelled step may keep its task: enough for a busy server, short beside a lease."""
PATIENCE_SECONDS = 0.5
"""How much of that a COMMIT or ROLLBACK gets before it is interrupted as well."""
ASK_AGAIN_SECONDS = 0.1
"""When to repeat a cancel request, then doubling: one of them ends one statement, of which a step
may have several, and passes unnoticed when the statement has not begun yet."""
BUSY_SECONDS = 0.005
"""How long a connection that never has to wait (COPY, a long pipeline) may keep the event loop."""
TCP_DEFAULTS = {
    "keepalives": 1,
    "keepalives_idle": 20,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
"""libpq's settings (seconds; the last one milliseconds) by which a vanished peer is noticed in half
a minute, idle or not. Systems left to themselves take a quarter of an hour to two hours."""

# Steps that begin or end something, by the names of psycopg's generators for them.
_WHOLE = frozenset(
    (
        *("_enter_gen", "_exit_gen", "_commit_gen", "_rollback_gen"),  # transactions, pipelines
        *("_close_gen", "copy_end", "_end_copy_out_gen"),  # server-side cursors, COPY
    )
)
# Steps within a COPY, which end the whole of it when they are cancelled.
_COPYING = frozenset(("copy_to", "_read_gen", "_read_row_gen"))
_COPY_BEGUN = (ExecStatus.COPY_IN, ExecStatus.COPY_OUT, ExecStatus.COPY_BOTH)

logger = logging.getLogger(__name__)


class TrioConnection(psycopg.AsyncConnection[Row]):
    """A `psycopg.AsyncConnection` for Trio.

    Use it as psycopg documents, in one Trio run. Tasks may share it; their statements take turns.
    What a cancellation leaves behind is said at the top of this module: a connection that works, or
    a closed one. No connection survives a fork.
    """

    def __init__(self, pgconn: PGconn, *args: Any, **kwargs: Any) -> None:
        super().__init__(pgconn, *args, **kwargs)
        # All that psycopg does with it is `async with`.
        self.lock = _Lock()  # pyright: ignore[reportAttributeAccessIssue]
        self._received: deque[Notify] = deque()
        self.add_notify_handler(self._received.append)
        self._last_yield = 0.0

    @classmethod
    async def connect(
        cls,
        conninfo: str = "",
        *,
        autocommit: bool = False,
        prepare_threshold: int | None = 5,
        context: AdaptContext | None = None,
        row_factory: AsyncRowFactory[Row] | None = None,
        cursor_factory: type[AsyncCursor[Row]] | None = None,
        **kwargs: ConnParam,
    ) -> Self:
        """Connect to the first server of ``conninfo`` that answers and has the wanted role.

        ``connect_timeout`` (seconds, at least 2, otherwise 130) limits the search for addresses,
        and each attempt at one. `TCP_DEFAULTS` hold unless ``conninfo`` says otherwise. Raises
        `psycopg.OperationalError` that names every failure. Cancelled, it leaves nothing open.
        """
        params = {**TCP_DEFAULTS, **conninfo_to_dict(conninfo, **kwargs)}
        timeout = timeout_from_conninfo(params)
        with _limit(timeout, errors.ConnectionTimeout(f"no address for {params.get('host')!r}")):
            # Splits lists of hosts, looks up names, shuffles for `load_balance_hosts`.
            # The limiter is its own: Trio's common one may be full of somebody's slow functions.
            attempts = await trio.to_thread.run_sync(
                conninfo_attempts,
                params,
                abandon_on_cancel=True,
                limiter=trio.CapacityLimiter(1),
            )
        failures: list[psycopg.Error] = []
        for attempt in attempts:
            where = {key: attempt[key] for key in ("host", "hostaddr", "port") if key in attempt}
            late = errors.ConnectionTimeout(f"no answer in {timeout} s from {where}")
            try:
                with _limit(timeout, late):
                    gen = generators.connect(make_conninfo("", **attempt))
                    connection = cls(await _drive_connecting(gen))
                break
            except psycopg.Error as error:
                failures.append(error)
        else:
            if len(failures) == 1:
                raise failures[0]
            summary = f"none of {len(failures)} attempts to connect succeeded"
            raise type(failures[-1])("\n- ".join([summary, *map(str, failures)]))
        connection._autocommit = autocommit
        connection.prepare_threshold = prepare_threshold
        if context is not None:
            connection._adapters = AdaptersMap(context.adapters)
        if row_factory is not None:
            connection.row_factory = row_factory
        if cursor_factory is not None:
            connection.cursor_factory = cursor_factory
        return connection

    async def wait(self, gen: PQGen[RV], interval: float = 0.0, timeout: float | None = None) -> RV:
        """Drive one of psycopg's generators to its end, and return its result.

        After ``timeout`` seconds raises `trio.TooSlowError`; ``interval`` is asyncio's. What it
        does when cancelled, this or the other way, is said at the top of the module.
        """
        if timeout is not None:
            with trio.fail_after(timeout):
                return await self.wait(gen)
        name = getattr(gen, "__name__", "")
        if name == "copy_end" and not self._is_active():
            # A cancelled `copy_to` has ended the COPY already; so psycopg understands it.
            raise errors.QueryCanceled("the COPY was cancelled")
        started = name in _WHOLE
        try:
            if not started:
                # Nothing is sent for a task that is cancelled already.
                await trio.lowlevel.checkpoint_if_cancelled()
                started = True
            return await self._drive(gen)
        except trio.Cancelled:
            # In a pipeline the server is active with earlier commands, which the end of the
            # pipeline will see to. Elsewhere, with a stream or a COPY between two of its steps.
            if not (started if self._pipeline else name in _WHOLE or self._is_active()):
                raise
            outcome = await self._wind_up(gen, name, is_wanted=started)
            if not outcome:
                raise
            return outcome[0]
        except Exception:
            raise  # psycopg's own, which leave things as psycopg documents
        except BaseException:
            # Ctrl-C may strike within the generator, and then nobody knows how far it came.
            if self._is_active():
                self._abandon("was interrupted")
            raise

    async def close(self) -> None:
        """Close at once. Tasks that wait for an answer get `psycopg.OperationalError`."""
        self._wake()
        await super().close()

    async def cancel_safe(self, *, timeout: float = 30.0) -> None:
        """Ask the server to stop what it does for this connection. For use from other tasks.

        Returns when the request was passed on. Raises `psycopg.errors.CancellationTimeout` after
        ``timeout`` seconds, `psycopg.OperationalError` if the request could not be made, and
        `psycopg.NotSupportedError` with a libpq before 17. (Every current psycopg[binary] has it;
        without it, a cancelled statement costs the connection.)
        """
        if not self._should_cancel():
            return
        # Before libpq 17 there is only a call that blocks, for ever if the server is silent, and
        # psycopg holds the interpreter's lock meanwhile: even in a thread it stops the process.
        capabilities.has_cancel_safe(check=True)
        late = errors.CancellationTimeout(f"no word of the cancel request in {timeout} s")
        with _limit(timeout or math.inf, late):
            request = self.pgconn.cancel_conn()
            try:
                request.start()
                await _drive_connecting(generators.cancel(request))
            finally:
                request.finish()

    async def _try_cancel(self, *, timeout: float = WIND_UP_SECONDS) -> None:
        # psycopg's, for a stream that is left early. Its task may well be cancelled.
        with trio.CancelScope(shield=True):
            await super()._try_cancel(timeout=timeout)

    async def wait_notifies(self) -> list[Notify]:
        """Wait until there is a notification, and return all those received so far.

        Those that arrive beside other answers are kept for it. It holds the connection while it
        waits, so give LISTEN a connection of its own. Cancelled, it loses none.
        """
        await self._until_notified()
        received = list(self._received)
        self._received.clear()
        return received

    async def notifies(
        self, *, timeout: float | None = None, stop_after: int | None = None
    ) -> AsyncGenerator[Notify]:
        """Yield notifications, for ``timeout`` seconds or until ``stop_after`` of them.

        Unlike psycopg's, it leaves the connection free for use by the body of the loop.
        """
        deadline = trio.current_time() + (math.inf if timeout is None else timeout)
        count = 0
        while stop_after is None or count < stop_after:
            with trio.move_on_at(deadline):
                await self._until_notified()
            if not self._received:
                return
            yield self._received.popleft()
            count += 1

    @asynccontextmanager
    async def transaction(
        self, savepoint_name: str | None = None, force_rollback: bool = False
    ) -> AsyncGenerator[AsyncTransaction]:
        """Open a transaction, or a savepoint within one, as psycopg does.

        A cancellation in the block rolls back. A block that has come to its end is committed even
        if its task is cancelled, or `trio.Cancelled` says that it was not.
        """
        depth = self._num_transactions
        try:
            async with super().transaction(savepoint_name, force_rollback) as transaction:
                yield transaction
        finally:
            # Another task has the connection, and this one, cancelled, could not wait for it.
            if self._num_transactions > depth:
                self._abandon("has a transaction whose end could not be sent")

    @asynccontextmanager
    async def pipeline(self) -> AsyncGenerator[AsyncPipeline]:
        """Send statements without waiting for each answer, as psycopg does."""
        try:
            async with super().pipeline() as pipeline:
                yield pipeline
        finally:
            if not self._pipeline or not self._pipeline.level:
                self._pipeline = None
                if self.pgconn.pipeline_status:
                    self._abandon("has a pipeline whose end could not be sent")

    async def _drive(self, gen: PQGen[RV]) -> RV:
        try:
            want = next(gen)
            while True:
                try:
                    # Asked afresh each time: another task may have closed the connection, and the
                    # number of its socket may be another's by now.
                    fd = self.pgconn.socket
                    if want == Wait.R:
                        await wait_readable(fd)
                        self._last_yield = monotonic()
                        ready = Ready.R
                    elif monotonic() - self._last_yield > BUSY_SECONDS:
                        await trio.lowlevel.checkpoint()
                        self._last_yield = monotonic()
                        continue
                    else:
                        ready = await _ready(fd, want)
                except (trio.ClosedResourceError, psycopg.OperationalError):
                    # psycopg's own clean-up hears of it as of any other lost connection.
                    closed = psycopg.OperationalError("the connection is closed")
                    gen.throw(closed)
                    raise closed from None
                want = gen.send(ready)
        except StopIteration as stop:
            result: RV = stop.value
        if monotonic() - self._last_yield > BUSY_SECONDS:
            await trio.lowlevel.cancel_shielded_checkpoint()  # else the result could get lost
            self._last_yield = monotonic()
        return result

    async def _wind_up(self, gen: PQGen[RV], name: str, is_wanted: bool) -> list[RV]:
        """End a cancelled step. A list of its result; empty if it has none, or none is wanted."""
        rest = self._rest_gen(gen, name, is_wanted)
        outcome: list[RV] | None = None
        why: object = f"no end in {WIND_UP_SECONDS} s"
        try:
            with trio.move_on_after(WIND_UP_SECONDS, shield=True):
                if name in _WHOLE:
                    with trio.move_on_after(PATIENCE_SECONDS):
                        outcome = await self._drive(rest)
                pause = ASK_AGAIN_SECONDS
                while outcome is None:
                    await self.cancel_safe(timeout=WIND_UP_SECONDS)
                    with trio.move_on_after(pause):
                        outcome = await self._drive(rest)
                    pause *= 2
        except psycopg.Error as error:
            why = error  # a request whose fate is unknown might yet hit a later statement
        finally:
            # A generator that is not psycopg's may have its own pipeline.
            is_loose = self._is_active() or self.pgconn.pipeline_status
            if outcome is None or (not outcome and not self._pipeline and is_loose):
                self._abandon(f"could not end a cancelled statement ({why})")
        return outcome or []

    def _rest_gen(self, gen: PQGen[RV], name: str, is_wanted: bool) -> PQGen[list[RV]]:
        with suppress(psycopg.Error):  # «canceling statement», or what went wrong just before
            if name == "copy_to":
                yield from generators.copy_end(self.pgconn, b"cancelled")
            else:
                result = yield from gen
                if is_wanted and name not in _COPYING:
                    return [result]
        # Results that nobody will come for any more. A pipeline's own end sees to those.
        fetch = generators.copy_from if name in _COPYING else generators.fetch
        with suppress(psycopg.Error):
            while self._is_active() and not self._pipeline:
                left = yield from fetch(self.pgconn)
                if left is None or (isinstance(left, PGresult) and left.status in _COPY_BEGUN):
                    break  # there would be no end to these
        return []

    def _is_active(self) -> bool:
        return self.pgconn.transaction_status == TransactionStatus.ACTIVE

    async def _until_notified(self) -> None:
        async with self.lock:
            while True:
                self._check_connection_ok()
                self.pgconn.consume_input()
                while notify := self.pgconn.notifies():
                    if self.pgconn.notify_handler:
                        self.pgconn.notify_handler(notify)  # psycopg's, which calls ours
                if self._received:
                    return
                await self.wait(_until_readable())

    def _abandon(self, why: str) -> None:
        if not self.closed:
            logger.warning("closing a connection that %s: %s", why, self)
        self._wake()
        self.pgconn.finish()

    def _wake(self) -> None:
        # Before the socket is closed, since afterwards its number may be that of another one.
        with suppress(psycopg.OperationalError):  # has no socket any more
            trio.lowlevel.notify_closing(self.pgconn.socket)


class _Lock:
    """A lock like Trio's, but for two things.

    Taking it while it is free is no checkpoint: the statement that follows is one, and the end of a
    transaction must reach the server even if its task is cancelled. And any task may release it,
    since Trio closes a stream that was left half read in a task of its own.
    """

    def __init__(self) -> None:
        self._semaphore = trio.Semaphore(1, max_value=1)
        self._owner: trio.lowlevel.Task | None = None

    async def __aenter__(self) -> None:
        task = trio.lowlevel.current_task()
        if self._owner is task:
            raise RuntimeError(
                "this task uses this connection already: leave its stream() (by way of"
                " contextlib.aclosing) or copy() first"
            )
        try:
            self._semaphore.acquire_nowait()
        except trio.WouldBlock:
            await self._semaphore.acquire()
        self._owner = task

    async def __aexit__(self, *exc_info: object) -> None:
        self._owner = None
        self._semaphore.release()


@contextmanager
def _limit(seconds: float, error: psycopg.Error) -> Generator[None]:
    with trio.move_on_after(seconds) as scope:
        yield
    if scope.cancelled_caught:
        raise error


async def _drive_connecting(gen: PQGenConn[RV]) -> RV:
    """For generators that say with each step which socket they mean."""
    try:
        fd, want = next(gen)
        while True:
            fd, want = gen.send(await _ready(fd, want))
    except StopIteration as stop:
        result: RV = stop.value
        return result
    finally:
        gen.close()  # and with it a connection that is not made yet


async def _ready(fd: int, want: int) -> Ready:
    """Wait until the socket can do what is wanted, or one of two things; say which."""
    if want == Wait.R:
        await wait_readable(fd)
        return Ready.R
    # It is nearly always writable, and asking costs a fraction of a turn of the event loop.
    poll = select.poll()
    poll.register(fd, select.POLLOUT | (select.POLLIN if want & Wait.R else 0))
    for _, event in poll.poll(0):
        ready = Ready.R if event & ~select.POLLOUT else 0  # an error or a hang-up counts as both
        return Ready((ready | (Ready.W if event & ~select.POLLIN else 0)) & want)
    if want == Wait.W:
        await wait_writable(fd)
        return Ready.W
    found = 0
    async with trio.open_nursery() as nursery:

        async def wait(until: Callable[[int], Awaitable[None]], flag: Ready) -> None:
            nonlocal found
            with suppress(trio.ClosedResourceError):  # asked for its socket, it will say so
                await until(fd)
                found |= flag
            nursery.cancel_scope.cancel()

        nursery.start_soon(wait, wait_readable, Ready.R)
        nursery.start_soon(wait, wait_writable, Ready.W)
    return Ready(found)


def _until_readable() -> PQGen[None]:
    while not (yield Wait.R):
        pass
