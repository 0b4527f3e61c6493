"""Claims that this process holds, and the one renewal that serves all of them.

A claim's scope has the end of its lease as its deadline, on Trio's clock: the moment before the
claim (or its last successful renewal) was *sent*, plus the lease, less a margin. So whatever runs
in the scope stops by itself when renewals stop succeeding, with nobody having to notice, and it
stops before the database lets anybody else have the job. A renewal that succeeds moves the
deadline; an answer that says no cancels the scope at once.

Where the store can be asked from another thread, `_pulse` renews; else `Renewal.run` does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import cached_property
from random import Random
from typing import Any

import trio
from attrs import frozen

from . import _rules as rules
from ._errors import StoreUnavailable
from ._model import CancelReason, CompletingJob, RunningJob, seconds_to_milliseconds
from ._outage import Outage
from ._store import Store
from ._wake import Doorbell
from ._wishes import Inspect, Renew
from ._wishes import Renewal as Answer

SOON = 1.0
"""Seconds until a renewal that was not answered, or met a locked row, is asked again at most."""

INSPECTION_INTERVAL = 0.05
"""Seconds between two looks at all claims, however often others ring."""

_REASONS: dict[CancelReason, str] = {
    "cancellation": "the job's cancellation was requested",
    "lease_lost": "the claim on the job is lost",
    "lane_failed": "the job's lane was failed",
    "timeout": "the job's time limit has passed",
    "shutdown": "the watchdog is stopping",
}


@frozen
class Lease:
    """How long a claim is good for, in seconds, and how often it is renewed."""

    duration: float
    heartbeat: float

    @cached_property
    def milliseconds(self) -> int:
        """The duration as the store takes it."""
        return seconds_to_milliseconds(self.duration)

    @cached_property
    def _usable(self) -> float:
        return self.duration - rules.lease_margin(self.duration)

    def deadline(self, asked_at: float) -> float:
        """When, on Trio's clock, work must stop under a lease that was asked for at this time."""
        return asked_at + self._usable


class Held:
    """One claim that this process holds: its lease, and why its scope was cancelled."""

    def __init__(self, job: RunningJob | CompletingJob, lease: Lease, renewed_at: float) -> None:
        self.id = job.id
        self.token = job.token
        self.lane = job.lane
        self.lease = lease
        self.renewed_at = renewed_at
        """When the last successful claim or renewal was sent, on Trio's clock."""
        self.lease_scope = trio.CancelScope(deadline=lease.deadline(renewed_at))
        self.cause: CancelReason | None = None
        self.cancelled_at: float | None = None
        self.over_at: float | None = None
        """When its handler was left; from then on no cause is recorded any more."""
        self.catch_up: Callable[[], None] = _nothing
        """Applies renewals that have arrived, before anybody looks at the deadline."""

    @property
    def lease_deadline(self) -> float:
        """The end of the lease as known here."""
        return self.lease_scope.deadline

    @property
    def write_until(self) -> float:
        """When to stop trying to write down how it ended."""
        if self.over_at is None:
            return self.lease_deadline
        # Also where renewals succeed, as when a projector refuses every transition.
        return min(self.lease_deadline, self.over_at + self.lease.duration)

    def renewed(self, asked_at: float) -> None:
        """Move the deadline: a renewal that was sent at ``asked_at`` succeeded."""
        self.renewed_at = max(asked_at, self.renewed_at)
        self.lease_scope.deadline = self.lease.deadline(self.renewed_at)

    def cancel(self, cause: CancelReason) -> None:
        """Cancel what runs under the claim. The first cause stands, but a lost lease beats all."""
        if self.over_at is not None:
            return
        if self.cause is None or cause == "lease_lost":
            self.cause = cause
        if self.cancelled_at is None:
            self.cancelled_at = trio.current_time()
        self.cancel_scope_of_work.cancel(_REASONS[self.cause])

    @property
    def cancel_scope_of_work(self) -> trio.CancelScope:
        """The scope that `cancel` cancels."""
        return self.lease_scope

    def requested(self) -> None:
        """Somebody asked for the job's cancellation. For a decided job that is too late."""

    def hear(self, answer: Answer, asked_at: float | None) -> None:
        """Act on the answer to a renewal sent at ``asked_at``, or to an inspection (None)."""
        if answer.status == "held":
            if asked_at is not None:
                self.renewed(asked_at)
            if answer.cancellation_requested:
                self.requested()
        elif answer.status == "lost":
            self.cancel("lane_failed" if answer.settled_as_failed else "lease_lost")


def _nothing() -> None:
    pass


current_held: ContextVar[Held | None] = ContextVar("trio_watchdog_held", default=None)
"""What the present task works under, for whoever finds the event loop blocked by it."""


class Renewal:
    """All claims of this process, renewed together every heartbeat."""

    def __init__(
        self, store: Store, doorbell: Doorbell, outage: Outage, lease: Lease, random: Random
    ) -> None:
        self.lease = lease
        self.random = random
        self.outage = outage
        self.renewed_at: float | None = None
        """When the last renewal that was answered was sent, on Trio's clock."""
        self.catch_up: Callable[[], None] = _nothing
        self._store = store
        self._doorbell = doorbell
        self._held: dict[str, Held] = {}
        # The renewal thread takes snapshots.
        self._lock = threading.Lock()
        self._scope = trio.CancelScope(shield=True)

    def hold(self, held: Held) -> None:
        """Renew this claim from now on."""
        held.catch_up = self.catch_up
        with self._lock:
            self._held[held.token] = held

    def release(self, held: Held) -> None:
        """Renew this claim no longer."""
        with self._lock:
            if self._held.get(held.token) is held:
                del self._held[held.token]

    def held(self) -> list[Held]:
        """All claims that are held now. May be called from any thread."""
        with self._lock:
            return list(self._held.values())

    def soon(self) -> float:
        """Seconds until an unanswered renewal should be repeated."""
        return min(SOON, self.lease.heartbeat) * (0.5 + self.random.random() / 2)

    def hear(self, claims: Sequence[Held], answers: Sequence[Any], asked_at: float) -> bool:
        """Hand out the answers; says whether every claim got a clear one."""
        self.renewed_at = asked_at
        clear = True
        for held, answer in zip(claims, answers, strict=True):
            if isinstance(answer, Exception):
                raise answer
            held.hear(answer, asked_at)
            clear = clear and answer.status != "locked"
        return clear

    async def run(self) -> None:
        """Renew on the event loop, until `stop`: for stores that live there."""
        with self._scope:
            delay = self.lease.heartbeat
            while True:
                await trio.sleep(delay)
                delay = self.lease.heartbeat
                claims = self.held()
                if not claims:
                    continue
                asked_at = trio.current_time()
                try:
                    answers = await self._store.submit(*map(renew_wish, claims))
                except StoreUnavailable as error:
                    self.outage.noticed(error)
                    delay = self.soon()
                else:
                    self.outage.answered()
                    if not self.hear(claims, answers, asked_at):
                        delay = self.soon()

    def stop(self) -> None:
        """End `run`; nothing is held any more."""
        self._scope.cancel()

    async def inspect(self) -> None:
        """Look at claims when somebody may have touched them, so that a cancellation arrives.

        Looks that all claims need are made at most every `INSPECTION_INTERVAL`, and none is lost.
        """
        bell = self._doorbell.claims
        is_all = False
        next_at = trio.current_time()
        while True:
            ticket = bell.ticket
            ids, is_all_now = self._doorbell.take_claims()
            is_all = is_all or is_all_now
            claims = self.held()
            if not (is_all and trio.current_time() >= next_at):
                claims = [held for held in claims if held.id in ids]
            else:
                is_all = False
                next_at = trio.current_time() + INSPECTION_INTERVAL
            if claims:
                await self._inspect(claims)
            with trio.move_on_at(next_at) if is_all else trio.CancelScope():
                await bell.wait(ticket)

    async def _inspect(self, claims: Sequence[Held]) -> None:
        wishes = [Inspect(held.id, held.token) for held in claims]
        answers = await self.outage.riding_out(lambda: self._store.submit(*wishes))
        for held, answer in zip(claims, answers, strict=True):
            if isinstance(answer, Exception):
                raise answer
            held.hear(answer, None)


def renew_wish(held: Held) -> Renew:
    """The wish that renews a claim."""
    return Renew(held.id, held.token, held.lease.milliseconds)
