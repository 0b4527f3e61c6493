"""`open_watchdog`, and how its parts are nested.

Outermost first: the store; renewal and the ear for changes; lanes and their runs; the caller's
block. What stands further out ends later, and stands behind a shield until what is inside has
ended: a handler that is told to stop still has a lease, and a way to write down how it ended.
"""

from __future__ import annotations

import contextvars
import math
import random as random_module
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal, TypeVar, cast

import trio
from attrs import frozen

from ._chores import Chores
from ._client import Client, fresh_random, open_client, unwrapped
from ._converter import check_payload_class
from ._errors import shown
from ._lane import (
    OTHERS,
    Handler,
    Hook,
    Lane,
    Lanes,
    LaneState,
    LaneStatistics,
    Others,
    Plan,
    RetryChoice,
)
from ._model import Admission, Job, RunningJob, TickResult, check_job, check_seconds
from ._open import Database, open_store
from ._outage import Outage
from ._pulse import Pulse
from ._renewal import Lease, Renewal
from ._retention import Retention
from ._run import Run
from ._runtime import Runtime, bound
from ._slot import Slot
from ._store import Project, Store
from ._supervisor import IsAlive, OnWake, Supervisor
from ._wake import Bell, Doorbell
from ._wishes import OTHERS_LIMIT

T = TypeVar("T")

# -- the watchdog ---------------------------------------------------------------------------------


@frozen
class WatchdogStatistics:
    """What a watchdog does now."""

    lanes: tuple[LaneStatistics, ...]
    running: int
    """Handlers that run."""
    claims: int
    """Claims that are held: running handlers, hooks, and what is being written down."""
    renewal_age: float | None
    """Seconds since the last renewal that was answered; None before the first."""
    changes: int
    """Changes of the store that were heard of."""
    is_store_available: bool
    is_draining: bool


class Watchdog(Client):
    """A client that also runs jobs. `open_watchdog` makes it."""

    def __init__(
        self, runtime: Runtime, supervisor: Supervisor, *, retry_for: float, poll: float
    ) -> None:
        super().__init__(
            runtime.store,
            runtime.doorbell,
            runtime.outage,
            retry_for=retry_for,
            poll=poll,
            watch=trio.lowlevel.checkpoint,
        )
        self._runtime = runtime
        self._supervisor = supervisor
        self._turn = 0

    async def enqueue(self, job: Job) -> Admission:
        runtime = self._runtime
        is_due = check_job(job).not_before is None
        if is_due and runtime.store.is_joint and runtime.doorbell.expect(job.lane):
            # Whoever waits for it here asks in the same exchange: one commit for both.
            await trio.lowlevel.checkpoint()
        return await super().enqueue(job)

    async def start_lane(
        self,
        name: str | Literal[Others.OTHERS],
        handler: Handler,
        *,
        workers: int = 1,
        retry: RetryChoice = None,
        timeout: float | None = None,
        on_completing: Hook | None = None,
        payload: Any = None,
    ) -> Lane:
        """A lane that claims jobs of this name and runs the handler on each, from now on.

        ``workers``: how many jobs run at a time. ``retry``: a `RetryPolicy`, or a callable that
        gives one (or None) for a job; without one an exception settles the job as failed.
        ``timeout``: seconds that one attempt may take; passing it is a failure of the attempt.
        ``on_completing``: an async function that is called, at least once, between the durable
        decision about a job and its settling, with the `CompletingJob`; while it fails it is
        called again, and the queue waits. ``payload``: a class to which the payload is
        structured; a payload that does not fit fails its job.

        Raises `ValueError` when the lane is started already, and for values out of range;
        `TypeError` for a ``payload`` to which nothing can be structured.
        """
        plan = Plan(name, handler, workers, retry, timeout, on_completing, payload)
        self._check_startable([plan])
        lane = self._start(plan)
        await trio.lowlevel.checkpoint()
        return lane

    async def start_lanes(self, lanes: Lanes) -> list[Lane]:
        """All these lanes, started as `start_lane` would; none if one of them cannot be."""
        plans = list(lanes)
        self._check_startable(plans)
        started = [self._start(plan) for plan in plans]
        await trio.lowlevel.checkpoint()
        return started

    def _check_startable(self, plans: Sequence[Plan]) -> None:
        runtime = self._runtime
        if runtime.is_closing:
            raise RuntimeError("this watchdog is stopping; no lane can be started")
        for plan in plans:
            if plan.key in runtime.lanes:
                raise ValueError(f"lane {plan.name!r} is already started here")
            if plan.payload is not None:
                check_payload_class(plan.payload)
        keys = {*runtime.lanes, *(plan.key for plan in plans)}
        if None in keys and len(keys) - 1 > OTHERS_LIMIT:
            raise ValueError(f"{len(keys) - 1} lanes beside OTHERS; {OTHERS_LIMIT} are allowed")

    def _start(self, plan: Plan) -> Lane:
        runtime = self._runtime
        lane = LaneState(plan, runtime.doorbell.lane(plan.key), runtime.quiet)
        runtime.lanes[plan.key] = lane
        for _ in range(plan.workers):
            runtime.start(Slot(runtime, lane).work)
        runtime.doorbell.supervisor.ring_all()
        return Lane(lane)

    def running(self) -> list[RunningJob]:
        """The jobs whose handlers run in this process, each with its ``cancel_scope``."""
        return [run.job for run in self._runs()]

    def _runs(self) -> list[Run]:
        held = self._runtime.renewal.held()
        return [run for run in held if isinstance(run, Run) and run.is_running]

    def statistics(self) -> WatchdogStatistics:
        """What this watchdog does now."""
        runtime = self._runtime
        renewed_at = runtime.renewal.renewed_at
        return WatchdogStatistics(
            lanes=tuple(Lane(lane).statistics() for lane in runtime.lanes.values()),
            running=len(self._runs()),
            claims=len(runtime.renewal.held()),
            renewal_age=None if renewed_at is None else trio.current_time() - renewed_at,
            changes=runtime.doorbell.changes_heard,
            is_store_available=not runtime.outage.is_on,
            is_draining=runtime.is_closing,
        )

    async def wait_idle(self) -> None:
        """Return when nothing runs here, and there is no due job that a lane here could run.

        Paused lanes run nothing, so their jobs do not count; nor does what becomes due later.
        """
        self._runtime.doorbell.ring_everything()
        await self._runtime.wait_quiet()

    async def drain(self) -> None:
        """Claim nothing more, for good, and return when nothing runs here any more.

        For hosts that handle signals: the first one drains. Leaving the block drains by itself,
        and for at most ``grace`` seconds.
        """
        self._runtime.close()
        await self._runtime.wait_left()

    def interrupt(self) -> None:
        """Cancel all handlers and hand off their jobs, at no cost to them; claim nothing more.

        For hosts that handle signals: the second one interrupts. Returns at once.
        """
        self._runtime.hurry()

    # -- steps from outside -----------------------------------------------------------------------

    async def tick(self, lanes: Lanes) -> TickResult:
        """One step of work: what was done, to which job, and when to come again.

        Finishes one completing job, or else reconciles one disappeared claim or settles one
        cancelled job, or else runs one job of ``lanes`` to its end. For hosts that are woken from
        outside and start no lanes: there the supervisor leaves these steps to them, unless it sees
        none for the time of a ``poll``.
        """
        if self._runtime.is_closing:
            raise RuntimeError("this watchdog is stopping; it does nothing more")
        self._supervisor.stepped()
        action, id = await self._step(lanes)
        return TickResult(action, id, await self.wake_state())

    async def _step(
        self, lanes: Lanes
    ) -> tuple[Literal["completed", "reconciled", "ran", "idle"], str | None]:
        runtime, supervisor = self._runtime, self._supervisor
        states = [LaneState(plan, Bell(), runtime.quiet) for plan in lanes]
        named = tuple(state.plan.key for state in states if state.plan.key is not None)
        for state in states:
            state.besides = named
        riding_out = runtime.outage.riding_out
        taken_at = trio.current_time()
        completing = await riding_out(lambda: supervisor.take_completing(states))
        if completing is not None:
            by_key = {state.plan.key: state for state in states}
            slot = Slot(runtime, by_key.get(completing.lane) or by_key[None], is_single=True)
            await self._outlive(slot, lambda: slot.finish(completing, taken_at))
            return "completed", completing.id
        reconciled = await riding_out(lambda: supervisor.reconcile(limit=1))
        if not reconciled:
            reconciled = await riding_out(lambda: runtime.store.settle_cancelled(limit=1))
        if reconciled:
            return "reconciled", reconciled[0]
        # Lanes take turns, so that a busy one does not keep the others waiting.
        self._turn += 1
        first = self._turn % len(states) if states else 0
        for state in states[first:] + states[:first]:
            slot = Slot(runtime, state, is_single=True)
            id = await self._outlive(slot, slot.work_once)
            if id is not None:
                return "ran", id
        return "idle", None

    async def _outlive(self, slot: Slot, function: Callable[[], Awaitable[T]]) -> T:
        """Run what a slot does as slots run; when we are cancelled, it hands its job off."""
        if self._runtime.is_over:
            with self._runtime.bounded():
                return await function()
        results: list[T] = []
        done = trio.Event()

        async def work() -> None:
            try:
                results.append(await function())
            finally:
                done.set()

        scope = self._runtime.start(work)
        try:
            await done.wait()
        except trio.Cancelled:
            slot.interrupt()
            bound(scope)
            # As with any call that is cancelled: what it runs has ended when it returns.
            with trio.CancelScope(shield=True):
                await done.wait()
            raise
        if not results:
            # It raised, which cancels the block, or a stop has cut it short.
            await trio.lowlevel.checkpoint()
            raise RuntimeError("this watchdog has stopped; it does nothing more")
        return results[0]


# -- opening --------------------------------------------------------------------------------------


@asynccontextmanager
@trio.lowlevel.enable_ki_protection
async def open_watchdog(
    database: Database,
    *,
    lease: float = 120.0,
    heartbeat: float = 10.0,
    grace: float = 30.0,
    poll: float = 5.0,
    retry_for: float = 30.0,
    is_alive: IsAlive | None = None,
    on_wake: OnWake | None = None,
    project: Project | None = None,
    retention: Retention | Sequence[Retention] = (),
    random: random_module.Random | None = None,
    stall_warning: float = 1.0,
    stall_limit: float = 600.0,
    **options: Any,
) -> AsyncGenerator[Watchdog]:
    """A `Watchdog`: a client that also runs jobs, once lanes are started on it.

    ``database``, ``project``, ``retry_for``, ``random`` and other options are those of
    `open_client`; on PostgreSQL a projector that uses the connection is an async function. All
    durations are seconds:

    * ``lease``: how long a claim is good for without renewal. A handler is cancelled when its
      renewals have not succeeded for that long (less a margin), and others may have the job after.
    * ``heartbeat``: how often all claims of the process are renewed; never less often than three
      times a lease, so that one renewal may fail.
    * ``grace``: how long running handlers may go on when the block is left normally. What is left
      then, and everything when the block is cancelled, is cancelled and handed off; that costs a
      job nothing.
    * ``poll``: how often to look for changes of which no notification came.
    * ``stall_warning``: a handler that blocks the event loop for longer is logged with its stack;
      ``stall_limit``: one that blocks for longer loses its lease. (For stores that are renewed
      from a thread: those in files and on servers.)

    ``is_alive(job)`` is asked, if given, about a claim whose lease has ended: only False lets the
    job be decided about. ``on_wake(state)`` is told whenever the `WakeState` changes, to arm an
    alarm outside of the process. Both may be async functions.

    ``retention`` says which settled jobs are deleted, every minute or as it says, a few hundred in
    a transaction; one, or several for different lanes and queues. Without it they stay.

    An error of the store that waiting does not mend, such as a corrupt file, ends the block and is
    raised from it.
    """
    check_seconds(lease, "lease", positive=True)
    check_seconds(heartbeat, "heartbeat", positive=True)
    # So that one may fail.
    heartbeat = min(heartbeat, lease / 3)
    if grace != math.inf:
        check_seconds(grace, "grace")
    check_seconds(poll, "poll", positive=True)
    check_seconds(retry_for, "retry_for")
    check_seconds(stall_warning, "stall_warning", positive=True)
    check_seconds(stall_limit, "stall_limit", positive=True)
    retentions = (retention,) if isinstance(retention, Retention) else tuple(retention)
    for each in retentions:
        if not isinstance(cast("object", each), Retention):
            raise TypeError(f"retention has {shown(each)}, which is not a Retention")
    random = random or fresh_random()
    context = contextvars.copy_context()
    with unwrapped() as body:
        async with open_store(database, project=project, **options) as store:
            doorbell = Doorbell(store.now)
            outage = Outage(random)
            renewal = Renewal(store, doorbell, outage, Lease(lease, heartbeat), random)
            async with _services(
                store, doorbell, renewal, stall_warning=stall_warning, stall_limit=stall_limit
            ) as serve:
                async with trio.open_nursery() as nursery:
                    runtime = Runtime(
                        store,
                        renewal.lease,
                        random,
                        doorbell,
                        outage,
                        renewal,
                        context,
                        nursery,
                    )
                    supervisor = Supervisor(runtime, poll=poll, is_alive=is_alive, on_wake=on_wake)
                    serve(supervisor.run)
                    serve(Chores(runtime, retentions).run)
                    watchdog = Watchdog(runtime, supervisor, retry_for=retry_for, poll=poll)
                    try:
                        with body.watched():
                            yield watchdog
                        with trio.move_on_after(grace):
                            await watchdog.drain()
                    finally:
                        runtime.hurry()


@asynccontextmanager
async def _services(
    store: Store,
    doorbell: Doorbell,
    renewal: Renewal,
    *,
    stall_warning: float,
    stall_limit: float,
) -> AsyncGenerator[Callable[[Callable[[], Awaitable[None]]], None]]:
    """What has to outlive the lanes: renewal, the ear for changes, and what the caller adds."""
    scopes: list[trio.CancelScope] = []

    @trio.lowlevel.enable_ki_protection
    async def outlive(
        function: Callable[..., Awaitable[None]],
        scope: trio.CancelScope,
        **options: Any,
    ) -> None:
        with scope:
            await function(**options)

    def new_scope(*, shield: bool = True) -> trio.CancelScope:
        # Known before its task begins, which may be after the end has come.
        scope = trio.CancelScope(shield=shield)
        scopes.append(scope)
        return scope

    service: Renewal | Pulse = renewal
    renewer = store.open_renewer()
    if renewer is not None:
        service = Pulse(
            renewal,
            store.open_renewer,
            stall_warning=stall_warning,
            stall_limit=stall_limit,
        )
    async with trio.open_nursery() as nursery:
        store.on_change.append(doorbell.hear)
        try:
            # No deadline on these shields: `finally` ends them, and the block before it is bounded.
            # A start may wait for the database, and must bear being cancelled.
            watching = new_scope(shield=False)
            await nursery.start(outlive, store.watch, watching)
            watching.shield = True
            nursery.start_soon(service.run)
            nursery.start_soon(outlive, renewal.inspect, new_scope())
            yield lambda function: nursery.start_soon(outlive, function, new_scope())
        finally:
            for scope in scopes:
                scope.cancel("the watchdog has stopped")
            service.stop()
            store.on_change.remove(doorbell.hear)


__all__ = [
    "OTHERS",
    "Client",
    "Lane",
    "LaneStatistics",
    "Lanes",
    "Watchdog",
    "WatchdogStatistics",
    "open_client",
    "open_watchdog",
]
