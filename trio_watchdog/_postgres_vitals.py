"""How a PostgreSQL server is, as far as jobs feel it: for the doctor. Reads only."""

from __future__ import annotations

import time
from typing import Any, cast

import psycopg
import trio

from ._identity import fresh_token
from ._psycopg import TrioConnection
from ._store import Level, Vital

CLOCK_WARNING = 5.0
"""Seconds between the host's clock and the server's, which judges all times of jobs."""

TRANSACTION_WARNING = 300.0
"""Seconds that a transaction is open; until it ends, the feed of settled jobs stands still behind
it, and vacuum removes nothing that is younger."""

DEAD_WARNING = 100_000
"""Dead rows, if they are more than the living: claims read past some of them."""

CONNECTIONS_WARNING = 10
"""Connections left: the needs of three processes."""

ROUND_TRIP_SECONDS = 5.0
"""How long a notification may take to arrive."""

Connection = TrioConnection[Any]


async def server_vitals(connection: Connection, schema: str) -> list[Vital]:
    """What the server's own views tell, and its clock."""
    return [
        await _version(connection),
        await _clock(connection),
        await _dead_rows(connection, schema),
        *await _transactions(connection),
        await _connections(connection),
    ]


async def round_trip(listening: Connection, sending: Connection) -> tuple[Vital, bool]:
    """How long a notification takes, and whether others arrived meanwhile."""
    channel = f"watchdog_probe_{fresh_token()[:16]}"
    has_others = False
    seconds: float | None = None
    try:
        await listening.execute(f'listen "{channel}"'.encode())
        began = time.perf_counter()
        await sending.execute("select pg_notify(%s, '')", (channel,))
        with trio.move_on_after(ROUND_TRIP_SECONDS):
            while seconds is None:
                for notification in await listening.wait_notifies():
                    if notification.channel == channel:
                        seconds = time.perf_counter() - began
                    else:
                        has_others = True
        await listening.execute(f'unlisten "{channel}"'.encode())
    except psycopg.errors.DatabaseError as error:
        if listening.closed or sending.closed:
            raise
        text = " ".join(str(error).split())
        return ("warning", "notify", f"notifications do not work here: {text}"), has_others
    if seconds is None:
        hint = "behind a pooler of transactions open with listen=False and prepare=False"
        text = f"no notification arrived within {ROUND_TRIP_SECONDS:g} s; {hint}"
        return ("warning", "notify", text), has_others
    return ("ok", "notify", f"a notification takes {seconds * 1000:.1f} ms"), has_others


async def _version(connection: Connection) -> Vital:
    version, is_standby, is_read_only = await _row(
        connection,
        "select current_setting('server_version'), pg_is_in_recovery(),"
        " current_setting('default_transaction_read_only') = 'on'",
    )
    if is_standby:
        return ("warning", "server", f"PostgreSQL {version}, a standby: jobs can only be read here")
    if is_read_only:
        hint = "default_transaction_read_only is on, so nothing can be written"
        return ("warning", "server", f"PostgreSQL {version}; {hint}")
    return ("ok", "server", f"PostgreSQL {version}")


async def _clock(connection: Connection) -> Vital:
    before = time.time()
    (server,) = await _row(connection, "select extract(epoch from clock_timestamp())::float8")
    after = time.time()
    difference = server - (before + after) / 2
    # By so much the answer may be off.
    level: Level = "warning" if abs(difference) - (after - before) / 2 > CLOCK_WARNING else "ok"
    text = (
        f"the server's clock is {abs(difference):.3f} s {'ahead' if difference > 0 else 'behind'}"
    )
    if level == "warning":
        text += " of this host's; the server's counts, but times in logs will not fit together"
    return (level, "clock", text)


async def _dead_rows(connection: Connection, schema: str) -> Vital:
    row = await _row(
        connection,
        "select n_live_tup, n_dead_tup, extract(epoch from clock_timestamp()"
        " - greatest(last_autovacuum, last_vacuum))::float8"
        " from pg_stat_user_tables where schemaname = %s and relname = 'jobs'",
        schema,
    )
    live, dead, age = row if row else (0, 0, None)
    when = "never" if age is None else f"{age:.0f} s ago"
    text = f"{dead} dead rows beside {live} in the jobs table; last vacuum: {when}"
    if dead > DEAD_WARNING and dead > live:
        hint = "let autovacuum come by numbers, and look for what holds it back"
        return ("warning", "vacuum", f"{text}; {hint}")
    return ("ok", "vacuum", text)


async def _transactions(connection: Connection) -> list[Vital]:
    # Only what has a number or a snapshot holds anything back. Of other roles' sessions the times
    # are hidden, unless this role may read all statistics.
    oldest = await _row(
        connection,
        "select extract(epoch from clock_timestamp() - xact_start)::float8, pid,"
        " coalesce(nullif(application_name, ''), usename, ''), coalesce(state, '')"
        " from pg_stat_activity where backend_type = 'client backend'"
        " and pid <> pg_backend_pid() and xact_start is not null"
        " and (backend_xid is not null or backend_xmin is not null)"
        " order by xact_start limit 1",
    )
    prepared = await _row(
        connection,
        "select extract(epoch from clock_timestamp() - prepared)::float8, gid"
        " from pg_prepared_xacts order by prepared limit 1",
    )
    (hidden,) = await _row(
        connection,
        "select count(*) from pg_stat_activity where backend_type = 'client backend'"
        " and pid <> pg_backend_pid() and xact_start is null"
        " and (backend_xid is not null or backend_xmin is not null)",
    )
    vitals: list[Vital] = []
    if oldest:
        age, pid, name, state = oldest
        vitals.append(_held(age, f"server process {pid} ({name}, {state})"))
    if prepared:
        vitals.append(_held(prepared[0], f"the prepared transaction {prepared[1]!r:.80}"))
    if hidden:
        text = f"{hidden} transactions of other roles, whose age only pg_read_all_stats may see"
        vitals.append(("note", "transactions", text))
    return vitals or [("ok", "transactions", "no other transaction is open")]


def _held(age: float, whose: str) -> Vital:
    text = f"the transaction of {whose} has been open for {age:.1f} s"
    if age < TRANSACTION_WARNING:
        return ("ok", "transactions", text)
    hint = "it holds back vacuum, and if it has written, the feed of settled jobs"
    return ("warning", "transactions", f"{text}: {hint}")


async def _connections(connection: Connection) -> Vital:
    limit, used = await _row(
        connection,
        "select current_setting('max_connections')::int"
        " - current_setting('superuser_reserved_connections')::int"
        " - coalesce(current_setting('reserved_connections', true), '0')::int,"
        " (select count(*) from pg_stat_activity where backend_type = 'client backend')::int",
    )
    text = f"{max(limit - used, 0)} of {limit} connections are left"
    if limit - used < CONNECTIONS_WARNING:
        return ("warning", "connections", f"{text}; a process with lanes needs three")
    return ("ok", "connections", text)


async def _row(connection: Connection, text: str, *parameters: Any) -> tuple[Any, ...]:
    """The first row, or an empty one."""
    cursor = await connection.execute(text.encode(), parameters or None)
    row = await cursor.fetchone()
    return () if row is None else cast("tuple[Any, ...]", row)
