"""What a watchdog does for the whole table now and then: old jobs go, lost ones are found."""

from __future__ import annotations

import logging

import pytest
import trio

from trio_watchdog import (
    InvalidJob,
    Job,
    Retention,
    SettledJob,
    StoreInvalid,
    converter,
    open_client,
    open_watchdog,
)
from trio_watchdog import _chores as chores
from trio_watchdog._model import Outcome
from trio_watchdog._rules import Settle
from trio_watchdog._sqlite import InlineStore


async def nothing(job):
    return None


async def settle(store, *ids, lane="mail", queue=None):
    for id in ids:
        await store.enqueue(Job(lane, id=id, queue=queue))
        await store.claim(lane, f"t-{id}")
        await store.decide(id, f"t-{id}", Settle(Outcome.COMPLETED))


async def left(client):
    return [job.id for job in await client.list_jobs("settled", limit=5000)][::-1]


# -- retention ------------------------------------------------------------------------------------


async def test_what_is_too_old_goes_and_what_is_young_stays(open_it, store):
    await settle(store, "a", "b")
    async with open_it(retention=Retention(older_than=3600)) as watchdog:
        await trio.sleep(3500)
        await settle(store, "c")
        assert await left(watchdog) == ["a", "b", "c"]
        # Within a minute of the hour.
        await trio.sleep(100 + 60)
        assert await left(watchdog) == ["c"]
        await trio.sleep(3600)
        assert await left(watchdog) == []


async def test_what_is_beyond_the_count_goes_lane_by_lane(open_it, store):
    await settle(store, "a1", "a2", "a3", lane="a")
    await settle(store, "b1", "b2", "b3", lane="b")
    await settle(store, "q1", "q2", lane="c", queue="q")
    retention = [
        Retention(keep=1, lane="a"),
        Retention(keep=2, lane="b"),
        Retention(keep=0, queue="q"),
    ]
    async with open_it(retention=retention) as watchdog:
        await trio.sleep(61)
        assert await left(watchdog) == ["a3", "b2", "b3"]


async def test_retention_is_carried_out_as_often_as_it_says(open_it, store):
    async with open_it(retention=Retention(keep=0, every=5)) as watchdog:
        for _ in range(20):
            await settle(store, "x")
            await trio.sleep(5)
            assert await left(watchdog) == []
    assert 20 <= store.calls["prune"] <= 40


async def test_a_thousand_jobs_go_in_portions(open_it, store):
    await settle(store, *(f"{n}" for n in range(1300)))
    async with open_it(retention=Retention(keep=10)) as watchdog:
        await trio.sleep(61)
        assert len(await left(watchdog)) == 10
    # 500, 500, 290, and one look that finds nothing more.
    assert store.calls["prune"] == 4


async def test_what_a_reader_protects_stays_until_it_was_read(open_it, store):
    await settle(store, "a", "b", "c")
    async with open_it(retention=Retention(older_than=0)) as watchdog:
        await watchdog.protect_settled("reader")
        await trio.sleep(600)
        page = await watchdog.read_settled(2)
        assert [job.id for job in page.jobs] == ["a", "b"]
        await watchdog.protect_settled("reader", page.cursor)
        await trio.sleep(61)
        assert await left(watchdog) == ["c"]
        assert await watchdog.release_settled("reader")
        await trio.sleep(61)
        assert await left(watchdog) == []


async def test_without_retention_nothing_goes(open_it, store):
    await settle(store, "a")
    async with open_it() as watchdog:
        await watchdog.start_lane("mail", nothing)
        await trio.sleep(10_000)
        assert await left(watchdog) == ["a"]


async def test_an_outage_postpones_it_and_a_refusal_is_told(open_it, store, until, caplog):
    caplog.set_level(logging.INFO, logger="trio_watchdog")
    await settle(store, "a")
    async with open_it(retention=Retention(keep=0)) as watchdog:
        store.fail("prune")
        store.fail("prune", on_call=2, error=StoreInvalid("permission denied for table jobs"))
        await until(lambda: store.calls["prune"] == 2)
        assert await left(watchdog) == ["a"]
        await trio.sleep(60)
        assert await left(watchdog) == []
    told = [record for record in caplog.records if "deleted" in record.message]
    assert [record.levelname for record in told] == ["ERROR", "INFO"]
    assert "permission denied" in told[0].message


async def test_a_watchdog_that_stops_prunes_no_more(open_it, store):
    await settle(store, "a")
    async with open_it(retention=Retention(keep=0), grace=1000) as watchdog:
        began = trio.Event()

        async def slow(job):
            began.set()
            await trio.sleep(500)

        await watchdog.start_lane("slow", slow)
        await watchdog.enqueue(Job("slow", id="b"))
        await began.wait()
    assert store.calls["prune"] == 0
    assert isinstance(await store.read("b"), SettledJob)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "neither older_than nor keep"),
        ({"keep": -1}, "keep is -1; 0 to"),
        ({"keep": True}, "keep is True, not an integer"),
        ({"keep": 1.5}, "keep is 1.5, not an integer"),
        ({"older_than": -1}, "older_than is -1 seconds; 0 to"),
        ({"older_than": float("nan")}, "older_than is nan"),
        ({"older_than": "1h"}, "older_than is '1h', not a number of seconds"),
        ({"keep": 1, "lane": ""}, "lane has 0 characters; 1 to 256"),
        ({"keep": 1, "queue": "q" * 257}, "queue has 257 characters"),
        ({"keep": 1, "lane": "a", "queue": "b"}, "lane 'a' and queue 'b' are both given"),
        ({"keep": 1, "every": 0}, "every is 0 seconds; more than 0"),
    ],
)
async def test_a_retention_that_makes_no_sense_is_refused(open_it, values, words):
    with pytest.raises(InvalidJob, match="^" + words):
        Retention(**values)
    async with open_it() as watchdog:
        if "every" not in values:
            with pytest.raises(InvalidJob, match="^" + words):
                await watchdog.prune(**values)


async def test_what_is_no_retention_is_refused_by_type(open_it):
    with pytest.raises(TypeError, match="is not a Retention"):
        async with open_it(retention=[{"keep": 1}]):
            raise AssertionError("it opened")


def test_a_retention_goes_through_json():
    for retention in (Retention(5), Retention(keep=3, lane="a", every=2), Retention(1.5, 0)):
        assert converter.structure(converter.unstructure(retention), Retention) == retention


# -- prune ----------------------------------------------------------------------------------------


async def test_prune_says_how_many_and_takes_what_is_exactly_so_old():
    async with open_client("sqlite::memory:") as client:
        store = client._store
        await settle(store, "a")
        await trio.sleep(10)
        assert await client.prune(older_than=10.001) == 0
        assert await client.prune(older_than=10) == 1
        await settle(store, *"bcdef")
        assert await client.prune(keep=5) == 0
        assert await client.prune(keep=3, lane="other") == 0
        assert await client.prune(keep=3) == 2
        # With both, both have to be so.
        assert await client.prune(older_than=3600, keep=0) == 0
        assert await client.prune(older_than=0, keep=3) == 0
        assert await client.prune(older_than=0, keep=1) == 2


async def test_prune_can_be_cancelled_between_two_portions(open_it, store):
    await settle(store, *(f"{n}" for n in range(1100)))
    async with open_it() as watchdog:
        with trio.CancelScope() as scope:
            store.delay("prune", 1, on_call=2)
            scope.deadline = trio.current_time() + 0.5
            await watchdog.prune(keep=0)
        assert scope.cancelled_caught
        assert len(await left(watchdog)) == 600


async def test_readers_are_protected_by_name_and_cursor(open_it):
    async with open_it() as watchdog:
        with pytest.raises(InvalidJob, match=r"^reader has 0 characters"):
            await watchdog.protect_settled("")
        with pytest.raises(InvalidJob, match=r"^after is '7', not a cursor"):
            await watchdog.protect_settled("r", "7")
        assert not await watchdog.release_settled("r")


# -- lost jobs ------------------------------------------------------------------------------------


def lose(store, id):
    """As no operation does: nobody will look at this head of a free queue."""
    inner = store.store
    assert isinstance(inner, InlineStore)
    inner._engine.connection.execute(
        "update watchdog_jobs set hint = 'lowered' where id = ?", (id,)
    )


async def test_a_lost_job_is_found_mended_and_reported(open_it, store, caplog):
    async with open_it() as watchdog:
        await watchdog.enqueue_many([Job("mail", id=id, queue=f"q {id}") for id in "abc"])
        lose(store, "a")
        lose(store, "c")
        lost = [("a", "q a"), ("c", "q c")]
        assert await store.lost_jobs() == lost
        assert [f.text for f in await watchdog.examine() if f.level == "fault"] == [
            f"job {id!r} goes first in its queue and no claim looks at it; a watchdog mends it"
            for id, _ in lost
        ]
        await watchdog.start_lane("mail", nothing)
        await watchdog.wait_settled("b")
        assert await store.lost_jobs() == lost
        began = trio.current_time()
        for id in "ac":
            assert (await watchdog.wait_settled(id)).outcome == "completed"
        assert trio.current_time() - began <= chores.LOST_INTERVAL + 1
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert record.__dict__["jobs"] == ["a", "c"]
    assert "must not happen" in record.message


async def test_lost_jobs_are_looked_for_a_page_of_queues_at_a_time(open_it, store, monkeypatch):
    async with open_it() as watchdog:
        await watchdog.start_lane("other", nothing)
        await watchdog.enqueue_many([Job("mail", id=f"{n:05}") for n in range(2500)])
        lose(store, "02499")
        await trio.sleep(3 * chores.LOST_INTERVAL)
        assert await store.lost_jobs() == []
        # Three pages for each round, and few rounds.
        assert store.calls["repair_lost"] == 1
        assert 3 <= store.calls["read_lost"] - 3 <= 3 * 6


async def test_a_job_that_waits_behind_another_is_not_lost(open_it, store):
    async with open_it() as watchdog:
        await watchdog.enqueue_many([Job("mail", id=id, queue="q") for id in "abc"])
        await store.claim("mail", "t")
        assert await store.lost_jobs() == []
        # Cancelled ones are found by another way.
        await watchdog.enqueue(Job("mail", id="d"))
        lose(store, "d")
        await watchdog.cancel("d")
        assert await store.lost_jobs() == []


async def test_a_watchdog_without_lanes_mends_nothing(open_it, store):
    async with open_it() as watchdog:
        await watchdog.enqueue(Job("mail", id="a"))
        lose(store, "a")
        await trio.sleep(600)
        assert store.calls["read_lost"] == store.calls["repair_lost"] == 0
    assert await store.lost_jobs() == [("a", "a")]


async def test_retention_needs_no_lanes():
    async with open_watchdog("sqlite::memory:", retention=Retention(keep=0, every=1)) as watchdog:
        await settle(watchdog._runtime.store, "a")
        await trio.sleep(1)
        assert await left(watchdog) == []
