"""The doorbell: rings merge, none is lost.

Somebody who waits for work takes the bell's ticket *before* looking into the store, looks, and
waits with that ticket. A ring after the ticket was taken ends the wait at once, so a change that
was committed between the look and the wait is not missed. Rings only ever mean "look"; what there
is to do is read from rows.

One ring wakes one slot of a lane. A slot that was woken and finds work wakes two more, so that a
thousand jobs reach all slots in a few steps, and one job does not wake a herd.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from weakref import WeakValueDictionary

import trio

from ._store import ELSEWHERE, Change

HOP = 60.0
"""Longest sleep, in seconds, until a durable instant: Trio's clock and the durable one may drift
apart, or the machine be suspended, so the clock is read again at least this often."""

RAMP = 2
"""How many more slots a slot wakes that was woken and found work."""


class Bell:
    """Something to wait for that may happen again."""

    __slots__ = ("__weakref__", "_lot", "ticket")

    def __init__(self) -> None:
        self.ticket = 0
        """To be taken before the look, and given to `wait`."""
        self._lot = trio.lowlevel.ParkingLot()

    @property
    def waiting(self) -> int:
        """How many tasks wait and have not been woken."""
        return len(self._lot)

    def ring(self, count: float = 1) -> None:
        """Wake up to ``count`` who wait, and everybody who looked before this and will wait."""
        self.ticket += 1
        self._lot.unpark(count=count)

    def ring_all(self) -> None:
        """Wake everybody who waits."""
        self.ring(math.inf)

    async def wait(self, ticket: int) -> None:
        """Return once the bell has rung after ``ticket`` was taken."""
        if ticket == self.ticket:
            await self._lot.park()
        else:
            await trio.lowlevel.checkpoint()


class Alarm:
    """The earliest durable instant, in milliseconds, at which something will be due."""

    def __init__(self, now: Callable[[], int | None]) -> None:
        self._now = now
        self.instant: int | None = None
        """When it goes off; None: it is off."""
        self._earlier = Bell()

    def arm(self, instant: int) -> None:
        """Go off at ``instant``, unless something earlier is known."""
        if self.instant is None or instant < self.instant:
            self.instant = instant
            self._earlier.ring_all()

    async def wait(self) -> int:
        """The instant, when it has come; the alarm is then off until it is armed again.

        Where the store cannot tell the time without being asked, it never goes off, and the slow
        poll finds what is due.
        """
        while True:
            ticket = self._earlier.ticket
            delay = math.inf
            now = self._now()
            if self.instant is not None and now is not None:
                delay = (self.instant - now) / 1000
            if self.instant is not None and delay <= 0:
                instant, self.instant = self.instant, None
                await trio.lowlevel.checkpoint()
                return instant
            with trio.move_on_after(min(delay, HOP)):
                await self._earlier.wait(ticket)


class Doorbell:
    """Hears every `Change` of the store, and knows whom it concerns.

    ``None`` stands for the lane of all lanes that have none of their own here.
    """

    def __init__(self, now: Callable[[], int | None]) -> None:
        self._now = now
        self.alarm = Alarm(now)
        self.supervisor = Bell()
        """Rung when cancelled, completing or disappeared jobs may need a hand."""
        self.changed = Bell()
        """Rung at every change."""
        self.claims = Bell()
        """Rung when claims that this process holds should be looked at; see `take_claims`."""
        self.changes_heard = 0
        self._lanes: dict[str | None, Bell] = {}
        self._claims: set[str] = set()
        self._all_claims = False
        self._settled: WeakValueDictionary[str, Bell] = WeakValueDictionary()

    def lane(self, name: str | None) -> Bell:
        """The bell of a lane that is worked here."""
        return self._lanes.setdefault(name, Bell())

    def settled(self, id: str) -> Bell:
        """A bell for those who wait until the job is settled; keep it while waiting."""
        bell = self._settled.get(id)
        if bell is None:
            bell = self._settled[id] = Bell()
        return bell

    def take_claims(self) -> tuple[frozenset[str], bool]:
        """The jobs whose claims should be looked at, and whether that means all of them."""
        taken = frozenset(self._claims), self._all_claims
        self._claims.clear()
        self._all_claims = False
        return taken

    def hear(self, change: Change) -> None:
        """Wake those whom the change concerns."""
        self.changes_heard += 1
        self.changed.ring_all()
        if change is ELSEWHERE:
            self.ring_everything()
            return
        for lane, due in change.lanes.items():
            bell = self._worked(lane)
            if due > 0:
                self.alarm.arm(due)
            # Also for an instant that has passed: whom the alarm wakes may be busy.
            if bell is not None and due <= (self._now() or due):
                bell.ring()
        if change.later is not None:
            self.alarm.arm(change.later)
        if change.claims:
            self._claims |= change.claims
            self.claims.ring_all()
        if change.cancelled:
            self.supervisor.ring_all()
        for id in change.settled:
            if (settled := self._settled.get(id)) is not None:
                settled.ring_all()

    def expect(self, lane: str) -> bool:
        """Wake one who waits for a job of the lane, since one is coming; says whether one does."""
        bell = self._worked(lane)
        if bell is None or not bell.waiting:
            return False
        bell.ring()
        return True

    def _worked(self, lane: str) -> Bell | None:
        """The bell of whoever works the lane's jobs here."""
        return self._lanes.get(lane) or self._lanes.get(None)

    def ring_lanes(self) -> None:
        """One slot of each lane should look."""
        for bell in self._lanes.values():
            bell.ring()

    def ring_everything(self) -> None:
        """Anything may have happened: everybody should look."""
        self.ring_lanes()
        self._all_claims = True
        self.claims.ring_all()
        self.supervisor.ring_all()
        for bell in list(self._settled.values()):
            bell.ring_all()
