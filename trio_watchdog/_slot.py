"""A slot: one place of a lane, where one job at a time is claimed, run, and seen settled."""

from __future__ import annotations

import functools
import inspect
import logging

import trio
from attrs import evolve, frozen

from . import _rules as rules
from ._desk import Desk
from ._errors import InvalidJob
from ._identity import fresh_token
from ._lane import Hook, LaneState
from ._model import PRIORITY_LIMIT, CancelReason, CompletingJob, Outcome, RetryPolicy
from ._renewal import Held, current_held
from ._rules import Settle
from ._run import Again, GiveBack, Left, Run, Wanted, conclude, fence
from ._runtime import HAND_OFF_LIMIT, Runtime
from ._wake import RAMP
from ._wishes import (
    Cancel,
    Decide,
    FinishCompleting,
    HandOff,
    Read,
    Renew,
    ReserveAttempt,
    RetryJob,
    Returned,
)

MORE_DELAY = 0.025
"""Seconds until a slot looks again whose look was full of jobs that others block, at most."""

UNLIMITED = RetryPolicy(PRIORITY_LIMIT, delay=0.0)

HOOK_DELAY = 1.0
"""Seconds before a failed completion hook is called again; doubles up to `HOOK_LONGEST_DELAY`."""

HOOK_LONGEST_DELAY = 60.0
"""Short enough that a mended hook does not block its queue for long."""

logger = logging.getLogger("trio_watchdog")


@frozen
class Settled:
    """The store has settled the job by itself: no attempt was left."""

    reason: str | None


@frozen
class Written:
    """What was written down, in a word."""

    result: str
    reason: str | None = None
    is_completing: bool = False


UNWRITTEN = Written("unwritten", "left to whoever reconciles the claim")
"""The store could not be reached before the lease was over, or before the stop was."""

CONFLICT = Written("conflict", "the claim was lost before this could be written down")


class Slot:
    """One place of a lane."""

    def __init__(self, runtime: Runtime, lane: LaneState, *, is_single: bool = False) -> None:
        self._runtime = runtime
        self._lane = lane
        self._desk = Desk(runtime, lane)
        has_hook = lane.plan.on_completing is not None
        self._has_hook = has_hook
        # One that does a single job claims no second; a hook comes between a job and the next.
        self._fuses_decision = not (is_single or has_hook)
        self._fuses_finish = not is_single

    # -- the loop ---------------------------------------------------------------------------------

    async def work(self) -> None:
        """Claim and run jobs until the runtime closes."""
        lane, desk = self._lane, self._desk
        lane.slots += 1
        was_woken = False
        try:
            while True:
                run = await desk.next_run()
                if run is not None:
                    if was_woken:
                        lane.bell.ring(RAMP)
                    was_woken = False
                    await self._do(run)
                elif self._runtime.is_closing:
                    return
                elif desk.is_full:
                    await trio.sleep(MORE_DELAY * (0.2 + 0.8 * self._runtime.random.random()))
                else:
                    # In the same step as the wait, so whoever wakes by it finds us waiting.
                    self._runtime.quiet.ring_all()
                    await lane.bell.wait(desk.ticket)
                    was_woken = True
        finally:
            lane.slots -= 1
            await desk.clear()

    async def work_once(self) -> str | None:
        """Claim and run one job; says which."""
        try:
            run = await self._desk.next_run()
            if run is not None:
                await self._do(run)
            return None if run is None else run.id
        finally:
            await self._desk.clear()

    def interrupt(self) -> None:
        """Cancel what runs here, for its job to be handed off."""
        self._desk.interrupt()

    def _freshen_context(self) -> None:
        """Leave nothing of a job to the next one.

        Takes effect at the task's next step, and so before the store answers the next question.
        """
        trio.lowlevel.current_task().context = self._runtime.context.copy()

    # -- a run ------------------------------------------------------------------------------------

    async def _do(self, run: Run) -> None:
        """Run a claimed job, write down how it ended, and see it settled."""
        runtime, lane = self._runtime, self._lane
        lane.running += 1
        try:
            began, left, wanted = await self._attempt(run)
            self._freshen_context()
            written = UNWRITTEN
            with runtime.bounded():
                if run.is_by_program:
                    # As `cancel` would have it.
                    await self._desk.ask(Cancel(run.id, fresh_token()), run)
                written = await self._write(run, wanted)
            if began or not isinstance(wanted, GiveBack):
                self._report(run, left, written)
            if written.is_completing:
                job = await self._desk.ask(Read(run.id), run)
                if isinstance(job, CompletingJob) and job.token == run.token:
                    await self._complete(job, run.renewed_at)
            self._desk.drop(run)
        finally:
            lane.running -= 1

    async def _attempt(self, run: Run) -> tuple[bool, Left, Wanted | Settled]:
        """Whether the handler ran, what left it, and what should be written down."""
        plan = self._lane.plan
        left = Left(is_cancelled=True)
        if not self._desk.is_open or (plan.key is None and run.lane in self._runtime.lanes):
            # Claimed while the lane was closing, or while one of the job's own was started.
            return False, left, GiveBack()
        try:
            run.policy = plan.policy(run.job)
            payload = plan.structured(run.job.payload)
        except Exception as error:
            # The fence of this job: neither its payload nor its policy may stop the lane.
            text = (
                str(error)
                if isinstance(error, InvalidJob)
                else rules.failure_reason(error, trio.Cancelled)
            )
            return False, Left(error=error), Settle(Outcome.FAILED, rules.cut(text))
        attempt_count = run.job.attempt_count + (plan.retry is not None)
        policy = run.policy
        if policy is None and plan.retry is not None:
            # The callable wants none for this job: its attempts are counted all the same.
            policy = UNLIMITED
        if policy is not None:
            jitter = self._runtime.random.random()
            wish = ReserveAttempt(run.id, run.token, policy, jitter)
            reserved = await self._desk.ask(wish, run)
            if reserved is None or reserved.status == "conflict":
                run.cancel("lease_lost")
            elif reserved.status == "cancelled":
                run.cancel("cancellation")
            elif reserved.status == "settled":
                return False, left, Settled(reserved.reason)
            else:
                attempt_count = reserved.attempt_count
        if run.cause is None and not self._desk.is_open:
            return False, left, GiveBack()
        run.begin(attempt_count, payload)
        if run.cause is not None:
            return False, left, conclude(left, run.cause, run.policy, "")
        self._lane.runs += 1
        try:
            left = await run.execute(plan.handler, plan.timeout)
        except BaseException:
            # Such as KeyboardInterrupt, which passes on; `Desk.clear` hands the job off.
            run.cause = run.cause or "shutdown"
            self._report(run, left, Written("handed_off"))
            raise
        return True, left, conclude(left, run.cause, run.policy, run.limit_text())

    async def _write(self, run: Run, wanted: Wanted | Settled) -> Written:
        fuses = self._fuses_decision
        match wanted:
            case None:
                return Written("nothing")
            case Settled(reason):
                return Written("failed", reason)
            case Settle():
                return await self._decide(run, wanted)
            case Again(reason, after):
                result = "retry"
                jitter = self._runtime.random.random()
                retry = RetryJob(
                    run.id, run.token, run.policy, after, reason, jitter, self._has_hook
                )
                returned = await self._desk.ask(retry, run, fuses=fuses)
            case GiveBack():
                result, reason = "handed_off", None
                returned = await self._desk.ask(HandOff(run.id, run.token), run, fuses=fuses)
        match returned:
            case None:
                return UNWRITTEN
            case Returned("cancelled"):
                return await self._decide(run, Settle(Outcome.CANCELLED), "cancellation")
            case Returned("queued"):
                return Written(result, reason)
            case Returned("conflict") if self._desk.is_repeated:
                # The first request went through, and the claim with it.
                return Written(result, reason)
            case Returned("settled" | "completing" as state, reason):
                return Written("failed", reason, is_completing=state == "completing")
            case _:
                return CONFLICT

    async def _decide(self, run: Run, settle: Settle, cause: CancelReason | None = None) -> Written:
        decide = Decide(run.id, run.token, settle, self._has_hook)
        recorded = await self._desk.ask(decide, run, fuses=self._fuses_decision)
        if recorded is None:
            return UNWRITTEN
        if recorded.status in ("conflict", "missing"):
            return CONFLICT
        stands = recorded.settle or settle
        if stands.outcome == Outcome.CANCELLED != settle.outcome:
            cause = "cancellation"
        run.cause = run.cause or cause
        return Written(stands.outcome.value, stands.reason, is_completing=self._has_hook)

    def _report(self, run: Run, left: Left, written: Written) -> None:
        """The one log record of a run."""
        is_unrecorded = written.result in ("nothing", "conflict", "unwritten")
        if is_unrecorded:
            self._runtime.unrecorded.append(run.token)
        cause = run.cause or ("lease_lost" if written is CONFLICT else written.result)
        duration = trio.current_time() - run.began_at
        is_bad = (
            left.error is not None
            or is_unrecorded
            or written.result == "failed"
            or cause == "timeout"
        )
        level = logging.WARNING if is_bad else logging.INFO
        if not logger.isEnabledFor(level):
            return
        notes = [f"attempt {run.attempt.count}", f"{duration:.3f} s"]
        if run.cause is not None:
            notes.append(f"{written.result.replace('_', ' ')}")
        if written.reason is not None:
            notes.append(written.reason)
        if left.replaced is not None:
            notes.append(f"while cancelled: {left.replaced}")
        logger.log(
            level,
            "job %r of lane %r ended: %s (%s)",
            run.id,
            run.lane,
            cause.replace("_", " "),
            ", ".join(notes),
            exc_info=left.error,
            extra={
                "job": run.id,
                "lane": run.lane,
                "cause": cause,
                "result": written.result,
                "attempt": run.attempt.count,
                "duration": duration,
            },
        )

    # -- the completion hook ----------------------------------------------------------------------

    async def finish(self, job: CompletingJob, taken_at: float) -> None:
        """Finish a completion that was taken over from somebody who has disappeared."""
        self._lane.running += 1
        try:
            await self._complete(job, taken_at)
        finally:
            self._lane.running -= 1

    async def _complete(self, job: CompletingJob, renewed_at: float) -> None:
        runtime, plan = self._runtime, self._lane.plan
        held = Held(job, runtime.lease, renewed_at)
        self._desk.keep(held)
        try:
            if plan.on_completing is not None:
                is_stopped = runtime.is_hurried or held.cause is not None
                if is_stopped:
                    # Its code up to the first checkpoint would run for nothing.
                    await self._let_go(held)
                    return
                job = evolve(job, payload=plan.structured_if_fit(job.payload))
                current_held.set(held)
                insist = functools.partial(self._insist, plan.on_completing)
                try:
                    left = await fence(insist, job, held.lease_scope, trio.CancelScope())
                except BaseException:
                    # It outlived the stop, or raised what passes on.
                    await self._let_go(held)
                    raise
                self._freshen_context()
                if left.is_cancelled or left.error is not None:
                    logger.warning(
                        "the completion hook of job %r of lane %r was cut short (%s);"
                        " it will be called again",
                        job.id,
                        job.lane,
                        (held.cause or "lease_lost").replace("_", " "),
                    )
                    if held.cause == "shutdown":
                        await self._let_go(held)
                    return
            held.over_at = trio.current_time()
            with runtime.bounded():
                wish = FinishCompleting(job.id, job.token)
                await self._desk.ask(wish, held, fuses=self._fuses_finish)
        finally:
            self._desk.drop(held)

    async def _let_go(self, held: Held) -> None:
        """End a completion's lease: its queue need not wait for that when we stop."""
        # Dropped first, or a renewal might bring the lease back.
        self._desk.drop(held)
        held.over_at = trio.current_time()
        with trio.move_on_after(HAND_OFF_LIMIT, shield=True):
            await self._desk.ask(Renew(held.id, held.token, lease=0), held)

    async def _insist(self, hook: Hook, job: CompletingJob) -> None:
        """Call the hook until it returns."""
        failures = 0
        while True:
            try:
                told = hook(job)
                if inspect.isawaitable(told):
                    await told
            except Exception as error:
                failures += 1
                delay = min(HOOK_DELAY * 2 ** min(failures - 1, 20), HOOK_LONGEST_DELAY)
                delay *= 0.5 + self._runtime.random.random() / 2
                logger.warning(
                    "the completion hook of job %r of lane %r failed (%d), again in %.1f s",
                    job.id,
                    job.lane,
                    failures,
                    delay,
                    exc_info=error,
                    extra={"job": job.id, "lane": job.lane},
                )
            else:
                return
            await trio.sleep(delay)
