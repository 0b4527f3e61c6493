"""A network that fails between a worker and its PostgreSQL server, in several manners.

Whatever the manner, the handler behind it is cancelled by its deadline, on its own clock, before
the server lets anybody else have the job; and when the network is well again its worker serves.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from tests.postgres.proxy import Proxy, open_proxy
from tests.process.harness import ALONE, World, at_once, on
from trio_watchdog import Recovery

LANES = [{"name": "work"}]

# Longer than elsewhere, for the networks stand still whenever this process does.
OWN: dict[str, Any] = {**ALONE, "lease": 8.0, "margin": 2.5}
LEASE: float = OWN["lease"]


async def nothing_passes(proxy: Proxy) -> None:
    proxy.stop()


async def no_question_passes(proxy: Proxy) -> None:
    proxy.stop("questions")


async def no_answer_passes(proxy: Proxy) -> None:
    proxy.stop("answers")


async def all_is_late(proxy: Proxy) -> None:
    proxy.delay = 1.25 * LEASE


async def all_is_cut(proxy: Proxy) -> None:
    await proxy.refuse()
    proxy.cut()


MANNERS: dict[str, Callable[[Proxy], Awaitable[None]]] = {
    manner.__name__: manner
    for manner in (nothing_passes, no_question_passes, no_answer_passes, all_is_late, all_is_cut)
}


async def heal(proxy: Proxy) -> None:
    proxy.delay = 0.0
    proxy.forward()
    await proxy.accept()


@contextlib.asynccontextmanager
async def open_proxies(world: World, *manners: str) -> AsyncGenerator[dict[str, Proxy]]:
    async with contextlib.AsyncExitStack() as stack:
        yield {manner: await stack.enter_async_context(open_proxy(world.url)) for manner in manners}


@on("postgres")
async def a_handler_behind_a_broken_network_stops_before_another_worker_may_start(
    world: World,
) -> None:
    async with open_proxies(world, *MANNERS) as proxies:
        await stops_in_all_manners(world, proxies)


async def stops_in_all_manners(world: World, proxies: dict[str, Proxy]) -> None:
    # All manners at once, each with a lane, a worker and a network of its own.
    first = {
        manner: world.launch(manner, database=proxy.url, lanes=[{"name": manner}], **OWN)
        for manner, proxy in proxies.items()
    }
    await world.ready(*first.values())
    for manner in MANNERS:
        fields = {"lane": manner, "queue": manner}
        await world.enqueue(manner, ["gate", "go"], recovery=Recovery(1), **fields)
        await world.enqueue(f"{manner}-next", ["beat", 0.02], **fields)
        await world.line("beat", job=manner, worker=manner)
    second = await world.start("b", lanes=[{"name": None, "workers": len(MANNERS)}])
    for manner in MANNERS:
        await world.renewed(manner)
    for manner, fail in MANNERS.items():
        await fail(proxies[manner])
    for manner in MANNERS:
        end = await world.line("end", job=manner, worker=manner)
        assert (end.facts["how"], end.facts["reason"]) == ("cancelled", "lease_lost"), manner
        # The other one begins as soon as the lease has ended.
        began = await world.line("begin", job=manner, worker="b")
        assert began.at > end.at, manner
    world.open("go")
    await world.settled()

    for proxy in proxies.values():
        await heal(proxy)
    second.terminate()
    assert await world.ended(second) == 0
    # What was under way for longer than a lease may have claimed this, and hear of it too late.
    for manner in MANNERS:
        await world.enqueue(f"{manner}-soon", ["beat", 0.02], lane=manner, recovery=Recovery(9))
    await world.settled()
    # Longer than a lease, and no second try: renewals have recovered as well.
    for manner in MANNERS:
        await world.enqueue(f"{manner}-later", ["beat", 1.25 * LEASE], lane=manner)
    await world.settled()
    jobs = world.check()
    for manner, worker in first.items():
        assert worker.is_running, manner
        for id, workers in {manner: [manner, "b"], f"{manner}-later": [manner]}.items():
            assert jobs[id]["outcome"] == "completed", id
            assert [run.worker for run in world.ledger.executions(job=id)] == workers


@on("postgres")
async def a_decision_that_comes_late_is_refused_and_one_whose_answer_is_lost_stands(
    world: World,
) -> None:
    held, unheard = "no_question_passes", "no_answer_passes"
    async with open_proxies(world, held, unheard) as proxies:
        await is_late_or_unheard(world, proxies, held, unheard)


async def is_late_or_unheard(
    world: World, proxies: dict[str, Proxy], held: str, unheard: str
) -> None:
    first = {
        name: world.launch(
            name, database=proxies[name].url, lanes=[{"name": name, "hook": True}], lease=LEASE
        )
        for name in (held, unheard)
    }
    await world.ready(*first.values())
    for name in first:
        # The second owner shows that it is undisturbed, for as long as it takes.
        await world.enqueue(name, ["gate", "go"], lane=name, recovery=Recovery(1))
        await world.line("beat", job=name, worker=name)
    lanes = [{"name": None, "workers": 2, "hook": True}]
    await world.start("b", lanes=lanes, lease=LEASE)
    for name in first:
        await world.renewed(name)
        await MANNERS[name](proxies[name])
        world.open("go", name)
    # The handlers are done, and their decisions on their way.
    for name in first:
        end = await world.line("end", job=name, worker=name)
        assert (end.facts["how"], end.facts["reason"]) == ("returned", None)
    # One never arrived, so another worker begins anew when the lease has ended.
    began = await world.line("begin", job=held, worker="b")
    # The other one did, so only its hook is left to do.
    await world.settled(unheard)
    for proxy in proxies.values():
        await heal(proxy)
    for name, worker in first.items():
        record = f"job {name!r} of lane {name!r} ended"
        await world.until(lambda w=worker, r=record: r in w.log, f"{name} has no record")
    row = world.job(held)
    assert (row["state"], row["token"]) == ("running", began.token)
    world.open("go")
    await world.settled()
    jobs = world.check()
    assert {row["outcome"] for row in jobs.values()} == {"completed"}
    assert [run.worker for run in world.ledger.executions(job=held)] == [held, "b"]
    assert [run.worker for run in world.ledger.executions(job=unheard)] == [unheard]
    assert world.ledger.lines("hooked", job=unheard, worker="b", how="returned")
    assert not world.ledger.lines("hook", job=held, worker=held)


@on("postgres")
async def a_slow_network_is_no_broken_one(world: World) -> None:
    async with open_proxy(world.url) as proxy:
        await world.start("a", database=proxy.url, lanes=LANES, lease=LEASE)
        proxy.delay = 0.05
        await world.enqueue("job", ["beat", 1.25 * LEASE], recovery=Recovery(1))
        await world.line("beat", job="job", worker="a")
        await world.start("b", lanes=LANES)
        await world.settled()
        world.check()
        assert [run.worker for run in world.ledger.executions()] == ["a"]


@on("postgres")
async def connections_that_fall_silent_for_good_are_replaced(world: World) -> None:
    async with open_proxy(world.url) as proxy, open_proxy(world.url) as detour:
        await are_replaced(world, proxy, detour)


async def are_replaced(world: World, proxy: Proxy, detour: Proxy) -> None:
    # As when a host, or a box in between, vanishes: what was open stays open and says nothing, and
    # new connections work.
    sooner = {"_postgres.EXCHANGE_SECONDS": 1.5, "_psycopg.WIND_UP_SECONDS": 0.5}
    # Time enough to find the other way, on a busy machine too.
    lease = {"lease": 20.0, "heartbeat": 0.3}
    await world.start("a", database=proxy.url, lanes=LANES, constants=sooner, **lease)
    await world.enqueue("job", ["gate", "go"], recovery=Recovery(0))
    await world.line("begin", job="job")
    # All three connections are there once one of them has renewed.
    await world.renewed("job")
    proxy.stop()
    await proxy.refuse()
    await detour.refuse()
    detour.port = proxy.port
    await detour.accept()
    # Twice, for one renewal may have been on its way.
    for _ in range(2):
        await world.renewed("job")
    world.open("go")
    await world.settled()
    await world.enqueue("later", ["beat", 0.1], recovery=Recovery(0))
    await world.settled()
    jobs = world.check()
    for id in ("job", "later"):
        assert jobs[id]["outcome"] == "completed", id
    assert [run.worker for run in world.ledger.executions()] == ["a", "a"]


test_a_network_that_fails = at_once(
    a_handler_behind_a_broken_network_stops_before_another_worker_may_start,
    a_decision_that_comes_late_is_refused_and_one_whose_answer_is_lost_stands,
    a_slow_network_is_no_broken_one,
    connections_that_fall_silent_for_good_are_replaced,
)
