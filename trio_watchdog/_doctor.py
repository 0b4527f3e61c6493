"""What is wrong with a database, and why a job is not running, in words. Reads only."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import frozen

from ._errors import StoreInvalid
from ._model import CompletingJob, QueuedJob, RunningJob, SettledJob
from ._store import Level, Store
from ._wishes import (
    CheckRows,
    Place,
    ReadExpired,
    ReadPlace,
    ReadWaitingOnTime,
)

LATE = 30.0
"""Seconds after the end of a lease at which nobody seems to supervise."""


@frozen
class Finding:
    """One thing that was looked at: ``fault`` must not be, ``warning`` should not stay."""

    level: Level
    topic: str
    text: str


async def examine(store: Store) -> list[Finding]:
    """All findings about a database; opening the store has checked its schema already."""
    findings = [Finding("ok", "schema", "the tables are there, in the version of this package")]
    findings += await _rows(store)
    findings += await _claims(store)
    findings += await _queues(store)
    findings += [Finding(*vital) for vital in await store.vitals()]
    return findings


async def _rows(store: Store) -> list[Finding]:
    after = count = 0
    findings: list[Finding] = []
    while True:
        checked = await store.ask(CheckRows(after))
        if not checked.count:
            break
        after = checked.last
        count += checked.count
        findings += [Finding("fault", "rows", text) for _, text in checked.faults]
    if not findings:
        findings.append(Finding("ok", "rows", f"{count} unsettled jobs, all readable"))
    return findings


async def _claims(store: Store) -> list[Finding]:
    expired = await store.ask(ReadExpired())
    if not expired:
        return [Finding("ok", "claims", "every claim has a lease that runs")]
    return [
        Finding(
            "warning" if trouble.seconds > LATE else "note",
            "claims",
            f"job {trouble.id!r} of lane {trouble.lane!r} is {trouble.state}, and its lease ended"
            f" {duration(trouble.seconds)} ago"
            + ("; no watchdog seems to run" if trouble.seconds > LATE else ""),
        )
        for trouble in expired
    ]


async def _queues(store: Store) -> list[Finding]:
    findings = [
        Finding(
            "fault",
            "queues",
            f"job {id!r} goes first in its queue and no claim looks at it; a watchdog mends it",
        )
        for id, _ in await store.lost_jobs()
    ]
    findings += [
        Finding(
            "note",
            "queues",
            f"queue {trouble.queue!r} waits for its head {trouble.id!r}, which is due in"
            f" {duration(trouble.seconds)}; {trouble.waiting} more wait behind it",
        )
        for trouble in await store.ask(ReadWaitingOnTime())
    ]
    return findings or [Finding("ok", "queues", "no queue is held up")]


async def explain(store: Store, id: str) -> str:
    """Why the job is not running, or what became of it, in a few sentences.

    Raises `StoreInvalid` when there is no such job.
    """
    job = await store.read(id)
    place = await store.ask(ReadPlace(id))
    if job is None or place is None:
        raise StoreInvalid(f"job {id!r} is not in this database")
    match job:
        case SettledJob():
            why = f" ({job.reason})" if job.reason is not None else ""
            return f"It settled as {job.outcome} at {job.settled_at.isoformat()}{why}."
        case CompletingJob():
            return " ".join(_completing(job, place))
        case RunningJob():
            return " ".join(_running(job, place))
        case QueuedJob():
            return " ".join(await _queued(store, job, place))


def _completing(job: CompletingJob, place: Place) -> Iterator[str]:
    yield f"Its outcome is decided ({job.outcome}), and the completion hook has not finished."
    if place.lease_for is not None and place.lease_for <= 0:
        yield (
            f"The process that ran the hook has been gone for {duration(-place.lease_for)};"
            f" a watchdog with a lane {job.lane!r} takes it over."
        )


def _running(job: RunningJob, place: Place) -> Iterator[str]:
    lease_for = place.lease_for or 0.0
    if lease_for > 0:
        yield f"It is running, under a lease that goes on for {duration(lease_for)}."
    else:
        yield (
            f"Its execution has disappeared: the lease ended {duration(-lease_for)} ago, and no"
            " watchdog has decided about it so far."
        )
    if job.cancellation_id is not None:
        yield "Its cancellation was requested."


async def _queued(store: Store, job: QueuedJob, place: Place) -> list[str]:
    if job.cancellation_id is not None:
        return ["Its cancellation was requested; a watchdog settles it without running it."]
    said: list[str] = []
    head = await store.read_queue_head(job.queue)
    if head.job_id is not None and head.job_id != job.id:
        state = "is running" if head.state == "running" else "waits"
        said.append(
            f"It waits in queue {job.queue!r} behind {head.job_id!r}, which {state}"
            f" ({place.ahead_in_queue} queued jobs go before it)."
        )
        blocking = await store.ask(ReadPlace(head.job_id))
        if head.state == "queued" and blocking is not None and blocking.due_in > 0:
            said.append(f"That one is due in {duration(blocking.due_in)}.")
    if place.due_in > 0:
        attempts = f", after {job.attempt_count} attempts" if job.attempt_count else ""
        said.append(f"It is due in {duration(place.due_in)}{attempts}.")
    elif head.job_id == job.id:
        said.append(
            f"It goes first in its queue and is due; it waits for a free worker of lane"
            f" {job.lane!r} ({place.ahead_in_lane} jobs of the lane go before it)."
        )
    return said


def duration(seconds: float) -> str:
    """A duration for people, in the unit that fits."""
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{max(seconds, 0) * 1000:.0f} ms"
