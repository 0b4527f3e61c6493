"""The operations on jobs, for processes that run none: `open_client`."""

from __future__ import annotations

import random as random_module
import time
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Collection,
    Generator,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager
from datetime import datetime
from typing import Any, TypeVar, cast, get_args

import trio
from attrs import evolve

from . import _wishes as wishes
from ._doctor import Finding, examine, explain
from ._errors import InvalidJob, StoreInvalid, WatchdogError, shown
from ._identity import fresh_token
from ._model import (
    Admission,
    CancellationResult,
    Job,
    LaneFailure,
    QueueHead,
    SettledJob,
    SettledPage,
    StoredJob,
    WakeState,
    check_instant,
    check_job,
    check_reason,
    check_seconds,
    check_text,
    to_milliseconds,
)
from ._open import Database, open_store
from ._outage import Outage
from ._retention import Retention, prune
from ._rules import State
from ._store import Project, Store
from ._wake import Doorbell

R = TypeVar("R")


FIRST_LOOK = 0.05
"""Seconds until `Client.wait_settled` looks for the second time; longer each time after that."""

LONGEST_LOOK = 1.0
"""Seconds between two of its looks at most."""


MADE_AT_ONCE = 100
"""Jobs that `Client.enqueue_many` takes from a generator in one step of the event loop: 1 ms."""


class Client:
    """Jobs in a database: enqueue, cancel, read. `open_client` makes it.

    Each operation is atomic, and durable when it returns. While the database cannot be reached an
    operation is tried again for up to ``retry_for`` seconds; then it raises `StoreUnavailable`,
    and as always after an error it may or may not have had its effect. Repeating an operation with
    the same id is harmless.
    """

    def __init__(
        self,
        store: Store,
        doorbell: Doorbell,
        outage: Outage,
        *,
        retry_for: float,
        poll: float,
        watch: Callable[[], Awaitable[None]],
    ) -> None:
        self._store = store
        self._doorbell = doorbell
        self._outage = outage
        self._retry_for = retry_for
        self._poll = poll
        self._watch = watch

    async def _ask(self, wish: wishes.Wish[R]) -> R:
        return await self._riding_out(lambda: self._store.ask(wish))

    async def _riding_out(self, ask: Callable[[], Awaitable[R]]) -> R:
        # Also before what a store does by itself, such as looking at the health of its file.
        self._store.check_usable()
        until = trio.current_time() + self._retry_for
        return await self._outage.riding_out(ask, until)

    async def enqueue(self, job: Job) -> Admission:
        """Whether the job was admitted, or had been before (``duplicate``).

        Raises `JobConflict` when its id belongs to a job that differs in queue, lane, priority,
        payload or recovery, and `InvalidJob` when its payload is over the limit.
        """
        return await self._ask(wishes.Enqueue(check_job(job)))

    async def enqueue_many(self, jobs: Iterable[Job]) -> list[Admission]:
        """As `enqueue` for each job, in one transaction: all are admitted or none.

        ``jobs`` may be a generator that makes them: it is a checkpoint now and then.
        """
        if isinstance(jobs, Collection):
            # Another task may change it at a checkpoint.
            jobs = tuple(jobs)
        admitted: list[Job] = []
        for job in jobs:
            admitted.append(check_job(job))
            if len(admitted) % MADE_AT_ONCE == 0:
                await trio.lowlevel.checkpoint()
        return await self._ask(wishes.EnqueueMany(tuple(admitted)))

    async def enqueue_select(
        self, sql: str, parameters: Sequence[Any] | Mapping[str, Any] = ()
    ) -> list[Admission]:
        """As `enqueue_many` for the rows of a SELECT whose columns are named like `Job`'s fields.

        The SELECT and the admission are one transaction. Give the rows ids of your own if a
        repetition must not admit them twice.
        """
        return await self._ask(wishes.EnqueueSelect(sql, parameters))

    async def read(self, id: str) -> StoredJob | None:
        """The job as it is now, or None; what it is tells its state."""
        return await self._ask(wishes.Read(check_text(id, "id")))

    async def cancel(
        self, id: str, *, cancellation_id: str | None = None, only_if_queued: bool = False
    ) -> CancellationResult:
        """Ask that a job stop, or never start.

        The wish is durable when this returns. A running handler is cancelled by its lane, on
        whichever host it runs. Asking again with the same ``cancellation_id`` changes nothing and
        says ``replayed``; without one, each call is a wish of its own.
        """
        check_text(id, "id")
        token = fresh_token() if cancellation_id is None else cancellation_id
        wish = wishes.Cancel(id, check_text(token, "cancellation_id"), bool(only_if_queued))
        result = await self._ask(wish)
        if result.status == "replayed" and cancellation_id is None:
            # Nobody else knows the id: the first answer was lost on its way.
            return evolve(result, status="recorded")
        return result

    async def read_queue_head(self, queue: str) -> QueueHead:
        """The job that goes first in the queue, and whether it runs."""
        return await self._ask(wishes.ReadQueueHead(check_text(queue, "queue")))

    async def read_latest_settled(self, queue: str) -> SettledJob | None:
        """The job of the queue that settled last, or None."""
        return await self._ask(wishes.ReadLatestSettled(check_text(queue, "queue")))

    async def read_settled(
        self, limit: int = 256, after: str | None = None, lane: str | None = None
    ) -> SettledPage:
        """Up to ``limit`` (1 to 256) settled jobs after the cursor ``after``, and the next cursor.

        A reader that keeps paging sees every settled job exactly once.
        """
        return await self._ask(wishes.ReadSettled(limit, after, lane))

    async def list_jobs(
        self,
        state: State | None = None,
        lane: str | None = None,
        queue: str | None = None,
        limit: int = 100,
    ) -> list[StoredJob]:
        """Up to ``limit`` jobs for a listing, newest first: of one state, lane or queue, or all."""
        if state is not None and state not in get_args(State):
            raise InvalidJob(f"state is {shown(state)}; {', '.join(get_args(State))} are allowed")
        for value, name in ((lane, "lane"), (queue, "queue")):
            if value is not None:
                check_text(value, name)
        return await self._ask(wishes.ReadJobs(state, lane, queue, limit))

    async def count_jobs(self) -> list[tuple[str, str, str | None, int]]:
        """Rows of lane, state, outcome and how many jobs; reads the whole table."""
        return await self._ask(wishes.ReadCounts())

    async def fail_lane(self, lane: str, reason: str) -> LaneFailure:
        """Settle up to 256 queued and running jobs of the lane as failed; says if more remain.

        Handlers of those that run are cancelled, and can record nothing.
        """
        return await self._ask(wishes.FailLane(check_text(lane, "lane"), check_reason(reason)))

    async def purge_queue(self, queue: str) -> int:
        """Delete the queue's queued jobs; says how many."""
        return await self._ask(wishes.PurgeQueue(check_text(queue, "queue")))

    async def prune(
        self,
        *,
        older_than: float | None = None,
        keep: int | None = None,
        lane: str | None = None,
        queue: str | None = None,
    ) -> int:
        """Delete settled jobs older than so many seconds, or beyond the newest ``keep``; says how
        many.

        One of the two is needed; with both, only what is older and beyond the count goes. Of one
        lane or queue, or of all. In transactions of a few hundred jobs, so a call that is cancelled
        has deleted a part. What a reader protects (`protect_settled`) stays. An id whose job has
        gone can be admitted again.
        """
        now = self._store.now()
        if now is None:
            now = time.time_ns() // 1_000_000
        return await prune(self._ask, Retention(older_than, keep, lane=lane, queue=queue), now)

    async def protect_settled(self, reader: str, after: str | None = None) -> None:
        """Keep what ``reader`` has still to read from being pruned: all after the cursor ``after``.

        Durable, until the same reader protects from a later cursor, or is released. So a reader of
        the feed calls it now and then with the cursor that it has written down for itself, and a
        reader that is gone for good has to be released, or nothing is ever pruned again.
        """
        check_text(reader, "reader")
        await self._ask(wishes.ProtectSettled(reader, after))

    async def release_settled(self, reader: str) -> bool:
        """End the reader's protection; says whether there was one."""
        check_text(reader, "reader")
        return await self._ask(wishes.ReleaseSettled(reader))

    async def examine(self) -> list[Finding]:
        """What is wrong with the database, and how it is: rows, claims, queues, the server or file.

        Changes nothing. It reads all unsettled jobs, and of a file every page.
        """
        return await self._riding_out(lambda: examine(self._store))

    async def explain(self, id: str) -> str:
        """Why the job is not running, or what became of it, in a few sentences.

        Raises `StoreInvalid` if there is no job of this id.
        """
        check_text(id, "id")
        return await self._riding_out(lambda: explain(self._store, id))

    async def wake_state(self, now: datetime | None = None) -> WakeState:
        """Whether anything is due (at ``now``), and the earliest instant at which more will be."""
        at = None if now is None else to_milliseconds(check_instant(now, "now"))
        return await self._ask(wishes.ReadWakeState(at))

    async def wait_settled(self, id: str) -> SettledJob:
        """The job, once it is settled. Raises `StoreInvalid` if there is no job of this id."""
        bell = self._doorbell.settled(id)
        await self._watch()
        # On a server nobody is told that a job has settled elsewhere, so the first looks are soon.
        delay = min(FIRST_LOOK, self._poll)
        while True:
            ticket = bell.ticket
            job = await self.read(id)
            if isinstance(job, SettledJob):
                return job
            if job is None:
                raise StoreInvalid(f"there is no job {id!r} to wait for")
            with trio.move_on_after(delay):
                await bell.wait(ticket)
            delay = min(delay * 1.5, LONGEST_LOOK, self._poll)


# -- opening --------------------------------------------------------------------------------------


@asynccontextmanager
async def open_client(
    database: Database,
    *,
    retry_for: float = 30.0,
    poll: float = 5.0,
    project: Project | None = None,
    random: random_module.Random | None = None,
    **options: Any,
) -> AsyncGenerator[Client]:
    """A `Client`: the operations on jobs, for processes that run none.

    ``database`` is ``"sqlite:PATH"``, ``"sqlite::memory:"``, a path, a ``postgresql://`` URL, or a
    `sqlite3.Connection` that stays the caller's. ``project(transition, connection)`` is called in
    the transaction of each queue change; on PostgreSQL one that uses the connection is an async
    function, and on SQLite it is a plain one. ``random`` is where jitter comes from. Other options
    are the store's, such as ``payload_limit`` in bytes.
    """
    check_seconds(retry_for, "retry_for")
    check_seconds(poll, "poll", positive=True)
    with unwrapped() as body:
        async with open_store(database, project=project, **options) as store:
            async with trio.open_nursery() as nursery:
                doorbell = Doorbell(store.now)
                store.on_change.append(doorbell.hear)
                outage = Outage(random or fresh_random())
                starting = trio.Lock()
                is_watching = False

                async def watch() -> None:
                    # Not before somebody waits: most clients only enqueue.
                    nonlocal is_watching
                    store.check_usable()
                    async with starting:
                        if not is_watching:
                            await nursery.start(store.watch)
                            is_watching = True

                client = Client(
                    store, doorbell, outage, retry_for=retry_for, poll=poll, watch=watch
                )
                with body.watched():
                    yield client
                nursery.cancel_scope.cancel("the client is closed")


def fresh_random() -> random_module.Random:
    """Where jitter comes from unless the caller says."""
    return random_module.Random()  # noqa: S311 (jitter is no secret)


class Body:
    """What the block inside of a context manager of ours has raised."""

    error: BaseException | None = None

    @contextmanager
    def watched(self) -> Generator[None]:
        """Remember what the block raises, which may be a group of its own."""
        try:
            yield
        except BaseException as error:
            self.error = error
            raise


@contextmanager
def unwrapped() -> Generator[Body]:
    """Raise a lone error as itself: callers should not have to know about our nurseries."""
    lone: BaseException | None = None
    body = Body()
    try:
        yield body
    except BaseExceptionGroup as group:
        lone = _lone(group, body.error)
        if lone is None:
            raise
    finally:
        body.error = None
    if lone is not None:
        try:
            raise lone
        finally:
            del lone


def _shape(error: BaseException) -> Any:
    """What tells a group from others though Trio, on its way, has made it anew."""
    if not isinstance(error, BaseExceptionGroup):
        return id(error)
    group = cast("BaseExceptionGroup[BaseException]", error)
    return group.message, tuple(map(_shape, group.exceptions))


def _lone(
    group: BaseExceptionGroup[BaseException], whole: BaseException | None
) -> BaseException | None:
    """The only error in the group, of which ``whole`` is not taken apart."""
    leaves: list[BaseException] = []
    shape = None if whole is None else _shape(whole)
    groups: list[BaseException] = [group]
    while groups:
        error = groups.pop()
        if _shape(error) != shape and isinstance(error, BaseExceptionGroup):
            groups += cast("BaseExceptionGroup[BaseException]", error).exceptions
        else:
            leaves.append(error)
    first = leaves[0]
    if len(leaves) > 1:
        # A store that has gone bad is met by every task that uses it.
        if not isinstance(first, WatchdogError) or {type(leaf) for leaf in leaves} != {type(first)}:
            return None
        first.add_note(f"(and {len(leaves) - 1} more of the same kind)")
    return first
