"""How fast one process reaches another: work for an idle lane, and a stop for a running handler.

Delays are medians of several, for any one of them may meet a busy machine. Leases and polls are so
long that nothing but a notification can be what arrives.
"""

from __future__ import annotations

import contextlib
import sqlite3
import statistics
from collections.abc import Callable
from typing import Any

import psycopg

from tests.process.harness import SECOND, World, now
from trio_watchdog import Job, enqueue_statement, transactional

ROUNDS = 7

DEAF: dict[str, Any] = {"lease": 90.0, "heartbeat": 30.0, "options": {"poll": 60.0}}
"""Neither a renewal nor the slow poll brings anything."""


def seconds(delays: list[int]) -> float:
    return statistics.median(delays) / SECOND


async def test_an_idle_lane_starts_what_another_process_enqueues_within_200_ms(
    world: World,
) -> None:
    await world.start("a", **DEAF)
    delays: list[int] = []
    for number in range(ROUNDS):
        await world.enqueue(f"{number}", queue="q")
        asked_at = now()
        delays.append((await world.line("begin", job=f"{number}")).at - asked_at)
        await world.settled(f"{number}")
    world.check()
    assert seconds(delays) < 0.2


def in_transaction(world: World, job: Job) -> int:
    """Enqueue in a transaction of the application's own; returns when it is about to commit."""
    if world.is_sqlite:
        with contextlib.closing(sqlite3.connect(world.path)) as connection, connection:
            connection.execute("begin")
            connection.execute("create table if not exists orders (id text)")
            transactional(connection).enqueue(job)
            return now()
    with psycopg.connect(world.url) as connection:
        connection.execute("create table if not exists orders (id text)")
        transactional(connection).enqueue(job)
        return now()


def by_any_driver(world: World, job: Job) -> int:
    """As `in_transaction`, by nothing but a statement: sqlite3 alone knows of it."""
    statement = enqueue_statement(job, "sqlite")
    with contextlib.closing(sqlite3.connect(world.path)) as connection, connection:
        connection.execute(statement.sql, statement.parameters)
        return now()


async def test_an_idle_lane_starts_what_an_applications_transaction_has_enqueued_within_200_ms(
    world: World,
) -> None:
    await started_by(world, in_transaction)


async def test_an_idle_lane_starts_what_a_plain_statement_has_put_into_its_file_within_200_ms(
    sqlite_world: World,
) -> None:
    await started_by(sqlite_world, by_any_driver)


async def started_by(world: World, enqueue: Callable[[World, Job], int]) -> None:
    await world.start("a", **DEAF)
    delays: list[int] = []
    for number in range(ROUNDS):
        job = Job("work", {"steps": []}, id=f"{number}", queue="q")
        committing_at = enqueue(world, job)
        committed_at = now()
        begin = await world.line("begin", job=job.id)
        assert begin.at > committing_at
        delays.append(begin.at - committed_at)
        await world.settled(job.id)
    world.check()
    assert seconds(delays) < 0.2


async def cancelled_after(world: World, rounds: int) -> list[int]:
    """How long each cancellation took from its being durable to the end of the handler."""
    delays: list[int] = []
    for number in range(rounds):
        id = f"cancelled-{number}"
        await world.enqueue(id, ["gate", "never"], queue="q")
        await world.line("beat", job=id)
        assert (await world.client.cancel(id)).status == "recorded"
        asked_at = now()
        end = await world.line("end", job=id)
        assert (end.facts["how"], end.facts["reason"]) == ("cancelled", "cancellation")
        delays.append(end.at - asked_at)
        await world.settled(id)
        assert world.job(id)["outcome"] == "cancelled"
    return delays


async def test_a_cancellation_reaches_a_handler_in_another_process(world: World) -> None:
    await world.start("a", **DEAF)
    delays = await cancelled_after(world, ROUNDS)
    world.check()
    assert seconds(delays) < (0.2 if world.is_sqlite else 1.0)


async def test_without_notifications_a_cancellation_and_work_arrive_with_the_poll(
    postgres_world: World,
) -> None:
    world = postgres_world
    poll = 0.5
    deaf = {**DEAF, "options": {"poll": poll}, "store": {"listen": False}}
    await world.start("a", **deaf)
    delays = await cancelled_after(world, 3)
    # Found by the pass that follows the poll; the rest is for a busy machine.
    assert seconds(delays) < poll + 0.5
    for number in range(3):
        await world.enqueue(f"{number}", queue="q")
        asked_at = now()
        begin = await world.line("begin", job=f"{number}")
        assert begin.at - asked_at < (poll + 2) * SECOND
        await world.settled(f"{number}")
    world.check()
