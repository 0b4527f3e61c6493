"""Every public name, used as a user would. Checked by pyright, never run."""

from __future__ import annotations

import sqlite3
from datetime import UTC, datetime
from typing import TYPE_CHECKING, assert_type

from attrs import frozen

import trio_watchdog as tw

if TYPE_CHECKING:
    import psycopg
    import trio


@frozen
class Mail:
    to: str


lanes = tw.Lanes()


@lanes.lane("mail", retry=tw.RetryPolicy(5, delay=0.5, jitter=0.2), payload=Mail, workers=2)
async def send_mail(job: tw.RunningJob) -> tw.Retry | None:
    assert_type(job.attempt, tw.Attempt)
    assert_type(job.attempt.is_last, bool)
    scope: trio.CancelScope = job.cancel_scope
    scope.cancel()
    mail: Mail = job.payload
    return tw.Retry(after=1.0, reason=mail.to) if job.cancel_reason is None else None


async def decide(job: tw.RunningJob) -> tw.Complete | tw.Fail | tw.Cancel | tw.OutcomeUnknown:
    match job.priority:
        case 0:
            return tw.Complete()
        case 1:
            return tw.Fail("no")
        case 2:
            return tw.Cancel()
        case _:
            return tw.OutcomeUnknown()


async def hook(job: tw.CompletingJob) -> None:
    assert_type(job.outcome, tw.Outcome)


def in_thread(job: tw.RunningJob) -> None:
    job.checkpoint()


async def in_asyncio(job: tw.RunningJob) -> tw.Complete:
    return tw.Complete()


def policy(job: tw.RunningJob) -> tw.RetryPolicy | None:
    return tw.RetryPolicy(3) if job.lane == "x" else None


def is_alive(job: tw.RunningJob) -> bool | None:
    return None


def on_wake(state: tw.WakeState) -> None:
    assert_type(state.next_wake_at, datetime | None)


def project(transition: tw.QueueTransition, connection: sqlite3.Connection) -> None:
    connection.execute("select ?", (transition.head.job_id,))


async def serve() -> None:
    async with tw.open_watchdog(
        "sqlite:jobs.db", lease=60, heartbeat=5, is_alive=is_alive, on_wake=on_wake, project=project
    ) as watchdog:
        assert_type(watchdog, tw.Watchdog)
        lane = await watchdog.start_lane("x", decide, retry=policy, on_completing=hook, timeout=9.0)
        assert_type(lane, tw.Lane)
        await watchdog.start_lane("t", tw.thread_handler(in_thread))
        await watchdog.start_lane("a", tw.asyncio_handler(in_asyncio))
        await watchdog.start_lane(tw.OTHERS, decide, workers=3)
        await watchdog.start_lanes(lanes)
        lane.pause()
        lane.resume()
        await lane.drain()
        assert_type(lane.statistics(), tw.LaneStatistics)
        assert_type(watchdog.running(), list[tw.RunningJob])
        assert_type(watchdog.statistics(), tw.WatchdogStatistics)
        assert_type(await watchdog.tick(lanes), tw.TickResult)
        await watchdog.wait_idle()


async def ask() -> None:
    async with tw.open_client("postgresql://localhost/app") as client:
        assert_type(client, tw.Client)
        job = tw.Job(
            "mail",
            {"to": "ada@example.org"},
            queue="ada",
            id="1",
            priority=2,
            not_before=datetime.now(UTC),
            recovery=tw.Recovery(3, window=60.0),
        )
        admission = await client.enqueue(job)
        assert_type(admission, tw.Admission)
        assert_type(await client.enqueue_many([job]), list[tw.Admission])
        assert_type(await client.enqueue_select("select 'mail' as lane"), list[tw.Admission])
        found = await client.read("1")
        match found:
            case tw.QueuedJob() | tw.RunningJob() | tw.CompletingJob():
                assert_type(found.attempt_count, int)
            case tw.SettledJob():
                assert_type(found.outcome, tw.Outcome)
            case None:
                pass
        assert_type(await client.cancel("1", only_if_queued=True), tw.CancellationResult)
        assert_type(await client.read_queue_head("ada"), tw.QueueHead)
        assert_type(await client.read_latest_settled("ada"), tw.SettledJob | None)
        page = await client.read_settled(limit=10, after=None, lane="mail")
        assert_type(page, tw.SettledPage)
        assert_type(page.jobs, tuple[tw.SettledJob, ...])
        assert_type(await client.fail_lane("mail", "closed"), tw.LaneFailure)
        assert_type(await client.purge_queue("ada"), int)
        assert_type(await client.wake_state(), tw.WakeState)
        assert_type(await client.wait_settled("1"), tw.SettledJob)


def transact(mine: sqlite3.Connection, theirs: psycopg.Connection) -> None:
    assert_type(tw.transactional(mine).enqueue(tw.Job("mail")), tw.Admission)
    assert_type(tw.transactional(theirs).cancel("1"), tw.CancellationResult)
    statement = tw.enqueue_statement(tw.Job("mail"), "postgres", paramstyle="numeric_dollar")
    assert_type(statement.sql, str)


async def transact_async(theirs: psycopg.AsyncConnection) -> None:
    assert_type(await tw.transactional(theirs).read_queue_head("ada"), tw.QueueHead)


def convert(job: tw.Job) -> tw.Job:
    return tw.converter.structure(tw.converter.unstructure(job), tw.Job)


def errors(error: tw.WatchdogError) -> str:
    match error:
        case tw.InvalidJob() | tw.JobConflict():
            return "ours"
        case tw.StoreInvalid() | tw.StoreUnavailable():
            return error.kind
        case tw.ClaimUnavailable() | tw.ExecutionFailed() | tw.SettlementRejected():
            return error.kind
        case tw.WakeUnavailable() | tw.LivenessUnavailable():
            return error.kind
        case _:
            return "other"
