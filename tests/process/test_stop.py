"""SIGTERM: one drains, two hand off, and neither costs a job anything."""

from __future__ import annotations

from tests.process.harness import LEASE, SECOND, World, at_once, on
from tests.process.test_kill import HOLD, LANES, LONG, PHASES, enqueue_in_phases, in_phases
from trio_watchdog import Recovery

RUN = ("-m", "trio_watchdog", "run", "worker:lanes", "--json", "--lease", f"{LEASE}", "--database")


@on("sqlite", "postgres")
async def a_drain_with_a_job_in_every_phase_loses_none_and_starts_none(world: World) -> None:
    first = await world.start("a", lanes=LANES, hold=HOLD, lease=LONG)
    await enqueue_in_phases(world, recovery=Recovery(1))
    await in_phases(world)
    first.terminate()
    draining = await world.line("draining")
    world.open("open")
    world.open("go")
    assert await world.ended(first) == 0
    jobs = world.check(is_done=False)
    for phase in PHASES:
        job, behind = jobs[phase], jobs[f"{phase}-next"]
        if phase in ("claimed", "reserved"):
            # It had not begun, so it goes back as if nothing had been.
            assert job["state"] == "queued", phase
            assert job["attempt_count"] == 0, phase
            assert not world.ledger.executions(job=phase), phase
        else:
            assert (job["state"], job["outcome"]) == ("settled", "completed"), phase
            (hook,) = world.ledger.lines("hooked", job=phase)
            assert hook.facts["how"] == "returned", phase
        assert behind["state"] == "queued", phase
        assert job["recovery_count"] == behind["recovery_count"] == 0, phase
    assert all(line.at < draining.at for line in world.ledger.lines("begin"))
    await world.start("b", lanes=LANES)
    await world.settled()
    jobs = world.check()
    assert {row["outcome"] for row in jobs.values()} == {"completed"}
    assert {row["attempt_count"] for row in jobs.values()} == {1}
    assert {row["recovery_count"] for row in jobs.values()} == {0}
    assert len(world.ledger.executions()) == len(jobs)


@on("sqlite", "postgres")
async def an_interrupt_with_a_job_in_every_phase_hands_off_at_no_cost(world: World) -> None:
    first = await world.start("a", lanes=LANES, hold=HOLD, lease=LONG)
    await enqueue_in_phases(world, recovery=Recovery(1))
    await in_phases(world)
    first.terminate()
    await world.line("draining")
    first.terminate()
    await world.line("interrupting")
    world.open("open")
    assert await world.ended(first) == 0
    (run,) = world.ledger.executions(job="handler")
    assert run.reason == "shutdown"
    jobs = world.check(is_done=False)
    for phase in ("claimed", "reserved", "handler"):
        assert jobs[phase]["state"] == "queued", phase
        assert jobs[phase]["attempt_count"] == jobs[phase]["recovery_count"] == 0, phase
    # What was decided stays decided; its hook is called again, and its lease not waited for.
    assert jobs["hook"]["state"] == "completing"
    world.open("go")
    await world.start("b", lanes=LANES)
    await world.settled()
    jobs = world.check()
    assert {row["outcome"] for row in jobs.values()} == {"completed"}
    assert {row["attempt_count"] for row in jobs.values()} == {1}
    assert {row["recovery_count"] for row in jobs.values()} == {0}
    for phase in PHASES:
        runs = [run.worker for run in world.ledger.executions(job=phase)]
        expected = {"handler": ["a", "b"], "claimed": ["b"], "reserved": ["b"]}
        assert runs == expected.get(phase, ["a"]), phase


@on("sqlite", "postgres")
async def a_drain_of_three_leases_keeps_its_claims_and_a_second_signal_gives_them_back(
    world: World,
) -> None:
    lanes = [{"name": "work", "workers": 3, "attempts": 5}]
    first = world.launch("a", command=(*RUN, world.url), lanes=lanes)
    for id in ("ends", "is_cancelled", "is_handed_off"):
        await world.enqueue(id, ["gate", id], recovery=Recovery(0))
        await world.line("beat", job=id, worker="a")
    await world.start("b", lanes=lanes)
    first.terminate()
    await world.until(lambda: '"draining"' in first.log, "it does not drain")
    # Its claims have to live through this, renewed by a process that does nothing else any more.
    drained_at = world.ledger.note("drained")
    for id in ("ends", "is_cancelled", "is_handed_off"):
        await world.lives_until(id, drained_at + 3 * LEASE * SECOND)
    assert len(world.ledger.executions()) == 3
    # A drain of which nobody knows the end can be cut short job by job.
    assert (await world.client.cancel("is_cancelled")).status == "recorded"
    await world.settled("is_cancelled")
    world.open("ends")
    await world.settled("ends")
    first.terminate()
    handed_off = await world.line("end", job="is_handed_off", worker="a")
    assert handed_off.facts["reason"] == "shutdown"
    assert await world.ended(first) == 128 + 15
    await world.line("begin", job="is_handed_off", worker="b")
    world.open("is_handed_off")
    await world.settled()
    jobs = world.check()
    assert {id: row["outcome"] for id, row in jobs.items()} == {
        "ends": "completed",
        "is_cancelled": "cancelled",
        "is_handed_off": "completed",
    }
    assert {row["recovery_count"] for row in jobs.values()} == {0}
    assert {row["attempt_count"] for row in jobs.values()} == {1}
    assert len(world.ledger.executions()) == 4


test_who_is_told_to_stop = at_once(
    a_drain_with_a_job_in_every_phase_loses_none_and_starts_none,
    an_interrupt_with_a_job_in_every_phase_hands_off_at_no_cost,
    a_drain_of_three_leases_keeps_its_claims_and_a_second_signal_gives_them_back,
)
