"""Every race of the claim protocol that has gone wrong somewhere, stepped by hand.

`A`, `B` and `C` are jobs of one queue, in order. *Lost* is a job that is first of a free queue and
hidden from claims: nobody would ever run it.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio

from tests.postgres.stepping import (
    LEASE,
    START,
    Stage,
    User,
    completing,
    open_stage,
    queued,
    running,
)
from trio_watchdog import _statements as sql
from trio_watchdog import _wishes as w
from trio_watchdog._borrowed import transactional
from trio_watchdog._errors import JobConflict, StoreUnavailable
from trio_watchdog._model import Job, Outcome, RetryPolicy
from trio_watchdog._rules import Settle

COMPLETED = Settle(Outcome.COMPLETED)


@pytest.fixture
async def stage(quick_database: str) -> AsyncIterator[Stage]:
    async with open_stage(quick_database, "stage") as stage:
        yield stage


def decide(id: str) -> w.Decide:
    return w.Decide(id, f"t{id}", COMPLETED)


def claim(token: str = "x", lane: str = "l") -> w.Claim:
    return w.Claim(lane, token, "o", LEASE)


def claimed(answers: Any) -> str | None:
    job = answers[0].job
    return None if job is None else job.id


def cancelling(id: str, *, commits: bool, cancellation_id: str = "user's") -> Any:
    """A user's transaction that cancels a job and then takes its time."""

    async def play(user: User) -> str:
        await user.turn("cancel")
        transaction = transactional(user.connection, schema=user.schema)
        result = await transaction.cancel(id, cancellation_id=cancellation_id)
        await user.turn("end")
        await (user.connection.commit() if commits else user.connection.rollback())
        return result.status

    return play


def admitting(job: Job, *, commits: bool) -> Any:
    """A user's transaction that enqueues a job and then takes its time."""

    async def play(user: User) -> str:
        await user.turn("enqueue")
        result = await transactional(user.connection, schema=user.schema).enqueue(job)
        await user.turn("end")
        await (user.connection.commit() if commits else user.connection.rollback())
        return result.status

    return play


async def look_after_notes(stage: Stage) -> None:
    """What each process does every few seconds."""
    store = stage.players["A"].store
    await store._look_at_notes()


async def drained(stage: Stage) -> list[str]:
    """Run everything that can be run; the jobs in order."""
    store = stage.players["A"].store
    order: list[str] = []
    while True:
        await store.submit(w.SettleCancelled())
        (answer,) = await store.submit(claim(secrets.token_hex(4)))
        if answer.job is None:
            return order
        order.append(answer.job.id)
        await store.submit(w.Decide(answer.job.id, answer.job.token, COMPLETED))


# -- freeing against freeing ----------------------------------------------------------------------


async def test_two_cancelled_jobs_that_go_at_once_lose_nobody(stage: Stage) -> None:
    await stage.set(
        queued("A", "ready", lane="l1", cancellation_id="cA"),
        queued("B", "ready", lane="l2", cancellation_id="cB"),
        queued("C", "lowered"),
    )
    async with stage.acting(A=[w.SettleCancelled("l1")], B=[w.SettleCancelled("l2")]) as (a, b):
        await a.through("settle")
        # Without the queue's lock each would see the other's job as the head, which is not lowered.
        await b.until("lock queues")
        await b.blocks()
        assert await a.finish() == [["A"]]
        assert await b.finish() == [["B"]]
    assert await stage.states() == {"A": "settled", "B": "settled", "C": "ready"}


async def test_a_purge_and_a_cancelled_job_that_go_at_once_do_not_deadlock(stage: Stage) -> None:
    await stage.set(
        queued("A", "ready"),
        queued("B", "lowered", lane="l2", cancellation_id="cB"),
        running("R", queue="r"),
        queued("D", "lowered", queue="r"),
    )
    async with stage.acting(A=[w.PurgeQueue("q")], B=[w.SettleCancelled("l2")]) as (a, b):
        await a.through("purge queue")
        await b.until("lock queues")
        await b.blocks()
        assert await a.finish() == [2]
        # It had found the job; that one is gone, and nothing else is taken for it.
        assert await b.finish() == [[]]
    assert await stage.states() == {"R": "running", "D": "lowered"}


async def test_a_job_that_comes_back_under_the_same_id_is_not_taken_for_the_old_one(
    stage: Stage,
) -> None:
    for wish in (w.SettleCancelled(), w.FailLane("l", "because")):
        await stage.set(queued("A", "ready", cancellation_id="cA"))
        async with stage.acting(A=[wish]) as (a,):
            await a.until("lock queues")
            await stage.monitor.execute(f"delete from {stage.jobs} where id = 'A'".encode())
            await stage.players["B"].store.enqueue(Job("other", id="A", queue="q2"))
            await a.finish()
        assert await stage.states() == {"A": "ready"}


async def test_queues_are_locked_in_one_order(stage: Stage) -> None:
    names = ("q1", "q2")
    # The same two queues, asked for in opposite orders.
    await stage.set(
        queued("A1", "ready", queue="q1", lane="l1", cancellation_id="1"),
        queued("A2", "ready", queue="q2", lane="l1", cancellation_id="2"),
        queued("B2", "ready", queue="q2", lane="l2", cancellation_id="3"),
        queued("B1", "ready", queue="q1", lane="l2", cancellation_id="4"),
    )
    key = stage.dialect.plain(sql.Statement("key", "{queue_key}"))
    cursor = await stage.monitor.execute(
        f"select {key} from unnest(%s::text[]) as t(queue) order by 1".encode(), (list(names),)
    )
    first, last = [row[0] for row in await cursor.fetchall()]
    await stage.monitor.execute("select pg_advisory_lock(%s)", (first,))
    async with stage.acting(A=[w.SettleCancelled("l1")], B=[w.SettleCancelled("l2")]) as (a, b):
        for actor in (a, b):
            await actor.until("lock queues")
            await actor.blocks()
        # Both wait for the first one, and neither holds the last.
        cursor = await stage.monitor.execute("select pg_try_advisory_lock(%s)", (last,))
        assert await cursor.fetchone() == (True,)
        await stage.monitor.execute("select pg_advisory_unlock_all()")
        assert await a.finish() == [["A1", "A2"]]
        assert await b.finish() == [["B2", "B1"]]


# -- freeing against lowering ---------------------------------------------------------------------


async def test_a_job_that_is_lowered_just_before_its_queue_is_freed_is_raised(
    stage: Stage,
) -> None:
    await stage.set(running("A"), queued("B", "ready"))
    async with stage.acting(A=[decide("A")], B=[claim()]) as (a, b):
        await b.through("lock lowering")
        # Its statement, begun before B is lowered, must not be the one that looks for the head.
        await a.until("lock queues")
        await a.blocks()
        await b.through("lower")
        assert claimed(await b.finish()) is None
        await a.finish()
    assert await stage.states() == {"A": "settled", "B": "ready"}


async def test_a_job_whose_queue_is_being_freed_is_not_lowered(stage: Stage) -> None:
    await stage.set(running("A"), queued("B", "ready"))
    async with stage.acting(A=[decide("A")], B=[claim()]) as (a, b):
        await a.through("promote")
        # A runs, as far as it can see; but it does not get the lock.
        (answer,) = await b.finish()
        assert answer.more
        await a.finish()
    assert await stage.states() == {"A": "settled", "B": "ready"}
    assert await drained(stage) == ["B"]


BEHIND = Job("l", id="Z", queue="q")


async def test_a_job_that_arrives_behind_others_is_lowered_at_once(stage: Stage) -> None:
    store = stage.players["A"].store
    await stage.set(running("A"))
    await store.enqueue(BEHIND)
    assert await stage.states() == {"A": "running", "Z": "lowered"}
    await stage.set(queued("A", "ready"))
    await store.enqueue(BEHIND)
    # None of a queue's newcomers but the first; which is not the one that came first.
    await store.enqueue_many(
        [Job("l", id=id, queue="r", priority=int(id[1])) for id in ("R0", "S1", "T0")]
    )
    states = {"A": "ready", "Z": "lowered", "R0": "lowered", "S1": "ready", "T0": "lowered"}
    assert await stage.states() == states


async def test_a_job_that_arrives_while_its_queue_is_being_freed_is_not_lowered(
    stage: Stage,
) -> None:
    await stage.set(running("A"))
    async with stage.acting(A=[decide("A")], B=[w.Enqueue(BEHIND)]) as (a, b):
        await a.through("lock queues")
        await b.finish()
        await a.finish()
    assert await stage.states() == {"A": "settled", "Z": "ready"}


async def test_a_job_that_arrives_just_before_its_queue_is_freed_is_raised(stage: Stage) -> None:
    await stage.set(running("A"))
    async with stage.acting(A=[decide("A")], B=[w.Enqueue(BEHIND)]) as (a, b):
        await b.through("try queues")
        await a.until("lock queues")
        await a.blocks()
        await b.finish()
        await a.finish()
    assert await stage.states() == {"A": "settled", "Z": "ready"}


async def test_who_asks_again_about_a_duplicate_holds_no_lock_of_its_queue(stage: Stage) -> None:
    await stage.set(running("A"))
    async with stage.players["A"].session.connected() as connection:
        await connection.execute("set lock_timeout = '50ms'")
    admitting_it = admitting(BEHIND, commits=False)
    async with stage.acting(A=[w.Enqueue(BEHIND)], B=admitting_it) as (a, b):
        await b.through("enqueue")
        await a.through("try queues")
        await a.until("insert")
        await a.step()
        # It waits for the other until its time is up, and then asks again.
        with trio.fail_after(60):
            while a.label is None:
                await stage.settle()
        first = len(stage.trace)
        await a.until("insert")
        await b.finish()
        assert (await a.finish())[0].status == "queued"
    assert not any("try queues" in line for line in stage.trace[first:])


async def test_what_was_blocked_when_the_lock_was_tried_is_looked_at_again(stage: Stage) -> None:
    await stage.set(queued("B", "ready"))
    names = {"rows": '[["l"]]'}
    async with stage.monitor.transaction():
        # As if the look that goes with the lock had seen A run, which it does no more.
        await stage.monitor.execute("select set_config('watchdog.lowering', '[\"q\"]', true)")
        text = stage.dialect.text(sql.LOWER)
        await stage.monitor.execute(text.encode(), names | stage.clock())
    assert await stage.states() == {"B": "ready"}


async def test_a_clock_that_is_behind_does_not_lose_the_next_job(stage: Stage) -> None:
    await stage.set(
        queued("A", "ready", cancellation_id="cA"),
        queued("B", "lowered", not_before=START + 5),
    )
    async with stage.acting(A=[w.SettleCancelled()]) as (a,):
        # B was due, by whoever staged and lowered it; the one that frees it thinks otherwise.
        await a.finish()
    assert await stage.states() == {"A": "settled", "B": "deferred"}
    assert await stage.lost() == []
    stage.clock.now += 5
    assert await drained(stage) == ["B"]


# -- beside a user's open transaction -------------------------------------------------------------


@pytest.mark.parametrize("commits", [True, False])
async def test_a_user_who_is_cancelling_the_next_job_holds_up_nobody(
    stage: Stage, commits: bool
) -> None:
    await stage.set(running("A"), queued("B", "lowered"), queued("C", "lowered"))
    async with stage.acting(A=[decide("A")], B=cancelling("B", commits=commits)) as (a, b):
        await b.through("cancel")
        assert (await a.finish())[0].status == "recorded"
        # It could not be raised, but it is not forgotten.
        assert await stage.notes() == ["q"]
        await look_after_notes(stage)
        assert await stage.notes() == ["q"]
        await b.finish()
    assert await stage.lost() == []
    await look_after_notes(stage)
    assert await stage.notes() == []
    assert await drained(stage) == (["C"] if commits else ["B", "C"])


async def test_removal_does_not_wait_for_a_user(stage: Stage) -> None:
    for wish, left in (
        (w.PurgeQueue("q"), {"B": "ready"}),
        (w.FailLane("l", "because"), {"A": "settled", "B": "ready", "C": "settled"}),
    ):
        await stage.set(queued("A", "ready"), queued("B", "lowered"), queued("C", "lowered"))
        async with stage.acting(A=[wish], B=cancelling("B", commits=False)) as (a, b):
            await b.through("cancel")
            await a.finish()
            await b.finish()
        await look_after_notes(stage)
        assert await stage.states() == left


async def test_lowering_does_not_wait_for_a_user(stage: Stage) -> None:
    await stage.set(running("A"), queued("B", "ready"), queued("C", "ready"))
    async with stage.acting(A=[claim()], B=cancelling("B", commits=False)) as (a, b):
        await b.through("cancel")
        assert claimed(await a.finish()) is None
        assert await stage.states() == {"A": "running", "B": "ready", "C": "lowered"}
        await b.finish()


@pytest.mark.parametrize("commits", [True, False])
async def test_a_user_who_is_admitting_a_job_holds_up_nobody(stage: Stage, commits: bool) -> None:
    await stage.set(running("A"), queued("B", "ready"), queued("C", "lowered"))
    job = Job("l", id="H", queue="q", priority=9)
    async with stage.acting(A=[claim()], B=admitting(job, commits=commits)) as (a, b):
        await b.through("enqueue")
        assert claimed(await a.finish()) is None
        store = stage.players["A"].store
        await store.submit(decide("A"))
        (second,) = await store.submit(claim("second"))
        assert second.job.id == "B"
        await b.finish()
        await store.submit(w.Decide("B", "second", COMPLETED))
    assert await drained(stage) == (["H", "C"] if commits else ["C"])


async def test_a_user_who_holds_all_that_is_in_front_hides_nothing_behind_it(
    stage: Stage,
) -> None:
    many = [queued(f"B{n}", "ready", queue=f"b{n}", priority=1) for n in range(100)]
    await stage.set(*many, queued("C", "ready"))

    async def holding(user: User) -> None:
        await user.turn("hold")
        await user.connection.execute(
            f"select from {stage.jobs} where priority = 1 for update".encode()
        )
        await user.turn("end")

    async with stage.acting(A=[claim()], B=holding) as (a, b):
        await b.through("hold")
        assert claimed(await a.finish()) == "C"
        await b.finish()


async def test_a_user_who_refers_to_a_job_does_not_hold_up_its_end(stage: Stage) -> None:
    await stage.set(running("A"), queued("B", "lowered"))
    await stage.monitor.execute(
        f"create table if not exists child (job text references {stage.jobs} (id))".encode()
    )

    async def referring(user: User) -> None:
        await user.turn("refer")
        await user.connection.execute("insert into child values ('A')")
        await user.turn("end")

    async with stage.acting(A=[decide("A"), w.Renew("A", "tA", LEASE)], B=referring) as (a, b):
        await b.through("refer")
        recorded, renewed = await a.finish()
        assert (recorded.status, renewed.status) == ("recorded", "held")
        await b.finish()
    await stage.monitor.execute("drop table child")


# -- claims ---------------------------------------------------------------------------------------


async def test_two_claims_of_one_job_give_it_to_one(stage: Stage) -> None:
    await stage.set(queued("A", "ready"), queued("B", "lowered"))
    async with stage.acting(A=[claim("a")], B=[claim("b")]) as (a, b):
        await a.through("claim")
        assert claimed(await b.finish()) is None
        assert claimed(await a.finish()) == "A"


async def test_a_newcomer_of_higher_priority_does_not_run_beside_the_head(stage: Stage) -> None:
    await stage.set(queued("A", "ready"))
    async with stage.acting(A=[claim("a")], B=[claim("b")]) as (a, b):
        await a.through("claim")
        await b.until("claim")
        # Committed now; and the second claim cannot see that A is being claimed.
        await stage.monitor.execute(
            f"insert into {stage.jobs} (id, queue, lane, priority, not_before, hint, payload)"
            " values ('H', 'q', 'l', 9, 0, 'ready', 'null')".encode()
        )
        await b.blocks()
        assert claimed(await a.finish()) == "A"
        assert claimed(await b.finish()) is None
    states = await stage.states()
    assert (states["A"], states["H"]) == ("running", "lowered")
    await stage.players["A"].store.submit(w.Decide("A", "a", COMPLETED))
    assert await drained(stage) == ["H"]


async def test_a_refused_claim_takes_nothing_else_of_its_exchange_with_it(stage: Stage) -> None:
    await stage.set(
        queued("A", "ready"), queued("D", "ready", queue="d", lane="l2"), running("R", queue="r")
    )
    batch = [claim("b"), claim("b2", "l2"), w.Decide("R", "tR", COMPLETED)]
    async with stage.acting(A=[claim("a")], B=batch) as (a, b):
        await a.through("claim")
        await b.until("claim")
        await stage.monitor.execute(
            f"insert into {stage.jobs} (id, queue, lane, priority, not_before, hint, payload)"
            " values ('H', 'q', 'l', 9, 0, 'ready', 'null')".encode()
        )
        await b.blocks()
        await a.finish()
        first, second, recorded = await b.finish()
    assert (first.job, second.job.id, recorded.status) == (None, "D", "recorded")


async def test_claims_of_many_queues_wait_for_each_other_in_one_order(stage: Stage) -> None:
    # Lanes ask for the queues in opposite orders; a newcomer in each makes both claims collide.
    await stage.set(
        queued("A1", "ready", queue="q1", lane="l1", priority=2),
        queued("A2", "ready", queue="q2", lane="l1", priority=1),
    )
    both = [w.Claim("l1", f"a{n}", "o", LEASE) for n in (1, 2)]
    others = [w.Claim("l2", f"b{n}", "o", LEASE) for n in (1, 2)]
    async with stage.acting(A=both, B=others) as (a, b):
        await a.through("claim")
        await b.until("claim")
        await stage.monitor.execute(
            f"insert into {stage.jobs} (id, queue, lane, priority, not_before, hint, payload)"
            " values ('H2', 'q2', 'l2', 9, 0, 'ready', 'null'),"
            " ('H1', 'q1', 'l2', 8, 0, 'ready', 'null')".encode()
        )
        await b.blocks()
        assert [answer.job.id for answer in await a.finish()] == ["A1", "A2"]
        assert [answer.job for answer in await b.finish()] == [None, None]


# -- the same job ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "commits", "expected"),
    [
        (Job("l", 1, id="J"), True, "duplicate"),
        (Job("l", 1, id="J"), False, "queued"),
        (Job("l", 2, id="J"), True, JobConflict),
        (Job("l", 2, id="J"), False, "queued"),
    ],
)
async def test_a_duplicate_of_an_uncommitted_job_is_answered_once_that_is_decided(
    stage: Stage, other: Job, commits: bool, expected: Any
) -> None:
    await stage.set()
    wish = w.Enqueue(Job("l", 1, id="J"))
    async with stage.acting(A=[wish], B=admitting(other, commits=commits)) as (a, b):
        await b.through("enqueue")
        await a.until("insert")
        await a.blocks()
        assert await b.finish() == "queued"
        (answer,) = await a.finish()
    if isinstance(expected, str):
        assert answer.status == expected
    else:
        assert isinstance(answer, expected)


async def test_a_job_that_is_purged_while_its_duplicate_is_admitted_is_admitted(
    stage: Stage,
) -> None:
    await stage.set(queued("J", "ready", queue="J"))
    async with stage.acting(A=[w.Enqueue(Job("l", id="J"))]) as (a,):
        await a.until("read many")
        await stage.monitor.execute(f"delete from {stage.jobs}".encode())
        (answer,) = await a.finish()
    assert answer.status == "queued"
    assert await stage.states() == {"J": "ready"}


async def test_one_cancellation_id_for_two_jobs_at_once_is_a_conflict_for_one(
    stage: Stage,
) -> None:
    await stage.set(queued("A", "ready"), queued("B", "ready", queue="b"))
    async with stage.acting(A=[w.Cancel("A", "c")], B=[w.Cancel("B", "c")]) as (a, b):
        await a.through("set cancellation")
        await b.until("set cancellation")
        await b.blocks()
        assert (await a.finish())[0].status == "recorded"
        assert (await b.finish())[0].status == "conflict"


async def test_a_cancellation_that_comes_between_look_and_write_counts(stage: Stage) -> None:
    policy = RetryPolicy(3)
    for wish, label, expected, outcome in (
        (w.ReserveAttempt("A", "tA", policy), "reserve attempt", "cancelled", None),
        (w.ReserveAttempt("A", "tA", RetryPolicy(1)), "lock queues", "cancelled", "cancelled"),
        (w.RetryJob("A", "tA", policy), "lock queues", "cancelled", None),
        (w.RetryJob("A", "tA", RetryPolicy(1)), "lock queues", "cancelled", "cancelled"),
        (w.HandOff("A", "tA"), "lock queues", "cancelled", None),
        (decide("A"), "lock queues", "recorded", "cancelled"),
    ):
        # No attempt is open, so that a policy of one attempt is used up by it.
        await stage.set(running("A", attempt_open=0), queued("B", "lowered"))
        async with stage.acting(A=[wish], B=[w.Cancel("A", "c")]) as (a, b):
            await a.until(label)
            assert (await b.finish())[0].status == "recorded"
            (answer,) = await a.finish()
        assert answer.status == expected, wish
        assert (await stage.rows())["A"]["outcome"] == outcome, wish


async def test_a_cancellation_that_comes_while_a_claim_is_reconciled_counts(stage: Stage) -> None:
    await stage.set(running("A", lease_until=START), queued("B", "lowered"))
    async with stage.acting(A=[w.Reconcile("A", "tA")], B=[w.Cancel("A", "c")]) as (a, b):
        await a.until("lock queues")
        await b.finish()
        (answer,) = await a.finish()
    assert answer == w.Reconciled("settled", Settle(Outcome.CANCELLED))


# -- claims that end ------------------------------------------------------------------------------


async def test_a_renewal_under_way_does_not_cost_the_claim(stage: Stage) -> None:
    for row, wish, expected in (
        (running("A"), decide("A"), "recorded"),
        (running("A"), w.HandOff("A", "tA"), "queued"),
        (running("A"), w.RetryJob("A", "tA"), "queued"),
        (running("A"), w.ReserveAttempt("A", "tA", RetryPolicy(3)), "reserved"),
        (completing("A"), w.FinishCompleting("A", "tA"), "settled"),
    ):
        await stage.set(row)
        async with stage.acting(A=[wish], B=[w.Renew("A", "tA", LEASE)]) as (a, b):
            await b.through("renew")
            # It skips the row that is locked, and asks again a moment later.
            for _ in range(12):
                if a.label is None:
                    break
                await a.step()
            await b.finish()
            (answer,) = await a.finish()
        assert getattr(answer, "status", answer) == expected, wish


async def test_a_job_that_a_user_holds_is_said_to_be_held(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trio_watchdog._postgres.LOCKED_SECONDS", {True: 0.0, False: 0.0})
    for row, wish in (
        (running("A"), decide("A")),
        (running("A"), w.HandOff("A", "tA")),
        (running("A"), w.RetryJob("A", "tA", RetryPolicy(1))),
        (completing("A"), w.FinishCompleting("A", "tA")),
    ):
        await stage.set(row)

        async def holding(user: User) -> None:
            await user.turn("hold")
            await user.connection.execute(f"select from {stage.jobs} for update".encode())
            await user.turn("end")

        async with stage.acting(A=[wish], B=holding) as (a, b):
            await b.through("hold")
            with pytest.raises(StoreUnavailable, match="holds the row of job 'A'"):
                await a.finish()
            await b.finish()
        assert (await stage.rows())["A"]["state"] == row["state"]


async def test_a_late_decision_loses_against_whoever_reconciles(stage: Stage) -> None:
    await stage.set(running("A", lease_until=START, max_recoveries=1), queued("B", "lowered"))
    async with stage.acting(A=[w.Reconcile("A", "tA")], B=[decide("A")]) as (a, b):
        await a.through("requeue")
        await b.until("lock queues")
        await b.blocks()
        assert (await a.finish())[0].status == "queued"
        assert (await b.finish())[0].status == "conflict"
    assert await stage.states() == {"A": "ready", "B": "lowered"}


async def test_two_supervisors_decide_about_a_claim_once(stage: Stage) -> None:
    await stage.set(running("A", lease_until=START, max_recoveries=1))
    wish = w.Reconcile("A", "tA")
    async with stage.acting(A=[wish], B=[wish]) as (a, b):
        await a.through("requeue")
        await b.until("lock queues")
        await b.blocks()
        assert (await a.finish())[0].status == "queued"
        assert (await b.finish())[0].status == "untouched"
    assert (await stage.rows())["A"]["recovery_count"] == 1


async def test_a_decision_that_comes_first_saves_its_job_from_the_lanes_failure(
    stage: Stage,
) -> None:
    await stage.set(running("A"), queued("B", "lowered"))
    async with stage.acting(A=[w.FailLane("l", "because")], B=[decide("A")]) as (a, b):
        await a.until("lock queues")
        await b.finish()
        (failure,) = await a.finish()
    assert [job.id for job in failure.jobs] == ["B"]
    assert failure.more
    assert (await stage.rows())["A"]["outcome"] == "completed"
