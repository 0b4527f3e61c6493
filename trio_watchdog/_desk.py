"""A slot's dealings with the store: what it asks until it is answered, and what it has in hand.

A claim is in hand from the very step in which its answer arrives, and renewed from then on, until
how it ended is written down or cannot be. An answer may be lost on its way. Questions are such that
asking again is harmless, and a claim is asked for again with the same token, so one that was made
is found, never orphaned.

What a slot writes down and its next claim go to the store together: a busy slot needs one exchange
for each job.
"""

from __future__ import annotations

import logging
from typing import Any, TypeVar, cast

import trio
from attrs import evolve

from ._errors import ClaimUnavailable, StoreInvalid, StoreUnavailable, WatchdogError
from ._identity import fresh_token
from ._lane import LaneState
from ._renewal import Held
from ._run import Run
from ._runtime import HAND_OFF_LIMIT, Runtime
from ._wishes import Claim, Claimed, Renew, Wish

R = TypeVar("R")

logger = logging.getLogger("trio_watchdog")


class Desk:
    """Where one slot asks the store, and keeps what it has claimed."""

    def __init__(self, runtime: Runtime, lane: LaneState) -> None:
        self.ticket = 0
        """The lane's bell when the last look at the store began."""
        self.is_full = False
        """The last look found only jobs that others block; there may be some behind them."""
        self._runtime = runtime
        self._lane = lane
        self.is_repeated = False
        """The last answer came only when asked again; the first request may have had its effect."""
        self._claim: Claim | None = None
        """Asked for, and not answered so far."""
        self._claim_asked_at = 0.0
        """When it was asked for first: its lease may have begun then."""
        self._next: Run | None = None
        """Claimed, and not taken so far."""
        self._is_stale = False
        self._has_looked = False
        self._in_hand: set[Held] = set()
        self._is_interrupted = False

    @property
    def is_open(self) -> bool:
        """Whether new jobs may be claimed, and claimed ones begun."""
        closed = self._runtime.is_closing or self._lane.is_paused or self._is_interrupted
        return not closed

    # -- asking -----------------------------------------------------------------------------------

    async def ask(self, wish: Wish[R], held: Held, *, fuses: bool = False) -> R | None:
        """The answer to a wish about a claim, asked again until there is one.

        With ``fuses`` the next claim goes along, if the lane is open. Gives up, with None, when
        the lease is over: whoever comes next decides.
        """
        return await self._exchange(wish, held, fuses=fuses)

    async def next_run(self) -> Run | None:
        """The next run, if the lane is open and has one; asks unless that went along before."""
        while True:
            if not self._has_looked:
                self.is_full = False
                await self._exchange(None, None, fuses=True)
            self._has_looked = False
            run, self._next = self._next, None
            if run is None or not self._is_stale or await self._is_refreshed(run):
                return run

    async def _is_refreshed(self, run: Run) -> bool:
        """Renew a claim whose lease may have begun a while ago, or only now."""
        asked_at = trio.current_time()
        answer = await self.ask(Renew(run.id, run.token, self._runtime.lease.milliseconds), run)
        if answer is None or answer.status == "lost":
            trouble = ClaimUnavailable(
                f"the claim on job {run.id!r} of lane {run.lane!r} ended before its answer arrived;"
                " recovery decides"
            )
            logger.warning("%s", trouble)
            self.drop(run)
            return False
        run.hear(answer, asked_at)
        return True

    async def _exchange(self, wish: Wish[R] | None, held: Held | None, *, fuses: bool) -> R | None:
        runtime = self._runtime
        failures = 0
        while True:
            claim = self._wanted_claim() if fuses else self._claim
            asked = [cast("Wish[Any]", each) for each in (wish, claim) if each is not None]
            if not asked:
                await trio.lowlevel.checkpoint()
                return None
            try:
                answers = await runtime.store.submit(*asked)
            except WatchdogError as error:
                answers = [error] * len(asked)
            trouble: Exception | None = None
            if claim is not None:
                trouble = self._hear_claim(claim, answers.pop())
            if answers:
                answer: Any = answers[0]
                if not isinstance(answer, Exception):
                    runtime.outage.answered()
                    self.is_repeated = failures > 0
                    return answer
                trouble = answer
            elif trouble is None:
                runtime.outage.answered()
                return None
            failures += 1
            self._complain(trouble, held)
            until = runtime.claim_until if held is None else held.write_until
            if trio.current_time() >= until:
                return None
            await runtime.outage.pause(failures, until)

    def _complain(self, trouble: Exception, held: Held | None) -> None:
        if isinstance(trouble, StoreInvalid):
            raise trouble
        if isinstance(trouble, StoreUnavailable):
            self._runtime.outage.noticed(trouble)
            return
        # A projector's refusal, for one: the world may change its mind, so it is asked again.
        what = "a claim" if held is None else f"job {held.id!r}"
        logger.error("lane %r: %s was refused", self._lane.name, what, exc_info=trouble)

    # -- claims -----------------------------------------------------------------------------------

    def _wanted_claim(self) -> Claim | None:
        if self._claim is None:
            # The ticket first, so that a ring during the look is not lost.
            self.ticket = self._lane.bell.ticket
            if not self.is_open or self._next is not None:
                return None
            plan = self._lane.plan
            self._claim_asked_at = trio.current_time()
            self._claim = Claim(
                plan.key,
                fresh_token(),
                self._runtime.store.owner,
                self._runtime.lease.milliseconds,
                counts=plan.retry is None,
                without=self._runtime.besides(self._lane) if plan.key is None else (),
            )
        return self._claim

    def _hear_claim(self, claim: Claim, answer: Any) -> Exception | None:
        if isinstance(answer, Exception):
            self._claim = evolve(claim, again=True)
            return answer
        claimed = cast("Claimed", answer)
        self._claim = None
        self._has_looked = True
        self.is_full = claimed.more
        if claimed.job is not None:
            self._next = Run(claimed.job, self._runtime.lease, self._claim_asked_at)
            # Who was frozen, or away, before the claim was sent has a lease and does not know.
            waited = trio.current_time() - self._claim_asked_at
            self._is_stale = claim.again or waited > self._runtime.lease.heartbeat
            self.keep(self._next)
        return None

    # -- what is in hand --------------------------------------------------------------------------

    def keep(self, held: Held) -> None:
        """Take a claim in hand."""
        self._in_hand.add(held)
        self._runtime.renewal.hold(held)
        if self._is_interrupted:
            held.cancel("shutdown")

    def drop(self, held: Held) -> None:
        """Be done with a claim."""
        self._in_hand.discard(held)
        self._runtime.renewal.release(held)

    def interrupt(self) -> None:
        """Claim no more, and cancel what runs, for its job to be handed off."""
        self._is_interrupted = True
        for held in self._in_hand:
            held.cancel("shutdown")

    async def clear(self) -> None:
        """Hand off what an error, such as KeyboardInterrupt, has left in hand."""
        with trio.move_on_after(HAND_OFF_LIMIT, shield=True):
            for held in list(self._in_hand):
                self.drop(held)
                # What a handler has finished must not run again because of us.
                if isinstance(held, Run) and held.over_at is None:
                    try:
                        await self._runtime.store.hand_off(held.id, held.token)
                    except WatchdogError as error:
                        logger.warning("job %r could not be handed off: %s", held.id, error)
