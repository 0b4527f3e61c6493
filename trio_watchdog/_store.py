"""The contract of a store, and its verbs.

A store can do one thing: take wishes and, in one transaction of its own or a shared one, answer
each (`Store.submit`). All verbs are spelled here once, in terms of that. A store adds how to
notice changes made elsewhere (`Store.watch`) and how to renew leases from another thread
(`Store.open_renewer`). It never decides anything: rows are chosen by statements, and what happens
to them by rules.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, TypeVar, cast

import trio
from attrs import frozen

from . import _wishes as wishes
from ._calls import Effects
from ._errors import StoreInvalid, WatchdogError
from ._model import (
    INSTANT_LIMIT,
    Admission,
    CancellationResult,
    CompletingJob,
    Job,
    LaneFailure,
    QueueHead,
    QueueTransition,
    RetryPolicy,
    RunningJob,
    SettledJob,
    SettledPage,
    StoredJob,
    WakeState,
    check_integer,
)
from ._payload import PAYLOAD_LIMIT
from ._rules import Settle
from ._wishes import Claimed, Reconciled, Recorded, Renewal, Reserved, Returned, Wish

R = TypeVar("R")

TOLD_LIMIT = 1000
"""Characters in which a change is told to other processes; a longer one is told as any change."""

Project = Callable[[QueueTransition, Any], Awaitable[None] | None]
"""A projector: called inside the transaction, with the store's own connection.

On PostgreSQL one that uses the connection is an async function, for the connection's methods are
to be awaited; a plain one can only look at the transition. On SQLite a transaction is one call in
a thread, with nobody who could await it, so there it is a plain function.
"""

Level = Literal["ok", "note", "warning", "fault"]

Vital = tuple[Level, str, str]
"""How bad it is, what it is about, and a sentence about it."""

Renewer = Callable[[Sequence[wishes.Renew]], Sequence[Renewal]]
"""Renews claims, blocking; for use by one other thread. Raises `WatchdogError`."""


@frozen
class Change:
    """What may have become claimable.

    ``lanes`` maps each lane to the earliest instant (ms since the epoch; 0: now) at which one of
    its jobs may be claimable. ``cancelled``: queued jobs were cancelled. ``claims``: ids whose
    running claims should be looked at. ``later``: the earliest instant at which jobs may be
    claimable that are not now. `ELSEWHERE` stands for changes made by others.
    """

    lanes: Mapping[str, int]
    cancelled: bool = False
    claims: frozenset[str] = frozenset()
    settled: frozenset[str] = frozenset()
    later: int | None = None

    @staticmethod
    def of(effects: Effects) -> Change:
        """What a transaction has changed."""
        return Change(
            effects.lanes,
            effects.cancelled,
            frozenset(effects.claims),
            frozenset(effects.settled),
            effects.later,
        )

    def told(self) -> str:
        """What other processes are told; empty, which is `ELSEWHERE`, where it would be long."""
        text = json.dumps([dict(self.lanes), self.cancelled, sorted(self.claims), self.later])
        return text if len(text) <= TOLD_LIMIT else ""

    @staticmethod
    def heard(text: str | bytes) -> Change:
        """The change that another process tells; `ELSEWHERE` when it is not as `told` has it."""
        try:
            lanes, cancelled, claims, later = json.loads(text)
            due = {str(lane): _heard_instant(instant) for lane, instant in lanes.items()}
            later = None if later is None else _heard_instant(later)
            return Change(due, bool(cancelled), frozenset(map(str, claims)), later=later)
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
            return ELSEWHERE


def _heard_instant(value: Any) -> int:
    return check_integer(value, "instant", 0, INSTANT_LIMIT)


ELSEWHERE = Change({}, cancelled=True)
"""Somebody else changed the database: look at everything. Compare by identity."""


class Store(ABC):
    """Jobs in a database. Made by `open_store`, which also closes it.

    Verbs raise `StoreUnavailable` when trying again later may help and `StoreInvalid` when it
    will not. A verb that is cancelled before its wish was taken up has done nothing; once taken
    up, it waits for the answer, and the cancellation is delivered at the next checkpoint, so
    the outcome of a transaction is never lost.
    """

    is_joint: bool = False
    """Wishes of callers and of lanes may share an exchange, in which claims see admissions."""
    payload_limit: int = PAYLOAD_LIMIT
    owner: str
    """The identity of this process start, as claims made here name it."""

    def __init__(self) -> None:
        self.on_change: list[Callable[[Change], None]] = []
        """Called on the loop after each transaction that may concern somebody, and by `watch`."""
        self.is_closed = False
        """Set by whoever opened the store, before closing it."""
        self._pid = os.getpid()

    # -- what a store implements ------------------------------------------------------------------

    @abstractmethod
    async def submit(self, *asked: Wish[Any]) -> list[Any]:
        """Answer all wishes, each atomically, together if possible.

        An answer may be a `WatchdogError` instance (or a projector's or caller's exception): a
        wish that fails hurts only itself. The order of wishes in one call is kept only as far as
        `_operations.ORDER` says: decisions before claims.
        """

    @abstractmethod
    async def watch(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Notice changes made elsewhere and call ``on_change`` with `ELSEWHERE`, until cancelled.

        Reports itself started once nothing committed afterwards can be missed. Rides out outages.
        """

    def open_renewer(self) -> AbstractContextManager[Renewer] | None:
        """A blocking renewer with a connection of its own, for the renewal thread to enter.

        After an error it is left, and a new one opened.

        None: this store lives on the loop, and renewals go through `submit`.
        """
        return None

    async def dead_owners(self) -> tuple[str, ...]:
        """Owners, named by claims, that are known to be dead although their lease may run on."""
        return ()

    def now(self) -> int | None:
        """The instant by the clock that judges due times, if it can be told without I/O."""
        return None

    async def vitals(self) -> list[Vital]:
        """What this kind of database has to tell about its health, for the doctor."""
        return []

    # -- verbs ------------------------------------------------------------------------------------

    async def ask(self, wish: Wish[R]) -> R:
        """The answer to one wish; raises it if it is an exception."""
        (answer,) = await self.submit(wish)
        if isinstance(answer, BaseException):
            raise answer
        return cast("R", answer)

    async def enqueue(self, job: Job) -> Admission:
        return await self.ask(wishes.Enqueue(job))

    async def enqueue_many(self, jobs: Sequence[Job]) -> list[Admission]:
        return await self.ask(wishes.EnqueueMany(tuple(jobs)))

    async def enqueue_select(
        self, sql: str, parameters: Sequence[Any] | Mapping[str, Any] = ()
    ) -> list[Admission]:
        return await self.ask(wishes.EnqueueSelect(sql, parameters))

    async def cancel(
        self, id: str, cancellation_id: str, *, only_if_queued: bool = False
    ) -> CancellationResult:
        return await self.ask(wishes.Cancel(id, cancellation_id, only_if_queued))

    async def fail_lane(self, lane: str, reason: str) -> LaneFailure:
        return await self.ask(wishes.FailLane(lane, reason))

    async def purge_queue(self, queue: str) -> int:
        return await self.ask(wishes.PurgeQueue(queue))

    async def read(self, id: str) -> StoredJob | None:
        return await self.ask(wishes.Read(id))

    async def read_queue_head(self, queue: str) -> QueueHead:
        return await self.ask(wishes.ReadQueueHead(queue))

    async def read_latest_settled(self, queue: str) -> SettledJob | None:
        return await self.ask(wishes.ReadLatestSettled(queue))

    async def read_settled(
        self, limit: int = 256, after: str | None = None, lane: str | None = None
    ) -> SettledPage:
        return await self.ask(wishes.ReadSettled(limit, after, lane))

    async def wake_state(self, now: int | None = None) -> WakeState:
        return await self.ask(wishes.ReadWakeState(now))

    async def claim(
        self, lane: str, token: str, *, lease: int = 120_000, counts: bool = True
    ) -> Claimed:
        return await self.ask(wishes.Claim(lane, token, self.owner, lease, counts))

    async def renew(self, id: str, token: str, *, lease: int = 120_000) -> Renewal:
        return await self.ask(wishes.Renew(id, token, lease))

    async def inspect(self, id: str, token: str) -> Renewal:
        return await self.ask(wishes.Inspect(id, token))

    async def reserve_attempt(
        self, id: str, token: str, policy: RetryPolicy, *, jitter: float = 0.0
    ) -> Reserved:
        return await self.ask(wishes.ReserveAttempt(id, token, policy, jitter))

    async def retry(
        self,
        id: str,
        token: str,
        policy: RetryPolicy | None = None,
        *,
        after: int | None = None,
        reason: str | None = None,
        jitter: float = 0.0,
        has_hook: bool = False,
    ) -> Returned:
        return await self.ask(wishes.RetryJob(id, token, policy, after, reason, jitter, has_hook))

    async def hand_off(self, id: str, token: str) -> Returned:
        return await self.ask(wishes.HandOff(id, token))

    async def decide(
        self, id: str, token: str, settle: Settle, *, has_hook: bool = False
    ) -> Recorded:
        return await self.ask(wishes.Decide(id, token, settle, has_hook))

    async def finish_completing(self, id: str, token: str) -> str:
        return await self.ask(wishes.FinishCompleting(id, token))

    async def take_completing(
        self,
        token: str,
        *,
        lease: int = 120_000,
        lanes: tuple[str, ...] | None = None,
        without: tuple[str, ...] = (),
    ) -> CompletingJob | None:
        return await self.ask(
            wishes.TakeCompleting(
                token, self.owner, lease, lanes, without, await self.dead_owners()
            )
        )

    async def next_running_claim(self, after: int = 0) -> RunningJob | None:
        return await self.ask(wishes.NextRunningClaim(after, await self.dead_owners()))

    async def reconcile(self, id: str, token: str) -> Reconciled:
        return await self.ask(wishes.Reconcile(id, token, await self.dead_owners()))

    async def settle_cancelled(self, lane: str | None = None, limit: int = 256) -> list[str]:
        return await self.ask(wishes.SettleCancelled(lane, limit))

    async def prune(
        self,
        *,
        before: int | None = None,
        keep: int | None = None,
        lane: str | None = None,
        queue: str | None = None,
        limit: int = 1000,
    ) -> int:
        return await self.ask(wishes.Prune(before, keep, lane, queue, limit))

    async def protect_settled(self, name: str, after: str | None) -> None:
        await self.ask(wishes.ProtectSettled(name, after))

    async def release_settled(self, name: str) -> bool:
        return await self.ask(wishes.ReleaseSettled(name))

    async def lost_jobs(self) -> list[tuple[str, str]]:
        lost: list[tuple[str, str]] = []
        after: str | None = ""
        while after is not None:
            found = await self.ask(wishes.ReadLost(after))
            lost += found.jobs
            after = found.last
        return lost

    # -- for stores -------------------------------------------------------------------------------

    def check_usable(self) -> None:
        """Raise `StoreInvalid` in a process that inherited the store, and after it was closed."""
        refuse_fork(self._pid)
        if self.is_closed:
            raise StoreInvalid(
                "the database is closed: the block of open_client or open_watchdog has ended"
            )

    def report(self, change: Change) -> None:
        """Tell everybody who listens about a change."""
        for listener in self.on_change:
            listener(change)


def refuse_fork(pid: int) -> None:
    """Raise `StoreInvalid` unless this is process ``pid``: sockets and locks are not shared."""
    if os.getpid() != pid:
        raise StoreInvalid(
            f"this store was opened by process {pid} and cannot be used in its fork"
            f" {os.getpid()}; open one there"
        )


__all__ = ["ELSEWHERE", "Change", "Project", "Renewer", "Store", "WatchdogError", "refuse_fork"]
