"""A worker whose wall clock is an hour ahead or back: it neither steals live claims nor keeps dead
ones. One clock judges leases: the server's, and on a host with SQLite the time since boot.
"""

from __future__ import annotations

import os
import sys

import trio

from tests.process.harness import (
    HEARTBEAT,
    HERE,
    LEASE,
    ROOT,
    SECOND,
    STALL,
    World,
    at_once,
    on,
    open_world,
)
from trio_watchdog import Recovery

HOUR = 3600.0


@on("sqlite", "postgres", skew={"ahead": HOUR, "behind": -HOUR})
async def a_worker_with_a_wrong_clock_neither_steals_claims_nor_keeps_them(
    world: World, skew: float
) -> None:
    await world.enqueue("job", ["gate", "go"], recovery=Recovery(9))
    right = await world.start("right")
    await world.line("beat", job="job", worker="right")

    # For more than a lease it looks at a claim that lives.
    wrong = await world.start("wrong", skew=skew)
    looked_at = world.ledger.note("looks")
    await world.lives_until("job", looked_at + (LEASE + 2 * HEARTBEAT) * SECOND)
    assert len(world.ledger.executions()) == 1

    # It takes over one that is dead, when its lease has ended and not before.
    world.freeze(right)
    await taken_over_in_time(world, "wrong", right.pid)
    right.kill()

    # And its own claim is taken over in the same way.
    world.freeze(wrong)
    await world.start("next")
    await taken_over_in_time(world, "next", wrong.pid)

    # Thawed, it finds that it has lost the job, and can do nothing to it.
    wrong.thaw()
    end = await world.line("end", job="job", worker="wrong")
    assert end.facts["reason"] == "lease_lost"
    world.open("go")
    await world.settled()
    rows = world.check()
    assert rows["job"]["outcome"] == "completed"
    assert [run.worker for run in world.ledger.executions()] == ["right", "wrong", "next"]


async def taken_over_in_time(world: World, by: str, pid: int) -> None:
    lease_until = world.lease_until("job")
    began = await world.line("begin", job="job", worker=by)
    (frozen, *_) = reversed(world.ledger.lines("freeze", pid=pid))
    assert frozen.at < lease_until < began.at
    # Not an hour later; the rest of the time is for a busy machine, and for a start.
    assert began.at < lease_until + 2 * STALL * SECOND


MAKE = """
import sys

from worker import skew

skew(3600)

import trio
from trio_watchdog import open_client


async def make():
    async with open_client(sys.argv[1]):
        pass


trio.run(make)
"""


@on("sqlite")
async def a_database_made_under_a_wrong_clock_is_as_good_as_any(world: World) -> None:
    # The first process after a boot writes down how leases are told from the time since boot; here
    # one does it whose clock is an hour ahead.
    folder = world.folder / "wrong"
    folder.mkdir()
    url = f"sqlite:{folder / 'jobs.db'}"
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    await trio.run_process(
        [sys.executable, "-c", MAKE, url], cwd=HERE, env=os.environ | {"PYTHONPATH": path}
    )
    async with open_world(url, folder) as world:
        await world.enqueue("job", ["gate", "go"], recovery=Recovery(1))
        first = await world.start("first")
        await world.line("beat", job="job", worker="first", count=3)
        world.freeze(first)
        await world.start("second")
        await taken_over_in_time(world, "second", first.pid)
        world.open("go")
        await world.settled()
        first.thaw()
        await world.line("end", job="job", worker="first")
        world.check()


test_a_wrong_clock = at_once(
    a_worker_with_a_wrong_clock_neither_steals_claims_nor_keeps_them,
    a_database_made_under_a_wrong_clock_is_as_good_as_any,
)
