"""How fast one process reaches another: work for an idle lane, and a stop for a running handler.

Delays are medians of several, for any one of them may meet a busy machine. Leases and polls are so
long that nothing but a notification can be what arrives.
"""

from __future__ import annotations

import contextlib
import itertools
import sqlite3
import statistics
from collections.abc import Callable
from typing import Any

import psycopg

from tests.process.harness import SECOND, OpenWorld, World, now
from trio_watchdog import Job, enqueue_statement, transactional

ROUNDS = 7

DEAF: dict[str, Any] = {"lease": 90.0, "heartbeat": 30.0, "options": {"poll": 60.0}}
"""Neither a renewal nor the slow poll brings anything."""


NOTHING_ELSE = 20.0
"""Seconds within which nothing but a notification brings anything."""


class Delays:
    """How long something took, again and again."""

    def __init__(self, rounds: int = ROUNDS) -> None:
        self._rounds = rounds
        self._found: list[int] = []

    def add(self, delay: int) -> None:
        assert delay < NOTHING_ELSE * SECOND
        self._found.append(delay)

    def are_within(self, seconds: float) -> bool:
        """Whether the median of the last rounds is.

        After the first few rounds there are more only where it is not: if the machine was busy it
        is given time to come to rest, and what is slow by itself stays so.
        """
        if len(self._found) < self._rounds:
            return False
        median = statistics.median(self._found[-self._rounds :]) / SECOND
        if len(self._found) < 10 * self._rounds:
            return median < seconds
        raise AssertionError(f"never within {seconds} s; lately {median} s")


async def test_an_idle_lane_starts_what_another_process_enqueues_within_200_ms(
    world: World,
) -> None:
    await world.start("a", **DEAF)
    delays = Delays()
    for number in itertools.count():
        await world.enqueue(f"{number}", queue="q")
        asked_at = now()
        delays.add((await world.line("begin", job=f"{number}")).at - asked_at)
        await world.settled(f"{number}")
        if delays.are_within(0.2):
            break
    world.check()


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
    open_worlds: OpenWorld,
) -> None:
    async with open_worlds("sqlite") as world:
        await started_by(world, by_any_driver)


async def started_by(world: World, enqueue: Callable[[World, Job], int]) -> None:
    await world.start("a", **DEAF)
    delays = Delays()
    for number in itertools.count():
        job = Job("work", {"steps": []}, id=f"{number}", queue="q")
        committing_at = enqueue(world, job)
        committed_at = now()
        begin = await world.line("begin", job=job.id)
        assert begin.at > committing_at
        delays.add(begin.at - committed_at)
        await world.settled(job.id)
        if delays.are_within(0.2):
            break
    world.check()


async def cancelled(world: World, number: int) -> int:
    """How long a cancellation took from its being durable to the end of the handler."""
    id = f"cancelled-{number}"
    await world.enqueue(id, ["gate", "never"], queue="q")
    await world.line("beat", job=id)
    assert (await world.client.cancel(id)).status == "recorded"
    asked_at = now()
    end = await world.line("end", job=id)
    assert (end.facts["how"], end.facts["reason"]) == ("cancelled", "cancellation")
    await world.settled(id)
    assert world.job(id)["outcome"] == "cancelled"
    return end.at - asked_at


async def test_a_cancellation_reaches_a_handler_in_another_process(world: World) -> None:
    await world.start("a", **DEAF)
    delays = Delays()
    for number in itertools.count():
        delays.add(await cancelled(world, number))
        if delays.are_within(0.2 if world.is_sqlite else 1.0):
            break
    world.check()


async def test_without_notifications_a_cancellation_and_work_arrive_with_the_poll(
    open_worlds: OpenWorld,
) -> None:
    poll = 0.5
    deaf = {**DEAF, "options": {"poll": poll}, "store": {"listen": False}}
    async with open_worlds("postgres") as world:
        await world.start("a", **deaf)
        # Found by the pass that follows the poll; the rest is for a busy machine.
        delays = Delays(3)
        for number in itertools.count():
            delays.add(await cancelled(world, number))
            if delays.are_within(poll + 0.5):
                break
        delays = Delays(3)
        for number in itertools.count():
            await world.enqueue(f"{number}", queue="q")
            asked_at = now()
            delays.add((await world.line("begin", job=f"{number}")).at - asked_at)
            await world.settled(f"{number}")
            if delays.are_within(poll + 0.5):
                break
        world.check()
