"""A worker that is there to be killed: it works on lanes and writes down what happens.

``python worker.py CONFIG``, or ``trio-watchdog run worker:lanes`` with CONFIG in ``WORKER_CONFIG``.
CONFIG is JSON; `Config` says what is in it.

What it writes is the ledger, one file for all workers of a test. Each line is one ``write`` to a
file opened for appending, so lines of several processes do not mix, and carries the time since
boot, one clock for all of them. The ledger knows nothing of the database and the database nothing
of the ledger; the tests hold one against the other.

A job's payload is what to do: ``{"steps": [["beat", 0.5], ...], "hook": [...]}``, see `STEPS`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = json.loads(
    os.environ.get("WORKER_CONFIG") or (sys.argv[1] if __name__ == "__main__" else "{}")
)


def skew(seconds: float) -> None:
    """Set this process's wall clock, and nobody else's, ahead or back."""
    real, real_ns = time.time, time.time_ns
    time.time = lambda: real() + seconds
    time.time_ns = lambda: real_ns() + int(seconds * 1e9)


# Before anything is imported that might take a function out of `time`.
skew(CONFIG.get("skew", 0.0))

import ctypes  # noqa: E402
import importlib  # noqa: E402
import logging  # noqa: E402
from collections.abc import Awaitable, Callable  # noqa: E402

import trio  # noqa: E402
from attrs import define, field  # noqa: E402

from trio_watchdog import (  # noqa: E402
    OTHERS,
    CompletingJob,
    Lanes,
    Retry,
    RetryPolicy,
    RunningJob,
    open_watchdog,
)
from trio_watchdog import _wishes as wishes  # noqa: E402
from trio_watchdog._open import open_store  # noqa: E402
from trio_watchdog.testing import FaultyStore  # noqa: E402

BEAT = 0.01
"""Seconds between two checkpoints of a handler that waits, and between two beats."""


@define
class Config:
    """What a worker is told."""

    name: str = "worker"
    database: str = ""
    folder: str = ""
    """Where the ledger is, and gates: files that somebody waits for."""
    lanes: list[dict[str, Any]] = field(factory=list[dict[str, Any]])
    """``name`` (None: all others), ``workers``, ``attempts`` and ``delay`` of a retry policy,
    ``hook``."""
    hold: dict[str, list[str]] = field(factory=dict[str, list[str]])
    """Point to ids of jobs: there the worker waits until the gate ``open`` is there.

    ``claimed``: the claim is committed, and its answer not heard. ``reserved``: likewise the
    attempt. ``decided``: likewise the decision. ``hooked``: the hook has ended, and settling is
    not asked for.
    """
    options: dict[str, Any] = field(factory=dict[str, Any])
    """For `open_watchdog`."""
    store: dict[str, Any] = field(factory=dict[str, Any])
    """For the store."""
    skew: float = 0.0
    constants: dict[str, float] = field(factory=dict[str, float])
    """``module.NAME`` of the package to another value, where the real one takes too long."""


# -- the ledger ----------------------------------------------------------------------------------


class Ledger:
    """Where a process writes down what it does, at the moment of doing it."""

    def __init__(self, folder: Path, worker: str) -> None:
        self.worker = worker
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._file = os.open(folder / "ledger", flags)

    def write(self, kind: str, **facts: Any) -> int:
        """Add a line; returns its time."""
        # Not `time.time`: a worker's own may be wrong, and this is what judges it.
        at = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        line = {"at": at, "kind": kind, "worker": self.worker, "pid": os.getpid(), **facts}
        os.write(self._file, json.dumps(line).encode() + b"\n")
        return at

    def close(self) -> None:
        os.close(self._file)


# -- what jobs do ---------------------------------------------------------------------------------


class Doer:
    """Handlers and hooks."""

    def __init__(self, config: Config) -> None:
        self.name = config.name
        self.folder = Path(config.folder)
        self.ledger = Ledger(self.folder, config.name)

    async def handle(self, job: RunningJob) -> Retry | None:
        known = {"job": job.id, "queue": job.queue, "token": job.token}
        how = "raised"
        self.ledger.write("begin", **known, attempt=job.attempt.count)
        try:
            for step, *arguments in job.payload["steps"]:
                if step == "retry":
                    # So many times again, whatever else happens to the job.
                    if self.taken(f"retry-{job.id}", *arguments):
                        how = "retry"
                        return Retry()
                else:
                    await STEPS[step](self, known, *arguments)
            how = "returned"
        except trio.Cancelled:
            how = "cancelled"
            raise
        finally:
            self.ledger.write("end", **known, how=how, reason=job.cancel_reason)
        return None

    async def hook(self, job: CompletingJob) -> None:
        known = {"job": job.id, "queue": job.queue, "token": job.token, "hook": True}
        how = "cut"
        self.ledger.write("hook", **known, outcome=job.outcome.value)
        try:
            for step, *arguments in job.payload.get("hook", ()):
                await STEPS[step](self, known, *arguments)
            how = "returned"
        finally:
            self.ledger.write("hooked", **known, how=how)

    # -- steps ------------------------------------------------------------------------------------

    async def beat(self, known: dict[str, Any], seconds: float) -> None:
        """Show life at each checkpoint."""
        until = trio.current_time() + seconds
        while trio.current_time() < until:
            self.ledger.write("beat", **known)
            await trio.sleep(BEAT)

    async def sleep(self, known: dict[str, Any], seconds: float) -> None:
        """Wait, and write nothing."""
        await trio.sleep(seconds)

    async def gate(self, known: dict[str, Any], name: str) -> None:
        """Show life until this worker may go on, or all may."""
        while not self.is_open(name):
            self.ledger.write("beat", **known)
            await trio.sleep(BEAT)

    async def block(self, known: dict[str, Any], seconds: float) -> None:
        """Block the event loop."""
        time.sleep(seconds)  # noqa: ASYNC251

    async def deaf(self, known: dict[str, Any], name: str) -> None:
        """As ``gate``, but block the event loop: no checkpoint, so no cancellation is felt."""
        while not self.is_open(name):
            self.ledger.write("beat", **known)
            time.sleep(BEAT)  # noqa: ASYNC251

    def is_open(self, name: str) -> bool:
        return (self.folder / name).exists() or (self.folder / f"{name}.{self.name}").exists()

    def taken(self, name: str, times: int) -> bool:
        """Whether there was one left of so many, across all processes."""
        for number in range(times):
            try:
                (self.folder / f"{name}-{number}").touch(exist_ok=False)
            except FileExistsError:
                continue
            return True
        return False


STEPS: dict[str, Callable[..., Awaitable[None]]] = {
    "beat": Doer.beat,
    "sleep": Doer.sleep,
    "gate": Doer.gate,
    "block": Doer.block,
    "deaf": Doer.deaf,
}
"""``retry`` is one more: ask for another attempt, so many times in all."""


def make_lanes(config: Config, doer: Doer) -> Lanes:
    lanes = Lanes()
    for lane in config.lanes:
        retry = None
        if "attempts" in lane:
            retry = RetryPolicy(lane["attempts"], delay=lane.get("delay", 0.0))
        lanes.lane(
            OTHERS if lane["name"] is None else lane["name"],
            workers=lane.get("workers", 1),
            retry=retry,
            on_completing=doer.hook if lane.get("hook") else None,
        )(doer.handle)
    return lanes


# -- points at which to be killed -----------------------------------------------------------------


class Stage(FaultyStore):
    """A store in which some answers wait for a gate on their way back to the runtime."""

    def __init__(self, store: Any, hold: dict[str, list[str]], doer: Doer) -> None:
        super().__init__(store)
        self._hold = hold
        self._doer = doer

    async def submit(self, *asked: wishes.Wish[Any]) -> list[Any]:
        for wish in asked:
            if isinstance(wish, wishes.FinishCompleting):
                await self._wait("hooked", wish.id)
        answers = await super().submit(*asked)
        for wish, answer in zip(asked, answers, strict=True):
            match wish:
                case wishes.Claim():
                    if isinstance(answer, wishes.Claimed) and answer.job is not None:
                        await self._wait("claimed", answer.job.id)
                case wishes.ReserveAttempt():
                    await self._wait("reserved", wish.id)
                case wishes.Decide():
                    await self._wait("decided", wish.id)
                case _:
                    pass
        return answers

    async def _wait(self, point: str, id: str) -> None:
        if id not in self._hold.get(point, ()):
            return
        self._doer.ledger.write("hold", point=point, job=id)
        # Shielded, for an answer that has come must not be lost.
        with trio.CancelScope(shield=True):
            while not self._doer.is_open("open"):  # noqa: ASYNC110 - the gate is a file
                await trio.sleep(BEAT)


# -- the process ----------------------------------------------------------------------------------


async def serve(config: Config, doer: Doer, lanes: Lanes) -> None:
    """Work on the lanes until SIGTERM: the first drains, the second interrupts."""
    async with open_store(config.database, **config.store) as store:
        staged = Stage(store, config.hold, doer) if config.hold else store
        async with open_watchdog(staged, **config.options) as watchdog:
            await watchdog.start_lanes(lanes)
            with trio.open_signal_receiver(signal.SIGTERM) as signals:
                doer.ledger.write("ready", owner=staged.owner)
                await anext(signals)
                doer.ledger.write("draining")
                async with trio.open_nursery() as nursery:

                    async def interrupt() -> None:
                        await anext(signals)
                        doer.ledger.write("interrupting")
                        watchdog.interrupt()

                    nursery.start_soon(interrupt)
                    await watchdog.drain()
                    nursery.cancel_scope.cancel()
    doer.ledger.write("bye")


def set_constants(constants: dict[str, float]) -> None:
    for path, value in constants.items():
        module, _, name = path.rpartition(".")
        where = importlib.import_module(f"trio_watchdog.{module}")
        assert hasattr(where, name), path
        setattr(where, name, value)


def die_with_parent() -> None:
    """Have the system kill this process, even a frozen one, when the test is gone."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


if CONFIG:
    die_with_parent()
    _config = Config(**CONFIG)
    set_constants(_config.constants)
    _doer = Doer(_config)
    lanes = make_lanes(_config, _doer)

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    trio.run(serve, _config, _doer, lanes)
