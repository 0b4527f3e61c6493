"""What all slots of a process share, and how they are stopped.

Slots are tasks that an outer cancellation does not reach: a handler has to be told why it is
cancelled, and its job to be handed off. So stopping is two calls, `Runtime.close` (claim nothing
more) and `Runtime.hurry` (cancel the handlers, and bound the rest), and whoever opens the nursery
makes both however its block ends.
"""

from __future__ import annotations

import contextvars
import math
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from random import Random
from typing import Any

import trio
from attrs import define, field

from ._lane import LaneState
from ._outage import Outage
from ._renewal import Lease, Renewal
from ._store import Store
from ._wake import Bell, Doorbell

HAND_OFF_LIMIT = 5.0
"""Seconds that a stop takes to write down what was cut short; then leases have to end."""


def bound(scope: trio.CancelScope) -> None:
    """Leave a scope the time to write down what was cut short, and no more."""
    scope.deadline = min(scope.deadline, trio.current_time() + HAND_OFF_LIMIT)


@define(eq=False)
class Runtime:
    """What all slots of a process share."""

    store: Store
    lease: Lease
    random: Random
    doorbell: Doorbell
    outage: Outage
    renewal: Renewal
    context: contextvars.Context
    """Each job runs in a fresh copy of this, so that nothing leaks from one to the next."""
    nursery: trio.Nursery
    lanes: dict[str | None, LaneState] = field(factory=dict[str | None, LaneState])
    quiet: Bell = field(factory=Bell)
    unrecorded: deque[str] = field(factory=lambda: deque[str](maxlen=1000))
    """Tokens of the runs that ended here last, and were logged, but not recorded in the store."""
    closed_at: float | None = None
    is_hurried: bool = False
    _scopes: set[trio.CancelScope] = field(factory=set[trio.CancelScope])

    def named(self) -> tuple[str, ...]:
        """The lanes with workers of their own."""
        return tuple(sorted(key for key in self.lanes if key is not None))

    def besides(self, lane: LaneState) -> tuple[str, ...]:
        """The lanes that a lane of all others must leave alone."""
        return tuple(sorted({*self.named(), *lane.besides}))

    def start(self, function: Callable[..., Awaitable[None]], *args: Any) -> trio.CancelScope:
        """Run the function as a task that no outer cancellation reaches; its scope.

        The shield has no deadline until `hurry`, or whoever started it, sets one.
        """
        scope = trio.CancelScope(shield=True)
        if self.is_hurried:
            bound(scope)
        self._scopes.add(scope)
        self.context.run(self.nursery.start_soon, self._outlive, scope, function, *args)
        return scope

    @trio.lowlevel.enable_ki_protection
    async def _outlive(
        self, scope: trio.CancelScope, function: Callable[..., Awaitable[None]], *args: Any
    ) -> None:
        try:
            with scope:
                await function(*args)
        finally:
            self._scopes.remove(scope)
            self.quiet.ring_all()

    def bounded(self) -> AbstractContextManager[object]:
        """For writing something down: whoever is being stopped has a time of its own for that.

        A thread may return long after the others were handed off.
        """
        if not self.is_hurried and trio.current_effective_deadline() == math.inf:
            return nullcontext()
        return trio.CancelScope(shield=True, deadline=trio.current_time() + HAND_OFF_LIMIT)

    @property
    def is_over(self) -> bool:
        """The block has ended, and its nursery takes no more tasks."""
        return self.is_hurried and not self.nursery.child_tasks

    @property
    def is_closing(self) -> bool:
        """Whether nothing is claimed any more."""
        return self.closed_at is not None

    @property
    def claim_until(self) -> float:
        """When to stop asking about a claim whose answer was lost."""
        return math.inf if self.closed_at is None else self.closed_at + HAND_OFF_LIMIT

    def close(self) -> None:
        """Claim nothing any more."""
        if self.closed_at is None:
            self.closed_at = trio.current_time()
        for lane in self.lanes.values():
            lane.bell.ring_all()

    def hurry(self) -> None:
        """Cancel all handlers, and bound what is left to be written down."""
        self.close()
        self.is_hurried = True
        for held in self.renewal.held():
            held.cancel("shutdown")
        for scope in self._scopes:
            bound(scope)

    async def wait_quiet(self) -> None:
        """Return when neither a lane nor the supervisor has anything to do."""
        while True:
            ticket = self.quiet.ticket
            is_quiet = all(lane.is_quiet for lane in self.lanes.values())
            if is_quiet and self.doorbell.supervisor.waiting and not self.renewal.held():
                await trio.lowlevel.checkpoint()
                return
            await self.quiet.wait(ticket)

    async def wait_left(self) -> None:
        """Return when every slot has ended."""
        while True:
            ticket = self.quiet.ticket
            if not self._scopes:
                await trio.lowlevel.checkpoint()
                return
            await self.quiet.wait(ticket)
