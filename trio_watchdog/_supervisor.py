"""The supervisor: sees to what has nobody who sees to it.

It takes over completions whose owner is gone, decides about claims that disappeared, settles
cancelled jobs that nobody claims, and keeps the alarm for what will be due. Each duty is a scan of
rows, made again and again; nothing is remembered between passes that a pass could lose.

A process without lanes may be driven from outside, by `tick`, whose caller wants to see what each
step does: there the duties on jobs begin when nobody has called it for the time of a poll.
"""

from __future__ import annotations

import inspect
import logging
import math
import traceback
from collections.abc import Awaitable, Callable
from typing import Any, cast

import trio

from ._errors import LivenessUnavailable, SettlementRejected, StoreInvalid
from ._identity import fresh_token
from ._lane import LaneState
from ._model import CompletingJob, RunningJob, WakeState, to_milliseconds
from ._run import Run
from ._runtime import Runtime
from ._slot import Slot

IsAlive = Callable[[RunningJob], "bool | Awaitable[bool | None] | None"]
"""Whether the execution of a claim whose lease has ended still goes on; None: cannot tell."""

OnWake = Callable[[WakeState], object]
"""Told when the wake state has changed; may be an async function."""

PASS_INTERVAL = 0.1
"""Seconds between two passes, however often others ring."""

SETTLE_LIMIT = 256
"""Cancelled jobs settled in one transaction."""

LIVENESS_LIMIT = 10.0
"""Seconds that ``is_alive`` may take in one pass; then it cannot tell."""

OVERDUE = 10.0
"""Seconds after its cancellation at which a handler that still runs is reported."""

logger = logging.getLogger("trio_watchdog")


class Supervisor:
    """Runs beside the lanes of a process, until cancelled."""

    def __init__(
        self,
        runtime: Runtime,
        *,
        poll: float,
        is_alive: IsAlive | None,
        on_wake: OnWake | None,
    ) -> None:
        self._runtime = runtime
        self._store = runtime.store
        self._poll = poll
        self._is_alive = is_alive
        self._on_wake = on_wake
        self._told: WakeState | None = None
        self._telling = trio.Lock()
        self._ask_again_at: dict[str, float] = {}
        self._after = 0
        """Where the next look at disappeared claims begins."""
        self._reported: dict[str, float] = {}
        self._stepped_at = trio.current_time()

    def stepped(self) -> None:
        """The process is driven from outside, as of now."""
        self._stepped_at = trio.current_time()

    async def run(self) -> None:
        """Patrol, and keep the alarm."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._patrol)
            nursery.start_soon(self._keep_alarm)
            if self._on_wake is not None:
                nursery.start_soon(self._follow_changes)

    async def _patrol(self) -> None:
        doorbell = self._runtime.doorbell
        poll_at = trio.current_time() + self._poll
        while True:
            ticket = doorbell.supervisor.ticket
            began_at = trio.current_time()
            await self._runtime.outage.riding_out(self._pass)
            # What a slow store takes does not count, or there would be no rest between two polls.
            poll_at += trio.current_time() - began_at
            await trio.sleep(PASS_INTERVAL)
            self._runtime.quiet.ring_all()
            with trio.move_on_at(poll_at):
                await doorbell.supervisor.wait(ticket)
            if trio.current_time() >= poll_at:
                # Whatever was not rung for, for whatever reason, and however often others ring.
                doorbell.ring_everything()
                poll_at = trio.current_time() + self._poll

    async def _pass(self) -> None:
        await self._look_after_runs()
        if self._runtime.is_closing:
            return
        state = await self._read_wake_state()
        if not self._runtime.lanes and trio.current_time() < self._stepped_at + self._poll:
            return
        # Two reads, which most of the time tell that there is nothing to do.
        if not state.pending and not await self._store.dead_owners():
            return
        for duty in (self._settle_cancelled, self._take_completions, self.reconcile):
            try:
                await duty()
            except SettlementRejected as error:
                # The next pass tries again; the other duties must not wait for it.
                logger.error("the supervisor was refused: %s", error, exc_info=error)
        await self._read_wake_state()

    # -- jobs -------------------------------------------------------------------------------------

    async def _settle_cancelled(self) -> None:
        while len(await self._store.settle_cancelled(limit=SETTLE_LIMIT)) == SETTLE_LIMIT:
            pass

    async def _take_completions(self) -> None:
        """Finish orphaned completions, at most as many at a time as a lane has workers."""
        runtime = self._runtime
        while not runtime.is_closing:
            idle = [lane for lane in runtime.lanes.values() if lane.takeovers < lane.plan.workers]
            taken_at = trio.current_time()
            job = await self.take_completing(idle)
            if job is None:
                return
            lane = runtime.lanes.get(job.lane) or runtime.lanes[None]
            lane.takeovers += 1
            if runtime.is_over:
                # While we asked.
                with runtime.bounded():
                    await self._finish(lane, job, taken_at)
                return
            runtime.start(self._finish, lane, job, taken_at)

    async def take_completing(self, lanes: list[LaneState]) -> CompletingJob | None:
        """Take over a completion of one of the lanes."""
        lease = self._runtime.lease.milliseconds
        names = tuple(lane.plan.key for lane in lanes if lane.plan.key is not None)
        job = None
        if names:
            job = await self._store.take_completing(fresh_token(), lease=lease, lanes=names)
        for lane in lanes:
            if job is None and lane.plan.key is None:
                job = await self._store.take_completing(
                    fresh_token(), lease=lease, without=self._runtime.besides(lane)
                )
        return job

    async def _finish(self, lane: LaneState, job: CompletingJob, taken_at: float) -> None:
        try:
            await Slot(self._runtime, lane, is_single=True).finish(job, taken_at)
        finally:
            lane.takeovers -= 1
            # There may be more of them.
            self._runtime.doorbell.supervisor.ring_all()

    async def reconcile(self, limit: float = math.inf) -> list[str]:
        """Decide about up to ``limit`` claims that disappeared; says about which jobs."""
        decided: list[str] = []
        here = {held.token for held in self._runtime.renewal.held()}
        now = trio.current_time()
        until = now + LIVENESS_LIMIT
        # Forget those whom there was no reason to ask about for long.
        asked = self._ask_again_at.items()
        self._ask_again_at = {token: at for token, at in asked if at > now - 10 * self._poll}
        after, self._after = self._after, 0
        try:
            while len(decided) < limit:
                job = await self._store.next_running_claim(after)
                if job is None:
                    break
                after = job.sequence
                # Lost, but its handler has not ended: nobody here should start another.
                is_gone = job.token not in here and await self._is_gone(job, until)
                if is_gone and await self._reconcile_one(job):
                    decided.append(job.id)
                if trio.current_time() >= until:
                    # Whoever is asked is slow; the other duties must not wait, nor the rest of
                    # the claims for ever.
                    self._after = after
                    break
        except StoreInvalid as error:
            # A row that cannot be read. If it is the whole store, the wake state cannot either.
            logger.error("a disappeared claim cannot be read: %s", error)
        return decided

    async def _is_gone(self, job: RunningJob, until: float) -> bool:
        if self._is_alive is None:
            return True
        now = trio.current_time()
        if now < self._ask_again_at.get(job.token, now):
            return False
        self._ask_again_at[job.token] = now + self._poll
        answer = None
        try:
            with trio.move_on_at(until):
                answer = self._is_alive(job)
                if inspect.isawaitable(answer):
                    answer = await answer
        except Exception as error:
            unavailable = LivenessUnavailable(f"is_alive raised for job {job.id!r}: {error!r:.200}")
            unavailable.__cause__ = error
            logger.warning("%s", unavailable, exc_info=unavailable)
            return False
        return answer is False

    async def _reconcile_one(self, job: RunningJob) -> bool:
        try:
            reconciled = await self._store.reconcile(job.id, job.token)
        except (StoreInvalid, SettlementRejected) as error:
            # One job that cannot be decided about must not keep the others.
            logger.error("job %r cannot be reconciled: %s", job.id, error, exc_info=error)
            return False
        if reconciled.status == "untouched":
            return False
        # A run that ended here has its record; one whose process is gone has this.
        is_logged = job.token in self._runtime.unrecorded
        settle = reconciled.settle
        result = "queued" if settle is None else settle.outcome.value
        logger.log(
            logging.DEBUG if is_logged else logging.WARNING,
            "job %r of lane %r disappeared: %s%s",
            job.id,
            job.lane,
            "queued again" if settle is None else f"settled as {result}",
            "" if settle is None or settle.reason is None else f" ({settle.reason})",
            extra=None
            if is_logged
            else {
                "job": job.id,
                "lane": job.lane,
                "cause": "disappeared",
                "result": result,
                "attempt": job.attempt_count,
                "duration": None,
            },
        )
        return True

    async def _look_after_runs(self) -> None:
        """Handlers that outlive their cancellation are reported, and the program's own recorded."""
        now = trio.current_time()
        runs = [held for held in self._runtime.renewal.held() if isinstance(held, Run)]
        reported = self._reported
        self._reported = {}
        for run in runs:
            if run.notice():
                await self._store.cancel(run.id, fresh_token())
            if run.cancelled_at is None or not run.is_running:
                continue
            next_at = reported.get(run.token, run.cancelled_at + OVERDUE)
            if now >= next_at:
                next_at = now + 2 * (now - run.cancelled_at)
                stack = "".join(traceback.format_list(run.await_stack())).rstrip()
                logger.warning(
                    "job %r of lane %r still runs %.1f s after it was cancelled (%s):\n%s",
                    run.id,
                    run.lane,
                    now - run.cancelled_at,
                    run.cause,
                    stack,
                    extra={"job": run.id, "lane": run.lane},
                )
            self._reported[run.token] = next_at

    # -- what will be due -------------------------------------------------------------------------

    async def _keep_alarm(self) -> None:
        doorbell = self._runtime.doorbell
        while True:
            instant = await doorbell.alarm.wait()
            doorbell.ring_lanes()
            # An expired lease is a due instant, too.
            doorbell.supervisor.ring_all()
            state = await self._read_wake_state()
            if state.next_wake_at is not None and to_milliseconds(state.next_wake_at) <= instant:
                # By the clock that judges it, it has not come. That clock will get there.
                await trio.sleep(PASS_INTERVAL)

    async def _follow_changes(self) -> None:
        bell = self._runtime.doorbell.changed
        while True:
            ticket = bell.ticket
            await self._read_wake_state()
            await trio.sleep(PASS_INTERVAL)
            await bell.wait(ticket)

    async def _read_wake_state(self) -> WakeState:
        async with self._telling:
            state = await self._runtime.outage.riding_out(self._store.wake_state)
            if state.next_wake_at is not None:
                self._runtime.doorbell.alarm.arm(to_milliseconds(state.next_wake_at))
            if self._on_wake is not None and state != self._told:
                self._told = state
                try:
                    told: Any = self._on_wake(state)
                    if inspect.isawaitable(told):
                        await cast("Awaitable[object]", told)
                except Exception as error:
                    logger.error("on_wake raised: %r", error, exc_info=error)
            return state
