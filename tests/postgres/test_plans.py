"""What the server has to look at, in tables of a few hundred thousand jobs.

Each statement is planned as a store's session plans it, and executed. None reads the table from
end to end, and none touches more pages because of what waits, or has been, behind it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
import trio
from attrs import define

from trio_watchdog import _statements as sql
from trio_watchdog import _upkeep_statements as upkeep
from trio_watchdog._operations import CLAIM_WINDOW
from trio_watchdog._postgres import open_postgres_store, settings
from trio_watchdog._statements import Dialect, Statement
from trio_watchdog._trip import Numbered

SCHEMA = "plans"
MANY = 100_000

DIALECT = Dialect("postgres", SCHEMA, clock_in_sql=True)
JOBS = DIALECT.table("jobs")
NOW = "cast(extract(epoch from clock_timestamp()) * 1000 as bigint)"

# What is always there: history, a running job at the head of a queue, some that are free.
COMMON = f"""
insert into {JOBS} (id, queue, lane, priority, not_before, state, token, outcome,
    settled_group, settled_at, payload)
select 's' || i, 'q' || i % 1000, 'lane' || i % 10, 0, 0, 'settled', 't' || i, 'completed',
    i / 10 + 1, i, 'null' from generate_series(1, {MANY}) i;
insert into {JOBS} (id, queue, lane, priority, not_before, state, token, owner, lease_until,
    payload)
values ('head', 'big', 'other', 0, 0, 'running', 't', 'o', {NOW} + 3600000, 'null'),
    ('gone', 'gone', 'other', 0, 0, 'running', 't gone', 'o', 1, 'null');
insert into {JOBS} (id, queue, lane, priority, not_before, state, outcome, token, owner,
    lease_until, payload)
values ('done', 'done', 'other', 0, 0, 'completing', 'completed', 't done', 'o', 1, 'null');
insert into {JOBS} (id, queue, lane, priority, not_before, state, hint, payload)
select 'free' || i, 'free' || i, 'lane' || i % 2, 0, 0, 'queued', 'ready', 'null'
from generate_series(1, 100) i;
insert into {JOBS} (id, queue, lane, priority, not_before, state, hint, cancellation_id, payload)
select 'cancelled' || i, 'cancelled' || i, 'lane0', 0, 0, 'queued', 'ready', 'c' || i, 'null'
from generate_series(1, 20) i;
"""

WAITING = f"""insert into {JOBS} (id, queue, lane, priority, not_before, state, hint, payload)
select 'w' || i, %s, 'lane0', %s, %s, 'queued', %s, 'null' from generate_series(1, {MANY}) i"""


def waiting(hint: str, queue: str = "'big'", priority: int = 5, due: str = "0") -> str:
    return WAITING % (queue, priority, due, f"'{hint}'")


SHAPES = {
    "history": "",
    "blocked and lowered": waiting("lowered"),
    "blocked and not lowered yet": waiting("ready"),
    "deferred": waiting("deferred", "'d' || i", due=f"{NOW} + 86400000 + i"),
    "deferred behind a head": waiting("deferred", due=f"{NOW} + 86400000 + i"),
    "free": waiting("ready", "'f' || i", priority=-1),
}
"""What waits, of higher priority than what is free: the shapes of a backlog."""

CLAIM = {"rows": json.dumps([("lane0", "x", "o", 1000, 1)]), "window": CLAIM_WINDOW}
MANY_CLAIMS = {
    "rows": json.dumps([(f"lane{i % 4}", f"x{i}", "o", 1000, 1) for i in range(8)]),
    "window": CLAIM_WINDOW,
}


@define
class Case:
    """A statement with parameters, and how many pages it may touch."""

    statement: Statement
    parameters: dict[str, Any]
    pages: int = 150


CASES = {
    "claim": Case(sql.CLAIM, CLAIM, 200),
    "claim for eight": Case(sql.CLAIM, MANY_CLAIMS, 600),
    "stage": Case(sql.STAGE, {}),
    "read ready lanes": Case(sql.READ_READY_LANES, {"without": "[]"}),
    "read claimed": Case(sql.READ_CLAIMED, {"rows": '[["t"]]'}),
    "lock queues": Case(sql.LOCK_QUEUES, {"rows": '[["head"],["free5"],[null,"q"]]'}),
    "promote": Case(sql.PROMOTE, {"rows": '[["head"],["free5"]]'}),
    "promote queue": Case(sql.PROMOTE_QUEUE, {"queue": "big"}),
    "promote noted": Case(sql.PROMOTE_NOTED, {}),
    "renew": Case(sql.RENEW, {"rows": '[["head","t",1000]]'}),
    "reserve attempt": Case(sql.RESERVE, {"rows": '[["head","t",1,1000]]'}),
    "requeue": Case(sql.REQUEUE, {"rows": '[["head","t",1000,1,0,null,0]]'}),
    "decide": Case(sql.DECIDE, {"rows": '[["head","t","completed",null,0]]'}),
    "finish completing": Case(sql.FINISH, {"rows": '[["done","t done"]]'}),
    "settle": Case(sql.SETTLE, {"rows": '[["free7",null,"cancelled",null,null,0]]'}),
    "read facts": Case(sql.READ_FACTS, {"rows": '[["free7"],["free8"]]'}),
    "read claim states": Case(sql.READ_CLAIM_STATES, {"rows": '[["free7"],["free8"]]'}),
    "read many": Case(sql.READ_MANY, {"rows": '[["free7"],["free8"]]'}),
    "read queue head": Case(sql.READ_QUEUE_HEAD, {"queue": "big"}),
    "read latest settled": Case(sql.READ_LATEST_SETTLED, {"queue": "q5"}),
    "read settled": Case(
        sql.READ_SETTLED, {"settled_group": 5000, "sequence": 3, "limit": 256}, 300
    ),
    "read settled of a lane": Case(
        sql.READ_SETTLED_LANE,
        {"settled_group": 5000, "sequence": 3, "limit": 256, "lane": "lane3"},
        600,
    ),
    # A hundred rows, and then the heads of a thousand queues.
    "read wake state": Case(sql.READ_WAKE_STATE, {"at": None}, 4000),
    "read cancellation": Case(sql.READ_CANCELLATION, {"id": "free5", "cancellation_id": "c"}),
    "set cancellation": Case(
        sql.SET_CANCELLATION, {"id": "free5", "cancellation_id": "c", "only_if_queued": 0}
    ),
    "find cancelled": Case(sql.FIND_CANCELLED, {"lane": None, "limit": 256}),
    "next running claim": Case(sql.NEXT_RUNNING_CLAIM, {"after": 0, "dead": "[]"}),
    "read disappeared": Case(sql.READ_DISAPPEARED, {"id": "gone", "token": "t gone", "dead": "[]"}),
    "take completing": Case(
        sql.TAKE_COMPLETING,
        {"token": "y", "owner": "o", "lease": 5, "lanes": None, "without": "[]", "dead": "[]"},
    ),
    "read owners": Case(sql.READ_OWNERS, {}),
    "lock notes": Case(sql.LOCK_NOTES, {}),
    # A thousand rows of the lane are looked at, and as many written: work that is done once.
    "lock lowering": Case(sql.LOCK_LOWERING, {"rows": '[["lane0"]]'}, 12_000),
    "lower": Case(sql.LOWER, {"rows": '[["lane0"]]'}, 40_000),
    # Not often: a page of queues.
    "find lost": Case(upkeep.FIND_LOST, {"after": "", "limit": 1000}, 20_000),
}


NOT_LOWERED = "blocked and not lowered yet"


@pytest.fixture(scope="module")
def common_table(quick_database: str) -> Iterator[psycopg.Connection[Any]]:
    """A session as a store has it, on a table with what is always there."""

    async def create() -> None:
        async with open_postgres_store(quick_database, schema=SCHEMA):
            pass

    trio.run(create)
    with psycopg.connect(quick_database, autocommit=True, prepare_threshold=None) as connection:
        # Vacuumed and analyzed by us, and not worth the trouble of a log.
        connection.execute(f"alter table {JOBS} set (autovacuum_enabled = off)".encode())
        connection.execute(f"alter table {JOBS} set unlogged".encode())
        connection.execute(COMMON.encode())
        connection.execute(settings(is_local=False).encode())
        yield connection
        connection.execute(f"truncate {JOBS}".encode())


@pytest.fixture(scope="module", params=SHAPES)
def shape(
    request: pytest.FixtureRequest, common_table: psycopg.Connection[Any]
) -> Iterator[psycopg.Connection[Any]]:
    """The same with this backlog."""
    if SHAPES[request.param]:
        common_table.execute(SHAPES[request.param].encode())
    yield common_table
    common_table.execute(f"delete from {JOBS} where id like 'w%%'".encode())
    common_table.execute(f"vacuum {JOBS}".encode())


@pytest.fixture(scope="module", params=["never analyzed", "analyzed"])
def table(
    request: pytest.FixtureRequest, shape: psycopg.Connection[Any]
) -> psycopg.Connection[Any]:
    """The same as a bulk load leaves it, or after somebody has counted."""
    if request.param == "analyzed":
        shape.execute(f"vacuum analyze {JOBS}".encode())
    else:
        shape.execute("delete from pg_statistic where starelid = %s::regclass", (JOBS,))
    return shape


def explained(connection: psycopg.Connection[Any], case: Case) -> tuple[list[str], int, int]:
    """Which tables are read from end to end, how many pages are touched, and how many rows come."""
    numbered = Numbered.of(DIALECT.text(case.statement))
    values = [case.parameters[name] for name in numbered.names]
    literals = ", ".join("null" if v is None else psycopg.sql.quote(str(v)) for v in values)
    connection.execute(b"prepare tried as " + numbered.text)
    try:
        with connection.transaction(force_rollback=True):
            connection.execute(
                "select set_config('watchdog.blocked', '[\"big\"]', true),"
                " set_config('watchdog.lowering', '[\"big\"]', true),"
                " set_config('watchdog.queues', '[\"big\"]', true)"
            )
            execute = f"execute tried{f'({literals})' if values else ''}"
            row = connection.execute(
                f"explain (analyze, buffers, format json) {execute}".encode()
            ).fetchone()
    finally:
        connection.execute("deallocate tried")
    assert row is not None
    plan = row[0][0]["Plan"]
    scanned = [n["Relation Name"] for n in nodes(plan) if n["Node Type"].endswith("Seq Scan")]
    pages = plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
    return scanned, pages, round(plan["Actual Rows"])


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


def test_no_statement_reads_more_than_it_needs(table: psycopg.Connection[Any]) -> None:
    faults: list[str] = []
    for name, case in CASES.items():
        scanned, pages, _ = explained(table, case)
        if "jobs" in scanned:
            faults.append(f"{name}: the whole table")
        if pages > case.pages:
            faults.append(f"{name}: {pages} pages, more than {case.pages}")
    assert faults == []


def test_a_free_job_is_claimed_whatever_stands_before_it(
    table: psycopg.Connection[Any], request: pytest.FixtureRequest
) -> None:
    _, pages, rows = explained(table, CASES["claim"])
    if NOT_LOWERED in request.node.name:
        # The window is full of blocked jobs; past them, by name, it goes at once.
        assert rows == 0
        _, pages, rows = explained(table, Case(sql.CLAIM_BEYOND, CLAIM))
        assert pages < MANY / 10
    assert rows == 1


@pytest.mark.parametrize("shape", [NOT_LOWERED], indirect=True)
async def test_a_lane_gets_its_job_while_masses_are_being_lowered(
    shape: psycopg.Connection[Any], quick_database: str
) -> None:
    async with open_postgres_store(quick_database, schema=SCHEMA) as store:
        for n in range(3):
            claimed = await store.claim("lane0", f"token {n}")
            assert claimed.job is not None
            assert claimed.job.id.startswith("free")
    (count,) = shape.execute(
        f"select count(*) from {JOBS} where hint = 'lowered'".encode()
    ).fetchone() or (0,)
    assert 1000 <= count <= 5000
