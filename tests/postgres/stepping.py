"""Operations stepped against each other, statement by statement, on real connections.

Each *actor* has a connection of its own, and none of its statements goes to the server before its
turn. What an actor does is what a store does: the same operations, trips and retries, except that
the statements of a transaction travel one by one. An actor that waits for a lock is `blocked` and
goes on by itself when the other lets go.

```python
async with stage.acting(A=[Decide(...)], B=[Claim(...)]) as (a, b):
    await a.until("commit")
    await b.finish()
    await a.finish()
```
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

import outcome
import trio
from attrs import define, field

from trio_watchdog import _statements as sql
from trio_watchdog._calls import Call
from trio_watchdog._postgres import (
    BEGIN,
    COMMIT,
    NOTIFY,
    PostgresStore,
    Session,
    open_postgres_store,
    settings,
)
from trio_watchdog._psycopg import TrioConnection
from trio_watchdog._store import Change
from trio_watchdog._trip import Prepared, trip
from trio_watchdog._wishes import Wish

State = Literal["gate", "blocked", "done"]

START = 2_000_000_000_000
"""The instant at which every play begins, in milliseconds."""

LEASE = 60_000

SILENCE = 0.003
"""Seconds without an answer after which the server is asked whether a statement waits."""


LOST = """
select head.id from (select distinct queue from {jobs} where state = 'queued') q
cross join lateral (select j.* from {jobs} j where j.queue = q.queue and j.state = 'queued'
    order by j.priority desc, j.sequence limit 1) head
where head.hint = 'lowered' and head.cancellation_id is null
    and not exists (select 1 from {jobs} r
        where r.queue = q.queue and r.state in ('running', 'completing'))
    and not exists (select 1 from {recheck} n where n.queue = q.queue)
"""
"""The invariant: no job that is first of a free queue is hidden from claims."""


# -- actors ---------------------------------------------------------------------------------------


class Actor:
    """Somebody whose statements wait for their turn."""

    def __init__(self, stage: Stage, name: str) -> None:
        self._stage = stage
        self.name = name
        self.label: str | None = None
        """The statement that comes next, while it waits for its turn."""
        self.pid = 0
        self.result: outcome.Outcome[Any] | None = None
        self._turn = trio.Event()

    async def turn(self, label: str, pid: int) -> None:
        """Wait until this statement may be executed."""
        self.label, self.pid = label, pid
        self._turn = trio.Event()
        self._stage.stirred.set()
        await self._turn.wait()

    def release(self) -> None:
        """Let the statement that waits be executed."""
        assert self.label is not None, f"{self.name} has no statement that waits"
        self._stage.trace.append(f"{self.name} {self.label}")
        self.label = None
        self._turn.set()

    async def act(self, play: Callable[[], Awaitable[Any]]) -> None:
        """Do all of it, and keep what comes of it."""
        self.result = await outcome.acapture(play)
        self._stage.stirred.set()

    @property
    def is_active(self) -> bool:
        """Whether a statement of it is being executed, or may be waiting for a lock."""
        return self.label is None and self.result is None

    # For tests that tell a story.

    async def step(self) -> State:
        """One statement."""
        self.release()
        return (await self._stage.settle())[self.name]

    async def until(self, label: str) -> None:
        """Everything before the next statement of this name."""
        states = await self._stage.settle()
        while self.label != label:
            assert states[self.name] == "gate", f"{self.name} is {states[self.name]}, not {label}"
            states[self.name] = await self.step()

    async def through(self, label: str) -> State:
        """Everything up to and with the next statement of this name."""
        await self.until(label)
        return await self.step()

    async def finish(self) -> Any:
        """Everything that is left. What the actor was answered, or raised, is the result."""
        states = await self._stage.settle()
        while states[self.name] == "gate":
            states[self.name] = await self.step()
        assert self.result is not None, f"{self.name} is {states[self.name]}, not done"
        return self.result.unwrap()

    async def blocks(self) -> None:
        """The next statement has to wait for a lock."""
        assert await self.step() == "blocked", self._stage.trace

    async def is_unblocked(self) -> None:
        """It goes on, now that the other has let go."""
        assert (await self._stage.settle())[self.name] != "blocked", self._stage.trace


class SteppedSession(Session):
    """A session whose statements travel one by one, each in its turn."""

    def __init__(self, conninfo: str, dialect: sql.Dialect, clock: Any) -> None:
        # Without prepared statements BEGIN and COMMIT are statements that can be seen.
        super().__init__(conninfo, dialect, clock, prepare=False)
        self._plans = Prepared()
        self.actor: Actor | None = None

    async def _connect(self) -> TrioConnection[Any]:
        connection = await super()._connect()
        self._plans = Prepared()
        await connection.execute(settings(is_local=False).encode())
        await connection.execute("set lock_timeout = '60s'")
        return connection

    async def execute(
        self,
        connection: TrioConnection[Any],
        calls: Sequence[Call],
        before: Sequence[tuple[str, Mapping[str, Any]]] = (),
        after: Sequence[tuple[str, Mapping[str, Any]]] = (),
    ) -> list[list[Any]]:
        rows: list[list[Any]] = []
        # What the session has anyway takes no turn.
        if any(text == BEGIN for text, _ in before):
            await trip(connection, self._plans, [(BEGIN, {})])
        for call in calls:
            assert isinstance(call.statement, sql.Statement)
            text, parameters = self.rendered(call)
            if not text:
                rows.append([])
                continue
            await self._turn(call.statement.name, connection)
            # Again: the clock may have moved while it waited for its turn.
            text, parameters = self.rendered(call)
            (result,) = await trip(connection, self._plans, [(text, parameters)])
            rows.append([(result.changed,)] if call.statement.counts else list(result.rows))
        for text, parameters in after:
            name = {COMMIT: "commit", NOTIFY: "notify"}[text]
            if name == "commit":
                await self._turn(name, connection)
            await trip(connection, self._plans, [(text, parameters)])
        return rows

    async def _turn(self, label: str, connection: TrioConnection[Any]) -> None:
        # An actor that is done has left the connection to the test.
        if self.actor is not None and self.actor.result is None:
            await self.actor.turn(label, connection.pgconn.backend_pid)


class User:
    """An application's own transaction: what it does, it does in turns."""

    def __init__(self, actor: Actor, connection: TrioConnection[Any], schema: str) -> None:
        self._actor = actor
        self.connection = connection
        self.schema = schema

    async def turn(self, label: str) -> None:
        await self._actor.turn(label, self.connection.pgconn.backend_pid)


NOTES = "notes"

Play = Sequence[Wish[Any]] | Callable[[User], Awaitable[Any]] | Literal["notes"]
"""Wishes for a store, all in one exchange; or what a user does; or a look at the notes."""


# -- the stage ------------------------------------------------------------------------------------


@define
class Clock:
    """Stands still unless it is moved."""

    now: int = START

    def __call__(self) -> Mapping[str, int]:
        return {"now": self.now, "lease_now": self.now}


@define
class Player:
    """The connections of one actor."""

    store: PostgresStore
    session: SteppedSession
    user: TrioConnection[Any]
    changes: list[Change] = field(factory=list[Change])


class Stage:
    """A schema, its players, and who may do what when. `open_stage` makes it."""

    def __init__(self, schema: str, monitor: TrioConnection[Any], clock: Clock) -> None:
        self.schema = schema
        self.monitor = monitor
        self.clock = clock
        self.dialect = sql.Dialect("postgres", schema, clock_in_sql=False)
        self.jobs = self.dialect.table("jobs")
        self.recheck = self.dialect.table("recheck")
        self.players: dict[str, Player] = {}
        self.actors: list[Actor] = []
        self.stirred = trio.Event()
        self.trace: list[str] = []

    # The table.

    async def set(self, *rows: Mapping[str, Any], notes: Sequence[str] = ()) -> None:
        """Make the table hold these jobs and nothing else; and set the clock to its start."""
        self.clock.now = START
        values = json.dumps([ROW | row | {"id": row["id"]} for row in rows])
        names = ", ".join(ROW)
        await self.monitor.execute(
            f"with gone as (delete from {self.jobs}), also as (delete from {self.recheck})"
            f" insert into {self.recheck} (queue) select unnest(%s::text[])".encode(),
            (list(notes),),
        )
        await self.monitor.execute(
            f"insert into {self.jobs} ({names}) select {names}"
            f" from json_populate_recordset(null::{self.jobs}, %s::json)"
            " with ordinality order by ordinality".encode(),
            (values,),
        )

    async def rows(self) -> dict[str, dict[str, Any]]:
        """All jobs, by id."""
        cursor = await self.monitor.execute(
            f"select to_jsonb(j) - 'payload' from {self.jobs} j order by sequence".encode()
        )
        return {row["id"]: row for (row,) in await cursor.fetchall()}

    async def states(self) -> dict[str, str]:
        """Each job's state; and a queued one's hint."""
        rows = await self.rows()
        return {id: row["hint"] or row["state"] for id, row in rows.items()}

    async def notes(self) -> list[str]:
        cursor = await self.monitor.execute(f"select queue from {self.recheck}".encode())
        return [row[0] for row in await cursor.fetchall()]

    async def lost(self) -> list[str]:
        """What `LOST` finds: must be nothing, at every moment."""
        query = LOST.format(jobs=self.jobs, recheck=self.recheck)
        cursor = await self.monitor.execute(query.encode())
        return [row[0] for row in await cursor.fetchall()]

    # Plays.

    @asynccontextmanager
    async def acting(self, **plays: Play) -> AsyncGenerator[tuple[Any, ...]]:
        """The actors, each before its first statement. At the end all must be done."""
        self.trace = []
        async with trio.open_nursery() as nursery:
            self.actors = []
            for name, play in plays.items():
                player = self.players[name]
                player.changes.clear()
                actor = Actor(self, name)
                self.actors.append(actor)
                nursery.start_soon(actor.act, self._bound(player, actor, play))
            await self.settle()
            yield tuple(self.actors)
            assert all(actor.result is not None for actor in self.actors), self.trace
        for player in self.players.values():
            player.session.actor = None

    def _bound(self, player: Player, actor: Actor, play: Play) -> Callable[[], Awaitable[Any]]:
        if not callable(play):
            player.session.actor = actor
            return (
                player.store._look_at_notes if play == NOTES else lambda: player.store.submit(*play)
            )

        async def act() -> Any:
            user = User(actor, player.user, self.schema)
            try:
                return await play(user)
            finally:
                await player.user.rollback()

        return act

    async def settle(self) -> dict[str, State]:
        """Wait until nothing moves any more; where everybody is then."""
        waiting: set[int] = set()
        while True:
            active = [actor for actor in self.actors if actor.is_active]
            if all(actor.pid in waiting for actor in active):
                return {actor.name: _state(actor) for actor in self.actors}
            with trio.move_on_after(SILENCE):
                await self.stirred.wait()
            self.stirred = trio.Event()
            active = [actor for actor in self.actors if actor.is_active]
            if active:
                cursor = await self.monitor.execute(
                    "select pid from pg_locks where not granted and pid = any(%s)",
                    ([actor.pid for actor in active],),
                )
                waiting = {pid for (pid,) in await cursor.fetchall()}

    async def play(
        self, choose: Callable[[list[Actor]], Actor], **plays: Play
    ) -> dict[str, outcome.Outcome[Any]]:
        """Let ``choose`` decide whose turn is next, until all are done. Their results."""
        async with self.acting(**plays) as actors:
            while True:
                states = await self.settle()
                ready = [actor for actor in actors if states[actor.name] == "gate"]
                if ready:
                    choose(ready).release()
                elif all(state == "done" for state in states.values()):
                    break
                else:
                    # A deadlock, which the server or a timeout will end.
                    await self.stirred.wait()
        return {actor.name: actor.result for actor in actors}


def _state(actor: Actor) -> State:
    if actor.result is not None:
        return "done"
    return "gate" if actor.label is not None else "blocked"


ROW: dict[str, Any] = {
    "id": "",
    "queue": "q",
    "lane": "l",
    "priority": 0,
    "not_before": 0,
    "max_recoveries": None,
    "recovery_window": None,
    "state": "queued",
    "hint": None,
    "token": None,
    "owner": None,
    "lease_until": None,
    "attempt_count": 0,
    "attempt_open": 0,
    "recovery_count": 0,
    "window_began_at": None,
    "cancellation_id": None,
    "outcome": None,
    "reason": None,
    "settled_group": None,
    "settled_at": None,
    "payload": "null",
}


def queued(id: str, hint: str, **columns: Any) -> dict[str, Any]:
    """A queued job."""
    return {"id": id, "hint": hint, **columns}


def running(id: str, **columns: Any) -> dict[str, Any]:
    """A running job, whose token is ``t`` and its id."""
    return {
        "id": id,
        "state": "running",
        "token": f"t{id}",
        "owner": "o",
        "lease_until": START + LEASE,
        "attempt_count": 1,
        "attempt_open": 1,
        **columns,
    }


def completing(id: str, **columns: Any) -> dict[str, Any]:
    """A completing job, whose token is ``t`` and its id."""
    values = {"state": "completing", "outcome": "completed", "attempt_open": 0}
    return running(id, **{**values, **columns})


@asynccontextmanager
async def open_stage(url: str, schema: str, names: str = "AB") -> AsyncGenerator[Stage]:
    """A stage with these players."""
    clock = Clock()
    monitor: TrioConnection[Any] = await TrioConnection.connect(url, autocommit=True)
    stage = Stage(schema, monitor, clock)
    try:
        async with _opened(stage, url, list(names)):
            await monitor.execute("set synchronous_commit = off")
            await monitor.execute(settings(is_local=False).encode())
            yield stage
    finally:
        await monitor.close()


@asynccontextmanager
async def _opened(stage: Stage, url: str, names: list[str]) -> AsyncGenerator[None]:
    if not names:
        yield
        return
    name, *others = names
    async with open_postgres_store(url, schema=stage.schema, clock=stage.clock) as store:
        assert isinstance(store, PostgresStore)
        session = SteppedSession(store._conninfo, store.dialect, stage.clock)
        user: TrioConnection[Any] = await TrioConnection.connect(url)
        player = stage.players[name] = Player(store, session, user)
        store.on_change.append(player.changes.append)
        # One session for both: an actor does one thing at a time.
        await store.close()
        store._lanes = store._callers = session
        # Whoever listens sends the notifications of lanes; they are no part of a play.
        store._is_watched = True
        try:
            async with _opened(stage, url, others):
                yield
        finally:
            await user.close()
