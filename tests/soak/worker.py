"""A worker of the soak: handlers of all colours that write down what they do, and what it costs.

Started by `World.launch`; the configuration and the ledger are those of `tests/process/worker.py`.
A job's payload says what its handler does:

* ``work``: seconds; then ``child``: another job in a transaction of the handler's own, committed
  unless ``rolls_back``;
* ``end``: how it ends, see `ENDINGS`; ``retry`` and ``raise`` in the first ``times`` attempts only,
  and ``complete`` after;
* ``overruns``: the attempts that work for longer than the time limit, in the lane ``limited``;
  ``colour``: of its handler; ``swallows``: it swallows its cancellation, and goes on to its end;
  ``retries``: whether a policy applies;
* ``hook``: steps of the completion hook; ``hook_fails``: which fails once, before them.
"""

from __future__ import annotations

# First, for it sets the clock before anything takes a function out of `time`.
from tests.process import worker as base  # isort: skip

import asyncio
import contextlib
import logging
import os
import signal
import sqlite3
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import psycopg
import trio

from tests.soak.terms import (
    AHEAD,
    ATTEMPTS,
    BEHIND,
    OVERRUN,
    RETENTION,
    RIGHT,
    TIME_LIMIT,
    TRY_LATER,
)
from trio_watchdog import (
    Cancel,
    Complete,
    CompletingJob,
    Fail,
    Job,
    Lanes,
    OutcomeUnknown,
    Retry,
    RetryPolicy,
    RunningJob,
    StoreUnavailable,
    asyncio_handler,
    thread_handler,
    transactional,
)

POLICY = RetryPolicy(ATTEMPTS, delay=0.05, max_delay=0.5, jitter=0.5)

BEAT = 0.05
THREAD_BEAT = 0.25
"""Longer, for a thread runs beside the event loop, which may take its time to cancel the job's
scope on a busy machine: right after a thaw a thread may go on for one beat, and not for two."""

SAMPLE_SECONDS = 2.0

HOUR = 3600.0
CLOCK_STEPS = {
    RIGHT: 0.0,
    # An hour where the server's clock judges all. With a file, due times are by the wall clock of
    # the host, so a retry that is written an hour ahead is due in an hour.
    AHEAD: HOUR if base.CONFIG["database"].startswith("postgres") else 2.0,
    BEHIND: -HOUR,
}
"""Seconds from the right time."""

ENDINGS: dict[str, Any] = {
    "none": None,
    "complete": Complete(),
    "fail": Fail("as it was told to"),
    "cancel": Cancel(),
    "unknown": OutcomeUnknown(),
    "retry": Retry(reason="as it was told to"),
}

base.BEAT = BEAT
doer = base.Doer(base.Config(**base.CONFIG))
database: str = base.CONFIG["database"]


# -- handlers -------------------------------------------------------------------------------------

Work = Callable[[RunningJob, dict[str, Any]], Awaitable[None]]


def seconds_of(job: RunningJob) -> float:
    """How long this attempt works."""
    is_overrun = job.attempt.count <= job.payload.get("overruns", 0)
    return OVERRUN if is_overrun else job.payload["work"]


@contextlib.contextmanager
def recorded(job: RunningJob) -> Iterator[dict[str, Any]]:
    """Begin and end of an execution; what is put into ``how`` is how it ended."""
    known = {"job": job.id, "queue": job.queue, "token": job.token}
    end = {"how": "raised"}
    doer.ledger.write(
        "begin",
        **known,
        lane=job.lane,
        attempt=job.attempt.count,
        of=job.attempt.max_attempts,
        recovered=job.recovery_count,
    )
    try:
        yield end
    except trio.Cancelled:
        end["how"] = "cancelled"
        raise
    finally:
        doer.ledger.write("end", **known, **end, reason=job.cancel_reason)


def handler_that(work: Work) -> Callable[[RunningJob], Awaitable[Any]]:
    """A handler that works in one colour or another, and then ends as the payload says."""

    async def handle(job: RunningJob) -> Any:
        payload = job.payload
        with recorded(job) as end:
            await work(job, {"job": job.id, "queue": job.queue, "token": job.token})
            ending = payload["end"]
            if ending in ("retry", "raise") and job.attempt.count > payload["times"]:
                ending = "complete"
            if ending == "raise":
                raise RuntimeError("as it was told to")
            end["how"] = ending
            return ENDINGS[ending]

    return handle


async def trio_work(job: RunningJob, known: dict[str, Any]) -> None:
    await doer.beat(known, seconds_of(job))
    await trio.lowlevel.checkpoint()


async def asyncio_work(job: RunningJob, known: dict[str, Any]) -> None:
    async def work(job: RunningJob) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds_of(job)
        while loop.time() < until:
            doer.ledger.write("beat", **known)
            await asyncio.sleep(BEAT)

    await asyncio_handler(work)(job)


async def thread_work(job: RunningJob, known: dict[str, Any]) -> None:
    pause = threading.Event()

    def work(job: RunningJob) -> None:
        left = seconds_of(job)
        while left > 0:
            job.checkpoint()
            doer.ledger.write("beat", **known)
            pause.wait(min(left, THREAD_BEAT))
            left -= THREAD_BEAT

    await thread_handler(work)(job)


COLOURS: dict[str, Work] = {"trio": trio_work, "asyncio": asyncio_work, "thread": thread_work}


async def limited_work(job: RunningJob, known: dict[str, Any]) -> None:
    try:
        await COLOURS[job.payload["colour"]](job, known)
    except trio.Cancelled:
        if not job.payload["swallows"]:
            raise
        # What follows is a word that must not count.


def limited_policy(job: RunningJob) -> RetryPolicy | None:
    return POLICY if job.payload["retries"] else None


async def family_work(job: RunningJob, known: dict[str, Any]) -> None:
    await trio_work(job, known)
    # One of its own for each execution, for at least once is what is promised.
    child = Job(
        "trio",
        {"work": 0.01, "end": "none"},
        id=f"{job.id}.{job.token[:8]}",
        queue=job.payload["child"],
    )
    await trio.to_thread.run_sync(admit, child, job.payload["rolls_back"])


def admit(child: Job, rolls_back: bool) -> None:
    """In a transaction of ours, together with a row of ours."""
    told = {"job": child.id, "queue": child.queue}
    insert = f"insert into soak_effects (id) values ('{child.id}')"
    if not rolls_back:
        doer.ledger.write("asked", **told, lane=child.lane, expects="completed", recoveries=0)
    with contextlib.closing(connect()) as connection:
        connection.execute(insert)
        admission = transactional(connection).enqueue(child)
        if rolls_back:
            connection.rollback()
            doer.ledger.write("rolled_back", **told)
            return
        connection.commit()
    doer.ledger.write("admitted", **told, sequence=admission.job.sequence)


def connect() -> Any:
    if database.startswith("sqlite:"):
        return sqlite3.connect(database.removeprefix("sqlite:"), timeout=30)
    return psycopg.connect(database, connect_timeout=10)


async def hook(job: CompletingJob) -> None:
    if job.payload.get("hook_fails") and doer.taken(f"hook-{job.id}", 1):
        raise RuntimeError("the hook fails, as it was told to")
    await doer.hook(job)


lanes = Lanes()
lanes.lane("trio", workers=4, retry=POLICY)(handler_that(trio_work))
lanes.lane("hook", workers=3, retry=POLICY, on_completing=hook)(handler_that(trio_work))
lanes.lane("asyncio", workers=2, retry=POLICY)(handler_that(asyncio_work))
lanes.lane("thread", workers=2, retry=POLICY)(handler_that(thread_work))
lanes.lane("family", workers=2, retry=POLICY)(handler_that(family_work))
lanes.lane("limited", workers=3, retry=limited_policy, timeout=TIME_LIMIT)(
    handler_that(limited_work)
)


# -- the process ----------------------------------------------------------------------------------


async def take_samples() -> None:
    """Now and then, what this process has."""
    while True:
        await trio.sleep(SAMPLE_SECONDS)
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[1])
        doer.ledger.write(
            "sample",
            memory=pages * os.sysconf("SC_PAGE_SIZE"),
            files=len(os.listdir("/proc/self/fd")),
            threads=len(os.listdir("/proc/self/task")),
            tasks=trio.lowlevel.current_statistics().tasks_living,
        )


async def step_clock() -> None:
    offset = 0.0
    with trio.open_signal_receiver(*CLOCK_STEPS) as signals:
        async for number in signals:
            wanted = CLOCK_STEPS[signal.Signals(number)]
            base.skew(wanted - offset)
            offset = wanted
            doer.ledger.write("clock", offset=offset)


async def main() -> int:
    code = 0
    config = base.Config(**base.CONFIG)
    config.options["retention"] = RETENTION
    async with trio.open_nursery() as nursery:
        nursery.start_soon(take_samples)
        nursery.start_soon(step_clock)
        try:
            await base.serve(config, doer, lanes)
        except StoreUnavailable as error:
            # The lanes ride out an outage, so it was the opening that failed.
            logging.getLogger("soak").error("%s", error)
            code = TRY_LATER
        nursery.cancel_scope.cancel()
    return code


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    sys.exit(trio.run(main))
