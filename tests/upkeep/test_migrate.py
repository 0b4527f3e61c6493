"""Unsettled jobs move from one database to another, whole, once, and in order."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.upkeep.conftest import execute
from trio_watchdog import Job, Outcome, Recovery, RunningJob, StoreInvalid, StoreUnavailable
from trio_watchdog._migrate import Migration, SourceInUse, migrate
from trio_watchdog._open import open_store
from trio_watchdog._rules import Settle
from trio_watchdog._store import Store
from trio_watchdog._wishes import Export, ReadJobs, Remove, Wish
from trio_watchdog.testing import FaultyStore

DONE = Settle(Outcome.COMPLETED)


@pytest.fixture(params=["sqlite to sqlite", "sqlite to postgres", "postgres to sqlite"])
def databases(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    def named(kind: str, name: str) -> str:
        if kind == "sqlite":
            return f"sqlite:{tmp_path / name}"
        url: str = request.getfixturevalue("postgres_database")
        return url

    source, _, target = request.param.split()
    return named(source, "old.db"), named(target, "new.db")


@pytest.fixture
async def stores(databases: tuple[str, str]) -> AsyncGenerator[tuple[Store, Store]]:
    async with AsyncExitStack() as stack:
        source = await stack.enter_async_context(open_store(databases[0]))
        target = await stack.enter_async_context(open_store(databases[1]))
        yield source, target


async def claim(store: Store, lane: str, token: str, lease: int = 60_000) -> RunningJob:
    while (claimed := await store.claim(lane, token, lease=lease)).job is None:
        assert claimed.more, f"nothing to claim in {lane}"
    return claimed.job


async def all_jobs(store: Store) -> dict[str, Any]:
    return {job.id: job for job in (await store.ask(ReadJobs(limit=10_000)))[::-1]}


async def drain(store: Store, lane: str) -> list[str]:
    order: list[str] = []
    while True:
        claimed = await store.claim(lane, f"t{len(order)}")
        if claimed.job is None:
            if claimed.more:
                continue
            return order
        order.append(claimed.job.id)
        await store.decide(claimed.job.id, claimed.job.token, DONE)


# -- moving ---------------------------------------------------------------------------------------


async def test_jobs_arrive_with_all_they_had_and_in_order(stores: tuple[Store, Store]) -> None:
    source, target = stores
    later = datetime.now(UTC).replace(microsecond=0) + timedelta(days=1)
    await source.enqueue(Job("done", id="settled"))
    await claim(source, "done", "t")
    await source.decide("settled", "t", DONE)
    jobs = [
        Job("a", {"n": 1}, id="first", queue="q", recovery=Recovery(3, 60)),
        Job("a", "\0 é 😀", id="second", queue="q"),
        Job("a", id="urgent", queue="q", priority=5),
        Job("b", id="later", not_before=later),
    ]
    await source.enqueue_many(jobs)
    await source.enqueue(Job("r", id="recovered", recovery=Recovery(2)))
    await claim(source, "r", "t1", 1)
    await trio.sleep(0.01)
    await source.reconcile("recovered", "t1")
    before = await all_jobs(source)
    told: list[int] = []
    assert await migrate(source, target, told.append) == Migration(5, 0, ())
    assert told == [5]
    assert list(await all_jobs(source)) == ["settled"]
    after = await all_jobs(target)
    assert list(after) == ["first", "second", "urgent", "later", "recovered"]
    for id, job in after.items():
        for name in ("queue", "lane", "priority", "payload", "not_before", "recovery", "state"):
            assert getattr(job, name) == getattr(before[id], name), (id, name)
        for name in ("attempt_count", "recovery_count", "cancellation_id"):
            assert getattr(job, name) == getattr(before[id], name), (id, name)
    assert after["recovered"].recovery_count == 1
    assert await drain(target, "a") == ["urgent", "first", "second"]
    # And a second time there is nothing to do.
    assert await migrate(source, target) == Migration(0, 0, ())


async def test_completions_without_an_owner_move_and_are_finished_there(
    stores: tuple[Store, Store],
) -> None:
    source, target = stores
    await source.enqueue(Job("a", id="j", queue="q"))
    await source.enqueue(Job("a", id="next", queue="q"))
    await claim(source, "a", "t", 300)
    await source.decide("j", "t", DONE, has_hook=True)
    await trio.sleep(0.35)
    assert (await migrate(source, target)).moved == 2
    # It blocks its queue there as it did here, and is free to be taken over at once.
    assert (await target.read_queue_head("q")).job_id == "j"
    assert (await target.claim("a", "t2")).job is None
    taken = await target.take_completing("t3")
    assert taken is not None
    assert (taken.id, taken.outcome) == ("j", Outcome.COMPLETED)
    assert await target.finish_completing("j", "t3") == "settled"
    assert await drain(target, "a") == ["next"]


async def test_what_is_over_is_decided_about_and_stays(stores: tuple[Store, Store]) -> None:
    source, target = stores
    await source.enqueue_many([Job("a", id="gone"), Job("b", id="again", recovery=Recovery(1))])
    await claim(source, "a", "t1", 1)
    await claim(source, "b", "t2", 1)
    await source.enqueue_many([Job("c", id=f"c{n}") for n in range(300)])
    for n in range(300):
        await source.cancel(f"c{n}", f"x{n}")
    await trio.sleep(0.01)
    assert (await migrate(source, target)).moved == 1
    assert list(await all_jobs(target)) == ["again"]
    left = await all_jobs(source)
    assert len(left) == 301
    assert {job.state for job in left.values()} == {"settled"}
    assert left["gone"].outcome == Outcome.INTERRUPTED


async def test_a_thousand_jobs_move_in_portions(stores: tuple[Store, Store]) -> None:
    source, target = stores
    await source.enqueue_many([Job("a", id=f"{n:04}", queue=f"q{n % 7}") for n in range(1300)])
    told: list[int] = []
    assert (await migrate(source, target, told.append)).moved == 1300
    assert told == [500, 1000, 1300]
    order = await drain(target, "a")
    assert len(order) == 1300
    for queue in range(7):
        mine = [id for id in order if int(id) % 7 == queue]
        assert mine == sorted(mine)


async def test_a_portion_is_limited_by_the_size_of_its_payloads(
    databases: tuple[str, str],
) -> None:
    limit = 8 * 1024 * 1024
    async with open_store(databases[0], payload_limit=limit) as source:
        for n, size in enumerate((3, 1, 3, 7, 1)):
            await source.enqueue(Job("a", "x" * (size * 1024 * 1024), id=f"{n}"))
        sizes: list[int] = []
        after = 0
        while (exported := await source.ask(Export(after))).rows:
            sizes.append(len(exported.rows))
            after = exported.last
        # Up to four MiB, and the one that goes beyond.
        assert sizes == [2, 2, 1]
        async with open_store(databases[1]) as target:
            assert (await migrate(source, target)).moved == 5
            job = await target.read("3")
            assert job is not None
            assert len(job.payload) == 7 * 1024 * 1024


# -- interruptions --------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("verb", ["import_", "remove", "export"])
async def test_a_move_that_was_interrupted_is_started_again(
    stores: tuple[Store, Store], verb: str, when: Any
) -> None:
    source, target = FaultyStore(stores[0]), FaultyStore(stores[1])
    await source.enqueue_many([Job("a", id=f"{n:04}") for n in range(700)])
    for _ in range(2):
        (target if verb == "import_" else source).fail(verb, when=when)
        with pytest.raises(StoreUnavailable):
            await migrate(source, target)
        jobs = {**await all_jobs(source), **await all_jobs(target)}
        assert len(jobs) == 700
    await migrate(source, target)
    assert await all_jobs(source) == {}
    assert sorted(await all_jobs(target)) == [f"{n:04}" for n in range(700)]


async def test_a_job_that_arrived_and_ended_there_meanwhile_is_not_moved_again(
    stores: tuple[Store, Store],
) -> None:
    source, target = FaultyStore(stores[0]), stores[1]
    await source.enqueue_many([Job("a", 1, id="j"), Job("a", 2, id="k")])
    source.fail("remove")
    with pytest.raises(StoreUnavailable):
        await migrate(source, target)
    assert await drain(target, "a") == ["j", "k"]
    assert await migrate(source, target) == Migration(2, 2, ())
    assert await all_jobs(source) == {}
    assert {job.state for job in (await all_jobs(target)).values()} == {"settled"}


# -- refusals -------------------------------------------------------------------------------------


async def test_nothing_moves_while_a_job_runs(stores: tuple[Store, Store]) -> None:
    source, target = stores
    await source.enqueue_many([Job("a", id="runs"), Job("b", id="waits"), Job("c", id="ends")])
    await claim(source, "a", "t")
    await claim(source, "c", "t2")
    await source.decide("ends", "t2", DONE, has_hook=True)
    with pytest.raises(SourceInUse, match="job 'runs' of lane 'a' is running under a lease until"):
        await migrate(source, target)
    await source.decide("runs", "t", DONE)
    with pytest.raises(SourceInUse, match=r"job 'ends' of lane 'c' is completing .*stop the worke"):
        await migrate(source, target)
    assert await all_jobs(target) == {}
    await source.finish_completing("ends", "t2")
    assert (await migrate(source, target)).moved == 1


async def test_a_different_job_with_the_same_id_is_not_lost(stores: tuple[Store, Store]) -> None:
    source, target = stores
    await source.enqueue_many(
        [Job("a", 1, id="same"), Job("a", 1, id="other payload"), Job("a", id="other lane")]
    )
    await source.enqueue(Job("a", id="free"))
    await target.enqueue_many(
        [Job("a", 1, id="same"), Job("a", 2, id="other payload"), Job("b", id="other lane")]
    )
    result = await migrate(source, target)
    assert (result.moved, result.duplicates) == (2, 1)
    assert dict(result.left) == {
        "other payload": "job 'other payload' is already there with another payload",
        "other lane": "job 'other lane' is already there with lane 'b', not 'a'",
    }
    assert sorted(await all_jobs(source)) == ["other lane", "other payload"]
    # When the way is free they follow.
    assert await drain(target, "b") == ["other lane"]
    assert len((await migrate(source, target)).left) == 2


async def test_what_cannot_go_beside_what_is_there_stays_until_it_can(
    stores: tuple[Store, Store],
) -> None:
    source, target = stores
    await source.enqueue_many([Job("a", id="completing", queue="q"), Job("a", id="cancelled")])
    await claim(source, "a", "t", 300)
    await source.decide("completing", "t", DONE, has_hook=True)
    await target.enqueue_many([Job("x", id="there", queue="q"), Job("x", id="cancelled there")])
    await claim(target, "x", "t1")
    await target.cancel("cancelled there", "c")
    await trio.sleep(0.35)
    result = await migrate(source, target)
    assert result.moved == 1
    assert result.left == (
        ("completing", "its queue is busy there, or its cancellation id is used there"),
    )
    await target.decide("there", "t1", DONE)
    await trio.sleep(0.01)
    assert (await migrate(source, target)) == Migration(1, 0, ())


async def test_a_row_that_cannot_be_read_stays_and_is_named(databases: tuple[str, str]) -> None:
    async with open_store(databases[0]) as source:
        await source.enqueue_many([Job("a", id=f"{n}") for n in range(5)])
    execute(databases[0], "update {jobs} set attempt_count = -1 where id = '2'")
    execute(databases[0], "update {jobs} set lane = '' where id = '3'")
    async with open_store(databases[0]) as source, open_store(databases[1]) as target:
        result = await migrate(source, target)
        assert result.moved == 3
        assert [id for id, _ in result.left] == ["2", "3"]
        assert all("check" in why.lower() for _, why in result.left)
        assert sorted(await all_jobs(target)) == ["0", "1", "4"]


async def test_a_database_is_not_moved_into_itself(databases: tuple[str, str]) -> None:
    async with open_store(databases[0]) as source, open_store(databases[0]) as same:
        await source.enqueue_many([Job("a", id=f"{n}") for n in range(5)])
        for other in (same, source):
            with pytest.raises(ValueError, match="name two databases"):
                await migrate(source, other)
        assert len(await all_jobs(source)) == 5
        # No protection is left behind.
        await drain(source, "a")
        assert await source.prune(keep=0) == 5


async def test_who_claims_in_the_old_place_meanwhile_is_noticed(
    stores: tuple[Store, Store],
) -> None:
    class Busy(FaultyStore):
        """Somebody claims a job just before what was copied is removed."""

        async def submit(self, *asked: Wish[Any]) -> list[Any]:
            if any(isinstance(wish, Remove) for wish in asked):
                await claim(self.store, "a", "t")
            return await super().submit(*asked)

    source, target = Busy(stores[0]), stores[1]
    await source.enqueue_many([Job("a", id="1"), Job("b", id="2")])
    with pytest.raises(SourceInUse, match="job '1' of lane 'a' was claimed in the old database"):
        await migrate(source, target)
    assert list(await all_jobs(source)) == ["1"]
    assert list(await all_jobs(target)) == ["1", "2"]


def test_a_source_in_use_is_a_kind_of_invalid_store() -> None:
    assert issubclass(SourceInUse, StoreInvalid)
