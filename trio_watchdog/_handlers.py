"""Handlers of other colours: asyncio coroutine functions and plain functions."""

from __future__ import annotations

import functools
import math
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import trio

from ._errors import ExecutionFailed

if TYPE_CHECKING:
    from ._model import Decision, Retry, RunningJob

J = TypeVar("J")
R = TypeVar("R")

_threads: trio.lowlevel.RunVar[trio.CapacityLimiter] = trio.lowlevel.RunVar("trio_watchdog_threads")


def thread_handler(function: Callable[[J], R]) -> Callable[[J], Awaitable[R]]:
    """A lane handler that calls a plain, blocking function in a thread.

    The function may call ``job.checkpoint()`` now and then, which raises `trio.Cancelled` once the
    job is cancelled. A thread cannot be stopped from outside: until the function returns, its lane
    is occupied, its claim is renewed unless it was lost, and its job is not settled.
    """

    @functools.wraps(function)
    async def handler(job: J) -> R:
        return await trio.to_thread.run_sync(
            function, job, abandon_on_cancel=False, limiter=_limiter()
        )

    return handler


def _limiter() -> trio.CapacityLimiter:
    # The lanes' own, for Trio's default one is anybody's. Unlimited, for `workers` is the limit.
    try:
        return _threads.get()
    except LookupError:
        limiter = trio.CapacityLimiter(math.inf)
        _threads.set(limiter)
        return limiter


def asyncio_handler(
    function: Callable[[RunningJob], Awaitable[Decision | Retry | None]],
) -> Callable[[RunningJob], Awaitable[Decision | Retry | None]]:
    """A lane handler that runs an asyncio coroutine function, by way of trio-asyncio.

    Cancelling the job's scope cancels the asyncio task and waits for it. Each run has an event
    loop of its own; where the watchdog was opened inside ``trio_asyncio.open_loop()``, all share
    that one. Needs the extra ``asyncio``; raises `ExecutionFailed` without it.
    """
    try:
        import asyncio

        import trio_asyncio  # pyright: ignore[reportMissingTypeStubs]
    except ImportError as error:
        raise ExecutionFailed(
            "asyncio_handler needs trio-asyncio: install trio-watchdog[asyncio]"
        ) from error
    module: Any = trio_asyncio

    async def call(job: RunningJob) -> Decision | Retry | None:
        try:
            return await module.aio_as_trio(function)(job)
        except asyncio.CancelledError as error:
            # Not ours, or it would have come as Trio's; and it is no `Exception`.
            raise ExecutionFailed("the asyncio task was cancelled from within") from error

    @functools.wraps(function)
    async def handler(job: RunningJob) -> Decision | Retry | None:
        if module.current_loop.get() is not None:
            return await call(job)
        async with module.open_loop():
            return await call(job)

    return handler
