"""The SQL of upkeep: history, moving, and looking for trouble. Written as `_statements` says."""

from __future__ import annotations

from ._statements import FIRST_OF_QUEUE, IS_FREE, Statement

# -- history --------------------------------------------------------------------------------------

LOCK_READERS = Statement(
    "lock readers",
    sqlite="",
    # Else a prune that has looked already would delete what is protected in this moment.
    postgres="select pg_advisory_xact_lock({readers_key})",
)

SHARE_READERS = Statement(
    "share readers",
    sqlite="",
    postgres="select pg_advisory_xact_lock_shared({readers_key})",
)

PROTECT_SETTLED = Statement(
    "protect settled",
    """insert into {readers} (name, settled_group, sequence)
    values (:name, :settled_group, :sequence)
    on conflict (name) do update set settled_group = excluded.settled_group,
        sequence = excluded.sequence""",
)

RELEASE_SETTLED = Statement(
    "release settled", "delete from {readers} where name = :name", counts=True
)

_HISTORY = {
    None: "x.state = 'settled'",
    "lane": "x.state = 'settled' and x.lane = :lane",
    "queue": "x.state = 'settled' and x.queue = :queue",
}

READ_PRUNE_EDGE = {
    scope: Statement(
        f"read prune edge of {scope}",
        "select x.settled_group, x.sequence from {jobs} x where "
        + which
        + " order by x.settled_group desc, x.sequence desc limit 1 offset :keep",
        writes=False,
    )
    for scope, which in _HISTORY.items()
}
"""The newest settled job that is beyond the count to keep."""

PRUNE = {
    scope: Statement(
        f"prune {scope}",
        # Only the oldest few are looked at, and of these goes what is old enough, not beyond the
        # edge, and read by every reader that asked for protection.
        """delete from {jobs} where sequence in (
    select x.sequence from {jobs} x where x.sequence in (
        select x.sequence from {jobs} x where """
        + which
        + """
        order by x.settled_group, x.sequence limit :limit)
    and x.settled_at < :before
    and (x.settled_group, x.sequence) <= (:settled_group, :sequence)
    and not exists (select 1 from {readers} p
        where (p.settled_group, p.sequence) < (x.settled_group, x.sequence)) {skip_locked})""",
        counts=True,
    )
    for scope, which in _HISTORY.items()
}

# -- moving to another database -------------------------------------------------------------------

MOVED_COLUMNS = (
    "id text, queue text, lane text, priority bigint, not_before bigint, max_recoveries bigint,"
    " recovery_window bigint, state text, token text, owner text, lease_until bigint,"
    " attempt_count bigint, recovery_count bigint, window_began_at bigint, cancellation_id text,"
    " outcome text, reason text, payload text"
)
"""All that an unsettled job is, apart from its place in this database."""

_MOVED = ", ".join(column.split()[0] for column in MOVED_COLUMNS.split(", "))

EXPORT_SIZE = 4 * 1024 * 1024
"""Characters of payloads in one page of exported jobs, unless a single one has more."""

EXPORT = Statement(
    "export",
    # As many as fit into one exchange, and one at least, whatever the size of their payloads.
    f"""select {_MOVED}, sequence from (
    select x.*, sum(length(x.payload)) over (order by x.sequence) as size from (
        select {_MOVED}, sequence from {{jobs}}
        where state in ('queued', 'completing') and sequence > :after
        order by sequence limit :limit) x) y
    where size - length(payload) < {EXPORT_SIZE} order by sequence""",
    writes=False,
)

IMPORT = Statement(
    "import",
    # `ready` for all: whoever claims looks at the real order anyway. A completion has no lease
    # here, so the first supervisor takes it over. Nothing is done about a row whose id is there, or
    # whose cancellation id, or whose queue has something running.
    f"""insert into {{jobs}} ({_MOVED}, hint)
    select {_MOVED.replace("lease_until", "case when state = 'completing' then 0 end")},
        case when state <> 'queued' then null
        when not_before > {{now}} then 'deferred' else 'ready' end
    from {{rows}} x where true order by ord
    on conflict do nothing
    returning id""",
    columns=MOVED_COLUMNS,
)

REMOVE = Statement(
    "remove",
    """delete from {jobs} where id in (select id from {rows} w)
    and state in ('queued', 'completing')""",
    columns="id text",
    counts=True,
)

# -- looking for trouble --------------------------------------------------------------------------

READ_UNSETTLED = Statement(
    "read unsettled",
    # And what is settled, where it cannot be.
    """select {job_columns}, coalesce({is_sound}, false) from {jobs}
    where (state <> 'settled' or not coalesce({is_sound}, false)) and sequence in (
        select sequence from {jobs} where sequence > :after order by sequence limit :limit)
    order by sequence""",
    writes=False,
)

READ_PAGE_END = Statement(
    "read page end",
    # Of rows walked, not found: one statement must not walk a whole history.
    """select max(sequence) from (
    select sequence from {jobs} where sequence > :after order by sequence limit :limit) page""",
    writes=False,
)

READ_EXPIRED = Statement(
    "read expired",
    """select id, queue, lane, state, {lease_now} - lease_until from {jobs}
    where state in ('running', 'completing') and lease_until <= {lease_now}
    order by sequence + 0 limit :limit""",
    writes=False,
)

READ_WAITING_ON_TIME = Statement(
    "read waiting on time",
    """select x.id, x.queue, x.lane, x.not_before - {now},
    (select count(*) from {jobs} q where q.queue = x.queue and q.state = 'queued') - 1
    from {jobs} x where x.hint = 'deferred' and x.not_before > {now} and x.sequence = """
    + FIRST_OF_QUEUE
    + " and "
    + IS_FREE
    + """
    and exists (select 1 from {jobs} q where q.queue = x.queue and q.state = 'queued'
        and q.sequence <> x.sequence)
    order by x.not_before desc limit :limit""",
    writes=False,
)

READ_UNSERVED = Statement(
    "read unserved",
    """select l.lane, l.ready from (
    select x.lane, count(*) as ready from {jobs} x
    where x.hint = 'ready' and x.cancellation_id is null group by x.lane) l
where not exists (select 1 from {jobs} r
    where r.state in ('running', 'completing') and r.lane = l.lane)
order by l.ready desc, l.lane limit :limit""",
    writes=False,
)

READ_PLACE = Statement(
    "read place",
    """select x.not_before - {now}, x.lease_until - {lease_now},
    (select count(*) from {jobs} q where q.queue = x.queue and q.state = 'queued'
        and (q.priority > x.priority or (q.priority = x.priority and q.sequence < x.sequence))),
    (select count(*) from {jobs} l where l.lane = x.lane and l.hint = 'ready'
        and l.cancellation_id is null
        and (l.priority > x.priority or (l.priority = x.priority and l.sequence < x.sequence))),
    (select count(*) from {jobs} r where r.state in ('running', 'completing') and r.lane = x.lane)
    from {jobs} x where x.id = :id""",
    writes=False,
)

_FIND_LOST = (
    """with recursive walk(queue, count) as (
    select * from (select q.queue, 1 from {jobs} q
        where q.state = 'queued' and q.queue > :after order by q.queue limit 1) first_queue
    union all
    select (select q.queue from {jobs} q where q.state = 'queued' and q.queue > walk.queue
        order by q.queue limit 1), walk.count + 1
    from walk where walk.queue is not null and walk.count < :limit)
select x.queue, (select h.id from {jobs} h where h.sequence = """
    + FIRST_OF_QUEUE
    + """
        and h.hint = 'lowered' and h.cancellation_id is null and """
    + IS_FREE
    + """ $note)
from walk x where x.queue is not null"""
)

FIND_LOST = Statement(
    "find lost",
    # The invariant: no first row is lowered while nothing of its queue runs and no note says so.
    # A walk from queue to queue, so it costs as many probes as there are queues in the page.
    sqlite=_FIND_LOST.replace("$note", ""),
    postgres=_FIND_LOST.replace(
        "$note", "and not exists (select 1 from {recheck} n where n.queue = x.queue)"
    ),
    writes=False,
)
