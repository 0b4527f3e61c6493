"""What must be true of the jobs table at every moment, whatever has happened before.

Written apart from the statements and the schema's own checks, so that a fault there shows here.
"""

from __future__ import annotations

import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from os import PathLike
from typing import Any, cast

from .._errors import StoreInvalid
from .._model import INSTANT_LIMIT, PRIORITY_LIMIT, REASON_LIMIT, TEXT_LIMIT, Outcome
from .._payload import decode_payload
from .._store import Store
from ._faulty import FaultyStore

Database = sqlite3.Connection | Store | str | PathLike[str]

_COLUMNS = (
    "sequence, id, queue, lane, priority, not_before, max_recoveries, recovery_window, state,"
    " hint, token, owner, lease_until, attempt_count, attempt_open, recovery_count,"
    " window_began_at, cancellation_id, outcome, reason, settled_group, settled_at, payload"
)

Row = Mapping[str, Any]


def check_invariants(database: Database) -> None:
    """Raise `AssertionError`, naming everything that is wrong with the jobs in ``database``.

    Takes a store, a `sqlite3.Connection`, or the path of a file, and reads the whole table on the
    calling thread. In a file it looks at what is committed.

    No queue has two running or completing jobs. No first job of a free queue is hidden from
    claims. Every row is one that the grammar of states allows: a running one has an owner, a token
    and a lease. Ids, tokens of live claims and cancellation ids are unique, limits are kept,
    budgets are not overspent, payloads are JSON.
    """
    if problems := broken_invariants(database):
        raise AssertionError(f"{len(problems)} invariants broken:\n" + "\n".join(problems))


def broken_invariants(database: Database) -> list[str]:
    """What `check_invariants` would complain about; empty if all is well."""
    if isinstance(database, FaultyStore):
        return broken_invariants(database.store)
    if isinstance(database, Store):
        path = getattr(database, "path", None)
        if path is not None:
            return broken_invariants(cast("PathLike[str]", path))
        engine = getattr(database, "_engine", None)
        if engine is None:
            raise TypeError(f"{type(database).__name__} has no SQLite connection to look into")
        return _of_connection(engine.connection)
    if isinstance(database, sqlite3.Connection):
        return _of_connection(database)
    with closing(sqlite3.connect(database)) as connection:
        return _of_connection(connection)


def _of_connection(connection: sqlite3.Connection) -> list[str]:
    cursor = connection.cursor()
    cursor.row_factory = None
    names: Sequence[str] = _COLUMNS.split(", ")
    # One statement, so one snapshot.
    cursor.execute(f"select {_COLUMNS} from watchdog_jobs order by sequence")  # noqa: S608
    rows: list[Row] = [dict(zip(names, row, strict=True)) for row in cursor]
    problems = broken_rows(rows)
    (highest,) = cursor.execute(
        "select value from watchdog_meta where name = 'settle_group'"
    ).fetchone()
    problems += [
        f"job {row['id']!r} settled in group {row['settled_group']}, beyond the counter {highest}"
        for row in rows
        if row["settled_group"] is not None and row["settled_group"] > highest
    ]
    (verdict, *_), *more = cursor.execute("pragma integrity_check(20)").fetchall()
    if verdict != "ok":
        problems += [f"SQLite: {line}" for line in (verdict, *[row[0] for row in more])]
    return problems


def broken_rows(rows: Iterable[Row]) -> list[str]:
    """The same for rows that were read from any database: mappings with all columns.

    Hints are judged as on SQLite, where each is exact at the end of every transaction.
    """
    problems: list[str] = []
    queues: dict[str, list[Row]] = defaultdict(list)
    seen: dict[str, Counter[Any]] = {name: Counter() for name in ("id", "cancellation_id", "live")}
    for row in rows:
        problems += [f"job {row['id']!r:.80}: {problem}" for problem in _of_row(row)]
        queues[row["queue"]].append(row)
        for name in ("id", "cancellation_id"):
            seen[name][row[name]] += row[name] is not None
        if row["state"] in ("running", "completing"):
            seen["live"][row["token"]] += 1
    for name, counted in seen.items():
        what = "token of a live claim" if name == "live" else name
        problems += [f"{what} {value!r} is there twice" for value in counted if counted[value] > 1]
    for queue, members in queues.items():
        problems += [f"queue {queue!r:.80}: {problem}" for problem in _of_queue(members)]
    return problems


def _of_queue(rows: list[Row]) -> list[str]:
    live = [row for row in rows if row["state"] in ("running", "completing")]
    if len(live) > 1:
        return [f"{len(live)} jobs run at once: {[row['id'] for row in live]}"]
    # One whose priority makes no sense is complained about elsewhere.
    waiting = [row for row in rows if row["state"] == "queued" and type(row["priority"]) is int]
    if live or not waiting:
        return []
    head = min(waiting, key=lambda row: (-row["priority"], row["sequence"]))
    if head["hint"] == "lowered":
        return [f"its head {head['id']!r} is lowered and nothing runs: nobody will find it"]
    return []


def _of_row(row: Row) -> list[str]:
    problems: list[str] = []

    def wrong(what: str) -> None:
        problems.append(what)

    state, outcome = row["state"], row["outcome"]
    is_live = state in ("running", "completing")
    if state not in ("queued", "running", "completing", "settled"):
        wrong(f"state is {state!r}")
    for name in ("id", "queue", "lane"):
        if not _is_text(row[name], TEXT_LIMIT):
            wrong(f"{name} is {row[name]!r:.80}")
    for name in ("token", "owner", "cancellation_id"):
        if row[name] is not None and not _is_text(row[name], TEXT_LIMIT):
            wrong(f"{name} is {row[name]!r:.80}")
    for name in ("token", "owner", "lease_until"):
        if is_live and row[name] is None:
            wrong(f"it is {state} without {name}")
        # A settled job keeps its token, by which a late answer is known.
        if not is_live and row[name] is not None and (name != "token" or state == "queued"):
            wrong(f"it is {state} with {name}")
    if row["hint"] not in (("ready", "lowered", "deferred") if state == "queued" else (None,)):
        wrong(f"it is {state} with hint {row['hint']!r}")
    if (outcome is not None) != (state in ("completing", "settled")):
        wrong(f"it is {state} with outcome {outcome!r}")
    if outcome is not None and outcome not in list(Outcome):
        wrong(f"outcome is {outcome!r}")
    if (row["reason"] is not None) != (outcome in ("failed", "interrupted")):
        wrong(f"outcome {outcome!r} with reason {row['reason']!r}")
    if row["reason"] is not None and not _is_text(row["reason"], REASON_LIMIT):
        wrong(f"reason is {row['reason']!r:.80}")
    for name in ("settled_group", "settled_at"):
        if (row[name] is not None) != (state == "settled"):
            wrong(f"it is {state} with {name} {row[name]!r}")
    if not _is_integer(row["priority"], -PRIORITY_LIMIT, PRIORITY_LIMIT):
        wrong(f"priority is {row['priority']!r}")
    for name, least in {
        "not_before": 0,
        "sequence": 1,
        "attempt_count": 0,
        "recovery_count": 0,
    }.items():
        if not _is_integer(row[name], least, INSTANT_LIMIT):
            wrong(f"{name} is {row[name]!r}")
    for name in ("lease_until", "settled_group", "settled_at", "max_recoveries"):
        if row[name] is not None and not _is_integer(row[name], 0, 2**63 - 1):
            wrong(f"{name} is {row[name]!r}")
    most = row["max_recoveries"]
    if row["recovery_count"] and (most is None or row["recovery_count"] > most):
        wrong(f"{row['recovery_count']} recoveries of {most} are spent")
    if row["attempt_open"] and not (state == "running" and row["attempt_count"] > 0):
        wrong(f"it is {state} with an open attempt")
    try:
        if not isinstance(row["payload"], str):
            raise TypeError(f"payload is {row['payload']!r:.80}")
        decode_payload(row["payload"])
    except (StoreInvalid, TypeError) as error:
        wrong(str(error))
    return problems


def _is_text(value: Any, limit: int) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= limit


def _is_integer(value: Any, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high
