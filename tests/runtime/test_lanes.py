"""Lanes: who claims what, how many at a time, and what a handler is given."""

from __future__ import annotations

import contextvars
import gc
import itertools
import weakref

import attrs
import pytest
import trio

from trio_watchdog import (
    OTHERS,
    Complete,
    CompletingJob,
    Job,
    Lanes,
    QueuedJob,
    RetryPolicy,
    RunningJob,
)


async def nothing(job: RunningJob):
    return None


def noting(ran: list[str], word: str):
    """A handler that says of each job who ran it."""

    async def handler(job: RunningJob):
        ran.append(word)

    return handler


class Meter:
    """A handler that counts how many of it run at a time."""

    def __init__(self) -> None:
        self.running = 0
        self.most = 0
        self.order: list[str] = []

    async def __call__(self, job: RunningJob) -> None:
        self.running += 1
        self.most = max(self.most, self.running)
        self.order.append(job.id)
        await trio.sleep(1)
        self.running -= 1


@pytest.mark.parametrize("workers", [1, 2, 7])
async def test_a_lane_runs_as_many_jobs_at_a_time_as_it_has_workers(open_it, workers):
    meter = Meter()
    async with open_it() as watchdog:
        await watchdog.start_lane("mail", meter, workers=workers)
        await watchdog.wait_idle()
        began = trio.current_time()
        await watchdog.enqueue_many([Job("mail", id=f"{n:02}") for n in range(14)])
        await watchdog.wait_idle()
    assert meter.most == workers
    assert trio.current_time() - began == pytest.approx(14 / workers, abs=0.1)


async def test_jobs_of_one_queue_run_one_after_another_in_their_order(open_it):
    meter = Meter()
    async with open_it() as watchdog:
        await watchdog.enqueue_many(
            [
                Job("mail", id="low", queue="q", priority=-1),
                Job("mail", id="first", queue="q"),
                Job("mail", id="second", queue="q"),
                Job("mail", id="high", queue="q", priority=1),
            ]
        )
        await watchdog.start_lane("mail", meter, workers=4)
        await watchdog.wait_idle()
    assert meter.most == 1
    assert meter.order == ["high", "first", "second", "low"]


async def test_a_burst_reaches_all_slots_without_waking_them_for_a_single_job(open_it, store):
    meter = Meter()
    async with open_it() as watchdog:
        await watchdog.start_lane("mail", meter, workers=50)
        await watchdog.wait_idle()
        before = store.calls["claim"]
        await watchdog.enqueue(Job("mail"))
        await trio.sleep(0.5)
        # The one that was woken, two more that it woke, and the one beside the decision.
        assert store.calls["claim"] - before <= 4
        await watchdog.wait_idle()
        began = trio.current_time()
        await watchdog.enqueue_many([Job("mail") for _ in range(50)])
        await watchdog.wait_idle()
    assert meter.most == 50
    assert trio.current_time() - began < 1.1


async def test_a_busy_slot_needs_one_exchange_per_job(open_it, store):
    async with open_it() as watchdog:
        await watchdog.enqueue_many([Job("mail") for _ in range(100)])
        before = store.exchanges
        await watchdog.start_lane("mail", nothing)
        await watchdog.wait_idle()
    assert store.exchanges - before < 115


async def test_a_paused_lane_claims_nothing_until_it_is_resumed(open_it, until):
    meter = Meter()
    async with open_it() as watchdog:
        lane = await watchdog.start_lane("mail", meter, workers=2)
        await watchdog.enqueue(Job("mail", id="a"))
        await until(lambda: meter.order)
        lane.pause()
        assert lane.statistics().is_paused
        await watchdog.enqueue(Job("mail", id="b"))
        await watchdog.wait_settled("a")
        await trio.sleep(20)
        await watchdog.wait_idle()
        assert meter.order == ["a"]
        lane.resume()
        await watchdog.wait_settled("b")


async def test_draining_a_lane_waits_for_its_job_and_leaves_it_paused(open_it, until):
    meter, other = Meter(), Meter()
    async with open_it() as watchdog:
        lane = await watchdog.start_lane("mail", meter)
        await watchdog.start_lane("fax", other)
        await watchdog.enqueue_many([Job("mail", id="a"), Job("mail", id="b"), Job("fax", id="c")])
        await until(lambda: meter.order)
        await lane.drain()
        assert meter.running == 0
        assert isinstance(await watchdog.read("b"), QueuedJob)
        await watchdog.wait_settled("c")
        lane.resume()
        await watchdog.wait_settled("b")
    await lane.drain()


async def test_others_takes_the_jobs_of_lanes_without_a_worker_here(open_it):
    ran = []

    async def mail(job: RunningJob):
        ran.append(("mail", job.lane))

    async def others(job: RunningJob):
        ran.append(("others", job.lane))

    async with open_it() as watchdog:
        lane = await watchdog.start_lane(OTHERS, others)
        assert lane.name == "OTHERS"
        paused = await watchdog.start_lane("mail", mail)
        await watchdog.enqueue_many([Job("mail"), Job("fax"), Job("telex")])
        await watchdog.wait_idle()
        assert sorted(ran) == [("mail", "mail"), ("others", "fax"), ("others", "telex")]
        paused.pause()
        await watchdog.enqueue(Job("mail", id="x"))
        await trio.sleep(11)
        assert isinstance(await watchdog.read("x"), QueuedJob)


async def test_a_lane_of_its_own_takes_over_from_others(open_it):
    ran: list[str] = []

    async with open_it() as watchdog:
        await watchdog.start_lane(OTHERS, noting(ran, "others"))
        await watchdog.enqueue(Job("fax"))
        await watchdog.wait_idle()
        await watchdog.start_lane("fax", noting(ran, "fax"))
        await watchdog.enqueue(Job("fax"))
        await watchdog.wait_idle()
    assert ran == ["others", "fax"]


async def test_others_gives_back_what_it_claimed_before_the_lane_was_started(open_it, store, ends):
    ran: list[str] = []

    async with open_it() as watchdog:
        await watchdog.enqueue(Job("fax", id="x"))
        store.delay("claim", 1, when="after")
        await watchdog.start_lane(OTHERS, noting(ran, "others"))
        await trio.sleep(0.5)
        await watchdog.start_lane("fax", noting(ran, "fax"))
        settled = await watchdog.wait_settled("x")
    assert ran == ["fax"]
    assert settled.attempt_count == 1
    assert ends.causes("x") == ["completed"]


async def test_a_lane_can_be_started_only_once(open_it):
    async with open_it() as watchdog:
        await watchdog.start_lane("mail", nothing)
        with pytest.raises(ValueError, match="lane 'mail' is already started here"):
            await watchdog.start_lane("mail", nothing)
        await watchdog.start_lane(OTHERS, nothing)
        with pytest.raises(ValueError, match="OTHERS is already started"):
            await watchdog.start_lane(OTHERS, nothing)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "workers is 0; 1 to"),
        ({"timeout": 0}, "timeout is 0 seconds"),
        ({"retry": 3}, "retry is 3"),
        ({"on_completing": 3}, "on_completing is 3"),
        ({"payload": 5}, "payload is 5, to which nothing can be structured"),
        ({"payload": {"n": int}}, "nothing can be structured: unhashable"),
        ({"payload": object}, "payload is <class 'object'>, to which nothing"),
    ],
)
async def test_a_lane_that_cannot_work_is_refused(open_it, options, message):
    async with open_it() as watchdog:
        with pytest.raises((ValueError, TypeError), match=message):
            await watchdog.start_lane("mail", nothing, **options)
        with pytest.raises(ValueError, match="lane has 0 characters"):
            await watchdog.start_lane("", nothing)


async def test_lanes_are_described_in_one_place_and_started_in_another(open_it):
    lanes = Lanes()
    ran = []

    @lanes.lane("mail", retry=RetryPolicy(2, delay=0))
    async def mail(job: RunningJob):
        ran.append((job.lane, job.attempt.count))
        if not job.attempt.is_last:
            raise ValueError

    @lanes.lane(OTHERS)
    async def others(job: RunningJob):
        ran.append((job.lane, job.attempt.count))

    with pytest.raises(ValueError, match="'mail' already has a handler"):
        lanes.lane("mail")(mail)
    async with open_it() as watchdog:
        started = await watchdog.start_lanes(lanes)
        assert [lane.name for lane in started] == ["mail", "OTHERS"]
        await watchdog.enqueue_many([Job("mail"), Job("fax")])
        await watchdog.wait_idle()
        with pytest.raises(ValueError, match="already started"):
            await watchdog.start_lanes(lanes)
    assert sorted(ran) == [("fax", 1), ("mail", 1), ("mail", 2)]


# -- what a handler is given ----------------------------------------------------------------------


async def test_running_lists_the_jobs_that_run_here_with_their_live_side(open_it):
    started = trio.Event()

    async def handler(job: RunningJob):
        started.set()
        await trio.sleep(1)

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler)
        assert watchdog.running() == []
        await watchdog.enqueue(Job("mail", {"to": "ada"}, id="x", priority=3))
        await started.wait()
        (job,) = watchdog.running()
        assert (job.id, job.payload, job.priority, job.lane) == ("x", {"to": "ada"}, 3, "mail")
        assert isinstance(job.cancel_scope, trio.CancelScope)
        assert job.cancel_reason is None
        job.checkpoint()
        assert watchdog.statistics().running == 1
        await watchdog.wait_settled("x")
        await watchdog.wait_idle()
        assert watchdog.running() == []
        (lane,) = watchdog.statistics().lanes
        assert (lane.name, lane.workers, lane.running, lane.runs) == ("mail", 1, 0, 1)


async def test_a_payload_is_structured_and_one_that_does_not_fit_fails_its_job(open_it, ends):
    @attrs.frozen
    class Letter:
        to: str
        pages: int = 1

    seen = []

    async def handler(job: RunningJob):
        seen.append(job.payload)

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler, payload=Letter, retry=RetryPolicy(5))
        await watchdog.enqueue(Job("mail", {"to": "ada"}, id="a"))
        await watchdog.enqueue(Job("mail", {"to": "ada", "pages": "many"}, id="b"))
        assert (await watchdog.wait_settled("a")).payload == {"to": "ada"}
        settled = await watchdog.wait_settled("b")
    assert seen == [Letter("ada")]
    assert settled.outcome == "failed"
    assert "pages" in settled.reason
    assert ends.causes("b") == ["failed"]


@pytest.mark.parametrize("has_hook", [False, True])
async def test_context_variables_do_not_leak_from_job_to_job(open_it, has_hook):
    variable = contextvars.ContextVar("variable", default="none")
    variable.set("of the program")
    seen = []

    async def child():
        seen.append(variable.get())

    async def handler(job: RunningJob):
        seen.append(variable.get())
        variable.set(job.id)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(child)
        if job.id == "a":
            raise ValueError

    async def hook(job: CompletingJob):
        seen.append(variable.get())
        variable.set(f"hook of {job.id}")

    async with open_it() as watchdog:
        variable.set("set after opening")
        await watchdog.enqueue_many([Job("mail", id=id, queue="q") for id in "abc"])
        await watchdog.start_lane("mail", handler, on_completing=hook if has_hook else None)
        await watchdog.wait_idle()
    expected = []
    for id in "abc":
        expected += ["of the program", id] + ["of the program"] * has_hook
    assert seen == expected


async def test_what_a_job_leaves_in_its_context_is_freed_with_it(open_it):
    class Big:
        pass

    variable: contextvars.ContextVar[Big | None] = contextvars.ContextVar("variable")
    references = []

    async def handler(job: RunningJob):
        big = Big()
        variable.set(big)
        references.append(weakref.ref(big))
        return Complete()

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler)
        await watchdog.enqueue(Job("mail"))
        await watchdog.wait_idle()
        await watchdog.enqueue(Job("mail"))
        await watchdog.wait_idle()
        gc.collect()
        assert [reference() for reference in references] == [None, None]


async def test_many_jobs_leave_nothing_behind(open_it):
    async with open_it() as watchdog:
        await watchdog.start_lane("mail", nothing, workers=4)
        await watchdog.enqueue_many([Job("mail") for _ in range(200)])
        await watchdog.wait_idle()
        gc.collect()
        objects = len(gc.get_objects())
        tasks = trio.lowlevel.current_statistics().tasks_living
        await watchdog.enqueue_many([Job("mail") for _ in range(2000)])
        await watchdog.wait_idle()
        gc.collect()
        assert len(gc.get_objects()) - objects < 200
        assert trio.lowlevel.current_statistics().tasks_living == tasks
        assert watchdog.statistics().claims == 0


async def test_a_collection_of_jobs_may_change_while_they_are_admitted(open_it):
    jobs = {f"{n}": Job("mail", id=f"{n}") for n in range(500)}

    async def change():
        while True:
            jobs[f"more {len(jobs)}"] = Job("mail")
            await trio.lowlevel.checkpoint()

    async with open_it() as watchdog, trio.open_nursery() as nursery:
        nursery.start_soon(change)
        await trio.lowlevel.checkpoint()
        await watchdog.enqueue_many(jobs.values())
        assert await watchdog.read("499") is not None
        nursery.cancel_scope.cancel()


async def test_a_generator_of_many_jobs_lets_other_tasks_run_and_its_error_admits_none(open_it):
    steps_of_others: list[int] = []
    made = 0

    async def others():
        while True:
            steps_of_others.append(made)
            await trio.lowlevel.checkpoint()

    def make(*, fails: bool):
        nonlocal made
        for made in range(1000):
            yield Job("mail", id=f"{made}")
        if fails:
            raise LookupError("no more of them")

    async with open_it() as watchdog, trio.open_nursery() as nursery:
        nursery.start_soon(others)
        with pytest.raises(LookupError):
            await watchdog.enqueue_many(make(fails=True))
        assert await watchdog.count_jobs() == []
        steps_of_others.clear()
        await watchdog.enqueue_many(make(fails=False))
        # A hundred jobs in each turn of the loop, of which the others may see every second only.
        steps = sorted({*steps_of_others, 0, 999})
        assert max(after - before for before, after in itertools.pairwise(steps)) <= 200
        assert sum(count for *_, count in await watchdog.count_jobs()) == 1000
        nursery.cancel_scope.cancel()
