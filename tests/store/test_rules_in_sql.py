"""Where SQL repeats a rule for the sake of speed, the two agree."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from typing import Any

import pytest
from attrs import evolve
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from trio_watchdog import _rules as rules
from trio_watchdog import _statements as sql
from trio_watchdog import _wishes as w
from trio_watchdog._errors import InvalidJob, StoreInvalid
from trio_watchdog._model import (
    INSTANT_LIMIT,
    PRIORITY_LIMIT,
    Outcome,
    Recovery,
    RetryPolicy,
    check_integer,
    check_reason,
    check_text,
    to_milliseconds,
)
from trio_watchdog._rows import FACT_COLUMNS, JOB_COLUMNS, claim_facts, stored_job
from trio_watchdog._rules import ClaimFacts, Settle
from trio_watchdog._sqlite import Engine, prepare
from trio_watchdog.testing import DurableClock, broken_rows

IS_FULL = os.environ.get("WATCHDOG_TEST_FULL", "0") not in ("", "0")

agree = settings(
    max_examples=200 if IS_FULL else 100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

COLUMNS = tuple(
    column
    for line in (
        "id queue lane priority not_before max_recoveries recovery_window state hint token owner",
        "lease_until attempt_count attempt_open recovery_count window_began_at cancellation_id",
        "outcome reason settled_group settled_at payload",
    )
    for column in line.split()
)

QUEUED: dict[str, Any] = {
    **dict.fromkeys(COLUMNS),
    "id": "j",
    "queue": "q",
    "lane": "a",
    "priority": 0,
    "not_before": 0,
    "state": "queued",
    "hint": "ready",
    "attempt_count": 0,
    "attempt_open": 0,
    "recovery_count": 0,
    "payload": "null",
}


class Table:
    """The engine on a table whose rows are written by hand."""

    def __init__(self) -> None:
        self.connection = sqlite3.connect(":memory:", isolation_level=None)
        prepare(self.connection, "memory")
        self.clock = DurableClock()
        self.engine = Engine(self.connection, self.clock)

    def insert(self, *, unchecked: bool = False, **changes: Any) -> None:
        row = {**QUEUED, **changes}
        self.connection.execute(f"pragma ignore_check_constraints = {int(unchecked)}")
        self.connection.execute(
            f"insert into watchdog_jobs ({', '.join(row)})"
            f" values ({', '.join(f':{name}' for name in row)})",
            row,
        )

    def only(self, **changes: Any) -> None:
        self.connection.execute("delete from watchdog_jobs")
        self.insert(**changes)

    def facts(self) -> ClaimFacts:
        (row,) = self.connection.execute(f"select {FACT_COLUMNS} from watchdog_jobs").fetchall()
        return claim_facts(row)

    def ask(self, wish: w.Wish[Any]) -> Any:
        (answer,), _ = self.engine.perform([wish])
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def table() -> Iterator[Table]:
    table = Table()
    yield table
    table.connection.close()


# -- who holds a claim ----------------------------------------------------------------------------

tokens = st.sampled_from(("ours", "other"))
ticks = st.sampled_from((-3_600_000, -1, 0, 1, 3_600_000))
cancellations = st.sampled_from((None, "c"))


@st.composite
def claims(draw: st.DrawFn) -> dict[str, Any]:
    """A row in any state, with a lease around the present."""
    state = draw(st.sampled_from(("queued", "running", "running", "completing", "settled")))
    row: dict[str, Any] = {"state": state, "cancellation_id": draw(cancellations)}
    if state != "queued":
        row |= {"hint": None, "token": draw(tokens)}
    if state in ("running", "completing"):
        row |= {"owner": draw(st.sampled_from(("alive", "dead"))), "lease_until": draw(ticks)}
    if state in ("completing", "settled"):
        row["outcome"] = draw(st.sampled_from([str(outcome) for outcome in Outcome]))
        if row["outcome"] in ("failed", "interrupted"):
            row["reason"] = "it broke"
    if state == "settled":
        row |= {"settled_group": 0, "settled_at": 0}
    if state == "running":
        row["attempt_open"] = draw(st.integers(0, 1))
    row["attempt_count"] = draw(st.integers(int(row.get("attempt_open", 0)), 4))
    row["max_recoveries"] = draw(st.sampled_from((None, 0, 1, 2)))
    if row["max_recoveries"] is not None:
        row["recovery_count"] = draw(st.integers(0, row["max_recoveries"]))
        if row["recovery_count"]:
            row["window_began_at"] = draw(st.sampled_from((-10_001, -10_000, -9_999, 0)))
        row["recovery_window"] = draw(st.sampled_from((None, 10_000)))
    return row


def around_now(table: Table, row: dict[str, Any]) -> dict[str, Any]:
    """The row with its instants counted from the table's present."""
    now = table.clock.lease_now()
    return {
        name: value + now if name in ("lease_until", "window_began_at") else value
        for name, value in row.items()
    }


@agree
@given(row=claims())
def test_sql_holds_a_claim_when_the_rule_does(table: Table, row: dict[str, Any]) -> None:
    table.only(**around_now(table, row))
    facts, now = table.facts(), table.clock.lease_now()
    is_held = rules.is_held(facts, "ours", now)
    # A completion is held as long as its lease, too; the rule speaks of running jobs only.
    is_kept = is_held or (
        facts.state == "completing" and rules.is_held(evolve(facts, state="running"), "ours", now)
    )
    for wish in (w.Inspect("j", "ours"), w.Renew("j", "ours", 5)):
        renewal = table.ask(wish)
        assert (renewal.status == "held") == is_kept
        assert renewal.cancellation_requested == (is_kept and facts.cancellation_id is not None)
        assert renewal.settled_as_failed == (
            facts.state == "settled" and facts.token == "ours" and facts.outcome == "failed"
        )


@agree
@given(row=claims(), has_hook=st.booleans(), reason=st.sampled_from((None, "it broke", "other")))
def test_sql_takes_a_decision_when_the_rule_does(
    table: Table, row: dict[str, Any], has_hook: bool, reason: str | None
) -> None:
    table.only(**around_now(table, row))
    facts = table.facts()
    wanted = Settle(Outcome.COMPLETED) if reason is None else Settle(Outcome.FAILED, reason)
    recorded = table.ask(w.Decide("j", "ours", wanted, has_hook))
    if not rules.is_held(facts, "ours", table.clock.lease_now()):
        assert recorded.status == rules.late_decision(facts, "ours", wanted)
        assert table.facts() == facts
        return
    stands = wanted if facts.cancellation_id is None else Settle(Outcome.CANCELLED)
    assert recorded == w.Recorded("recorded", stands)
    after = table.facts()
    assert (after.outcome, after.reason) == (stands.outcome, stands.reason)
    assert after.state == ("completing" if has_hook else "settled")
    # And the rule for those who come late knows it again.
    assert rules.late_decision(after, "ours", wanted) == "replayed"


@agree
@given(
    row=claims(),
    policy=st.sampled_from((RetryPolicy(1), RetryPolicy(3, delay=7), RetryPolicy(9, delay=0))),
    jitter=st.sampled_from((0.0, 1.0)),
)
def test_sql_reserves_gives_back_and_refuses_as_the_rules_say(
    table: Table, row: dict[str, Any], policy: RetryPolicy, jitter: float
) -> None:
    row = around_now(table, row)
    now = table.clock.lease_now()
    for wish in (
        w.ReserveAttempt("j", "ours", policy, jitter),
        w.RetryJob("j", "ours", policy, None, "why", jitter),
        w.HandOff("j", "ours"),
    ):
        table.only(**row)
        facts = table.facts()
        match wish:
            case w.ReserveAttempt():
                verdict: Any = rules.reservation(facts, "ours", policy, now, jitter)
            case w.RetryJob():
                verdict = rules.retry(facts, "ours", policy, None, "why", now, jitter)
            case w.HandOff():
                verdict = rules.hand_off(facts, "ours", now)
        answer = table.ask(wish)
        after = table.facts()
        if isinstance(verdict, str):
            assert answer.status == verdict
            assert after == facts
        elif isinstance(verdict, rules.Settle):
            assert answer.status == "settled"
            assert (after.state, after.outcome, after.reason) == (
                "settled",
                verdict.outcome,
                verdict.reason,
            )
        elif isinstance(verdict, rules.Reservation):
            assert (after.state, after.attempt_open) == ("running", True)
            assert after.attempt_count == verdict.attempt_count
        else:
            assert (after.state, after.attempt_open, after.token) == ("queued", False, None)
            assert after.attempt_count == verdict.attempt_count
            assert after.recovery_count == verdict.recovery_count
            assert after.window_began_at == verdict.window_began_at


@agree
@given(row=claims(), dead=st.sampled_from(((), ("dead",))))
def test_sql_finds_a_claim_disappeared_when_its_lease_is_over_or_its_owner_dead(
    table: Table, row: dict[str, Any], dead: tuple[str, ...]
) -> None:
    row = around_now(table, row)
    table.only(**row)
    facts = table.facts()
    is_live = facts.state in ("running", "completing")
    now = table.clock.lease_now()
    is_gone = is_live and (row["lease_until"] <= now or row["owner"] in dead)
    # The rule for holding a claim is the other side of the same instant.
    if is_live and not dead:
        assert facts.token is not None
        held = rules.is_held(evolve(facts, state="running"), facts.token, now)
        assert held == (not is_gone)
    found = table.ask(w.NextRunningClaim(0, dead))
    assert (found is not None) == (is_gone and facts.state == "running")
    reconciled = table.ask(w.Reconcile("j", row.get("token") or "ours", dead))
    after = table.facts()
    if not (is_gone and facts.state == "running"):
        assert reconciled.status == "untouched"
        assert after == facts
        taken = table.ask(w.TakeCompleting("new", "o", 5, dead=dead))
        assert (taken is not None) == is_gone
        return
    verdict = rules.disappearance(facts, now)
    if isinstance(verdict, rules.Settle):
        assert reconciled == w.Reconciled("settled", verdict)
        assert (after.outcome, after.reason) == (verdict.outcome, verdict.reason)
    else:
        assert reconciled.status == "queued"
        assert after.attempt_count == verdict.attempt_count
        assert after.recovery_count == verdict.recovery_count
        assert after.window_began_at == verdict.window_began_at


@agree
@given(row=claims())
def test_sql_finishes_a_completion_when_the_rule_does(table: Table, row: dict[str, Any]) -> None:
    table.only(**around_now(table, row))
    facts = table.facts()
    answer = table.ask(w.FinishCompleting("j", "ours"))
    if facts.state == "completing" and facts.token == "ours":
        assert answer == "settled"
        assert table.facts().outcome == facts.outcome
    else:
        assert answer == rules.late_finish(facts, "ours")
        assert table.facts() == facts


@agree
@given(row=claims(), id=st.sampled_from(("c", "d")), only_if_queued=st.booleans())
def test_sql_records_a_cancellation_when_the_rule_does(
    table: Table, row: dict[str, Any], id: str, only_if_queued: bool
) -> None:
    table.only(**around_now(table, row))
    table.insert(id="k", queue="another", cancellation_id="d")
    (present,) = table.connection.execute(
        f"select {FACT_COLUMNS} from watchdog_jobs where id = 'j'"
    ).fetchall()
    facts = claim_facts(present)
    expected = rules.cancellation(
        facts.state,
        facts.cancellation_id,
        facts.outcome,
        id,
        only_if_queued,
        is_used_elsewhere=id == "d",
    )
    assert table.ask(w.Cancel("j", id, only_if_queued)) == expected
    assert rules.cancellation(None, None, None, id, False, is_used_elsewhere=False) == (
        table.ask(w.Cancel("missing", id))
    )


# -- instants -------------------------------------------------------------------------------------


@agree
@given(
    delay=st.one_of(
        st.sampled_from((0, 1, INSTANT_LIMIT - 1, INSTANT_LIMIT, 2**62)),
        st.integers(0, INSTANT_LIMIT * 2),
    )
)
@example(delay=0)
def test_sql_adds_a_delay_as_the_rule_does(table: Table, delay: int) -> None:
    expected = rules.instant_after(table.clock.now(), delay)
    row = {"state": "running", "hint": None, "token": "ours", "owner": "o"}
    table.only(**row, lease_until=table.clock.lease_now() + 1)
    assert table.ask(w.RetryJob("j", "ours", after=delay)).status == "queued"
    assert to_milliseconds(table.ask(w.Read("j")).not_before) == expected
    seconds = min(delay, INSTANT_LIMIT) / 1000
    policy = RetryPolicy(5, delay=seconds, max_delay=seconds)
    expected = rules.instant_after(table.clock.now(), rules.retry_delay(policy, 1, 0.0))
    table.only(**row, lease_until=table.clock.lease_now() + 1)
    assert table.ask(w.ReserveAttempt("j", "ours", policy)).status == "reserved"
    assert to_milliseconds(table.ask(w.Read("j")).not_before) == expected


# -- order ----------------------------------------------------------------------------------------


@agree
@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from("pq"),
            st.one_of(st.integers(-1, 1), st.sampled_from((PRIORITY_LIMIT, -PRIORITY_LIMIT))),
            st.sampled_from((0, 0, 1)),
        ),
        max_size=8,
    )
)
def test_sql_orders_a_queue_by_priority_and_then_by_admission(
    table: Table, rows: list[tuple[str, int, int]]
) -> None:
    table.connection.execute("delete from watchdog_jobs")
    for n, (queue, priority, due) in enumerate(rows):
        table.insert(
            id=f"{n}",
            queue=queue,
            priority=priority,
            not_before=due * INSTANT_LIMIT,
            hint="deferred" if due else "ready",
        )
    heads = {
        queue: min(
            ((-priority, n, due) for n, (own, priority, due) in enumerate(rows) if own == queue),
            default=None,
        )
        for queue in "pq"
    }
    for queue, head in heads.items():
        assert table.ask(w.ReadQueueHead(queue)).job_id == (None if head is None else f"{head[1]}")
    claimable = sorted(head for head in heads.values() if head is not None and not head[2])
    claimed = [table.ask(w.Claim("a", f"t{n}", "o", 5)).job for n in range(3)]
    assert [None if job is None else job.id for job in claimed] == [
        *[f"{n}" for _, n, _ in claimable],
        *[None] * (3 - len(claimable)),
    ]


@agree
@given(
    rows=st.lists(st.tuples(st.integers(0, 3), st.sampled_from("ab")), max_size=12),
    after=st.tuples(st.integers(0, 3), st.integers(0, 13)),
    limit=st.integers(1, 5),
)
def test_sql_pages_the_feed_by_group_and_then_by_admission(
    table: Table, rows: list[tuple[int, str]], after: tuple[int, int], limit: int
) -> None:
    table.connection.execute("delete from watchdog_jobs")
    table.connection.execute("delete from sqlite_sequence")
    for n, (group, lane) in enumerate(rows, 1):
        table.insert(
            id=f"{n}",
            lane=lane,
            state="settled",
            hint=None,
            outcome="completed",
            settled_group=group,
            settled_at=0,
        )
    places = sorted((group, n, lane) for n, (group, lane) in enumerate(rows, 1))
    for lane in (None, "a", "b"):
        expected = [
            f"{n}" for group, n, own in places if (group, n) > after and lane in (None, own)
        ]
        page = table.ask(w.ReadSettled(limit, f"{after[0]}.{after[1]}", lane))
        assert [job.id for job in page.jobs] == expected[:limit]


# -- limits and the grammar -----------------------------------------------------------------------

characters = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
texts = st.one_of(
    st.text(characters, max_size=4),
    st.builds(
        lambda text, n: text * n, st.text(characters, min_size=1, max_size=2), st.integers(99, 258)
    ),
)


@agree
@given(text=texts)
@example(text="")
@example(text="x" * 256)
@example(text="x" * 257)
@example(text="\U0001f600" * 256)
@example(text="\U0001f600" * 257)
@example(text="e\u0301" * 128)
@example(text="r" * 200)
@example(text="r" * 201)
def test_sql_counts_characters_as_the_model_does(table: Table, text: str) -> None:
    names = ("id", "queue", "lane", "cancellation_id")
    for name in names:
        assert is_taken(table, {name: text}) == is_legal(check_text, text, name)
    live = {"state": "running", "hint": None, "token": "t", "owner": "o", "lease_until": 5}
    for name in ("token", "owner"):
        assert is_taken(table, {**live, name: text}) == is_legal(check_text, text, name)
    ended = {"state": "settled", "hint": None, "outcome": "failed", "settled_group": 0}
    assert is_taken(table, {**ended, "settled_at": 0, "reason": text}) == is_legal(
        check_reason, text
    )


@agree
@given(number=st.integers(-(2**63), 2**63 - 1))
@example(number=PRIORITY_LIMIT)
@example(number=PRIORITY_LIMIT + 1)
@example(number=-PRIORITY_LIMIT)
@example(number=-PRIORITY_LIMIT - 1)
@example(number=INSTANT_LIMIT)
@example(number=INSTANT_LIMIT + 1)
@example(number=0)
@example(number=-1)
def test_sql_limits_numbers_as_the_model_does(table: Table, number: int) -> None:
    limits = (-PRIORITY_LIMIT, PRIORITY_LIMIT)
    assert is_taken(table, {"priority": number}) == is_legal(check_integer, number, "", *limits)
    assert is_taken(table, {"not_before": number}) == is_legal(
        check_integer, number, "", 0, INSTANT_LIMIT
    )
    if number <= PRIORITY_LIMIT:
        assert is_taken(table, {"max_recoveries": number}) == is_legal(Recovery, number)


def is_taken(table: Table, changes: dict[str, Any]) -> bool:
    """Whether the database takes the row."""
    try:
        table.only(**changes)
    except sqlite3.IntegrityError:
        return False
    return True


def is_legal(check: Any, *values: Any) -> bool:
    """Whether the model's check lets the values pass."""
    try:
        check(*values)
    except InvalidJob:
        return False
    return True


@st.composite
def any_rows(draw: st.DrawFn) -> dict[str, Any]:
    """A legal row with a few of its fields replaced by what might be in other rows."""
    pools: dict[str, tuple[Any, ...]] = {
        "state": ("queued", "running", "completing", "settled", "paused"),
        "hint": (None, "ready", "lowered", "deferred", "maybe"),
        "token": (None, "t", "", b"t"),
        "owner": (None, "o", "", b"o"),
        "lease_until": (None, 0, 5, -1, "soon", 1.5),
        "outcome": (None, *[str(outcome) for outcome in Outcome], "fine"),
        "reason": (None, "r", "", "r" * 201, b"r"),
        "settled_group": (None, 0, "first"),
        "settled_at": (None, 0, "soon", 1.5),
        "priority": (0, "high", 1.5, PRIORITY_LIMIT + 1, None),
        "not_before": (0, 1, -1, "soon", 0.5, None),
        "id": ("j", "", b"j", 7),
        "queue": ("q", "", b"q"),
        "lane": ("a", "", b"a"),
        "cancellation_id": (None, "c", "", b"c"),
        "payload": ("null", b"null", 7, None),
        "recovery_count": (0, -1, "x"),
        "attempt_count": (0, 2, -1, "x"),
    }
    row = {**QUEUED, **draw(st.sampled_from(LEGAL))}
    names = draw(st.lists(st.sampled_from(sorted(pools)), max_size=3, unique=True))
    return row | {name: draw(st.sampled_from(pools[name])) for name in names}


LIVE = {"state": "running", "hint": None, "token": "t", "owner": "o", "lease_until": 5}
ENDED = {"state": "settled", "hint": None, "settled_group": 0, "settled_at": 5}
LEGAL: tuple[dict[str, Any], ...] = (
    {},
    LIVE,
    {**LIVE, "state": "completing", "outcome": "completed"},
    {**LIVE, "state": "completing", "outcome": "failed", "reason": "r"},
    {**ENDED, "outcome": "cancelled"},
    {**ENDED, "outcome": "interrupted", "reason": "r", "token": "t"},
)


@settings(agree, max_examples=600 if IS_FULL else 300)
@given(row=any_rows())
def test_the_database_the_reader_and_the_invariants_agree_on_the_grammar(
    table: Table, row: dict[str, Any]
) -> None:
    taken = is_taken(table, row)
    if not taken:
        try:
            table.connection.execute("delete from watchdog_jobs")
            table.insert(unchecked=True, **row)
        except sqlite3.IntegrityError:
            return  # NOT NULL cannot be switched off.
    columns = ", ".join(COLUMNS)
    (stored,) = table.connection.execute(
        f"select sequence, {columns} from watchdog_jobs"
    ).fetchall()
    stored = dict(zip(["sequence", *COLUMNS], stored, strict=True))
    # SQLite turns what looks like a number into one, and numbers in a column of text into text.
    stored |= {"hint": "ready"} if stored["hint"] == "lowered" else {}
    problems = broken_rows([stored])
    assert (problems == []) == taken, problems
    (job,) = table.connection.execute(f"select {JOB_COLUMNS} from watchdog_jobs").fetchall()
    if taken:
        assert stored_job(job).state == row["state"]
        return
    # What the reader is not shown, such as the hint and the owner, it cannot judge.
    shown = [problem for problem in problems if not is_hidden(problem)]
    if shown:
        with pytest.raises(StoreInvalid):
            stored_job(job)


def is_hidden(problem: str) -> bool:
    """Whether a problem is about a column that readers of jobs are not shown."""
    return any(word in problem for word in ("hint", "owner", "settled_group"))


EXPLAINING = {"READ_EXPIRED", "READ_PLACE"}
"""They tell people how long ago or until when, and decide nothing."""


def test_every_place_where_sql_repeats_a_rule_is_tested_here() -> None:
    # A statement that begins to judge leases or to add delays belongs into this module.
    judging = {
        name
        for name, value in vars(sql).items()
        if isinstance(value, sql.Statement)
        and ("lease_now" in (text := value.sqlite or value.text or "") or "least}" in text)
    }
    assert judging - EXPLAINING == {
        "CLAIM",
        "CLAIM_BEYOND",
        "DECIDE",
        "NEXT_RUNNING_CLAIM",
        "READ_CLAIM_STATES",
        "READ_CLOCK",
        "READ_DISAPPEARED",
        "READ_WAKE_STATE",
        "RENEW",
        "REQUEUE",
        "RESERVE",
        "TAKE_COMPLETING",
    }
