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
    ReadUnserved,
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
    for topic, look in (
        ("rows", _rows),
        ("claims", _claims),
        ("queues", _queues),
        ("database", _vitals),
    ):
        try:
            findings += await look(store)
        except StoreInvalid as error:
            # Damage here must not hide what the other looks find.
            findings.append(Finding("fault", topic, str(error)))
    return findings


async def _vitals(store: Store) -> list[Finding]:
    return [Finding(*vital) for vital in await store.vitals()]


async def _rows(store: Store) -> list[Finding]:
    after: int | None = 0
    count = 0
    findings: list[Finding] = []
    while after is not None:
        checked = await store.ask(CheckRows(after))
        after = checked.last
        count += checked.count
        findings += [Finding("fault", "rows", text) for _, text in checked.faults]
    if not findings:
        findings.append(Finding("ok", "rows", f"{_count(count, 'unsettled job')}, all readable"))
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
            f" {duration(trouble.seconds)}; {_count(trouble.waiting)} behind it",
        )
        for trouble in await store.ask(ReadWaitingOnTime())
    ]
    findings += [
        Finding(
            "note",
            "lanes",
            f"lane {lane!r} has {_count(count)} that may be claimable, and none runs; if it stays"
            " so, no process serves it",
        )
        for lane, count in await store.ask(ReadUnserved())
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
    head = await store.read_queue_head(job.queue)
    if head.job_id in (None, job.id):
        return list(_at_head(job, place, "It goes first in its queue and"))
    said = [
        f"It waits in queue {job.queue!r} behind {head.job_id!r}, which"
        f" {'is running' if head.state == 'running' else 'waits itself'}."
    ]
    if place.ahead_in_queue > (head.state == "queued"):
        said.append(f"In all, {_count(place.ahead_in_queue)} of the queue go before it.")
    first = await store.read(head.job_id)
    standing = await store.ask(ReadPlace(head.job_id))
    if isinstance(first, QueuedJob) and standing is not None:
        said += _at_head(first, standing, "That one")
    if place.due_in > 0:
        said.append(f"It is not due itself: {_due(job, place)}.")
    return said


def _at_head(job: QueuedJob, place: Place, subject: str) -> Iterator[str]:
    """Why a job that nothing of its queue is in the way of does not run."""
    if job.cancellation_id is not None:
        yield f"{subject} is to be cancelled, which a watchdog does."
    elif place.due_in > 0:
        yield f"{subject} is not due: {_due(job, place)}."
    else:
        yield f"{subject} is due, and waits for a free worker of lane {job.lane!r}."
        running, ahead = place.running_in_lane, place.ahead_in_lane
        if ahead:
            yield f"There, {_count(ahead)} may go before it."
        if running:
            yield f"{_count(running).capitalize()} of the lane run now."
        else:
            yield "None of the lane runs now: if it stays so, no process serves it."


def _due(job: QueuedJob, place: Place) -> str:
    attempts = f", after {_count(job.attempt_count, 'attempt')}" if job.attempt_count else ""
    return f"it may run in {duration(place.due_in)}{attempts}"


def _count(count: int, noun: str = "job") -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def duration(seconds: float) -> str:
    """A duration for people, in the unit that fits."""
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        # What would be shown as 60 min is an hour.
        if seconds >= 0.9995 * size:
            count = seconds / size
            return f"{count:.3g} {unit}" if count < 1000 else f"{count:.0f} {unit}"
    return f"{max(seconds, 0) * 1000:.0f} ms"
