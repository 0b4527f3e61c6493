"""The operations that look after the table: history, moving, and looking for trouble.

As those of `_operations`, but rare and so plain: one row, or one page, at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

from . import _rules as rules
from . import _statements as sql
from . import _upkeep_statements as texts
from . import _wishes as w
from ._calls import Effects, Operation, Rows, many, one, promoted
from ._errors import StoreInvalid
from ._model import check_text
from ._rows import stored_job

LAST_NUMBER = 2**63 - 1
"""Beyond every instant and every number that a row can have."""

# -- history --------------------------------------------------------------------------------------


def prune(wishes: Sequence[w.Prune], effects: Effects) -> Operation[list[int]]:
    answers: list[int] = []
    for wish in wishes:
        scope = "lane" if wish.lane is not None else "queue" if wish.queue is not None else None
        names = {"lane": wish.lane, "queue": wish.queue}
        edge = (LAST_NUMBER, LAST_NUMBER)
        if wish.keep is not None:
            edges: Rows = yield one(texts.READ_PRUNE_EDGE[scope], keep=wish.keep, **names)
            if not edges:
                answers.append(0)
                continue
            edge = edges[0]
        _, pruned = yield (
            one(texts.SHARE_READERS),
            one(
                texts.PRUNE[scope],
                before=LAST_NUMBER if wish.before is None else wish.before,
                settled_group=edge[0],
                sequence=edge[1],
                limit=wish.limit,
                **names,
            ),
        )
        answers.append(pruned[0][0])
    return answers


def protect_settled(wishes: Sequence[w.ProtectSettled], effects: Effects) -> Operation[list[None]]:
    for wish in wishes:
        group, sequence = rules.feed_position(wish.after)
        name = check_text(wish.name, "name")
        yield (
            one(texts.LOCK_READERS),
            one(texts.PROTECT_SETTLED, name=name, settled_group=group, sequence=sequence),
        )
    return [None] * len(wishes)


def release_settled(wishes: Sequence[w.ReleaseSettled], effects: Effects) -> Operation[list[bool]]:
    answers: list[bool] = []
    for wish in wishes:
        rows: Rows = yield one(texts.RELEASE_SETTLED, name=check_text(wish.name, "name"))
        answers.append(rows[0][0] > 0)
    return answers


# -- moving to another database -------------------------------------------------------------------


def export(wishes: Sequence[w.Export], effects: Effects) -> Operation[list[w.Exported]]:
    answers: list[w.Exported] = []
    for wish in wishes:
        rows: Rows = yield one(texts.EXPORT, after=wish.after, limit=wish.limit)
        last = rows[-1][-1] if rows else wish.after
        answers.append(w.Exported([tuple(row[:-1]) for row in rows], last))
    return answers


def import_(wishes: Sequence[w.Import], effects: Effects) -> Operation[list[int]]:
    answers: list[int] = []
    for wish in wishes:
        rows: Rows = yield many(texts.IMPORT, wish.rows)
        imported = {row[0] for row in rows}
        for id, queue, lane, _, not_before, *_ in wish.rows:
            if id in imported:
                effects.claimable(lane, not_before)
                effects.moved(queue)
        # There may be completions to take over, and cancelled ones to settle.
        effects.cancelled |= bool(imported)
        answers.append(len(imported))
    return answers


def remove(wishes: Sequence[w.Remove], effects: Effects) -> Operation[list[int]]:
    answers: list[int] = []
    for wish in wishes:
        ids = [(id,) for id in wish.ids]
        facts: Rows = yield many(sql.READ_FACTS, ids)
        queues = sorted({row[1] for row in facts if row[3] in ("queued", "completing")})
        # Somebody may have queued up behind them meanwhile.
        _, removed, *raised = yield (
            many(sql.LOCK_QUEUES, ids),
            many(texts.REMOVE, ids),
            *[one(sql.PROMOTE_QUEUE, queue=queue) for queue in queues],
        )
        for queue, rows in zip(queues, raised, strict=True):
            effects.moved(queue)
            promoted(rows, effects)
        answers.append(removed[0][0])
    return answers


# -- looking for trouble --------------------------------------------------------------------------


def check_rows(wishes: Sequence[w.CheckRows], effects: Effects) -> Operation[list[w.Checked]]:
    answers: list[w.Checked] = []
    for wish in wishes:
        place = {"after": wish.after, "limit": wish.limit}
        ends, rows = yield (
            one(texts.READ_PAGE_END, **place),
            one(texts.READ_UNSETTLED, **place),
        )
        (end,) = ends[0]
        faults: list[tuple[str, str]] = []
        for row in rows:
            try:
                stored_job(row[:-1])
            except StoreInvalid as error:
                faults.append((str(row[0]), str(error)))
            else:
                if not row[-1]:
                    text = f"the row of job {row[0]!r} breaks the rules of its table"
                    faults.append((row[0], text))
        answers.append(w.Checked(faults, len(rows), end))
    return answers


def read_expired(
    wishes: Sequence[w.ReadExpired], effects: Effects
) -> Operation[list[list[w.Trouble]]]:
    answers: list[list[w.Trouble]] = []
    for wish in wishes:
        rows: Rows = yield one(texts.READ_EXPIRED, limit=wish.limit)
        answers.append([w.Trouble(row[0], row[1], row[2], row[3], row[4] / 1000) for row in rows])
    return answers


def read_waiting_on_time(
    wishes: Sequence[w.ReadWaitingOnTime], effects: Effects
) -> Operation[list[list[w.Trouble]]]:
    answers: list[list[w.Trouble]] = []
    for wish in wishes:
        rows: Rows = yield one(texts.READ_WAITING_ON_TIME, limit=wish.limit)
        answers.append(
            [w.Trouble(row[0], row[1], row[2], "queued", row[3] / 1000, row[4]) for row in rows]
        )
    return answers


def read_unserved(
    wishes: Sequence[w.ReadUnserved], effects: Effects
) -> Operation[list[list[tuple[str, int]]]]:
    answers: list[list[tuple[str, int]]] = []
    for wish in wishes:
        rows: Rows = yield one(texts.READ_UNSERVED, limit=wish.limit)
        answers.append([(lane, count) for lane, count in rows])
    return answers


def read_place(wishes: Sequence[w.ReadPlace], effects: Effects) -> Operation[list[w.Place | None]]:
    answers: list[w.Place | None] = []
    for wish in wishes:
        rows: Rows = yield one(texts.READ_PLACE, id=wish.id)
        if not rows:
            answers.append(None)
            continue
        due_in, lease_for, in_queue, in_lane, running = rows[0]
        lease = None if lease_for is None else lease_for / 1000
        answers.append(w.Place(due_in / 1000, lease, in_queue, in_lane, running))
    return answers


def read_lost(wishes: Sequence[w.ReadLost], effects: Effects) -> Operation[list[w.Lost]]:
    answers: list[w.Lost] = []
    for wish in wishes:
        rows: Rows = yield one(texts.FIND_LOST, after=wish.after, limit=wish.limit)
        lost = [(id, queue) for queue, id in rows if id is not None]
        answers.append(w.Lost(lost, rows[-1][0] if len(rows) == wish.limit else None))
    return answers


def repair_lost(wishes: Sequence[w.RepairLost], effects: Effects) -> Operation[list[int]]:
    answers: list[int] = []
    for wish in wishes:
        _, raised = yield (
            one(sql.LOCK_QUEUE, queue=wish.queue),
            one(sql.PROMOTE_QUEUE, queue=wish.queue),
        )
        promoted(raised, effects)
        # One that is claimable already is told of, but was not lost.
        answers.append(sum(bool(row[-1]) for row in raised))
    return answers
