"""Every SQL text, once, with the few slots in which the databases differ.

How claims stay cheap
---------------------
A job may be claimed when it is queued, due, and first of its queue while nothing of that queue
runs. Asking that of every waiting row costs as much as there are rows, so each queued row carries
a *hint*:

``ready``     worth a look; may be wrong. Written by whoever makes a row claimable, and by insert.
``lowered``   was blocked when somebody looked; whoever frees its queue raises it.
``deferred``  its time had not come; staged to ``ready`` when it has.

A claim looks at a small window of ready rows of its lane and checks the real condition on each
with two index probes. When the window gives less than was wanted, the blocked rows among the
first thousand are lowered and the claim looks again. Whoever *frees* a queue (settles, returns or
removes a row of it) raises the queue's first row if that was lowered. A partial unique index
refuses a second running row of a queue, whatever the hints say.

On PostgreSQL two such transactions may overlap, so those that free a queue, and those that lower,
first take the queue's transaction-level advisory lock in a statement of its own, and look in a
later, younger one. On SQLite there is one writer and those statements are empty.

Writing style
-------------
``:name`` is a parameter. ``{rows}`` is the parameter ``:rows``, a JSON array of arrays, expanded
to rows with the statement's ``columns`` and ``ord``, their position. `{now}` judges due times,
`{lease_now}` leases; both are milliseconds and on PostgreSQL the same.
"""

from __future__ import annotations

import re
import zlib
from typing import Literal

from attrs import field, frozen

from ._model import INSTANT_LIMIT, PRIORITY_LIMIT, REASON_LIMIT, TEXT_LIMIT
from ._rows import ATTEMPT_LIMIT, FACT_COLUMNS, JOB_COLUMNS

SCHEMA_VERSION = 1

DialectName = Literal["sqlite", "postgres"]

NAMED = re.compile(r"(?<!:):([a-z_]+)")
"""A ``:name`` parameter, and not a ``::cast``."""


DEFAULT_SCHEMA = "trio_watchdog"
"""The PostgreSQL schema that holds the tables unless another is named."""

NOTIFY = "select pg_notify(%s, '')"
"""Wakes whoever listens, when the transaction commits. PostgreSQL's own, so in its own style.

Without a word of what concerns whom, so that many in one transaction are one.
"""


def channel(schema: str) -> str:
    """The notification channel of a schema; a literal in SQL, so made of plain characters only."""
    plain = "".join(c if c.isascii() and (c.isalnum() or c == "_") else "_" for c in schema)
    return f"{plain}_wake"[:63]


def _identifier(name: str) -> str:
    """A quoted identifier of PostgreSQL, free of anything a driver could take for a parameter."""
    if all(c.isascii() and (c.isalnum() or c in "_- ") for c in name):
        return f'"{name}"'
    escaped = "".join(c if c.isascii() and c.isalnum() else f"\\+{ord(c):06x}" for c in name)
    return f'U&"{escaped}"'


@frozen(eq=False)
class Statement:
    """One SQL text, or one for each database where they must differ. Empty: nothing to do."""

    name: str
    text: str | None = None
    sqlite: str | None = None
    postgres: str | None = None
    columns: str = ""
    """Columns of ``{rows}`` with their types, such as ``"id text, delay bigint"``."""
    counts: bool = False
    """The answer is the number of rows changed, not rows."""
    writes: bool = True


@frozen(eq=False)
class Dialect:
    """How one database spells the slots. Renders each statement once."""

    name: DialectName
    schema: str = ""
    clock_in_sql: bool = False
    """`{now}` is SQL that asks the database; else it is a parameter that the store fills in."""
    _texts: dict[Statement, str] = field(factory=dict["Statement", str], init=False, repr=False)

    def table(self, name: str) -> str:
        """The quoted name of a table."""
        if self.name == "sqlite":
            return f"watchdog_{name}"
        return f"{_identifier(self.schema)}.{name}"

    def text(self, statement: Statement) -> str:
        """The statement in this dialect, with ``:name`` parameters in the driver's style."""
        text = self._texts.get(statement)
        if text is None:
            text = self._texts[statement] = self._rendered(statement)
        return text

    def plain(self, statement: Statement, rows: str = "") -> str:
        """A statement with its slots filled in and parameters still spelled ``:name``.

        ``rows`` replaces the expansion of the JSON parameter.
        """
        template = statement.sqlite if self.name == "sqlite" else statement.postgres
        if template is None:
            template = statement.text or ""
        columns = statement.columns
        is_sqlite = self.name == "sqlite"
        seed = zlib.crc32(self.schema.encode())
        clock = (
            "cast((julianday('now') - 2440587.5) * 86400000 as integer)"
            if is_sqlite
            else "cast(extract(epoch from statement_timestamp()) * 1000 as bigint)"
        )
        slots = {
            "jobs": self.table("jobs"),
            "meta": self.table("meta"),
            "recheck": self.table("recheck"),
            "readers": self.table("readers"),
            "now": clock if self.clock_in_sql else self._clock("now"),
            "lease_now": clock if self.clock_in_sql else self._clock("lease_now"),
            # A key of 64 bits may be another queue's, or an application's: one waits for nothing
            # then, and nothing worse.
            "queue_key": f"hashtextextended(queue, {seed})",
            # As if of a queue whose name is longer than any.
            "readers_key": f"hashtextextended(repeat('readers', {TEXT_LIMIT}), {seed})",
            "rows": rows or (self._rows(columns) if columns else ""),
            "skip_locked": "" if is_sqlite else "for no key update of x skip locked",
            # Past rows that a hand has made nonsense: no update of such a row passes the checks.
            # PostgreSQL has such rows only without its checks.
            "or_ignore": "or ignore" if is_sqlite else "",
            "is_sound": IS_SOUND_ON_SQLITE if is_sqlite else IS_SOUND,
            "materialized": "materialized",
            "least": "min" if is_sqlite else "least",
            "greatest": "max" if is_sqlite else "greatest",
            "settle_group": (
                f"(select value from {self.table('meta')} where name = 'settle_group')"
                if is_sqlite
                else "cast(cast(pg_current_xact_id() as text) as bigint)"
            ),
            "instant_limit": str(INSTANT_LIMIT),
            "text_limit": str(TEXT_LIMIT),
            "reason_limit": str(REASON_LIMIT),
            "priority_limit": str(PRIORITY_LIMIT),
            "attempt_limit": str(ATTEMPT_LIMIT),
            "integer": "integer" if is_sqlite else "bigint",
            "job_columns": JOB_COLUMNS,
            "j_job_columns": ", ".join(
                f"{'' if is_sqlite else 'j.'}{name}" for name in JOB_COLUMNS.split(", ")
            ),
            # SQLite's RETURNING sees only the table, and not by an alias.
            "j": "" if is_sqlite else "j.",
            "fact_columns": FACT_COLUMNS,
        }
        for name in ("lanes", "without", "dead"):
            slots[f"{name}_list"] = (
                f"(select value from json_each(:{name}))"
                if is_sqlite
                else f"(select json_array_elements_text(cast(:{name} as json)))"
            )
        return template.format_map(slots)

    def _clock(self, name: str) -> str:
        return f":{name}" if self.name == "sqlite" else f"cast(:{name} as bigint)"

    def _rendered(self, statement: Statement) -> str:
        text = self.plain(statement)
        if self.name == "postgres":
            text = NAMED.sub(r"%(\1)s", text)
        return text

    def _rows(self, columns: str) -> str:
        names = [column.split() for column in columns.split(", ")]
        if self.name == "sqlite":
            parts = [
                f"json_extract(value, '$[{i}]') as {name}" for i, (name, _) in enumerate(names)
            ]
            return f"(select key as ord, {', '.join(parts)} from json_each(:rows))"
        parts = [
            f"e.value->>{i} as {name}"
            if kind == "text"
            else f"cast(e.value->>{i} as {kind}) as {name}"
            for i, (name, kind) in enumerate(names)
        ]
        source = "json_array_elements(cast(:rows as json)) with ordinality as e(value, ord)"
        return f"(select e.ord, {', '.join(parts)} from {source})"


# -- schema ---------------------------------------------------------------------------------------

FIRST_OF_QUEUE = """(
        select q.sequence from {jobs} q where q.queue = x.queue and q.state = 'queued'
        order by q.priority desc, q.sequence limit 1)"""

# A scalar subquery, for PostgreSQL would turn NOT EXISTS into a join and read every running row.
IS_FREE = """(
        select r.sequence from {jobs} r where r.queue = x.queue
        and r.state in ('running', 'completing') limit 1) is null"""

_GRAMMAR = """case state
        when 'queued' then hint is not null and token is null and owner is null
            and lease_until is null and outcome is null and reason is null
            and settled_group is null and settled_at is null
        when 'running' then hint is null and token is not null and owner is not null
            and lease_until is not null and outcome is null and reason is null
            and settled_group is null and settled_at is null
        when 'completing' then hint is null and token is not null and owner is not null
            and lease_until is not null and outcome is not null
            and (reason is not null) = (outcome in ('failed', 'interrupted'))
            and settled_group is null and settled_at is null
        when 'settled' then hint is null and owner is null and lease_until is null
            and outcome is not null
            and (reason is not null) = (outcome in ('failed', 'interrupted'))
            and settled_group is not null and settled_at is not null
        else false end"""

_COLUMNS = """
    id text not null unique check (length(id) between 1 and {text_limit}),
    queue text not null check (length(queue) between 1 and {text_limit}),
    lane text not null check (length(lane) between 1 and {text_limit}),
    priority {integer} not null check (priority between -{priority_limit} and {priority_limit}),
    not_before {integer} not null check (not_before between 0 and {instant_limit}),
    max_recoveries {integer} check (max_recoveries >= 0),
    recovery_window {integer} check (
        recovery_window is null or (recovery_window > 0 and max_recoveries is not null)),
    state text not null default 'queued'
        check (state in ('queued', 'running', 'completing', 'settled')),
    hint text check (hint in ('ready', 'lowered', 'deferred')),
    token text check (length(token) between 1 and {text_limit}),
    owner text check (length(owner) between 1 and {text_limit}),
    lease_until {integer} check (lease_until >= 0),
    attempt_count {integer} not null default 0 check (attempt_count >= 0),
    attempt_open {integer} not null default 0 check (attempt_open in (0, 1)),
    recovery_count {integer} not null default 0 check (recovery_count >= 0),
    window_began_at {integer},
    cancellation_id text check (length(cancellation_id) between 1 and {text_limit}),
    outcome text check (
        outcome in ('completed', 'failed', 'cancelled', 'outcome_unknown', 'interrupted')),
    reason text check (length(reason) between 1 and {reason_limit}),
    settled_group {integer},
    settled_at {integer},
    payload text not null"""

# SQLite keeps any type in any column, so there the types are part of the grammar. Spelled so that
# it is fast, as `typeof` is not: blobs come after all texts, and a number that is no integer is not
# equal to itself made one. In one check: all of it is asked again by each update.
_TEXT = "{0} < x''"
_TEXT_OR_NULL = "({0} is null or {0} < x'')"
_INTEGER = "{0} | 0 = {0}"
_INTEGER_OR_NULL = "({0} is null or {0} | 0 = {0})"
# The one number that `|` takes for equal, and is none of these, is below zero.
_INSTANT_OR_NULL = "({0} is null or ({0} | 0 = {0} and {0} >= 0))"
_SQLITE_TYPES = " and ".join(
    kind.format(name)
    for kind, names in {
        _TEXT: ("id", "queue", "lane", "payload", "state"),
        _TEXT_OR_NULL: ("token", "owner", "cancellation_id", "reason"),
        _INTEGER: ("priority", "not_before", "attempt_count", "attempt_open", "recovery_count"),
        _INTEGER_OR_NULL: ("lease_until", "max_recoveries", "recovery_window"),
        _INSTANT_OR_NULL: ("window_began_at", "settled_group", "settled_at"),
    }.items()
    for name in names
)

IS_SOUND = f"""(({_GRAMMAR}) and attempt_count >= 0
        and coalesce(hint, 'ready') in ('ready', 'lowered', 'deferred')
        and coalesce(outcome, 'completed') in
            ('completed', 'failed', 'cancelled', 'outcome_unknown', 'interrupted'))"""
"""Whether a row keeps the rules that updates are checked by. Costs too much for every claim."""

IS_SOUND_ON_SQLITE = f"({IS_SOUND} and {_SQLITE_TYPES})"

CREATE_META = Statement(
    "create meta",
    sqlite="create table {meta} (name text primary key, value not null) without rowid",
    postgres="create table {meta} (name text primary key, value text not null)",
)

CREATE_JOBS = Statement(
    "create jobs",
    # AUTOINCREMENT: without it a deleted highest sequence would be given out again.
    sqlite="create table {jobs} (\n    sequence integer primary key autoincrement,"
    + _COLUMNS
    + ",\n    check ("
    + _GRAMMAR
    + "),\n    check ("
    + _SQLITE_TYPES
    + "))",
    # Room on each page for the next version of a row; payloads over 2 kB live elsewhere.
    postgres="create table {jobs} (\n    sequence bigint generated always as identity primary key,"
    + _COLUMNS
    + ",\n    check ("
    + _GRAMMAR
    + ")) with (fillfactor = 80)",
)

CREATE_RECHECK = Statement(
    "create recheck",
    sqlite="",
    postgres="create table {recheck} ("
    "note bigint generated always as identity, queue text not null)",
)

CREATE_READERS = Statement(
    "create readers",
    """create table {readers} (
    name text primary key, settled_group {integer} not null, sequence {integer} not null)""",
)

_INDEXES = {
    "ready": "(lane, priority desc, sequence) where hint = 'ready' and cancellation_id is null",
    "deferred": "(not_before) where hint = 'deferred'",
    "order": "(queue, priority desc, sequence) where state = 'queued'",
    "cancelled": "(sequence) where cancellation_id is not null and state in ('queued', 'running')",
    "settled": "(settled_group, sequence) where state = 'settled'",
    "settled_lane": "(lane, settled_group, sequence) where state = 'settled'",
    "settled_queue": "(queue, settled_group, sequence) where state = 'settled'",
}

CREATE_INDEXES = tuple(
    Statement(
        f"create index {name}",
        sqlite=f"create index watchdog_jobs_{name} on {{jobs}} {definition}",
        postgres=f"create index jobs_{name} on {{jobs}} {definition}",
    )
    for name, definition in _INDEXES.items()
) + tuple(
    Statement(
        f"create unique index {name}",
        sqlite=f"create unique index watchdog_jobs_{name} on {{jobs}} {definition}",
        postgres=f"create unique index jobs_{name} on {{jobs}} {definition}",
    )
    for name, definition in {
        "single_flight": "(queue) where state in ('running', 'completing')",
        "cancellation": "(cancellation_id) where cancellation_id is not null",
    }.items()
)

CREATE_SCHEMA = (CREATE_META, CREATE_JOBS, CREATE_RECHECK, CREATE_READERS, *CREATE_INDEXES)

WRITE_META = Statement(
    "write meta",
    """insert into {meta} (name, value) values (:name, :value)
    on conflict (name) do update set value = excluded.value""",
)

READ_META = Statement("read meta", "select name, value from {meta}", writes=False)

# -- admission ------------------------------------------------------------------------------------


def _insert(is_blocked: str, rows: str = "{rows}") -> str:
    return f"""insert into {{jobs}} (
    id, queue, lane, priority, not_before, max_recoveries, recovery_window, payload, hint)
select id, queue, lane, priority, not_before, max_recoveries, recovery_window, payload,
    case when {is_blocked} then 'lowered'
        when x.not_before > {{now}} then 'deferred' else 'ready' end
from {rows} x where true order by ord
on conflict (id) do nothing
returning id, sequence"""


_IS_BEHIND = """(exists (select 1 from {jobs} b where b.queue = x.queue
        and b.state in ('running', 'completing'))
    or exists (select 1 from {jobs} b where b.queue = x.queue
        and b.state = 'queued' and b.priority >= x.priority))"""

_RANKED = """(select *, row_number() over (partition by queue order by priority desc, ord) as nth
    from {rows} w)"""

# Differs by necessity: with one writer a look at the queue is exact, so a blocked row can be born
# lowered. With several, a look without the queue's lock could lose the row.
_IS_LOCKED = """x.queue in (select json_array_elements_text(cast(
        coalesce(nullif(current_setting('watchdog.born', true), ''), '[]') as json)))"""

_INSERT_COLUMNS = (
    "id text, queue text, lane text, priority bigint, not_before bigint,"
    " max_recoveries bigint, recovery_window bigint, payload text"
)

INSERT = Statement(
    "insert",
    columns=_INSERT_COLUMNS,
    sqlite=_insert(f"x.queue <> x.id and {_IS_BEHIND}"),
    # After TRY_QUEUES; or else all are taken for free, and lowered when a claim meets them.
    postgres=_insert(f"{_IS_LOCKED} and {_IS_BEHIND}"),
)

INSERT_MANY = Statement(
    "insert many",
    columns=_INSERT_COLUMNS,
    # A row sees no other of its own statement. One that goes before may turn out to be there
    # already, and in another state, so PROMOTE follows whenever fewer are inserted than came.
    sqlite=_insert(f"(x.nth > 1 or {_IS_BEHIND})", _RANKED),
    postgres=_insert(f"{_IS_LOCKED} and (x.nth > 1 or {_IS_BEHIND})", _RANKED),
)

TRY_QUEUES = Statement(
    "try queues",
    columns="queue text",
    sqlite="",
    # Never waits. The insertion that follows learns of its success through a setting that ends
    # with the transaction.
    postgres="""with wanted as {materialized} (select w.queue from {rows} w),
got as {materialized} (
    select queue from wanted where pg_try_advisory_xact_lock({queue_key}))
select set_config('watchdog.born',
    coalesce((select json_agg(queue) from got), '[]')::text, true)""",
)

# -- reading --------------------------------------------------------------------------------------

READ = Statement("read", "select {job_columns} from {jobs} where id = :id", writes=False)

READ_MANY = Statement(
    "read many",
    "select {job_columns} from {jobs} where id in (select id from {rows} w)",
    columns="id text",
    writes=False,
)

READ_QUEUE_HEAD = Statement(
    "read queue head",
    """select id, state, cancellation_id is not null from (
    select * from (select 0 as rank, id, state, cancellation_id from {jobs}
        where queue = :queue and state in ('running', 'completing') limit 1) running
    union all
    select * from (select 1 as rank, id, state, cancellation_id from {jobs}
        where queue = :queue and state = 'queued'
        order by priority desc, sequence limit 1) waiting
    ) heads order by rank limit 1""",
    writes=False,
)

READ_LATEST_SETTLED = Statement(
    "read latest settled",
    """select {job_columns} from {jobs} where queue = :queue and state = 'settled'
    order by settled_group desc, sequence desc limit 1""",
    writes=False,
)

_READ_SETTLED = """select {job_columns}, settled_group from {jobs}
where state = 'settled' and (settled_group, sequence) > (:settled_group, :sequence)
    $lane $horizon
order by settled_group, sequence limit :limit"""

# Differs by necessity: on PostgreSQL a transaction with a lower number may commit later, so only
# what is below the oldest one still running is shown. SQLite commits in the order of its counter.
_HORIZON = (
    "and settled_group < cast(cast(pg_snapshot_xmin(pg_current_snapshot()) as text) as bigint)"
)

READ_SETTLED = Statement(
    "read settled",
    sqlite=_READ_SETTLED.replace("$lane", "").replace("$horizon", ""),
    postgres=_READ_SETTLED.replace("$lane", "").replace("$horizon", _HORIZON),
    writes=False,
)

READ_SETTLED_LANE = Statement(
    "read settled of a lane",
    sqlite=_READ_SETTLED.replace("$lane", "and lane = :lane").replace("$horizon", ""),
    postgres=_READ_SETTLED.replace("$lane", "and lane = :lane").replace("$horizon", _HORIZON),
    writes=False,
)

READ_JOBS = Statement(
    "read jobs",
    """select {job_columns} from {jobs}
    where (cast(:state as text) is null or state = :state)
        and (cast(:lane as text) is null or lane = :lane)
        and (cast(:queue as text) is null or queue = :queue)
    order by sequence desc limit :limit""",
    writes=False,
)

READ_COUNTS = Statement(
    "read counts",
    """select lane, state, outcome, count(*) from {jobs}
    group by lane, state, outcome order by lane, state, outcome""",
    writes=False,
)

READ_OWNERS = Statement(
    "read owners",
    "select distinct owner from {jobs} where state in ('running', 'completing')",
    writes=False,
)

READ_WAKE_STATE = Statement(
    "read wake state",
    sqlite="""with clock as (
    select coalesce(cast(:at as bigint), {now}) as due_at,
        {lease_now} + coalesce(cast(:at as bigint) - {now}, 0) as lease_at)
select
    exists (select 1 from {jobs} where state in ('running', 'completing')
        and (state = 'completing' or lease_until <= lease_at))
    or exists (select 1 from {jobs} where cancellation_id is not null
        and state in ('queued', 'running'))
    or exists (select 1 from {jobs} x where x.hint = 'ready' and x.cancellation_id is null
        and x.not_before <= due_at and x.sequence = """
    + FIRST_OF_QUEUE
    + " and "
    + IS_FREE
    + """)
    or exists (select 1 from {jobs} x where x.hint = 'deferred'
        and x.not_before <= due_at and x.sequence = """
    + FIRST_OF_QUEUE
    + " and "
    + IS_FREE
    + """),
    (select min(lease_until) - lease_at + due_at from {jobs}
        where state in ('running', 'completing') and lease_until > lease_at),
    (select x.not_before from {jobs} x where x.hint = 'deferred' and x.not_before > due_at
        and x.cancellation_id is null and x.sequence = """
    + FIRST_OF_QUEUE
    + " and "
    + IS_FREE
    + """
        order by x.not_before limit 1),
    (select min(x.not_before) from {jobs} x where cast(:at as bigint) < {now}
        and x.hint = 'ready' and x.cancellation_id is null and x.not_before > due_at
        and x.sequence = """
    # For an instant that is past: what is ready by now was not then.
    + FIRST_OF_QUEUE
    + " and "
    + IS_FREE
    + """)
from clock""",
    # Differs by necessity: here hints may be wrong, and any number of rows that are blocked stand
    # before the first that is not. So it looks at a hundred rows, then at the heads of a thousand
    # queues, and at everything only if that did not tell.
    postgres="""with recursive clock as {materialized} (
    select coalesce(cast(:at as bigint), {now}) as due_at,
        {lease_now} + coalesce(cast(:at as bigint) - {now}, 0) as lease_at),
ready as {materialized} (select x.queue, x.sequence, x.not_before from {jobs} x
    where x.hint = 'ready' and x.cancellation_id is null limit 100),
due as {materialized} (select x.queue, x.sequence from {jobs} x
    where x.hint = 'deferred' and x.not_before <= (select due_at from clock)
    order by x.not_before limit 100),
later as {materialized} (select x.queue, x.sequence, x.not_before, x.cancellation_id
    from {jobs} x where x.hint = 'deferred' and x.not_before > (select due_at from clock)
    order by x.not_before limit 100),
walk(queue, n) as (
    select * from (select q.queue, 1 from {jobs} q where q.state = 'queued'
        order by q.queue limit 1) first_queue
    union all
    select (select q.queue from {jobs} q where q.state = 'queued' and q.queue > walk.queue
        order by q.queue limit 1), walk.n + 1
    from walk where walk.queue is not null and walk.n <= 1000),
heads as {materialized} (
    select x.* from walk cross join lateral (
        select h.queue, h.hint, h.not_before, h.cancellation_id from {jobs} h
        where h.queue = walk.queue and h.state = 'queued'
        order by h.priority desc, h.sequence limit 1) x
    where """
    + IS_FREE
    + """)
select
    exists (select 1 from {jobs} where state in ('running', 'completing')
        and (state = 'completing' or lease_until <= lease_at))
    or exists (select 1 from {jobs} where cancellation_id is not null
        and state in ('queued', 'running'))
    or exists (select 1 from ready x where x.not_before <= due_at and $first)
    or exists (select 1 from due x where $first)
    or case when (select count(*) from ready) + (select count(*) from due) < 100 then false
        when exists (select 1 from heads where hint in ('ready', 'deferred')
            and cancellation_id is null and not_before <= due_at) then true
        when (select max(n) from walk) <= 1000 then false
        else exists (select 1 from {jobs} x where x.hint = 'ready'
                and x.cancellation_id is null and x.not_before <= due_at and $first)
            or exists (select 1 from {jobs} x where x.hint = 'deferred'
                and x.not_before <= due_at and $first) end,
    (select min(lease_until) - lease_at + due_at from {jobs}
        where state in ('running', 'completing') and lease_until > lease_at),
    coalesce(
        (select x.not_before from later x where x.cancellation_id is null and $first
            order by x.not_before limit 1),
        case when (select count(*) from later) < 100 then null
            when (select max(n) from walk) <= 1000 then (select min(not_before) from heads
                where hint = 'deferred' and cancellation_id is null and not_before > due_at)
            else (select x.not_before from {jobs} x where x.hint = 'deferred'
                and x.not_before > due_at and x.cancellation_id is null and $first
                order by x.not_before limit 1) end),
    (select min(x.not_before) from {jobs} x where cast(:at as bigint) < {now}
        and x.hint = 'ready' and x.cancellation_id is null and x.not_before > due_at and $first)
from clock""".replace("$first", "x.sequence = " + FIRST_OF_QUEUE + " and " + IS_FREE),
    writes=False,
)

READ_FACTS = Statement(
    "read facts",
    "select {fact_columns} from {jobs} x where id in (select id from {rows} w) order by id",
    columns="id text",
    writes=False,
)

READ_CLAIM_STATES = Statement(
    "read claim states",
    """select id, state, token, lease_until > {lease_now}, cancellation_id is not null, outcome
    from {jobs} where id in (select id from {rows} w)""",
    columns="id text",
    writes=False,
)

READ_CLOCK = Statement("read clock", "select {lease_now}", writes=False)

# -- claims ---------------------------------------------------------------------------------------

_STAGE = """update {or_ignore} {jobs} set hint = 'ready' where sequence in (
        select x.sequence from {jobs} x where x.hint = 'deferred' and x.not_before <= {now}
        order by x.not_before limit 1000 {skip_locked})"""

STAGE = Statement(
    "stage",
    sqlite=_STAGE,
    # Differs by necessity: whoever looks at the same time passes over these rows and finds
    # nothing, so the lanes are told of.
    postgres="with staged as ("
    + _STAGE
    + """ returning lane)
select lane, count(*) from staged group by lane""",
)

_READY = """(
        select r.sequence from {jobs} r
        where r.hint = 'ready' and r.cancellation_id is null and r.lane = l.lane
        order by r.priority desc, r.sequence limit $limit)"""

# COALESCE hides the hint from the planner, which else would walk the index of all ready rows for
# each row of the window instead of looking the row up.
_CLAIMABLE = (
    "coalesce(x.hint, '') = 'ready' and x.cancellation_id is null and x.not_before <= {now}"
    "\n        and x.sequence = " + FIRST_OF_QUEUE + "\n        and " + IS_FREE
)

_CLAIM_SET = """update {or_ignore} {jobs} as j set state = 'running', hint = null, token = c.token,
    owner = c.owner, lease_until = {lease_now} + c.lease, attempt_open = c.counts,
    attempt_count = {least}(j.attempt_count, {attempt_limit}) + c.counts"""

# Differs by necessity: SQLite has no LATERAL, but a correlated subquery may be an array. The window
# is its first table and so walked row by row, in its order, no further than to the last one wanted;
# and so the array has that order.
_CLAIM_SQLITE = (
    _CLAIM_SET
    + """
from (
    with wish as {materialized} (
        select *, row_number() over (partition by lane order by ord) as rank from {rows}),
    look as {materialized} (
        select l.lane, w.value as sequence, w.key + 1 as rank
        from (select distinct lane from wish) l
        cross join json_each((select json_group_array(sequence) from (
            select x.sequence from """
    + _READY.replace("$limit", ":window + :wanted")
    + """ w
            cross join {jobs} x on x.sequence = w.sequence
            where """
    + _CLAIMABLE
    + """
            limit :wanted))) w)
    select look.sequence, wish.token, wish.owner, wish.lease, wish.counts
    from look join wish on wish.lane = look.lane and wish.rank = look.rank) c
where j.sequence = c.sequence
returning {j_job_columns}, {j}attempt_open"""
)

# Ordered by queue, so that two claims wait for each other at the unique index in one order.
_CLAIM_POSTGRES = (
    _CLAIM_SET
    + """
from (
    with wish as {materialized} (
        select *, row_number() over (partition by lane order by ord) as rank from {rows} w),
    look as {materialized} (
        select l.lane, v.sequence, v.queue, row_number() over (
            partition by l.lane order by v.priority desc, v.sequence) as rank
        from (select lane, count(*) as wanted from wish group by lane) l
        cross join lateral (
            select x.sequence, x.queue, x.priority
            from """
    # In the order of the index: it looks no further than the first rows that will do.
    + _READY.replace("select r.sequence", "select r.sequence, r.priority")
    + """ w
            join {jobs} x on x.sequence = w.sequence
            where """
    + _CLAIMABLE
    + """
            order by w.priority desc, w.sequence limit l.wanted {skip_locked}) v)
    select look.sequence, wish.token, wish.owner, wish.lease, wish.counts
    from look join wish on wish.lane = look.lane and wish.rank = look.rank
    order by look.queue) c
where j.sequence = c.sequence
returning {j_job_columns}, {j}attempt_open"""
)

_CLAIM_COLUMNS = "lane text, token text, owner text, lease bigint, counts bigint"

CLAIM = Statement(
    "claim",
    columns=_CLAIM_COLUMNS,
    sqlite=_CLAIM_SQLITE,
    # Other processes may be taking as many just now, and a second look would cost a trip.
    postgres=_CLAIM_POSTGRES.replace("$limit", ":window + 4 * l.wanted"),
)

CLAIM_BEYOND = Statement(
    "claim beyond",
    columns=_CLAIM_COLUMNS,
    # Past rows that are nonsense: the first look has chosen them, and could not change them.
    sqlite=_CLAIM_SQLITE.replace(
        "order by r.priority desc, r.sequence limit :window",
        "and {is_sound}\n        order by r.priority desc, r.sequence limit :window",
    ),
    # After LOCK_LOWERING, and far beyond the window: past the queues that it found blocked, of
    # which there may be more rows than were lowered now, and past the rows that somebody's open
    # transaction holds.
    postgres=_CLAIM_POSTGRES.replace(
        "order by r.priority desc, r.sequence limit $limit",
        """and r.queue not in (select json_array_elements_text(
            cast(current_setting('watchdog.blocked') as json)))
        order by r.priority desc, r.sequence limit 100000""",
    ),
)

READ_READY_LANES = Statement(
    "read ready lanes",
    # A walk from lane to lane over the ready index: as many probes as there are lanes.
    """with recursive walk(lane) as (
    select * from (select x.lane from {jobs} x where x.hint = 'ready'
        and x.cancellation_id is null order by x.lane limit 1) first_lane
    union all
    select (select x.lane from {jobs} x where x.hint = 'ready' and x.cancellation_id is null
        and x.lane > walk.lane order by x.lane limit 1) from walk where walk.lane is not null)
select w.lane, (select x.priority from {jobs} x where x.hint = 'ready'
        and x.cancellation_id is null and x.lane = w.lane
        order by x.priority desc, x.sequence limit 1) as priority
from (select lane from walk where lane is not null limit 10000) w
where w.lane not in {without_list}
order by priority desc, w.lane limit 64""",
    writes=False,
)

READ_CLAIMED = Statement(
    "read claimed",
    """select {job_columns}, attempt_open from {jobs}
    where state in ('running', 'completing') and state = 'running'
        and token in (select token from {rows} w)""",
    columns="token text",
    writes=False,
)

_IS_BLOCKED = "not (" + IS_FREE + " and x.sequence = " + FIRST_OF_QUEUE + ")"

LOCK_LOWERING = Statement(
    "lock lowering",
    columns="lane text",
    sqlite="",
    # Tries, and never waits: whoever holds a lock frees that queue, or admits to it. What it got
    # goes to the next statements through settings that end with the transaction. A few hundred
    # at most, for each takes a slot of the server's lock table.
    postgres="""with blocked as {materialized} (
    select distinct x.queue from {rows} l
    cross join lateral """
    + _READY.replace("$limit", "1000")
    + """ w join {jobs} x on x.sequence = w.sequence
    where """
    + _IS_BLOCKED
    + """ limit 256),
got as {materialized} (
    select queue from blocked where pg_try_advisory_xact_lock({queue_key}))
select (select count(*) from blocked) - (select count(*) from got),
    set_config('watchdog.blocked',
        coalesce((select json_agg(queue) from blocked), '[]')::text, true),
    set_config('watchdog.lowering',
        coalesce((select json_agg(queue) from got), '[]')::text, true)""",
)

LOWER = Statement(
    "lower",
    columns="lane text",
    # What is not due after all, since the clock was set back, must not fill the window either.
    sqlite="""update {or_ignore} {jobs} set
    hint = case when not_before > {now} then 'deferred' else 'lowered' end
where sequence in (
    select x.sequence from {rows} l
    cross join json_each((select json_group_array(sequence) from """
    + _READY.replace("$limit", "1000")
    + """)) w
    cross join {jobs} x on x.sequence = w.value
    where x.not_before > {now} or """
    + _IS_BLOCKED
    + ")",
    # The stager looks after deferred rows, whoever frees their queue: that needs no lock.
    postgres="""update {jobs}
set hint = case when not_before > {now} then 'deferred' else 'lowered' end
where sequence in (
    select x.sequence from {rows} l
    cross join lateral """
    + _READY.replace("$limit", "1000")
    + """ w join {jobs} x on x.sequence = w.sequence
    where coalesce(x.hint, '') = 'ready' and (x.not_before > {now} or x.queue in (
        select json_array_elements_text(cast(current_setting('watchdog.lowering') as json)))
    and """
    + _IS_BLOCKED
    + ") {skip_locked})",
    counts=True,
)

# A head whose time has not come becomes deferred, never stays lowered: the stager looks at
# deferred rows with a clock of its own, nobody looks at lowered ones.
_RAISED = "hint = case when not_before > {now} then 'deferred' else 'ready' end"

_PROMOTE_SQLITE = (
    "update {or_ignore} {jobs} set "
    + _RAISED
    + """ where hint = 'lowered' and sequence in (
    select (select q.sequence from {jobs} q where q.queue = x.queue and q.state = 'queued'
        order by q.priority desc, q.sequence limit 1)
    from ($freed) x where """
    + IS_FREE
    + """)
returning lane, hint, not_before, true"""
)

# A row that somebody's open transaction holds is noted, to be looked at again: nobody waits.
_PROMOTE_POSTGRES = (
    """with head as {materialized} (
    select x.queue, """
    + FIRST_OF_QUEUE
    + """ as sequence from ($freed) x where """
    + IS_FREE
    + """),
got as {materialized} (
    select x.sequence from head join {jobs} x on x.sequence = head.sequence
    where x.hint = 'lowered' {skip_locked}),
raised as (
    update {jobs} j set """
    + _RAISED
    + """ from got where j.sequence = got.sequence returning j.lane, j.hint, j.not_before),
noted as (
    insert into {recheck} (queue) select head.queue from head
    join {jobs} x on x.sequence = head.sequence
    where x.hint = 'lowered' and head.sequence not in (select sequence from got))
select lane, hint, not_before, true from raised
union all
select x.lane, x.hint, x.not_before, false from head join {jobs} x on x.sequence = head.sequence
where x.hint in ('ready', 'deferred')"""
)

_QUEUES_OF_ROWS = "select distinct j.queue from {rows} w join {jobs} j on j.id = w.id"

PROMOTE = Statement(
    "promote",
    columns="id text",
    sqlite=_PROMOTE_SQLITE.replace("$freed", _QUEUES_OF_ROWS),
    postgres=_PROMOTE_POSTGRES.replace("$freed", _QUEUES_OF_ROWS),
)

PROMOTE_QUEUE = Statement(
    "promote queue",
    sqlite=_PROMOTE_SQLITE.replace("$freed", "select :queue as queue"),
    postgres=_PROMOTE_POSTGRES.replace("$freed", "select cast(:queue as text) as queue"),
)

LOCK_QUEUES = Statement(
    "lock queues",
    # A row gives the id of a job, or the queue itself.
    columns="id text, queue text",
    sqlite="",
    # Sorted, and all of a transaction in one statement, so that two never wait in a circle.
    postgres="""select pg_advisory_xact_lock(key) from (
    select distinct {queue_key} as key from (
        select coalesce(j.queue, w.queue) as queue
        from {rows} w left join {jobs} j on j.id = w.id) freed
    order by key) keys""",
)

LOCK_QUEUE = Statement(
    "lock queue",
    sqlite="",
    postgres="""select pg_advisory_xact_lock({queue_key})
    from (select cast(:queue as text) as queue) freed""",
)

LOCK_NOTES = Statement(
    "lock notes",
    sqlite="",
    postgres="""with noted as {materialized} (
    select x.note, x.queue from {recheck} x order by x.note limit 100 for update skip locked),
got as {materialized} (
    select note, queue from noted where pg_try_advisory_xact_lock({queue_key}))
select set_config('watchdog.notes', coalesce((select json_agg(note) from got), '[]')::text, true),
    set_config('watchdog.queues', coalesce((select json_agg(distinct queue) from got), '[]')::text,
        true)""",
)

DELETE_NOTES = Statement(
    "delete notes",
    sqlite="",
    postgres="""delete from {recheck} where note in (
    select cast(json_array_elements_text(
        cast(current_setting('watchdog.notes') as json)) as bigint))""",
)

PROMOTE_NOTED = Statement(
    "promote noted",
    sqlite="",
    postgres=_PROMOTE_POSTGRES.replace(
        "$freed",
        """select json_array_elements_text(
        cast(current_setting('watchdog.queues') as json)) as queue""",
    ),
)


# -- what the holder of a claim writes ------------------------------------------------------------

_HELD = "x.id = w.id and x.token = w.token and x.state = 'running' and x.lease_until > {lease_now}"

RENEW = Statement(
    "renew",
    """update {or_ignore} {jobs} as j set lease_until = {lease_now} + c.lease from (
    select x.sequence, w.lease from {rows} w join {jobs} x on x.id = w.id and x.token = w.token
    where x.state in ('running', 'completing') and x.lease_until > {lease_now}
    {skip_locked}) c
where j.sequence = c.sequence
returning {j}id, {j}token, {j}cancellation_id is not null""",
    columns="id text, token text, lease bigint",
)

RESERVE = Statement(
    "reserve attempt",
    """update {jobs} as j set attempt_count = c.attempt_count, attempt_open = 1,
    not_before = {least}({now} + c.delay, {instant_limit}) from (
    select x.sequence, w.attempt_count, w.delay from {rows} w join {jobs} x on """
    + _HELD
    + """ and x.cancellation_id is null {skip_locked}) c
where j.sequence = c.sequence
returning {j}id""",
    columns="id text, token text, attempt_count bigint, delay bigint",
)

REQUEUE = Statement(
    "requeue",
    # `keeps`: the instant stays as the reservation wrote it.
    """update {jobs} as j set state = 'queued', token = null, owner = null, lease_until = null,
    attempt_open = 0, attempt_count = c.attempt_count, recovery_count = c.recovery_count,
    window_began_at = c.window_began_at,
    not_before = case when c.keeps = 1 then j.not_before
        else {least}({now} + c.delay, {instant_limit}) end,
    hint = case when (c.keeps = 1 and j.not_before > {now}) or (c.keeps = 0 and c.delay > 0)
        then 'deferred' else 'ready' end
from (select x.sequence, w.* from {rows} w join {jobs} x
    on x.id = w.id and x.token = w.token and x.state = 'running' and x.cancellation_id is null
    and (w.keeps = 1 or x.lease_until > {lease_now}) {skip_locked}) c
where j.sequence = c.sequence
returning {j}id, {j}lane, {j}hint, {j}not_before, {j}queue""",
    columns="id text, token text, delay bigint, attempt_count bigint, recovery_count bigint,"
    " window_began_at bigint, keeps bigint",
)

BUMP_SETTLE_GROUP = Statement(
    "bump settle group",
    sqlite="update {meta} set value = value + 1 where name = 'settle_group'",
    postgres="",
    counts=True,
)

DECIDE = Statement(
    "decide",
    # A recorded cancellation overrules the handler in the same statement.
    """update {jobs} as j set
    state = case when c.has_hook = 1 then 'completing' else 'settled' end,
    outcome = case when j.cancellation_id is null then c.outcome else 'cancelled' end,
    reason = case when j.cancellation_id is null then c.reason end,
    attempt_open = 0,
    owner = case when c.has_hook = 1 then j.owner end,
    lease_until = case when c.has_hook = 1 then j.lease_until end,
    settled_group = case when c.has_hook = 0 then {settle_group} end,
    settled_at = case when c.has_hook = 0 then {now} end
from (select x.sequence, w.* from {rows} w join {jobs} x on """
    + _HELD
    + """ {skip_locked}) c
where j.sequence = c.sequence
returning {j}id, {j}queue, {j}state, {j}outcome, {j}reason""",
    columns="id text, token text, outcome text, reason text, has_hook bigint",
)

FINISH = Statement(
    "finish completing",
    """update {jobs} as j set state = 'settled', owner = null, lease_until = null,
    settled_group = {settle_group}, settled_at = {now}
from (select x.sequence from {rows} w join {jobs} x
    on x.id = w.id and x.token = w.token and x.state = 'completing' {skip_locked}) c
where j.sequence = c.sequence
returning {j}id, {j}queue""",
    columns="id text, token text",
)

# -- what others write ----------------------------------------------------------------------------

SETTLE = Statement(
    "settle",
    # The token, not the id alone: by now the row may belong to a newer claim, or to none.
    """update {jobs} as j set state = 'settled', hint = null,
    outcome = case when c.yields = 1 and j.cancellation_id is not null then 'cancelled'
        else c.outcome end,
    reason = case when c.yields = 1 and j.cancellation_id is not null then null
        else c.reason end,
    owner = null, lease_until = null, attempt_open = 0,
    settled_group = {settle_group}, settled_at = {now}
from (select x.sequence, w.outcome, w.reason, w.yields from {rows} w join {jobs} x
    on x.id = w.id and x.state in ('queued', 'running')
    and coalesce(x.token, '') = coalesce(w.token, '')
    and x.sequence = coalesce(w.sequence, x.sequence) {skip_locked}) c
where j.sequence = c.sequence
returning {j}id, {j}queue, {j}outcome, {j}reason""",
    columns="id text, token text, outcome text, reason text, sequence bigint, yields bigint",
)

READ_CANCELLATION = Statement(
    "read cancellation",
    """select state, cancellation_id, outcome, queue,
    exists (select 1 from {jobs} o where o.cancellation_id = :cancellation_id and o.id <> :id)
    from {jobs} where id = :id""",
    writes=False,
)

SET_CANCELLATION = Statement(
    "set cancellation",
    """update {jobs} set cancellation_id = :cancellation_id
    where id = :id and cancellation_id is null
        and (state = 'queued' or (state = 'running' and :only_if_queued = 0))""",
    counts=True,
)

FIND_CANCELLED = Statement(
    "find cancelled",
    """select id, sequence from {jobs} where cancellation_id is not null
    and state in ('queued', 'running') and token is null and {is_sound}
    and (cast(:lane as text) is null or lane = :lane) order by sequence limit :limit""",
    writes=False,
)

FIND_LANE = Statement(
    "find lane",
    """select id, token, sequence from (
    select 0 as rank, id, token, sequence from {jobs}
        where state in ('running', 'completing') and state = 'running' and lane = :lane
        and {is_sound}
    union all
    select 1 as rank, id, token, sequence from {jobs} where state = 'queued' and lane = :lane
        and {is_sound}
    ) unsettled order by rank, sequence limit :limit""",
    writes=False,
)

PURGE = Statement(
    "purge queue",
    """delete from {jobs} where sequence in (
    select x.sequence from {jobs} x where x.queue = :queue and x.state = 'queued' {skip_locked})""",
    counts=True,
)

_DISAPPEARED = "(lease_until <= {lease_now} or owner in {dead_list})"

NEXT_RUNNING_CLAIM = Statement(
    "next running claim",
    """select {job_columns} from {jobs} where state in ('running', 'completing')
    and state = 'running' and sequence + 0 > :after and """
    + _DISAPPEARED
    # `+ 0`: else SQLite walks over the whole table in this order, settled rows and all.
    + " order by sequence + 0 limit 1",
    writes=False,
)

READ_DISAPPEARED = Statement(
    "read disappeared",
    """select {fact_columns} from {jobs} x where id = :id and token = :token
    and state = 'running' and """
    + _DISAPPEARED,
    writes=False,
)

TAKE_COMPLETING = Statement(
    "take completing",
    """update {jobs} set token = :token, owner = :owner, lease_until = {lease_now} + :lease
where sequence = (
    select x.sequence from {jobs} x where state in ('running', 'completing')
        and state = 'completing' and """
    + _DISAPPEARED
    + """
        and {is_sound} and (cast(:lanes as text) is null or lane in {lanes_list})
        and lane not in {without_list}
    order by x.sequence + 0 limit 1 {skip_locked})
returning {job_columns}""",
)
