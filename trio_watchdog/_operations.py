"""Each operation of a store, once, as a generator.

It yields statements with their parameters, is sent rows, asks a rule, and returns answers. It
does no I/O, reads no clock and draws nothing random, so the same operation runs on SQLite, on
PostgreSQL, inside a caller's own transaction, and one statement at a time in a test.

Every operation takes all the wishes of its kind that go together and answers them in order. Hot
ones speak in sets: a few statements, whatever the number of wishes. An answer may be an exception;
an operation that *raises* has its transaction rolled back, and each wish is then tried alone.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar, cast

from attrs import frozen

from . import _rules as rules
from . import _statements as sql
from . import _upkeep as upkeep
from . import _wishes as w
from ._calls import Call, Effects, Operation, Rows, many, one, promoted
from ._errors import InvalidJob, JobConflict, StoreInvalid, StoreUnavailable, shown
from ._model import (
    Admission,
    CancellationResult,
    CompletingJob,
    Job,
    LaneFailure,
    Outcome,
    QueuedJob,
    QueueHead,
    Recovery,
    RunningJob,
    SettledJob,
    SettledPage,
    StoredJob,
    WakeState,
    check_integer,
    check_reason,
    check_text,
    seconds_to_milliseconds,
    to_instant,
    to_milliseconds,
)
from ._payload import check_payload_size, decode_payload
from ._rows import (
    ENCODED,
    SEQUENCE,
    Row,
    claim_facts,
    completing_job,
    running_job,
    settled_job,
    standing,
    stored_job,
    without_payload,
)
from ._rules import ClaimFacts, Requeue, Settle

T = TypeVar("T")

PAGE_LIMIT = 256
"""Jobs in one page of the settled feed, and that one `fail_lane` settles."""

ADMISSION_CHUNK = 1000
"""Jobs of one admission that go to the database together; more would block the event loop."""

CLAIM_WINDOW = 16
"""Ready rows that a claim looks at beyond the number it wants."""

LANES_TRIED = 4
"""Lanes in which one claim of any lane looks for a job, before it is told to come again."""


class Locked(StoreUnavailable):
    """Somebody's open transaction holds what the wish needs; nothing has changed."""


# -- admission ------------------------------------------------------------------------------------


def enqueue(wishes: Sequence[w.Enqueue], effects: Effects) -> Operation[list[Any]]:
    return (yield from _admit([wish.job for wish in wishes], effects))


def enqueue_many(wishes: Sequence[w.EnqueueMany], effects: Effects) -> Operation[list[Any]]:
    answers: list[Any] = []
    if sum(len(wish.jobs) for wish in wishes) > ADMISSION_CHUNK:
        # Between two trips a handler may block the loop: no queue shall wait for that.
        effects.lockable = 0
    for wish in wishes:
        answers.append((yield from _admit_all(wish.jobs, effects)))
    return answers


def enqueue_select(wishes: Sequence[w.EnqueueSelect], effects: Effects) -> Operation[list[Any]]:
    answers: list[Any] = []
    # Callers' statements may take long.
    effects.lockable = 0
    for wish in wishes:
        rows: list[dict[str, Any]] = yield Call(wish.sql, wish.parameters)
        jobs = [job_from_columns(row) for row in rows]
        answers.append((yield from _admit_all(jobs, effects)))
    return answers


def _admit_all(jobs: Sequence[Job], effects: Effects) -> Operation[list[Admission]]:
    admissions: list[Admission] = []
    for start in range(0, len(jobs), ADMISSION_CHUNK):
        chunk = jobs[start : start + ADMISSION_CHUNK]
        for admission in (yield from _admit(chunk, effects, sql.INSERT_MANY)):
            if isinstance(admission, Exception):
                # All or nothing: raising rolls the others back.
                raise admission
            admissions.append(admission)
    return admissions


def due(job: Job) -> int:
    """The instant (ms) from which on a new job may be claimed; 0: at once."""
    return 0 if job.not_before is None else to_milliseconds(job.not_before)


def insertion(job: Job) -> tuple[Any, ...]:
    """The job as a row of `sql.INSERT`."""
    recovery = job.recovery
    window = None if recovery is None else recovery.window
    return (
        job.id,
        job.queue,
        job.lane,
        job.priority,
        due(job),
        None if recovery is None else recovery.max_recoveries,
        None if window is None else seconds_to_milliseconds(window),
        job.encoded,
    )


def _admit(
    jobs: Sequence[Job], effects: Effects, insert: sql.Statement = sql.INSERT
) -> Operation[list[Admission | Exception]]:
    answers: dict[int, Admission | Exception] = {}
    fitting: list[int] = []
    for index, job in enumerate(jobs):
        try:
            check_payload_size(job.encoded, effects.payload_limit)
        except InvalidJob as error:
            answers[index] = error
        else:
            fitting.append(index)
    for _ in range(3):
        if not fitting:
            break
        # A queue of its own, as a job has by default, nobody is in front of.
        named = {jobs[index].queue for index in fitting if jobs[index].queue != jobs[index].id}
        if not named:
            # So there is nothing to rank.
            insert = sql.INSERT
        inserting = many(insert, [insertion(jobs[index]) for index in fitting])
        tried = [(queue,) for queue in sorted(named)[: effects.lockable]]
        effects.lockable -= len(tried)
        inserted: Rows
        if tried:
            _, inserted = yield (many(sql.TRY_QUEUES, tried), inserting)
        else:
            inserted = yield inserting
        if insert is sql.INSERT_MANY and len(inserted) < len(fitting):
            yield many(sql.PROMOTE, [(row[0],) for row in inserted])
        sequences: dict[str, int] = {row[0]: row[1] for row in inserted}
        present: list[int] = []
        for index in fitting:
            job = jobs[index]
            # Popped: when two wishes of one batch have the same id, the second is a duplicate.
            sequence = sequences.pop(job.id, None)
            if sequence is None:
                present.append(index)
                continue
            due_at = due(job)
            answers[index] = Admission("queued", _queued(job, sequence, due_at))
            effects.claimable(job.lane, due_at)
            effects.moved(job.queue)
        fitting = []
        if present:
            found: Rows = yield many(sql.READ_MANY, [(jobs[index].id,) for index in present])
            there = {row[0]: row for row in found}
            for index in present:
                id = jobs[index].id
                if id in there:
                    answers[index] = _duplicate(there[id], jobs[index])
                else:
                    # Purged or pruned between the two statements: admit it after all.
                    fitting.append(index)
    for index in fitting:
        answers[index] = StoreUnavailable(
            f"job {jobs[index].id!r} came and went too often while it was being admitted"
        )
    return [answers[index] for index in range(len(jobs))]


def _queued(job: Job, sequence: int, due: int) -> QueuedJob:
    return QueuedJob(
        id=job.id,
        queue=job.queue,
        lane=job.lane,
        priority=job.priority,
        payload=job.payload,
        # As the store has it, and as every later reader sees it.
        not_before=to_instant(due) if due else None,
        recovery=job.recovery,
        sequence=sequence,
        cancellation_id=None,
        recovery_count=0,
        attempt_count=0,
    )


def _duplicate(row: Row, job: Job) -> Admission | Exception:
    try:
        present = stored_job(row)
        rules.check_duplicate(present, row[ENCODED], job)
    except (JobConflict, StoreInvalid) as error:
        return error
    return Admission("duplicate", present)


_SELECT_COLUMNS = {
    "lane",
    "payload",
    "queue",
    "id",
    "priority",
    "not_before",
    "recovery",
    "max_recoveries",
    "window",
}


JSON_COLUMNS = ("payload", "recovery")
"""Those whose text is JSON, which is decoded here and nowhere else."""

NO_ROWS = "the SQL yields no rows and cannot; give a SELECT, or RETURNING"


def job_from_columns(row: Mapping[str, Any]) -> Job:
    """The job that a row of the caller's SELECT describes; `InvalidJob` says what is wrong.

    Columns are named like `Job`'s fields; ``lane`` is needed. Text in ``payload`` and
    ``recovery`` is JSON, ``not_before`` is an aware instant (on SQLite ISO 8601 text), and
    ``max_recoveries`` with ``window`` may stand for ``recovery``.
    """
    unknown = set(row) - _SELECT_COLUMNS
    if unknown:
        raise InvalidJob(
            f"the SELECT yields the columns {sorted(unknown)};"
            f" only {sorted(_SELECT_COLUMNS)} are known"
        )
    if "lane" not in row:
        raise InvalidJob("the SELECT yields no column `lane`")
    not_before = row.get("not_before")
    if isinstance(not_before, str):
        try:
            not_before = datetime.fromisoformat(not_before)
        except ValueError as error:
            raise InvalidJob(f"not_before is {shown(not_before)}, not ISO 8601") from error
    recovery = _from_json(row.get("recovery"), "recovery")
    if recovery is None and row.get("max_recoveries") is not None:
        recovery = {"max_recoveries": row["max_recoveries"], "window": row.get("window")}
    if recovery is not None:
        fields = cast("dict[str, Any]", recovery)
        if not isinstance(recovery, dict) or "max_recoveries" not in fields:
            raise InvalidJob(f"recovery is {shown(fields)}, without max_recoveries")
        recovery = Recovery(fields["max_recoveries"], fields.get("window"))
    priority = row.get("priority")
    return Job(
        row["lane"],
        _from_json(row.get("payload"), "payload"),
        queue=cast("str", row.get("queue")),
        id=cast("str", row.get("id")),
        priority=0 if priority is None else priority,
        not_before=not_before,
        recovery=recovery,
    )


def _from_json(value: Any, name: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return decode_payload(value)
    except StoreInvalid as error:
        raise InvalidJob(f"{name} is {shown(value)}, not JSON") from error


# -- cancellation ---------------------------------------------------------------------------------


def cancel(wishes: Sequence[w.Cancel], effects: Effects) -> Operation[list[CancellationResult]]:
    answers: list[CancellationResult] = []
    for wish in wishes:
        answers.append((yield from cancel_one(wish, effects)))
    return answers


_NO_ROW = (None, None, None, "", False)


def cancel_one(wish: w.Cancel, effects: Effects) -> Operation[CancellationResult]:
    """One cancellation; also run inside callers' transactions."""
    id = check_text(wish.id, "id")
    cancellation_id = check_text(wish.cancellation_id, "cancellation_id")
    for _ in range(3):
        rows: Rows = yield one(sql.READ_CANCELLATION, id=id, cancellation_id=cancellation_id)
        state, recorded, outcome, queue, is_used = rows[0] if rows else _NO_ROW
        state, outcome = standing(id, state, outcome)
        result = rules.cancellation(
            state,
            recorded,
            outcome,
            cancellation_id,
            wish.only_if_queued,
            is_used_elsewhere=bool(is_used),
        )
        if result.status != "recorded":
            return result
        changed: Rows = yield one(
            sql.SET_CANCELLATION,
            id=id,
            cancellation_id=cancellation_id,
            only_if_queued=int(wish.only_if_queued),
        )
        if changed[0][0]:
            effects.cancelled = True
            effects.claims.add(id)
            effects.moved(queue)
            return result
        # Somebody changed the row between the look and the write: look again.
    raise StoreUnavailable(f"job {id!r} changed too often while it was being cancelled")


def settle_cancelled(
    wishes: Sequence[w.SettleCancelled], effects: Effects
) -> Operation[list[list[str]]]:
    answers: list[list[str]] = []
    for wish in wishes:
        found: Rows = yield one(sql.FIND_CANCELLED, lane=wish.lane, limit=wish.limit)
        settles = [
            Settling(id, None, Settle(Outcome.CANCELLED), sequence) for id, sequence in found
        ]
        answers.append(list((yield from _settle(settles, effects))))
    return answers


def fail_lane(wishes: Sequence[w.FailLane], effects: Effects) -> Operation[list[LaneFailure]]:
    answers: list[LaneFailure] = []
    for wish in wishes:
        found: Rows = yield one(sql.FIND_LANE, lane=wish.lane, limit=PAGE_LIMIT + 1)
        reason = check_reason(wish.reason)
        settles = [
            Settling(id, token, Settle(Outcome.FAILED, reason), sequence)
            for id, token, sequence in found[:PAGE_LIMIT]
        ]
        settled = yield from _settle(settles, effects)
        effects.claims.update(settled)
        jobs: dict[str, SettledJob] = {}
        if settled:
            rows: Rows = yield many(sql.READ_MANY, [(id,) for id in settled])
            for row in rows:
                # One that cannot be read is settled like the others, and cannot be told.
                with contextlib.suppress(StoreInvalid):
                    jobs[row[0]] = settled_job(row)
        more = len(found) > PAGE_LIMIT or len(settled) < len(settles)
        answers.append(LaneFailure(tuple(jobs[id] for id in settled if id in jobs), more))
    return answers


@frozen
class Settling:
    """A row to settle that is queued or, with this token, running.

    ``sequence`` tells a queued row, which has no token, from a later one of the same id.
    ``yields``: a cancellation that is recorded by then overrules the outcome.
    """

    id: str
    token: str | None
    settle: Settle
    sequence: int | None = None
    yields: bool = False


def _settle(settles: Sequence[Settling], effects: Effects) -> Operation[dict[str, Settle]]:
    """Settle these rows; says which were, in order, and how."""
    if not settles:
        return {}
    ids = [(each.id,) for each in settles]
    rows = [
        (
            each.id,
            each.token,
            each.settle.outcome,
            each.settle.reason,
            each.sequence,
            int(each.yields),
        )
        for each in settles
    ]
    _, _, settled, raised = yield (
        many(sql.LOCK_QUEUES, ids),
        one(sql.BUMP_SETTLE_GROUP),
        many(sql.SETTLE, rows),
        many(sql.PROMOTE, ids),
    )
    promoted(raised, effects)
    done: dict[str, Settle] = {}
    for id, queue, outcome, reason in settled:
        effects.moved(queue, id)
        done[id] = Settle(Outcome(outcome), reason)
    return {each.id: done[each.id] for each in settles if each.id in done}


def purge_queue(wishes: Sequence[w.PurgeQueue], effects: Effects) -> Operation[list[int]]:
    answers: list[int] = []
    for wish in wishes:
        _, removed, raised = yield (
            one(sql.LOCK_QUEUE, queue=wish.queue),
            one(sql.PURGE, queue=wish.queue),
            one(sql.PROMOTE_QUEUE, queue=wish.queue),
        )
        promoted(raised, effects)
        if removed[0][0]:
            effects.moved(wish.queue)
        answers.append(removed[0][0])
    return answers


# -- reading --------------------------------------------------------------------------------------


def read(wishes: Sequence[w.Read], effects: Effects) -> Operation[list[StoredJob | None]]:
    rows: Rows = yield many(sql.READ_MANY, [(wish.id,) for wish in wishes])
    there = {row[0]: row for row in rows}
    return [stored_job(there[wish.id]) if wish.id in there else None for wish in wishes]


def read_queue_head(
    wishes: Sequence[w.ReadQueueHead], effects: Effects
) -> Operation[list[QueueHead]]:
    answers: list[QueueHead] = []
    for wish in wishes:
        answers.append((yield from queue_head(wish.queue)))
    return answers


def queue_head(queue: str) -> Operation[QueueHead]:
    """The head of one queue; also run inside callers' transactions and for projectors."""
    rows: Rows = yield one(sql.READ_QUEUE_HEAD, queue=check_text(queue, "queue"))
    if not rows:
        return QueueHead("idle")
    id, state, is_requested = rows[0]
    return QueueHead("queued" if state == "queued" else "running", id, bool(is_requested))


def read_latest_settled(
    wishes: Sequence[w.ReadLatestSettled], effects: Effects
) -> Operation[list[SettledJob | None]]:
    answers: list[SettledJob | None] = []
    for wish in wishes:
        rows: Rows = yield one(sql.READ_LATEST_SETTLED, queue=check_text(wish.queue, "queue"))
        answers.append(settled_job(rows[0]) if rows else None)
    return answers


def read_settled(wishes: Sequence[w.ReadSettled], effects: Effects) -> Operation[list[SettledPage]]:
    answers: list[SettledPage] = []
    for wish in wishes:
        limit = check_integer(wish.limit, "limit", 1, PAGE_LIMIT)
        group, sequence = rules.feed_position(wish.after)
        parameters = {"settled_group": group, "sequence": sequence, "limit": limit}
        if wish.lane is None:
            rows: Rows = yield one(sql.READ_SETTLED, **parameters)
        else:
            lane = check_text(wish.lane, "lane")
            rows = yield one(sql.READ_SETTLED_LANE, lane=lane, **parameters)
        jobs: list[SettledJob] = []
        cursor = wish.after
        for row in rows:
            try:
                jobs.append(settled_job(row[:-1]))
            except StoreInvalid:
                # What comes before it can still be read; then it is reported, not passed over.
                if not jobs:
                    raise
                break
            cursor = f"{row[-1]}.{jobs[-1].sequence}"
        answers.append(SettledPage(tuple(jobs), cursor))
    return answers


def read_jobs(wishes: Sequence[w.ReadJobs], effects: Effects) -> Operation[list[list[StoredJob]]]:
    answers: list[list[StoredJob]] = []
    for wish in wishes:
        rows: Rows = yield one(
            sql.READ_JOBS,
            state=wish.state,
            lane=wish.lane,
            queue=wish.queue,
            limit=check_integer(wish.limit, "limit", 1, 100_000),
        )
        answers.append([stored_job(row) for row in rows])
    return answers


def read_counts(wishes: Sequence[w.ReadCounts], effects: Effects) -> Operation[list[Any]]:
    rows: Rows = yield one(sql.READ_COUNTS)
    return [[tuple(row) for row in rows]] * len(wishes)


def read_owners(wishes: Sequence[w.ReadOwners], effects: Effects) -> Operation[list[list[str]]]:
    rows: Rows = yield one(sql.READ_OWNERS)
    return [[row[0] for row in rows]] * len(wishes)


def read_wake_state(
    wishes: Sequence[w.ReadWakeState], effects: Effects
) -> Operation[list[WakeState]]:
    answers: list[WakeState] = []
    for wish in wishes:
        rows: Rows = yield one(sql.READ_WAKE_STATE, at=wish.now)
        pending, *nexts = rows[0]
        # Anything but an integer is nonsense, and due never.
        instants = [instant for instant in nexts if isinstance(instant, int)]
        answers.append(WakeState(bool(pending), to_instant(min(instants)) if instants else None))
    return answers


# -- claims ---------------------------------------------------------------------------------------


def claim(wishes: Sequence[w.Claim], effects: Effects) -> Operation[list[Any]]:
    answers: dict[int, w.Claimed | StoreUnavailable] = {}
    again = [index for index, wish in enumerate(wishes) if wish.again]
    if again:
        rows: Rows = yield many(sql.READ_CLAIMED, [(wishes[index].token,) for index in again])
        held = {job.token: job for job in [running_job(row[:-1]) for row in rows]}
        for index in again:
            if wishes[index].token in held:
                answers[index] = w.Claimed(held[wishes[index].token])
    others = [i for i, wish in enumerate(wishes) if i not in answers and wish.lane is None]
    lanes: dict[int, str] = {
        index: wish.lane
        for index, wish in enumerate(wishes)
        if index not in answers and wish.lane is not None
    }
    choices: dict[int, list[str]] = {}
    for without in {wishes[index].without for index in others}:
        slots = [index for index in others if wishes[index].without == without]
        staged, rows = yield (
            one(sql.STAGE),
            one(sql.READ_READY_LANES, without=json.dumps(without)),
        )
        for lane, count in staged:
            effects.claimable(lane, 0, count)
        found = [row[0] for row in rows]
        for position, index in enumerate(slots):
            # With more slots than lanes the lanes take turns; each slot asks for one of them.
            turn = position % max(len(found), 1)
            choices[index] = found[turn:] + found[:turn]
    for _ in range(LANES_TRIED):
        lanes.update({index: left.pop(0) for index, left in choices.items() if left})
        yield from _claim_in_lanes(wishes, lanes, answers, effects)
        # What was ready there somebody else has taken, or holds; there may be something elsewhere.
        choices = {i: left for i, left in choices.items() if left and i not in answers}
        lanes = {}
        if not choices:
            break
    answers.update({index: w.Claimed(None, more=True) for index in choices})
    return [answers.get(index, w.Claimed(None)) for index in range(len(wishes))]


def _claim_in_lanes(
    wishes: Sequence[w.Claim],
    lanes: dict[int, str],
    answers: dict[int, w.Claimed | StoreUnavailable],
    effects: Effects,
) -> Operation[None]:
    refused: Rows = []
    lowered: Rows = [(0,)]
    for is_last in (False, True):
        if not lanes:
            return
        by_token = {wishes[index].token: index for index in lanes}
        requests = [
            (
                lane,
                # Here, since the statement passes over a row that the checks refuse.
                check_text(wish.token, "token"),
                check_text(wish.owner, "owner"),
                wish.lease,
                int(wish.counts),
            )
            for index, lane in lanes.items()
            for wish in [wishes[index]]
        ]
        names = [(lane,) for lane in sorted(set(lanes.values()))]
        limits = {"window": CLAIM_WINDOW, "wanted": len(requests)}
        try:
            if is_last:
                # Less than was wanted: lower what is blocked in front, and look once more.
                refused, lowered, rows = yield (
                    many(sql.LOCK_LOWERING, names),
                    many(sql.LOWER, names),
                    many(sql.CLAIM_BEYOND, requests, **limits),
                )
            else:
                staged, rows = yield (one(sql.STAGE), many(sql.CLAIM, requests, **limits))
                for lane, count in staged:
                    effects.claimable(lane, 0, count)
        except Locked:
            if not is_last:
                raise
            # What the first look claimed is ours all the same; the others look again.
            answers.update(dict.fromkeys(lanes, w.Claimed(None, more=True)))
            return
        except StoreUnavailable as error:
            if not is_last:
                raise
            # Whether the second look claimed anything nobody can tell: they ask again, by token.
            answers.update(dict.fromkeys(lanes, error))
            return
        for row in rows:
            index = by_token[row[10]]
            del lanes[index]
            effects.claimed(row[2])
            effects.moved(row[1])
            job = yield from _running_or_failed(row, effects)
            answers[index] = w.Claimed(job, more=job is None)
    # Rows were in the way, so there may be more behind them; or somebody frees a queue just now.
    if lowered[0][0] or (refused and refused[0][0]):
        answers.update(dict.fromkeys(lanes, w.Claimed(None, more=True)))


def _running_or_failed(row: Row, effects: Effects) -> Operation[RunningJob | None]:
    """The claimed job; one that cannot be read fails by itself, and its lane goes on."""
    try:
        return running_job(row[:-1])
    except StoreInvalid as error:
        settle = Settle(Outcome.FAILED, rules.cut(str(error)))
        if isinstance(row[0], str):
            # If even that cannot be written now, its lease will end; the other claims stand.
            yield from _or_error(_settle([Settling(row[0], row[10], settle)], effects))
        return None


def renew(wishes: Sequence[w.Renew], effects: Effects) -> Operation[list[w.Renewal]]:
    rows: Rows = yield many(sql.RENEW, [(wish.id, wish.token, wish.lease) for wish in wishes])
    held = {(row[0], row[1]): w.Renewal("held", bool(row[2])) for row in rows}
    if len(held) == len(wishes):
        return [held[wish.id, wish.token] for wish in wishes]
    missed = [wish for wish in wishes if (wish.id, wish.token) not in held]
    looked = yield from _look([(wish.id, wish.token) for wish in missed], "locked")
    held.update(zip([(wish.id, wish.token) for wish in missed], looked, strict=True))
    return [held[wish.id, wish.token] for wish in wishes]


def inspect(wishes: Sequence[w.Inspect], effects: Effects) -> Operation[list[w.Renewal]]:
    return (yield from _look([(wish.id, wish.token) for wish in wishes], "held"))


def _look(claims: Sequence[tuple[str, str]], ours: Any) -> Operation[list[w.Renewal]]:
    """What a plain look tells of claims; ``ours`` is the status of one that is still held."""
    rows: Rows = yield many(sql.READ_CLAIM_STATES, [(id,) for id, _ in claims])
    there = {row[0]: row for row in rows}
    answers: list[w.Renewal] = []
    for id, token in claims:
        row = there.get(id)
        if row is None:
            answers.append(w.Renewal("lost"))
            continue
        _, state, row_token, is_live, is_requested, outcome = row
        is_ours = row_token == token
        if is_ours and is_live and state in ("running", "completing"):
            answers.append(w.Renewal(ours, bool(is_requested)))
        else:
            is_failed = is_ours and state == "settled" and outcome == Outcome.FAILED
            answers.append(w.Renewal("lost", settled_as_failed=is_failed))
    return answers


def reserve_attempt(wishes: Sequence[w.ReserveAttempt], effects: Effects) -> Operation[list[Any]]:
    facts, lease_now = yield from _facts([wish.id for wish in wishes])
    answers: dict[int, Any] = {}
    reserves: dict[int, tuple[Any, ...]] = {}
    settles: dict[int, Settling] = {}
    for index, wish in enumerate(wishes):
        claim = facts.get(wish.id)
        if claim is None:
            answers[index] = w.Reserved("conflict")
            continue
        verdict = rules.reservation(claim, wish.token, wish.policy, lease_now, wish.jitter)
        if isinstance(verdict, str):
            answers[index] = w.Reserved(verdict)
        elif isinstance(verdict, Settle):
            settles[index] = Settling(wish.id, wish.token, verdict, yields=True)
            answers[index] = w.Reserved("settled", claim.attempt_count, verdict.reason)
        else:
            reserves[index] = (wish.id, wish.token, verdict.attempt_count, verdict.delay)
            answers[index] = w.Reserved("reserved", verdict.attempt_count)
    if reserves:
        rows: Rows = yield many(sql.RESERVE, list(reserves.values()))
        done = {row[0] for row in rows}
        missed = [index for index in reserves if wishes[index].id not in done]
        yield from _refuse(wishes, missed, answers)
    if settles:
        settled = yield from _or_error(_settle(list(settles.values()), effects))
        if isinstance(settled, StoreUnavailable):
            answers.update(dict.fromkeys(settles, settled))
        else:
            missed = [index for index in settles if wishes[index].id not in settled]
            for index in settles:
                # Recorded between our look and our write.
                if index not in missed and settled[wishes[index].id].reason is None:
                    answers[index] = w.Reserved("cancelled")
            yield from _refuse(wishes, missed, answers)
    return [answers[index] for index in range(len(wishes))]


def _refuse(
    wishes: Sequence[w.ReserveAttempt], missed: Sequence[int], answers: dict[int, Any]
) -> Operation[None]:
    if missed:
        claims = [(wishes[index].id, wishes[index].token) for index in missed]
        refusals = yield from _refusals(claims, w.Reserved("conflict"), w.Reserved("cancelled"))
        answers.update(zip(missed, refusals, strict=True))


def retry_job(wishes: Sequence[w.RetryJob], effects: Effects) -> Operation[list[Any]]:
    facts, lease_now = yield from _facts([wish.id for wish in wishes])
    answers: dict[int, Any] = {}
    requeues: dict[int, tuple[str, str, Requeue]] = {}
    decides: dict[int, w.Decide] = {}
    for index, wish in enumerate(wishes):
        claim = facts.get(wish.id)
        if claim is None:
            answers[index] = w.Returned("missing")
            continue
        verdict = rules.retry(
            claim, wish.token, wish.policy, wish.after, wish.reason, lease_now, wish.jitter
        )
        if isinstance(verdict, str):
            answers[index] = w.Returned(verdict)
        elif isinstance(verdict, Settle):
            decides[index] = w.Decide(wish.id, wish.token, verdict, wish.has_hook)
        else:
            requeues[index] = (wish.id, wish.token, verdict)
    yield from _requeue(requeues, answers, effects)
    if decides:
        recorded = yield from _or_error(decide(list(decides.values()), effects))
        results: list[Any] = (
            [recorded] * len(decides) if isinstance(recorded, StoreUnavailable) else recorded
        )
        for index, result in zip(decides, results, strict=True):
            if isinstance(result, Exception):
                answers[index] = result
            elif result.settle is not None and result.settle.outcome == Outcome.CANCELLED:
                # Recorded between our look and our write, which it overruled.
                answers[index] = w.Returned("cancelled")
            elif result.status == "recorded":
                status = "completing" if decides[index].has_hook else "settled"
                answers[index] = w.Returned(status, decides[index].settle.reason)
            else:
                answers[index] = w.Returned("conflict")
    return [answers[index] for index in range(len(wishes))]


def hand_off(wishes: Sequence[w.HandOff], effects: Effects) -> Operation[list[Any]]:
    facts, lease_now = yield from _facts([wish.id for wish in wishes])
    answers: dict[int, Any] = {}
    requeues: dict[int, tuple[str, str, Requeue]] = {}
    for index, wish in enumerate(wishes):
        claim = facts.get(wish.id)
        if claim is None:
            answers[index] = w.Returned("missing")
            continue
        verdict = rules.hand_off(claim, wish.token, lease_now)
        if isinstance(verdict, str):
            answers[index] = w.Returned(verdict)
        else:
            requeues[index] = (wish.id, wish.token, verdict)
    yield from _requeue(requeues, answers, effects)
    return [answers[index] for index in range(len(wishes))]


def _facts(ids: Sequence[str]) -> Operation[tuple[dict[str, ClaimFacts], int]]:
    """The facts of these rows, and the instant that judges their leases.

    Not locked: the write that follows is guarded by token, state and lease instead, so that no
    lock is held while an answer travels.
    """
    facts: Rows
    clock: Rows
    facts, clock = yield (many(sql.READ_FACTS, [(id,) for id in ids]), one(sql.READ_CLOCK))
    return {row[0]: claim_facts(row) for row in facts}, clock[0][0]


def _refusals(
    claims: Sequence[tuple[str, str]], conflict: Any, cancelled: Any
) -> Operation[list[Any]]:
    """Why guarded writes changed nothing: refused, or somebody's transaction has the row."""
    found = yield from _or_error(_facts([id for id, _ in claims]))
    if isinstance(found, StoreUnavailable):
        return [found] * len(claims)
    facts, lease_now = found
    refusals: list[Any] = []
    for id, token in claims:
        claim = facts.get(id)
        if claim is None or not rules.is_held(claim, token, lease_now):
            refusals.append(conflict)
        elif claim.cancellation_id is not None:
            refusals.append(cancelled)
        else:
            refusals.append(_locked(id))
    return refusals


def _locked(id: str) -> Locked:
    return Locked(f"another transaction holds the row of job {id!r}; try again")


def _or_error(operation: Operation[T]) -> Operation[T | StoreUnavailable]:
    """Its answer or its error: what was written before it stands, and is to be answered."""
    try:
        return (yield from operation)
    except StoreUnavailable as error:
        return error


def _requeue(
    requeues: Mapping[int, tuple[str, str, Requeue]],
    answers: dict[int, Any],
    effects: Effects,
    *,
    keeps: bool = False,
) -> Operation[None]:
    if not requeues:
        return
    rows = [
        (
            id,
            token,
            to.delay,
            to.attempt_count,
            to.recovery_count,
            to.window_began_at,
            int(keeps),
        )
        for id, token, to in requeues.values()
    ]
    ids = [(row[0],) for row in rows]
    _, returned, raised = yield (
        many(sql.LOCK_QUEUES, ids),
        many(sql.REQUEUE, rows),
        many(sql.PROMOTE, ids),
    )
    promoted(raised, effects)
    done: dict[str, Row] = {row[0]: row for row in returned}
    missed: dict[int, tuple[str, str]] = {}
    for index, (id, token, to) in requeues.items():
        row = done.get(id)
        if row is None:
            missed[index] = (id, token)
            continue
        _, lane, hint, not_before, queue = row
        effects.claimable(lane, not_before if hint == "deferred" else 0)
        effects.moved(queue)
        answers[index] = w.Returned("queued", attempt_count=to.attempt_count)
    if missed:
        refusals = yield from _refusals(
            list(missed.values()), w.Returned("conflict"), w.Returned("cancelled")
        )
        answers.update(zip(missed, refusals, strict=True))


def decide(wishes: Sequence[w.Decide], effects: Effects) -> Operation[list[Any]]:
    rows = [
        (wish.id, wish.token, wish.settle.outcome, wish.settle.reason, int(wish.has_hook))
        for wish in wishes
    ]
    ids = [(wish.id,) for wish in wishes]
    _, _, recorded, raised = yield (
        many(sql.LOCK_QUEUES, ids),
        one(sql.BUMP_SETTLE_GROUP),
        many(sql.DECIDE, rows),
        many(sql.PROMOTE, ids),
    )
    promoted(raised, effects)
    done: dict[str, Settle] = {}
    for id, queue, state, outcome, reason in recorded:
        done[id] = Settle(Outcome(outcome), reason)
        effects.moved(queue, id if state == "settled" else None)
    missed = [wish.id for wish in wishes if wish.id not in done]
    facts: dict[str, ClaimFacts] = {}
    lease_now = 0
    trouble: StoreUnavailable | None = None
    if missed:
        looked = yield from _or_error(_facts(missed))
        if isinstance(looked, StoreUnavailable):
            trouble = looked
        else:
            facts, lease_now = looked
    answers: list[Any] = []
    for wish in wishes:
        found = facts.get(wish.id)
        if wish.id in done:
            answers.append(w.Recorded("recorded", done[wish.id]))
        elif trouble is not None:
            answers.append(trouble)
        elif found is not None and rules.is_held(found, wish.token, lease_now):
            answers.append(_locked(wish.id))
        else:
            status = rules.late_decision(found, wish.token, wish.settle)
            stands = None
            if status == "replayed" and found is not None and found.outcome is not None:
                stands = Settle(found.outcome, found.reason)
            answers.append(w.Recorded(status, stands))
    return answers


def finish_completing(
    wishes: Sequence[w.FinishCompleting], effects: Effects
) -> Operation[list[Any]]:
    ids = [(wish.id,) for wish in wishes]
    _, _, finished, raised = yield (
        many(sql.LOCK_QUEUES, ids),
        one(sql.BUMP_SETTLE_GROUP),
        many(sql.FINISH, [(wish.id, wish.token) for wish in wishes]),
        many(sql.PROMOTE, ids),
    )
    promoted(raised, effects)
    for id, queue in finished:
        effects.moved(queue, id)
    done = {row[0] for row in finished}
    missed = [wish.id for wish in wishes if wish.id not in done]
    if not missed:
        return ["settled"] * len(wishes)
    looked = yield from _or_error(_facts(missed))
    answers: list[Any] = []
    for wish in wishes:
        if wish.id in done:
            answers.append("settled")
        elif isinstance(looked, StoreUnavailable):
            answers.append(looked)
        else:
            found = looked[0].get(wish.id)
            if found is not None and found.token == wish.token and found.state == "completing":
                # A renewal that is under way, for one, holds the row for a moment.
                answers.append(_locked(wish.id))
            else:
                answers.append(rules.late_finish(found, wish.token))
    return answers


def take_completing(
    wishes: Sequence[w.TakeCompleting], effects: Effects
) -> Operation[list[CompletingJob | None]]:
    answers: list[CompletingJob | None] = []
    for wish in wishes:
        rows: Rows = yield one(
            sql.TAKE_COMPLETING,
            token=check_text(wish.token, "token"),
            owner=check_text(wish.owner, "owner"),
            lease=wish.lease,
            lanes=None if wish.lanes is None else json.dumps(wish.lanes),
            without=json.dumps(wish.without),
            dead=json.dumps(wish.dead),
        )
        answers.append((yield from _completing_or_settled(wish, rows, effects)))
    return answers


def _completing_or_settled(
    wish: w.TakeCompleting, rows: Rows, effects: Effects
) -> Operation[CompletingJob | None]:
    """The completion that was taken; one that cannot be read settles without its hook."""
    if not rows:
        return None
    try:
        return completing_job(rows[0])
    except StoreInvalid:
        # Its outcome is durable already, and there is no job to give to the hook.
        finishing = w.FinishCompleting(rows[0][0], wish.token)
        yield from finish_completing([finishing], effects)
    (job,) = yield from take_completing([wish], effects)
    return job


# -- the supervisor's -----------------------------------------------------------------------------


def next_running_claim(
    wishes: Sequence[w.NextRunningClaim], effects: Effects
) -> Operation[list[RunningJob | None]]:
    answers: list[RunningJob | None] = []
    for wish in wishes:
        after = wish.after
        while True:
            rows: Rows = yield one(sql.NEXT_RUNNING_CLAIM, after=after, dead=json.dumps(wish.dead))
            found = _disappeared(rows[0]) if rows else None
            if found is not None or not rows:
                break
            after = rows[0][SEQUENCE]
        answers.append(found)
    return answers


def _disappeared(row: Row) -> RunningJob | None:
    """The job in the row; None if that cannot be told, which must not hide those behind it."""
    try:
        return running_job(row)
    except StoreInvalid:
        pass
    try:
        # Without its payload it can be decided about all the same.
        return running_job(without_payload(row))
    except StoreInvalid:
        return None


def reconcile(wishes: Sequence[w.Reconcile], effects: Effects) -> Operation[list[w.Reconciled]]:
    answers: list[w.Reconciled] = []
    for wish in wishes:
        answers.append((yield from _reconcile_one(wish, effects)))
    return answers


def _reconcile_one(wish: w.Reconcile, effects: Effects) -> Operation[w.Reconciled]:
    rows: Rows
    clock: Rows
    rows, clock = yield (
        one(sql.READ_DISAPPEARED, id=wish.id, token=wish.token, dead=json.dumps(wish.dead)),
        one(sql.READ_CLOCK),
    )
    if not rows:
        return w.Reconciled("untouched")
    verdict = rules.disappearance(claim_facts(rows[0]), clock[0][0])
    if isinstance(verdict, Settle):
        settles = [Settling(wish.id, wish.token, verdict, yields=True)]
        settled = yield from _settle(settles, effects)
        if wish.id not in settled:
            return w.Reconciled("untouched", verdict)
        return w.Reconciled("settled", settled[wish.id])
    answers: dict[int, Any] = {}
    yield from _requeue({0: (wish.id, wish.token, verdict)}, answers, effects, keeps=True)
    is_queued = isinstance(answers[0], w.Returned) and answers[0].status == "queued"
    return w.Reconciled("queued" if is_queued else "untouched")


Kind = Callable[[Any, Effects], Operation[list[Any]]]

OPERATIONS: dict[type[w.Wish[Any]], Kind] = {
    w.Renew: renew,
    w.Inspect: inspect,
    w.ReserveAttempt: reserve_attempt,
    w.Decide: decide,
    w.FinishCompleting: finish_completing,
    w.RetryJob: retry_job,
    w.HandOff: hand_off,
    w.Cancel: cancel,
    w.FailLane: fail_lane,
    w.SettleCancelled: settle_cancelled,
    w.Reconcile: reconcile,
    w.PurgeQueue: purge_queue,
    w.ProtectSettled: upkeep.protect_settled,
    w.ReleaseSettled: upkeep.release_settled,
    w.Prune: upkeep.prune,
    w.RepairLost: upkeep.repair_lost,
    w.Remove: upkeep.remove,
    w.Import: upkeep.import_,
    w.Enqueue: enqueue,
    w.EnqueueMany: enqueue_many,
    w.EnqueueSelect: enqueue_select,
    w.TakeCompleting: take_completing,
    w.Claim: claim,
    w.NextRunningClaim: next_running_claim,
    w.Export: upkeep.export,
    w.CheckRows: upkeep.check_rows,
    w.ReadExpired: upkeep.read_expired,
    w.ReadLost: upkeep.read_lost,
    w.ReadWaitingOnTime: upkeep.read_waiting_on_time,
    w.ReadUnserved: upkeep.read_unserved,
    w.ReadPlace: upkeep.read_place,
    w.Read: read,
    w.ReadQueueHead: read_queue_head,
    w.ReadLatestSettled: read_latest_settled,
    w.ReadSettled: read_settled,
    w.ReadJobs: read_jobs,
    w.ReadCounts: read_counts,
    w.ReadOwners: read_owners,
    w.ReadWakeState: read_wake_state,
}
"""Which operation answers which wish, in the order in which one exchange runs them.

Renewals first, for nothing may delay them into refusal; then what frees queues; then admissions;
claims late, so that they see all of it; reads last, so that they see what the batch wrote.
"""

ORDER = {kind: position for position, kind in enumerate(OPERATIONS)}

KINDS = list(OPERATIONS.values())

READS = frozenset(
    {
        w.CheckRows,
        w.Export,
        w.Inspect,
        w.ReadExpired,
        w.ReadLost,
        w.ReadPlace,
        w.ReadUnserved,
        w.ReadWaitingOnTime,
        w.NextRunningClaim,
        w.Read,
        w.ReadQueueHead,
        w.ReadLatestSettled,
        w.ReadSettled,
        w.ReadJobs,
        w.ReadCounts,
        w.ReadOwners,
        w.ReadWakeState,
    }
)
"""Wishes that need no write transaction."""


def plan(asked: Sequence[w.Wish[Any]]) -> list[tuple[Kind, list[int]]]:
    """Which operations answer these wishes, and the positions of the wishes each answers.

    Two wishes of one kind about the same job go to two runs of the operation, one after the
    other: a set-wise statement could not tell them apart. So does each statement of the caller's
    own, which might end its transaction, and must not end that of others.
    """
    steps: dict[tuple[int, int], list[int]] = {}
    seen: dict[tuple[type, Any], int] = {}
    for position, wish in enumerate(asked):
        kind = type(wish)
        turn = 0
        subject = kind if kind is w.EnqueueSelect else getattr(wish, "id", None)
        if subject is not None:
            turn = seen.get((kind, subject), 0)
            seen[kind, subject] = turn + 1
        steps.setdefault((ORDER[kind], turn), []).append(position)
    return [(KINDS[order], steps[order, turn]) for order, turn in sorted(steps)]
