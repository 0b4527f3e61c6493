"""No hot statement walks over the table, whatever lies in it."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator
from typing import Any

import pytest

from trio_watchdog import _statements as sql
from trio_watchdog import _wishes as w
from trio_watchdog._model import Job, Outcome, RetryPolicy
from trio_watchdog._rules import Settle
from trio_watchdog._sqlite import DIALECT, Engine, prepare
from trio_watchdog._wishes import Wish
from trio_watchdog.testing import DurableClock, check_invariants

MANY = 20_000
LEASE = 60_000

SHAPES = ("free", "blocked and ready", "blocked and lowered", "deferred", "cancelled", "one by one")


def table(shape: str, count: int, clock: DurableClock) -> sqlite3.Connection:
    """As many settled as waiting jobs, and a few of every other kind.

    The waiting ones are of lane `noise`: in queues of their own, or in one whose head runs.
    """
    connection = sqlite3.connect(":memory:", isolation_level=None)
    prepare(connection, "memory")
    connection.execute("begin")
    insert = """insert into watchdog_jobs (id, queue, lane, priority, not_before, state, hint,
        outcome, settled_group, settled_at, cancellation_id, payload)
        values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 'null')"""
    settled = ("settled", None, "completed")
    connection.executemany(
        insert,
        ((f"s{n}", f"sq{n % 500}", f"l{n % 50}", 0, 0, *settled, n, n, None) for n in range(count)),
    )
    connection.execute("update watchdog_meta set value = ? where name = 'settle_group'", (count,))
    blocked = shape in ("blocked and ready", "blocked and lowered", "cancelled")
    hint = {"blocked and lowered": "lowered", "deferred": "deferred"}.get(shape, "ready")
    due = clock.now() + 10**9 if shape == "deferred" else 0

    def queue(n: int) -> str:
        return "noisy" if blocked else f"wq{n % 50}" if shape == "one by one" else f"wq{n}"

    connection.executemany(
        insert,
        (
            (
                *(f"w{n}", queue(n), "noise", n % 5, due, "queued"),
                "lowered" if shape == "one by one" and n >= 50 else hint,
                *(None, None, None),
                f"c{n}" if shape == "cancelled" and n % 100 == 0 else None,
            )
            for n in range(count)
        ),
    )
    if blocked:
        connection.execute(
            """insert into watchdog_jobs (id, queue, lane, priority, not_before, state, token,
                owner, lease_until, payload)
            values ('head', 'noisy', 'elsewhere', 0, 0, 'running', 't head', 'o', ?, 'null')""",
            (clock.lease_now() + LEASE,),
        )
    connection.execute("commit")
    return connection


class Work:
    """The engine on such a table, and how many steps SQLite's machine takes."""

    def __init__(self, shape: str, count: int) -> None:
        self.clock = DurableClock()
        self.connection = table(shape, count, self.clock)
        self.engine = Engine(self.connection, self.clock)
        self.steps = 0
        self.connection.set_progress_handler(self._step, 10)

    def _step(self) -> int:
        self.steps += 10
        return 0

    def ask(self, *asked: Wish[Any]) -> list[Any]:
        answers, _ = self.engine.perform(asked)
        for answer in answers:
            assert not isinstance(answer, Exception), answer
        return answers

    def cost(self, *asked: Wish[Any]) -> int:
        before = self.steps
        self.ask(*asked)
        return self.steps - before


# -- plans ----------------------------------------------------------------------------------------

# A scan of one of these is a scan of what waits for exactly this, not of the table.
SMALL_INDEXES = {
    "watchdog_jobs_single_flight": "one entry for each running job",
    "watchdog_jobs_cancelled": "cancelled jobs that are not settled yet",
}

HOT: dict[str, tuple[str, ...]] = {
    "READ": (),
    "READ_MANY": (),
    "READ_QUEUE_HEAD": (),
    "READ_LATEST_SETTLED": (),
    "READ_SETTLED": (),
    "READ_SETTLED_LANE": (),
    "READ_FACTS": (),
    "READ_CLAIM_STATES": (),
    "READ_OWNERS": ("watchdog_jobs_single_flight",),
    # The first free one of the ready rows is usually the first; those in the way are lowered.
    "READ_WAKE_STATE": (
        "watchdog_jobs_single_flight",
        "watchdog_jobs_cancelled",
        "watchdog_jobs_ready",
    ),
    "STAGE": (),
    "CLAIM": (),
    "CLAIM_BEYOND": (),
    "READ_READY_LANES": ("watchdog_jobs_ready",),
    "READ_CLAIMED": ("watchdog_jobs_single_flight",),
    "LOWER": (),
    "PROMOTE": (),
    "PROMOTE_QUEUE": (),
    "RENEW": ("watchdog_jobs_single_flight",),
    "RESERVE": (),
    "REQUEUE": (),
    "DECIDE": (),
    "FINISH": (),
    "SETTLE": (),
    "SET_CANCELLATION": (),
    "FIND_CANCELLED": ("watchdog_jobs_cancelled",),
    "NEXT_RUNNING_CLAIM": ("watchdog_jobs_single_flight",),
    "READ_DISAPPEARED": (),
    "TAKE_COMPLETING": ("watchdog_jobs_single_flight",),
    "PURGE": (),
    "INSERT": (),
    "INSERT_MANY": (),
}


@pytest.fixture(scope="module", params=[False, True], ids=["no statistics", "analyzed"])
def planned(request: pytest.FixtureRequest) -> Iterator[Work]:
    work = Work("blocked and lowered", MANY)
    if request.param:
        work.connection.execute("analyze")
    yield work
    work.connection.close()


def test_hot_statements_are_all_there() -> None:
    assert [name for name in HOT if not hasattr(sql, name)] == []


@pytest.mark.parametrize("name", HOT)
def test_a_hot_statement_walks_over_no_table(name: str, planned: Work) -> None:
    text = DIALECT.text(getattr(sql, name))
    parameters = {
        match: json.dumps([["x"] * 8]) if match == "rows" else "[]" if match in LISTS else 1
        for match in re.findall(r"(?<!:):([a-z_]+)", text)
    }
    plan = planned.connection.execute(f"explain query plan {text}", parameters).fetchall()
    lines = [row[3] for row in plan]
    own = {line.split()[-1] for line in lines if line.startswith(("CO-ROUTINE", "MATERIALIZE"))}
    scans = [line for line in lines if is_walk(line, own)]
    allowed = HOT[name]
    assert [line for line in scans if not any(index in line for index in allowed)] == [], lines
    # And sorts nothing but what it has found.
    assert not any("AUTOMATIC" in line for line in lines), lines


LISTS = ("lanes", "without", "dead")


ALIASES = ("watchdog_jobs", "x", "j", "q", "r", "b", "o", "p", "l")
"""Names by which the statements call the table."""


def is_walk(line: str, own: set[str]) -> bool:
    """Whether a line of a plan means every row of the table, or every entry of an index.

    ``own`` are names that the plan gives to what the statement has put together itself.
    """
    found = re.match(r"(SCAN|SEARCH) (\w+)(.*)", line)
    if found is None or found[2] not in ALIASES or found[2] in own:
        return False
    # A range of row ids is the table in the order of admission, settled rows and all.
    return found[1] == "SCAN" or "(rowid>?)" in found[3] or "(rowid<?)" in found[3]


# -- work -----------------------------------------------------------------------------------------


def operations(work: Work) -> dict[str, int]:
    """The steps of each hot operation, on jobs that have nothing to do with the noise."""
    cost: dict[str, int] = {}
    policy = RetryPolicy(9, delay=0)
    done = Settle(Outcome.COMPLETED)
    cost["enqueue"] = work.cost(w.Enqueue(Job("mine", id="mine", queue="mine")))
    cost["enqueue behind"] = work.cost(w.Enqueue(Job("mine", id="next", queue="mine")))
    cost["claim"] = work.cost(w.Claim("mine", "t1", "o", LEASE, counts=False))
    cost["claim nothing"] = work.cost(w.Claim("mine", "t2", "o", LEASE))
    cost["reserve"] = work.cost(w.ReserveAttempt("mine", "t1", policy))
    cost["renew"] = work.cost(w.Renew("mine", "t1", LEASE))
    cost["renew in vain"] = work.cost(w.Renew("mine", "t2", LEASE))
    cost["inspect"] = work.cost(w.Inspect("mine", "t1"))
    cost["retry"] = work.cost(w.RetryJob("mine", "t1", policy))
    work.ask(w.Claim("mine", "t3", "o", LEASE))
    cost["hand off"] = work.cost(w.HandOff("mine", "t3"))
    work.ask(w.Claim("mine", "t4", "o", LEASE))
    cost["decide"] = work.cost(w.Decide("mine", "t4", done))
    cost["decide again"] = work.cost(w.Decide("mine", "t4", done))
    work.ask(w.Claim("mine", "t5", "o", LEASE))
    work.ask(w.Decide("next", "t5", done, has_hook=True))
    cost["finish"] = work.cost(w.FinishCompleting("next", "t5"))
    cost["take completing"] = work.cost(w.TakeCompleting("t6", "o", LEASE))
    cost["next running claim"] = work.cost(w.NextRunningClaim())
    work.ask(w.Enqueue(Job("mine", id="third", queue="mine")))
    cost["cancel"] = work.cost(w.Cancel("third", "my cancellation"))
    cost["wake state"] = work.cost(w.ReadWakeState())
    cost["read head"] = work.cost(w.ReadQueueHead("mine"))
    cost["latest settled"] = work.cost(w.ReadLatestSettled("mine"))
    cost["feed"] = work.cost(w.ReadSettled(5))
    cost["feed of a lane"] = work.cost(w.ReadSettled(5, None, "mine"))
    cost["owners"] = work.cost(w.ReadOwners())
    cost["prune"] = work.cost(w.Prune(10, limit=5))
    work.ask(w.Enqueue(Job("other", id="other", queue="other")))
    cost["purge"] = work.cost(w.PurgeQueue("other"))
    return cost


@pytest.mark.parametrize("shape", SHAPES)
def test_the_work_does_not_grow_with_what_waits_and_what_was_settled(shape: str) -> None:
    few, many = Work(shape, 400), Work(shape, MANY)
    for work in (few, many):
        # The noise has a lane of its own, which looks, and lowers what is in its way.
        for _ in range(MANY // 1000 + 2):
            work.ask(w.Claim("noise", f"noise {work.steps}", "o", LEASE))
    small, large = operations(few), operations(many)
    grown = {
        name: (small[name], large[name]) for name in small if large[name] > 2 * small[name] + 400
    }
    assert grown == {}
    for work in (few, many):
        check_invariants(work.connection)
        work.connection.close()


def test_a_noisy_lane_finds_its_free_job_and_each_row_is_in_the_way_once() -> None:
    work = Work("blocked and ready", MANY)
    work.ask(w.Enqueue(Job("noise", id="free", queue="free", priority=-1)))
    spent: list[int] = []
    while True:
        before = work.steps
        (claimed,) = work.ask(w.Claim("noise", "t free", "o", LEASE))
        spent.append(work.steps - before)
        if claimed.job is not None:
            break
        assert claimed.more
    assert claimed.job.id == "free"
    # A thousand at a time, so that nobody's renewal has to wait for twenty thousand.
    assert len(spent) <= MANY // 1000 + 1
    assert max(spent) < 2_000_000
    # From now on they are in nobody's way.
    work.ask(w.HandOff("free", "t free"))
    assert work.cost(w.Claim("noise", "t again", "o", LEASE)) < 5_000
    check_invariants(work.connection)
    work.connection.close()


def test_a_queue_of_thousands_is_drained_at_a_flat_cost() -> None:
    work = Work("free", 10)
    work.ask(w.EnqueueMany([Job("mine", queue="mine", priority=n % 3) for n in range(5_000)]))
    spent: list[int] = []
    for n in range(400):
        before = work.steps
        claimed = work.ask(w.Claim("mine", f"t{n}", "o", LEASE))[0]
        while claimed.more:
            claimed = work.ask(w.Claim("mine", f"t{n}", "o", LEASE))[0]
        work.ask(w.Decide(claimed.job.id, f"t{n}", Settle(Outcome.COMPLETED)))
        spent.append(work.steps - before)
    # The first claims lower what came in one batch; then each costs the same.
    late = sorted(spent[50:])
    assert late[-1] < 3 * late[0]
    work.connection.close()


def test_thousands_that_fall_due_at_once_are_staged_in_portions() -> None:
    work = Work("deferred", MANY)
    work.clock.advance(10**6 + 1)
    first = work.cost(w.Claim("noise", "t", "o", LEASE))
    # Nowhere near the twenty thousand, which would be a million steps.
    assert first < 600_000
    work.connection.close()
