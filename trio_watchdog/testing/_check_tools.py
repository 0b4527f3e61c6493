"""What the store checks are written with."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Generic, TypeVar

from .. import _wishes as wishes
from .._identity import fresh_token
from .._model import (
    CompletingJob,
    Job,
    Outcome,
    QueuedJob,
    RunningJob,
    SettledJob,
    StoredJob,
    to_milliseconds,
)
from .._rules import Settle
from .._store import Store

LEASE = 60_000
"""Milliseconds that claims of the checks last."""

LEASE_SECONDS = LEASE / 1000

COMPLETED = Settle(Outcome.COMPLETED)

X = TypeVar("X", bound=BaseException)


class Caught(Generic[X]):
    """The exception that `raises` caught."""

    error: X


@contextmanager
def raises(kind: type[X], *words: str) -> Generator[Caught[X]]:
    """The block must raise ``kind``, with every one of ``words`` in the message."""
    caught: Caught[X] = Caught()
    try:
        yield caught
    except kind as error:
        caught.error = error
    else:
        raise AssertionError(f"{kind.__name__} was not raised")
    for word in words:
        message = str(caught.error)
        assert word in message, f"{word!r} is not in the message {message!r}"


async def find(
    store: Store, lane: str, *, lease: int = LEASE, counts: bool = True
) -> RunningJob | None:
    """What a lane claims: it looks again while it is told to."""
    for _ in range(200):
        claimed = await store.claim(lane, fresh_token(), lease=lease, counts=counts)
        if claimed.job is not None or not claimed.more:
            return claimed.job
    raise AssertionError(f"a claim for lane {lane!r} was told to look again, 200 times")


async def claim(store: Store, lane: str, *, lease: int = LEASE, counts: bool = True) -> RunningJob:
    """A claimed job; there must be one."""
    job = await find(store, lane, lease=lease, counts=counts)
    assert job is not None, f"nothing to claim in lane {lane!r}"
    return job


async def start(store: Store, job: Job, *, lease: int = LEASE, counts: bool = True) -> RunningJob:
    """Admit a job and claim it; nothing else may be claimable in its lane."""
    await store.enqueue(job)
    claimed = await claim(store, job.lane, lease=lease, counts=counts)
    assert claimed.id == job.id
    return claimed


async def complete(store: Store, job: RunningJob) -> None:
    """Settle a running job as completed."""
    recorded = await store.decide(job.id, job.token, COMPLETED)
    assert recorded.status == "recorded", recorded


async def start_completing(store: Store, job: Job, *, lease: int = LEASE) -> RunningJob:
    """Admit, claim and decide a job whose completion hook has not finished."""
    running = await start(store, job, lease=lease)
    recorded = await store.decide(running.id, running.token, COMPLETED, has_hook=True)
    assert recorded.status == "recorded", recorded
    return running


async def settled(store: Store, job: Job) -> SettledJob:
    """Admit a job and see it through."""
    await complete(store, await start(store, job))
    return await read_settled_job(store, job.id)


async def drain(store: Store, *lanes: str) -> list[RunningJob]:
    """Claim and complete until nothing can be claimed; the jobs in the order of their claims."""
    order: list[RunningJob] = []
    while True:
        round = [job for lane in lanes if (job := await find(store, lane)) is not None]
        if not round:
            return order
        for job in round:
            await complete(store, job)
        order += round


async def read(store: Store, id: str) -> StoredJob:
    """A job that must be there."""
    job = await store.read(id)
    assert job is not None, f"job {id!r} is gone"
    return job


async def read_queued(store: Store, id: str) -> QueuedJob:
    """A job that must be queued."""
    job = await read(store, id)
    assert isinstance(job, QueuedJob), job
    return job


async def read_running(store: Store, id: str) -> RunningJob:
    """A job that must be running."""
    job = await read(store, id)
    assert isinstance(job, RunningJob), job
    return job


async def read_completing(store: Store, id: str) -> CompletingJob:
    """A job that must be completing."""
    job = await read(store, id)
    assert isinstance(job, CompletingJob), job
    return job


async def read_settled_job(store: Store, id: str) -> SettledJob:
    """A job that must be settled."""
    job = await read(store, id)
    assert isinstance(job, SettledJob), job
    return job


async def read_all(store: Store) -> list[StoredJob]:
    """Every job, oldest first: what nothing that was refused may have changed."""
    jobs: list[StoredJob] = await store.ask(wishes.ReadJobs(limit=100_000))
    return jobs[::-1]


async def feed(store: Store, *, limit: int = 256, lane: str | None = None) -> list[SettledJob]:
    """The whole settled feed, page by page."""
    jobs: list[SettledJob] = []
    cursor: str | None = None
    while True:
        page = await store.read_settled(limit, cursor, lane)
        if not page.jobs:
            assert page.cursor == cursor, "an empty page must leave the cursor where it is"
            return jobs
        jobs += page.jobs
        cursor = page.cursor


def ids(jobs: Sequence[StoredJob]) -> list[str]:
    """The jobs' ids, in order."""
    return [job.id for job in jobs]


def milliseconds(instant: datetime | None) -> int:
    """An instant as the store keeps it; None is 0, at once."""
    return 0 if instant is None else to_milliseconds(instant)


def expected_order(jobs: Sequence[StoredJob]) -> list[str]:
    """Ids by priority, higher first, then by admission."""
    return ids(sorted(jobs, key=lambda job: (-job.priority, job.sequence)))


def as_values(*jobs: Job, **literal: Any) -> str:
    """A SELECT that yields rows for `enqueue_select`, with nothing but literals in it."""

    def quoted(value: Any) -> str:
        if value is None:
            return "null"
        return str(value) if isinstance(value, int) else "'" + str(value).replace("'", "''") + "'"

    rows: list[str] = []
    for job in jobs:
        columns: dict[str, Any] = {
            "id": job.id,
            "lane": job.lane,
            "queue": job.queue,
            "priority": job.priority,
            "payload": job.encoded,
            "max_recoveries": None if job.recovery is None else job.recovery.max_recoveries,
            **literal,
        }
        rows.append(", ".join(f"{quoted(value)} as {name}" for name, value in columns.items()))
    return "\nunion all\n".join(f"select {row}" for row in rows)
