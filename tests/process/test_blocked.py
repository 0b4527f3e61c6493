"""A handler that blocks the event loop, and a file that somebody else keeps locked."""

from __future__ import annotations

from tests.process.harness import (
    ALONE,
    LEASE,
    SECOND,
    STALL,
    World,
    at_once,
    locked,
    on,
)
from trio_watchdog import Recovery


@on("sqlite", "postgres")
async def a_handler_that_blocks_for_three_leases_keeps_its_job_and_is_named(world: World) -> None:
    first = await world.start("a", options={"stall_warning": 0.5})
    await world.enqueue("job", ["block", 3.2 * LEASE], queue="q", recovery=Recovery(1))
    await world.enqueue("next", queue="q")
    await world.line("begin", job="job")
    # While it blocks, and not afterwards, the log says which job it is and where it stands.
    await world.until(lambda: "has blocked the event loop" in first.log, "it is not reported")
    assert not world.ledger.lines("end", job="job")
    await world.start("b")
    log = first.log
    assert "job 'job' of lane 'work' has blocked the event loop" in log
    assert "in block\n    time.sleep(seconds)" in log
    end = await world.line("end", job="job")
    assert (end.facts["how"], end.facts["reason"]) == ("returned", None)
    await world.settled()
    jobs = world.check()
    assert {row["outcome"] for row in jobs.values()} == {"completed"}
    (run,) = world.ledger.executions(job="job")
    assert run.worker == "a"
    assert end.at - run.begin.at > 3 * LEASE * SECOND
    assert jobs["job"]["recovery_count"] == 0
    # It was reported a few times, and not every half second, which would be 19 times.
    assert 1 <= first.log.count("job 'job' of lane 'work' has blocked the event loop") <= 7


@on("sqlite", "postgres")
async def a_handler_that_blocks_past_the_stall_limit_loses_its_job_and_its_result(
    world: World,
) -> None:
    options = {"stall_warning": 0.5, "stall_limit": 1.0}
    first = await world.start("a", options=options)
    await world.enqueue("job", ["deaf", "go"], recovery=Recovery(1))
    await world.line("begin", job="job", worker="a")
    await world.start("b", options=options | {"stall_limit": 600.0})
    began = await world.line("begin", job="job", worker="b")
    assert "leases are no longer renewed" in first.log
    # It does not feel that it has lost the job, and so is at work; its word does not count.
    world.open("go", "a")
    await world.line("end", job="job", worker="a")
    await world.until(lambda: "job 'job' of lane 'work' ended" in first.log, "no record of it")
    assert world.job("job")["token"] == began.token
    assert world.job("job")["state"] == "running"
    world.open("go", "b")
    await world.settled()
    assert world.job("job")["outcome"] == "completed"


@on("sqlite")
async def a_file_locked_for_several_leases_stops_who_cannot_renew_and_loses_nothing(
    world: World,
) -> None:
    lanes = [{"name": "short"}, {"name": "many", "workers": 4}]
    short = await world.start("short", lanes=lanes, **ALONE)
    long = await world.start("long", lanes=[{"name": "long"}], lease=60.0, heartbeat=1.0)
    await world.enqueue("short", ["gate", "go"], lane="short", recovery=Recovery(1))
    await world.enqueue("long", ["gate", "go"], lane="long", recovery=Recovery(0))
    await world.line("beat", job="short")
    await world.line("beat", job="long")
    for number in range(40):
        fields = {"lane": "many", "queue": f"q{number % 5}", "recovery": Recovery(1)}
        await world.enqueue(f"many{number}", ["sleep", 0.05], **fields)
    await world.line("end", count=8)
    with locked(world.path):
        locked_at = world.ledger.note("locked")
        end = await world.line("end", job="short")
        assert end.facts["reason"] == "lease_lost"
        # By its own clock: nobody could tell it anything.
        assert end.at < locked_at + (ALONE["lease"] + STALL) * SECOND
        # One whose lease is long enough goes on.
        await world.lives_until("long", locked_at + 2 * ALONE["lease"] * SECOND)
        assert not world.ledger.lines("end", job="long")
        unlocked_at = world.ledger.note("unlocked")
    world.open("go")
    await world.settled()
    jobs = world.check()
    assert {row["outcome"] for row in jobs.values()} == {"completed"}
    assert len(world.ledger.executions(job="long")) == 1
    first, second = world.ledger.executions(job="short")
    assert first.end is not None
    assert second.begin.at > unlocked_at > first.end.at
    for number in range(40):
        runs = world.ledger.executions(job=f"many{number}")
        assert len(runs) <= 1 + jobs[f"many{number}"]["recovery_count"]
    assert short.is_running
    assert long.is_running


test_who_is_blocked = at_once(
    a_handler_that_blocks_for_three_leases_keeps_its_job_and_is_named,
    a_handler_that_blocks_past_the_stall_limit_loses_its_job_and_its_result,
    a_file_locked_for_several_leases_stops_who_cannot_renew_and_loses_nothing,
)
