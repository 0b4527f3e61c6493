"""SIGKILL, in every phase of a job's life: nothing is lost, nothing is run by two live owners."""

from __future__ import annotations

from typing import Any

from tests.process.harness import LEASE, SECOND, World, at_once, on
from trio_watchdog import Recovery
from trio_watchdog._open import open_store

BEFORE = ("claimed", "reserved", "handler")
"""Phases in which the handler has not decided; a kill there costs a recovery."""
AFTER = ("decided", "hook", "hooked")
"""Phases in which it has: the hook may run again, the handler never."""
PHASES = (*BEFORE, *AFTER)

LONG = 90.0
"""A lease that no test waits for."""

LANES = [{"name": phase, "attempts": 5, "hook": True} for phase in PHASES]
HOLD = {point: [point] for point in ("claimed", "reserved", "decided", "hooked")}


async def enqueue_in_phases(world: World, **fields: object) -> None:
    """A job for each phase, of that name, and another one behind it in its queue."""
    for phase in PHASES:
        steps = [["gate", "go"]] if phase == "handler" else [["beat", 0.05]]
        hook = [["gate", "go"]] if phase == "hook" else [["beat", 0.05]]
        await world.enqueue(phase, *steps, hook=hook, lane=phase, **fields)
        behind = f"{phase}-next"
        await world.enqueue(behind, ["beat", 0.02], lane=phase, queue=phase, **fields)


async def in_phases(world: World) -> None:
    """Return when the first worker holds each job in its phase."""
    for point in HOLD:
        await world.line("hold", point=point, worker="a")
    await world.line("beat", job="handler", worker="a", count=3)
    await world.line("beat", job="hook", hook=True, worker="a", count=3)


@on("sqlite", "postgres", who={"a_restart": "a_restart", "a_standby": "a_standby"})
async def a_kill_in_any_phase_loses_nothing_and_repeats_no_decision(world: World, who: str) -> None:
    # On the host of an SQLite file a killed owner is known by its lock, and no lease is waited for.
    lease = LONG if world.is_sqlite else LEASE
    if who == "a_standby":
        # Frozen while the jobs are given out, or it would take some of them.
        second = await world.start("b", lanes=LANES, lease=lease)
        world.freeze(second)
    first = await world.start("a", lanes=LANES, hold=HOLD, lease=lease)
    await enqueue_in_phases(world, recovery=Recovery(1))
    await in_phases(world)
    if who == "a_standby":
        second.thaw()
    killed_at = first.kill()
    world.open("go")
    leases = {} if world.is_sqlite else {phase: world.lease_until(phase) for phase in PHASES}
    if who == "a_restart":
        await world.start("b", lanes=LANES, lease=lease)
    await world.settled()
    jobs = world.check()
    for phase in PHASES:
        job, behind = jobs[phase], jobs[f"{phase}-next"]
        assert (job["outcome"], behind["outcome"]) == ("completed", "completed"), phase
        assert behind["settled_group"] > job["settled_group"], phase
        runs = world.ledger.executions(job=phase)
        hooks = world.ledger.lines("hooked", job=phase, how="returned")
        assert hooks, f"{phase}: no hook has ended"
        taken_over_at = world.ledger.lines(job=phase, worker="b")[0].at
        assert taken_over_at > killed_at, phase
        if world.is_sqlite:
            assert taken_over_at < killed_at + LONG / 3 * SECOND, phase
        else:
            assert taken_over_at > leases[phase], phase
        if phase in BEFORE:
            assert [run.worker for run in runs] == (["a", "b"] if phase == "handler" else ["b"]), (
                phase
            )
            assert job["recovery_count"] == 1, phase
            # A crash cannot dodge the count of attempts once one was reserved.
            assert job["attempt_count"] == (1 if phase == "claimed" else 2), phase
        else:
            assert [run.worker for run in runs] == ["a"], phase
            assert job["recovery_count"] == 0, phase
            assert job["attempt_count"] == 1, phase
        assert runs[-1].end is not None
        assert all(line.at > runs[-1].end.at for line in world.ledger.lines("hook", job=phase))
        assert jobs[f"{phase}-next"]["attempt_count"] == 1, phase


@on("sqlite")
async def an_owner_that_claims_and_dies_while_others_look_is_known_dead_all_the_same(
    world: World,
) -> None:
    # Another store has just read who has claims when this one makes its claim, and dies.
    async with open_store(world.url) as other:
        ask, owner = other.ask, None

        async def ask_slowly(wish: Any) -> Any:
            nonlocal owner
            answer = await ask(wish)
            if owner is None:
                worker = await world.start("a", lease=LONG)
                owner = world.ledger.lines("ready")[0].facts["owner"]
                await world.enqueue("job", ["gate", "never"], recovery=Recovery(1))
                await world.line("begin", job="job")
                worker.kill()
            return answer

        other.ask = ask_slowly  # type: ignore[method-assign]
        assert await other.dead_owners() == ()
        assert await other.dead_owners() == (owner,)


@on("sqlite", "postgres")
async def a_kill_without_a_recovery_budget_interrupts_and_frees_the_queue(
    world: World,
) -> None:
    lease = LONG if world.is_sqlite else LEASE
    first = await world.start("a", lease=lease, lanes=[{"name": "work", "workers": 2}])
    await world.start("b", lease=lease, lanes=[{"name": "other"}])
    await world.enqueue("lost", ["gate", "never"], queue="q")
    await world.enqueue("next", ["beat", 0.02], queue="q")
    await world.enqueue("spent", ["gate", "never"], recovery=Recovery(0))
    await world.line("beat", job="lost")
    await world.line("beat", job="spent")
    # "b" works another lane, and yet decides about jobs that have nobody.
    first.kill()
    await world.settled("lost", "spent")
    await world.start("c", lease=lease)
    await world.settled()
    jobs = world.check()
    for id in ("lost", "spent"):
        assert jobs[id]["outcome"] == "interrupted"
        assert jobs[id]["reason"]
        assert [run.worker for run in world.ledger.executions(job=id)] == ["a"]
    assert jobs["next"]["outcome"] == "completed"


@on("sqlite", "postgres")
async def a_job_that_kills_its_worker_each_time_is_given_up_when_its_budget_is_spent(
    world: World,
) -> None:
    lease = LONG if world.is_sqlite else 2.0
    await world.enqueue("poison", ["gate", "never"], queue="q", recovery=Recovery(2))
    await world.enqueue("next", ["beat", 0.02], queue="q")
    for name in "abc":
        worker = await world.start(name, lease=lease, heartbeat=0.3)
        await world.line("begin", job="poison", worker=name)
        worker.kill()
    await world.start("d", lease=lease, heartbeat=0.3)
    await world.settled()
    jobs = world.check()
    assert jobs["poison"]["outcome"] == "interrupted"
    assert "2" in jobs["poison"]["reason"]
    assert jobs["poison"]["recovery_count"] == 2
    assert jobs["next"]["outcome"] == "completed"
    assert [run.worker for run in world.ledger.executions(job="poison")] == ["a", "b", "c"]


test_who_is_killed = at_once(
    a_kill_in_any_phase_loses_nothing_and_repeats_no_decision,
    an_owner_that_claims_and_dies_while_others_look_is_known_dead_all_the_same,
    a_kill_without_a_recovery_budget_interrupts_and_frees_the_queue,
    a_job_that_kills_its_worker_each_time_is_given_up_when_its_budget_is_spent,
)
