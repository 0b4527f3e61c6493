"""Moving unsettled jobs from one database to another, such as from SQLite to PostgreSQL.

Jobs are copied first and removed from their old place afterwards, a page at a time, and a job that
is in its new place already is not copied again: a move that was interrupted is simply started
again. What is settled stays where it is. Nobody may work in the old place meanwhile, for a job
could run in both; who is found at work there ends the move.

A job is removed from its old place only when the very same job is in the new one. What cannot be
moved, since another job has its id there, for one, stays and is named.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import trio
from attrs import frozen

from ._errors import JobConflict, StoreInvalid, WatchdogError
from ._identity import fresh_token
from ._model import CompletingJob, Job, Recovery, RunningJob
from ._payload import decode_payload, encode_payload
from ._rules import check_duplicate
from ._store import Store
from ._upkeep_statements import MOVED_COLUMNS
from ._wishes import Export, Import, Read, ReadJobs, Remove, Renew

_COLUMNS = [column.split()[0] for column in MOVED_COLUMNS.split(", ")]

Row = tuple[Any, ...]


class SourceInUse(StoreInvalid):
    """Somebody works in the database that is to be emptied."""


@frozen
class Migration:
    """What was moved, and how many of these were in the new place before.

    ``left``: ids of what could not be moved, each with the reason.
    """

    moved: int
    duplicates: int
    left: tuple[tuple[str, str], ...]


async def migrate(
    source: Store, target: Store, progress: Callable[[int], object] = lambda moved: None
) -> Migration:
    """Move all queued and completing jobs, with their counters, in order of admission.

    Claims in ``source`` that disappeared are decided about first. Raises `SourceInUse` when a
    job still runs there, before anything is moved. ``progress`` is told how many have been moved.
    """
    await _refuse_same(source, target)
    async with _nobody_at_work(source):
        moved = duplicates = after = 0
        left: list[tuple[str, str]] = []
        while (exported := await source.ask(Export(after))).rows:
            after = exported.last
            copy = await _copy(target, exported.rows)
            await _remove(source, copy.there)
            moved += len(copy.there)
            duplicates += copy.duplicates
            left += copy.refused
            progress(moved)
    return Migration(moved, duplicates, tuple(left))


async def _refuse_same(source: Store, target: Store) -> None:
    # Else every job would be found in its new place, and removed from its old one.
    mark = fresh_token()
    await source.protect_settled(mark, None)
    is_same = await target.release_settled(mark)
    await source.release_settled(mark)
    if is_same:
        raise ValueError("the jobs are to be moved to where they are; name two databases")


@asynccontextmanager
async def _nobody_at_work(source: Store) -> AsyncGenerator[None]:
    """Decide about what disappeared and what was cancelled; nothing else may be under way."""
    after = 0
    while (job := await source.next_running_claim(after)) is not None:
        after = job.sequence
        await source.reconcile(job.id, job.token)
    while await source.settle_cancelled():
        pass
    token = fresh_token()
    taken: list[str] = []
    try:
        # Completions without an owner; all under one token, which tells them from the live ones.
        while (completing := await source.take_completing(token)) is not None:
            taken.append(completing.id)
        for state in ("running", "completing"):
            for job in await source.ask(ReadJobs(state=state)):
                if isinstance(job, (RunningJob, CompletingJob)) and job.token != token:
                    raise SourceInUse(
                        f"job {job.id!r} of lane {job.lane!r} is {job.state} under a lease until"
                        f" {job.lease_until.isoformat()}; stop the workers of the old database"
                        " first, and if they were killed, wait until then"
                    )
        yield
    finally:
        # Those that stay are anybody's again; else the next move would have to wait for us.
        with trio.move_on_after(5, shield=True), suppress(WatchdogError):
            await source.submit(*(Renew(id, token, 1) for id in taken))


@frozen
class _Copy:
    there: list[str]
    """Ids of the jobs that are in the new place now."""
    duplicates: int = 0
    """How many of them were before."""
    refused: Sequence[tuple[str, str]] = ()


async def _copy(target: Store, rows: Sequence[Row]) -> _Copy:
    ids: list[str] = [row[0] for row in rows]
    try:
        count = await target.ask(Import(rows))
    except StoreInvalid as error:
        if len(rows) == 1:
            return _Copy([], refused=[(ids[0], str(error))])
        # One row is to blame, and hurts only itself.
        copies = [await _copy(target, [row]) for row in rows]
        return _Copy(
            [id for copy in copies for id in copy.there],
            sum(copy.duplicates for copy in copies),
            [refusal for copy in copies for refusal in copy.refused],
        )
    if count == len(rows):
        return _Copy(ids)
    present = await target.submit(*(Read(id) for id in ids))
    refused = [
        (row[0], why) for row, job in zip(rows, present, strict=True) if (why := _refusal(row, job))
    ]
    kept = {id for id, _ in refused}
    there = [id for id in ids if id not in kept]
    return _Copy(there, len(there) - count, refused)


def _refusal(row: Row, present: Any) -> str | None:
    """Why the row is not the job that has its id in the new place; None: it is."""
    if isinstance(present, BaseException):
        return str(present)
    if present is None:
        return "its queue is busy there, or its cancellation id is used there"
    fields = dict(zip(_COLUMNS, row, strict=True))
    recovery = None
    if fields["max_recoveries"] is not None:
        window = fields["recovery_window"]
        recovery = Recovery(fields["max_recoveries"], None if window is None else window / 1000)
    try:
        job = Job(
            fields["lane"],
            decode_payload(fields["payload"]),
            queue=fields["queue"],
            id=fields["id"],
            priority=fields["priority"],
            recovery=recovery,
        )
        check_duplicate(present, encode_payload(present.payload), job)
    except (JobConflict, StoreInvalid) as error:
        return str(error)
    return None


async def _remove(source: Store, ids: Sequence[str]) -> None:
    if ids and await source.ask(Remove(ids)) < len(ids):
        for job in await source.submit(*(Read(id) for id in ids)):
            if isinstance(job, RunningJob):
                raise SourceInUse(
                    f"job {job.id!r} of lane {job.lane!r} was claimed in the old database while it"
                    " was moved, and is in both now; stop the workers there, then look at it"
                )
