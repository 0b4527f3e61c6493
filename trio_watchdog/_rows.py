"""Rows of the jobs table, read strictly: nonsense raises `StoreInvalid`, it is never guessed at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ._errors import InvalidJob, StoreInvalid
from ._model import (
    CompletingJob,
    Outcome,
    QueuedJob,
    Recovery,
    RunningJob,
    SettledJob,
    StoredJob,
    check_integer,
    check_text,
    to_instant,
)
from ._payload import decode_payload
from ._rules import ClaimFacts, State

Row = Sequence[Any]

FACT_COLUMNS = (
    "id, queue, lane, state, token, lease_until, cancellation_id, outcome, reason,"
    " attempt_count, attempt_open, recovery_count, window_began_at,"
    " max_recoveries, recovery_window"
)
"""What `claim_facts` reads: no payload."""

JOB_COLUMNS = (
    "id, queue, lane, priority, payload, not_before, max_recoveries, recovery_window,"
    " state, sequence, token, lease_until, cancellation_id, recovery_count, attempt_count,"
    " outcome, reason, settled_at"
)
"""What `stored_job` reads."""

ENCODED = 4
"""Where `JOB_COLUMNS` has the payload's text."""


def stored_job(row: Row) -> StoredJob:
    """The job in a row of `JOB_COLUMNS`."""
    try:
        return _stored_job(row)
    except (InvalidJob, TypeError, ValueError) as error:
        raise StoreInvalid(f"the row of job {row[0]!r:.100} is invalid: {error}") from error


def _stored_job(row: Row) -> StoredJob:
    (
        id,
        queue,
        lane,
        priority,
        payload,
        not_before,
        max_recoveries,
        recovery_window,
        state,
        sequence,
        token,
        lease_until,
        cancellation_id,
        recovery_count,
        attempt_count,
        outcome,
        reason,
        settled_at,
    ) = row
    common: dict[str, Any] = {
        "id": check_text(id, "id"),
        "queue": queue,
        "lane": lane,
        "priority": priority,
        "payload": decode_payload(payload),
        "not_before": to_instant(not_before) if not_before else None,
        "recovery": _recovery(max_recoveries, recovery_window),
        "sequence": check_integer(sequence, "sequence", 1, 2**63 - 1),
        "cancellation_id": cancellation_id,
        "recovery_count": recovery_count,
        "attempt_count": attempt_count,
    }
    match state:
        case "queued":
            return QueuedJob(**common)
        case "running":
            return RunningJob(
                **common, token=check_text(token, "token"), lease_until=to_instant(lease_until)
            )
        case "completing":
            return CompletingJob(
                **common,
                token=check_text(token, "token"),
                lease_until=to_instant(lease_until),
                outcome=Outcome(outcome),
                reason=reason,
            )
        case "settled":
            return SettledJob(
                **common,
                outcome=Outcome(outcome),
                reason=reason,
                settled_at=to_instant(settled_at),
            )
        case _:
            raise ValueError(f"state is {state!r}")


def settled_job(row: Row) -> SettledJob:
    """The settled job in a row of `JOB_COLUMNS`."""
    job = stored_job(row)
    if not isinstance(job, SettledJob):
        raise StoreInvalid(f"job {job.id!r} is {job.state}, where a settled one was expected")
    return job


def running_job(row: Row) -> RunningJob:
    """The running job in a row of `JOB_COLUMNS`."""
    job = stored_job(row)
    if not isinstance(job, RunningJob):
        raise StoreInvalid(f"job {job.id!r} is {job.state}, where a running one was expected")
    return job


def completing_job(row: Row) -> CompletingJob:
    """The completing job in a row of `JOB_COLUMNS`."""
    job = stored_job(row)
    if not isinstance(job, CompletingJob):
        raise StoreInvalid(f"job {job.id!r} is {job.state}, where a completing one was expected")
    return job


def claim_facts(row: Row) -> ClaimFacts:
    """What the rules need, from a row of `FACT_COLUMNS`."""
    try:
        return ClaimFacts(
            id=check_text(row[0], "id"),
            queue=row[1],
            lane=row[2],
            state=_state(row[3]),
            token=row[4],
            lease_until=row[5],
            cancellation_id=row[6],
            outcome=None if row[7] is None else Outcome(row[7]),
            reason=row[8],
            attempt_count=row[9],
            attempt_open=bool(row[10]),
            recovery_count=row[11],
            window_began_at=row[12],
            recovery=_recovery(row[13], row[14]),
        )
    except (InvalidJob, TypeError, ValueError) as error:
        raise StoreInvalid(f"the row of job {row[0]!r:.100} is invalid: {error}") from error


def _state(value: Any) -> State:
    if value not in ("queued", "running", "completing", "settled"):
        raise ValueError(f"state is {value!r}")
    return value


def _recovery(max_recoveries: int | None, window: int | None) -> Recovery | None:
    if max_recoveries is None:
        return None
    return Recovery(max_recoveries, None if window is None else window / 1000)
