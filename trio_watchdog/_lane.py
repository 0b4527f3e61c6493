"""Lanes: what they are made from (`Lanes`), and what a program holds of a running one (`Lane`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from enum import Enum
from typing import Any, Literal, TypeVar, cast

import trio
from attrs import frozen

from ._converter import structure_payload
from ._errors import InvalidJob
from ._model import (
    CompletingJob,
    Decision,
    Retry,
    RetryPolicy,
    RunningJob,
    check_integer,
    check_seconds,
    check_text,
)
from ._wake import Bell

WORKERS_LIMIT = 10_000
"""Slots of one lane; a typing error should not start a million tasks."""


class Others(Enum):
    """The type of `OTHERS`."""

    OTHERS = "OTHERS"

    def __repr__(self) -> str:
        return self.value


OTHERS = Others.OTHERS
"""Instead of a lane's name: every lane that has no worker of its own in this process."""

Handler = Callable[[RunningJob], Awaitable[Decision | Retry | None]]
"""An async function that does one job."""

Hook = Callable[[CompletingJob], object]
"""A lane's completion hook, async or plain; may be called more than once for a job."""

RetryChoice = RetryPolicy | Callable[[RunningJob], RetryPolicy | None] | None

H = TypeVar("H", bound=Handler)


@frozen(eq=False)
class Plan:
    """A lane as it was described; checked when made."""

    name: str | Literal[Others.OTHERS]
    handler: Handler
    workers: int = 1
    retry: RetryChoice = None
    timeout: float | None = None
    on_completing: Hook | None = None
    payload: Any = None

    def __attrs_post_init__(self) -> None:
        if self.name is not OTHERS:
            check_text(self.name, "lane")
        for name, function in (("handler", self.handler), ("on_completing", self.on_completing)):
            if not callable(function) and (function is not None or name == "handler"):
                raise TypeError(f"{name} is {function!r:.80}, not an async function")
        check_integer(self.workers, "workers", 1, WORKERS_LIMIT)
        if self.timeout is not None:
            check_seconds(self.timeout, "timeout", positive=True)
        retry: object = self.retry
        if retry is not None and not isinstance(retry, RetryPolicy) and not callable(retry):
            raise TypeError(f"retry is {retry!r:.80}, not a RetryPolicy or a callable")

    @property
    def key(self) -> str | None:
        """The lane's name; None for `OTHERS`."""
        return None if self.name is OTHERS else self.name

    def policy(self, job: RunningJob) -> RetryPolicy | None:
        """The retry policy for a job. Raises whatever the lane's own callable raises."""
        if self.retry is None or isinstance(self.retry, RetryPolicy):
            return self.retry
        # Somebody else's function may return anything.
        policy = cast("object", self.retry(job))
        if policy is not None and not isinstance(policy, RetryPolicy):
            raise TypeError(f"retry returned {policy!r:.80}, not a RetryPolicy or None")
        return policy

    def structured(self, payload: Any) -> Any:
        """The payload as the lane wants it. Raises `InvalidJob` when it does not fit."""
        return payload if self.payload is None else structure_payload(payload, self.payload)

    def structured_if_fit(self, payload: Any) -> Any:
        """As `structured`, but what does not fit stays as it is: the hook runs all the same."""
        try:
            return self.structured(payload)
        except InvalidJob:
            return payload


class Lanes:
    """Lanes described in one place, to be started in another.

    ::

        lanes = Lanes()


        @lanes.lane("mail", retry=RetryPolicy(5))
        async def send_mail(job): ...
    """

    def __init__(self) -> None:
        self._plans: dict[str | None, Plan] = {}

    def lane(
        self,
        name: str | Literal[Others.OTHERS],
        *,
        workers: int = 1,
        retry: RetryChoice = None,
        timeout: float | None = None,
        on_completing: Hook | None = None,
        payload: Any = None,
    ) -> Callable[[H], H]:
        """A decorator that makes a function the handler of the lane ``name``.

        Parameters are those of `Watchdog.start_lane`. Raises `ValueError` for a name that is
        taken and for parameters that are out of range.
        """

        def decorate(handler: H) -> H:
            plan = Plan(name, handler, workers, retry, timeout, on_completing, payload)
            if plan.key in self._plans:
                raise ValueError(f"lane {name!r} already has a handler in these lanes")
            self._plans[plan.key] = plan
            return handler

        return decorate

    def __iter__(self) -> Iterator[Plan]:
        return iter(self._plans.values())

    def __len__(self) -> int:
        return len(self._plans)


@frozen
class LaneStatistics:
    """What a lane does in this process, and has done since it was started."""

    name: str
    workers: int
    running: int
    """Handlers and completion hooks that run now."""
    runs: int
    """Runs of the handler so far."""
    is_paused: bool


class LaneState:
    """A lane as its slots see it."""

    def __init__(self, plan: Plan, bell: Bell, quiet: Bell) -> None:
        self.plan = plan
        self.bell = bell
        self.quiet = quiet
        """Rung whenever a slot has nothing more to do; shared by all lanes."""
        self.is_paused = False
        self.slots = 0
        self.running = 0
        self.runs = 0
        self.takeovers = 0
        """Completions that were taken over and are being finished."""
        self.besides: tuple[str, ...] = ()
        """For `OTHERS`: lanes to leave alone, beside those that are worked here."""

    @property
    def name(self) -> str:
        """For people: what `OTHERS` is called, too."""
        return self.plan.key or OTHERS.value

    @property
    def is_quiet(self) -> bool:
        """Whether all slots have looked and found nothing, and nothing runs."""
        return self.running == 0 and self.bell.waiting >= self.slots

    async def wait_quiet(self) -> None:
        """Return when the lane is quiet."""
        while True:
            ticket = self.quiet.ticket
            if self.is_quiet:
                await trio.lowlevel.checkpoint()
                return
            await self.quiet.wait(ticket)


class Lane:
    """A lane that is worked in this process. `Watchdog.start_lane` makes it."""

    def __init__(self, state: LaneState) -> None:
        self._state = state

    @property
    def name(self) -> str:
        """The lane's name; ``"OTHERS"`` for the lane of all others."""
        return self._state.name

    def pause(self) -> None:
        """Claim nothing more until `resume`. Running handlers go on."""
        self._state.is_paused = True

    def resume(self) -> None:
        """Claim again."""
        self._state.is_paused = False
        self._state.bell.ring_all()

    async def drain(self) -> None:
        """Pause, and return when no job of the lane runs here any more."""
        self.pause()
        await self._state.wait_quiet()

    def statistics(self) -> LaneStatistics:
        """What the lane does now, and has done so far."""
        state = self._state
        return LaneStatistics(
            state.name, state.plan.workers, state.running, state.runs, state.is_paused
        )

    def __repr__(self) -> str:
        return f"<trio_watchdog.Lane {self.name!r}, {self._state.running} running>"
