"""A PostgreSQL server that dies, is away, or is restarted under running workers."""

from __future__ import annotations

import trio

from tests.postgres.server import StopMode
from tests.process.harness import ALONE, IS_FULL, SECOND, STALL, World, at_once, on
from trio_watchdog import Job, Recovery

AWAY = 20.0 if IS_FULL else 10.0
"""Seconds of a long outage."""

JOBS = 240


@on(
    "server",
    how={"killed": ("kill", 0.0), "restarted": ("fast", 0.0), "away_for_long": ("fast", AWAY)},
)
async def workers_carry_on_by_themselves_when_the_server_comes_back(
    world: World, how: tuple[StopMode, float]
) -> None:
    mode, away = how
    server = world.server
    assert server is not None
    many = {"name": "many", "workers": 4, "hook": True}
    own = [{"name": name, "workers": 2} for name in ("short", "long")]
    short = world.launch("short", lanes=[own[0], many], **ALONE)
    long = world.launch("long", lanes=[own[1], many], lease=90.0, heartbeat=1.0)
    await world.ready(short, long)
    await world.enqueue("short", ["gate", "go"], lane="short", recovery=Recovery(1))
    await world.enqueue("long", ["gate", "go"], lane="long", recovery=Recovery(0))
    await world.line("beat", job="short")
    await world.line("beat", job="long")
    payload = {"steps": [["sleep", 0.05]], "hook": []}
    await world.client.enqueue_many(
        Job("many", payload, id=f"many{n}", queue=f"q{n % 12}", recovery=Recovery(5))
        for n in range(JOBS)
    )
    await world.line("end", count=JOBS // 8)

    stopped_at = world.ledger.note("stop")
    await trio.to_thread.run_sync(server.stop, mode)
    if away:
        # No server, no renewal: this one stops by its own clock, long before the server is back.
        end = await world.line("end", job="short")
        assert end.facts["reason"] == "lease_lost"
        assert end.at < stopped_at + (ALONE["lease"] + STALL) * SECOND
        await world.lives_until("long", stopped_at + away * SECOND)
    await trio.to_thread.run_sync(server.start)
    world.ledger.note("start")

    # Both processes work on, without anybody's help.
    for name in ("short", "long"):
        await world.enqueue(f"{name}-after", lane=name)
        await world.line("end", job=f"{name}-after", worker=name)
    assert not world.ledger.lines("end", job="long")
    world.open("go")
    await world.settled()
    jobs = world.check()
    assert short.is_running
    assert long.is_running
    assert len(jobs) == JOBS + 4
    assert {row["outcome"] for row in jobs.values()} == {"completed"}
    (run,) = world.ledger.executions(job="long")
    assert (run.worker, run.reason) == ("long", None)
    for id, row in jobs.items():
        runs = world.ledger.executions(job=id)
        assert 1 <= len(runs) <= 1 + row["recovery_count"], id
        if row["lane"] == "many":
            assert world.ledger.lines("hooked", job=id, how="returned"), id


test_a_server_that_goes_and_comes_back = at_once(
    workers_carry_on_by_themselves_when_the_server_comes_back,
)
