"""SIGSTOP for longer than the lease, and SIGCONT: who has lost a job stops, and changes nothing.

While a process is frozen it does nothing, so nothing of it overlaps with what others do then. When
it goes on it is between two checkpoints at most: it does the step that it was about to do, and at
the next checkpoint its handler is cancelled. `overlaps` allows that one step and no more.
"""

from __future__ import annotations

from tests.process.harness import World, at_once, on
from trio_watchdog import Recovery

LANES = [{"name": "work"}, {"name": "hook", "hook": True}]


@on("sqlite", "postgres")
async def a_thawed_handler_is_cancelled_and_its_queue_never_runs_two_jobs(
    world: World,
) -> None:
    first = await world.start("a", lanes=LANES)
    await world.enqueue("job", ["gate", "go"], queue="q", recovery=Recovery(1))
    await world.enqueue("next", ["beat", 0.05], queue="q")
    await world.enqueue("hook", hook=[["gate", "go"]], lane="hook", queue="h")
    await world.enqueue("hook-next", lane="hook", queue="h")
    await world.line("beat", job="job", worker="a", count=3)
    await world.line("beat", job="hook", worker="a", count=3)
    second = await world.start("b", lanes=LANES)
    frozen_at = world.freeze(first)
    lease_until = world.lease_until("job")
    began = await world.line("begin", job="job", worker="b")
    await world.line("hook", job="hook", worker="b")
    assert began.at > lease_until > frozen_at

    thawed_at = first.thaw()
    end = await world.line("end", job="job", worker="a")
    assert (end.facts["how"], end.facts["reason"]) == ("cancelled", "lease_lost")
    cut = await world.line("hooked", job="hook", worker="a")
    assert cut.facts["how"] == "cut"
    for job in ("job", "hook"):
        late = world.ledger.lines("beat", job=job, worker="a")
        assert sum(line.at > thawed_at for line in late) <= 1
    # The other owner is not disturbed.
    await world.line("beat", job="job", worker="b", count=10)
    await world.line("beat", job="hook", worker="b", count=10)
    world.open("go")
    await world.settled()
    await world.until(lambda: "lease lost" in first.log, "no record of the lost run")

    # And the first one works again.
    second.terminate()
    assert await world.ended(second) == 0
    await world.enqueue("later", ["beat", 0.02])
    await world.settled()
    jobs = world.check()
    assert {row["outcome"] for row in jobs.values()} == {"completed"}
    assert [run.worker for run in world.ledger.executions(job="job")] == ["a", "b"]
    assert [run.worker for run in world.ledger.executions(job="hook")] == ["a"]
    assert [run.worker for run in world.ledger.executions(job="later")] == ["a"]
    assert [hook.facts["how"] for hook in world.ledger.lines("hooked", job="hook")] == [
        "cut",
        "returned",
    ]


@on("sqlite", "postgres")
async def a_result_that_comes_after_the_thaw_is_refused(world: World) -> None:
    # This handler feels no cancellation, for it blocks the event loop all the time.
    first = await world.start("a")
    await world.enqueue("job", ["deaf", "go"], queue="q", recovery=Recovery(1))
    await world.enqueue("next", ["beat", 0.02], queue="q")
    await world.line("beat", job="job", worker="a", count=3)
    await world.start("b")
    frozen_at = world.freeze(first)
    lease_until = world.lease_until("job")
    # The gate of the first is open by now, so its handler returns at once when it is thawed.
    world.open("go", "a")
    began = await world.line("begin", job="job", worker="b")
    assert began.at > lease_until > frozen_at
    first.thaw()
    end = await world.line("end", job="job", worker="a")
    assert end.facts["how"] == "returned"
    await world.until(lambda: "job 'job' of lane 'work' ended" in first.log, "no record of it")
    row = world.job("job")
    assert (row["state"], row["token"]) == ("running", began.token)
    world.open("go", "b")
    await world.settled()
    jobs = world.check()
    assert jobs["job"]["outcome"] == "completed"
    assert jobs["job"]["token"] == began.token
    assert jobs["job"]["recovery_count"] == 1
    assert [run.worker for run in world.ledger.executions(job="job")] == ["a", "b"]


test_who_is_frozen_and_thawed = at_once(
    a_thawed_handler_is_cancelled_and_its_queue_never_runs_two_jobs,
    a_result_that_comes_after_the_thaw_is_refused,
)
