"""The test kit itself: what users get to test their lanes and their stores with."""

from __future__ import annotations

import inspect
import itertools
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

import trio_watchdog
from trio_watchdog import (
    Job,
    Lanes,
    Outcome,
    Recovery,
    Retry,
    RetryPolicy,
    StoreInvalid,
    StoreUnavailable,
    testing,
    thread_handler,
)
from trio_watchdog import _wishes as w
from trio_watchdog._open import open_store
from trio_watchdog._rules import Settle
from trio_watchdog._sqlite import FileStore, InlineStore
from trio_watchdog._store import Store
from trio_watchdog.testing import (
    TICK,
    DurableClock,
    FaultyStore,
    InlineWatchdog,
    StoreMaker,
    broken_invariants,
    check_invariants,
    missing_capabilities,
    open_test_watchdog,
    run_lanes,
    store_check,
)

DONE = Settle(Outcome.COMPLETED)


@pytest.fixture
async def faulty() -> AsyncGenerator[FaultyStore]:
    async with open_store(":memory:") as inner:
        yield FaultyStore(inner)


# -- the faulty store -----------------------------------------------------------------------------


async def test_a_fault_before_the_effect_leaves_no_trace(faulty: FaultyStore) -> None:
    faulty.fail("enqueue")
    with pytest.raises(StoreUnavailable, match="before"):
        await faulty.enqueue(Job("a", id="j"))
    assert await faulty.read("j") is None
    assert (await faulty.enqueue(Job("a", id="j"))).status == "queued"


async def test_a_fault_after_the_effect_loses_only_the_answer(faulty: FaultyStore) -> None:
    faulty.fail("enqueue", when="after")
    with pytest.raises(StoreUnavailable, match="after"):
        await faulty.enqueue(Job("a", id="j"))
    assert (await faulty.enqueue(Job("a", id="j"))).status == "duplicate"


async def test_faults_strike_the_call_they_are_told_to_as_often_as_they_are_told_to(
    faulty: FaultyStore,
) -> None:
    fault = faulty.fail("read", on_call=3, times=2)
    told: list[bool] = []
    for _ in range(6):
        try:
            await faulty.read("j")
            told.append(True)
        except StoreUnavailable:
            told.append(False)
        # Other verbs are not counted.
        await faulty.read_queue_head("q")
    assert told == [True, True, False, False, True, True]
    assert (fault.calls, fault.struck) == (6, 2)
    assert faulty.calls == {"read": 6, "read_queue_head": 6}
    assert faulty.exchanges == 12


async def test_an_outage_lasts_until_it_is_removed(faulty: FaultyStore) -> None:
    outage = faulty.fail(times=None)
    for _ in range(3):
        with pytest.raises(StoreUnavailable):
            await faulty.wake_state()
    outage.remove()
    await faulty.wake_state()
    faulty.fail(times=None)
    faulty.fail("read", times=None)
    faulty.heal()
    assert await faulty.read("j") is None


async def test_the_error_is_the_callers_and_fresh_each_time(faulty: FaultyStore) -> None:
    error = StoreInvalid("corrupt")
    error.__cause__ = OSError("EIO")
    faulty.fail("read", times=2, error=error)
    seen: list[Exception] = []
    for _ in range(2):
        with pytest.raises(StoreInvalid, match="corrupt") as caught:
            await faulty.read("j")
        assert isinstance(caught.value.__cause__, OSError)
        seen.append(caught.value)
    assert seen[0] is not seen[1]
    faulty.fail("read", error=lambda: TimeoutError("made anew"))
    with pytest.raises(TimeoutError):
        await faulty.read("j")


async def test_what_is_hit_is_the_whole_exchange(faulty: FaultyStore) -> None:
    faulty.fail(w.Cancel)
    with pytest.raises(StoreUnavailable):
        await faulty.submit(w.Enqueue(Job("a", id="j")), w.Cancel("j", "c"))
    assert await faulty.read("j") is None


async def test_delays_take_time_and_answers_come_nevertheless(
    faulty: FaultyStore, autojump_clock: MockClock
) -> None:
    faulty.delay("read", 5)
    faulty.delay("read", 7, when="after", on_call=2)
    await faulty.read("j")
    assert trio.current_time() == 5
    await faulty.read("j")
    assert trio.current_time() == 12
    # Before it was sent a wish can be withdrawn; afterwards its answer must not be lost.
    faulty.delay("enqueue", 10)
    with trio.move_on_after(1) as scope:
        await faulty.enqueue(Job("a", id="j"))
    assert scope.cancelled_caught
    assert await faulty.read("j") is None
    faulty.delay("enqueue", 10, when="after")
    with trio.move_on_after(1) as scope:
        assert (await faulty.enqueue(Job("a", id="j"))).status == "queued"
    assert trio.current_time() == 23


async def test_a_faulty_store_is_the_store_in_everything_else(faulty: FaultyStore) -> None:
    assert isinstance(faulty, Store)
    assert faulty.owner == faulty.store.owner
    assert faulty.payload_limit == faulty.store.payload_limit
    assert faulty.now() is not None
    heard: list[Any] = []
    faulty.on_change.append(heard.append)
    await faulty.store.enqueue(Job("a"))
    assert len(heard) == 1
    assert faulty.open_renewer() is None
    with pytest.raises(ValueError, match="'enqeue'"):
        faulty.fail("enqeue")


def test_a_faulty_store_passes_on_everything_that_stores_implement() -> None:
    implemented = {
        name
        for kind in (InlineStore, FileStore)
        for base in kind.__mro__[:-1]
        if base is not Store and issubclass(base, Store)
        for name in vars(base)
        if hasattr(Store, name) and not name.startswith("_")
    }
    assert "submit" in implemented
    assert implemented - set(vars(FaultyStore)) == set()


async def test_renewals_from_the_renewal_thread_fail_too(tmp_path: Path) -> None:
    async with open_store(tmp_path / "jobs.db") as inner:
        faulty = FaultyStore(inner)
        await faulty.enqueue(Job("a", id="j"))
        await faulty.claim("a", "t")
        renewer = faulty.open_renewer()
        assert renewer is not None
        faulty.fail("renew", on_call=2)
        with renewer as renew:
            assert [each.status for each in renew([w.Renew("j", "t", 5000)])] == ["held"]
            with pytest.raises(StoreUnavailable):
                renew([w.Renew("j", "t", 5000)])
            assert faulty.calls["renew"] == 2


# -- the clock ------------------------------------------------------------------------------------


def test_a_durable_clock_stands_still_until_it_is_moved() -> None:
    clock = DurableClock()
    now = clock.now()
    assert (clock.now(), clock.lease_now()) == (now, now)
    clock.advance(1.5)
    assert clock.now() == clock.lease_now() == now + 1500
    assert clock.instant(TICK) - clock.instant() == timedelta(milliseconds=1)
    clock.step(-3600)
    assert clock.lease_now() - clock.now() == 3_600_000
    clock.advance_to(clock.instant(2))
    assert clock.lease_now() == now + 3500
    clock.advance_to(clock.instant(-2))
    assert clock.lease_now() == now + 3500
    with pytest.raises(ValueError, match="-1"):
        clock.advance(-1)


def test_a_sum_of_small_steps_ends_on_the_exact_instant() -> None:
    for trio_clock in (None, MockClock()):
        clock = DurableClock(trio_clock=trio_clock)
        now = clock.now()
        for _ in range(1000):
            clock.advance(0.1)
        assert clock.now() == now + 100_000


async def test_one_clock_moves_leases_due_times_and_deadlines(mock_clock: MockClock) -> None:
    clock = DurableClock(trio_clock=mock_clock)
    async with open_store(":memory:", clock=clock) as store:
        await store.enqueue(Job("a", id="later", not_before=clock.instant(60)))
        await store.enqueue(Job("b", id="j", recovery=Recovery(1)))
        assert (await store.claim("b", "t", lease=60_000)).job is not None
        with trio.move_on_after(60) as scope:
            clock.advance(60 - TICK)
            await trio.lowlevel.checkpoint()
            assert (await store.claim("a", "u")).job is None
            assert (await store.inspect("j", "t")).status == "held"
            clock.advance(TICK)
            await trio.sleep_forever()
        assert scope.cancelled_caught
        assert (await store.claim("a", "u")).job is not None
        assert (await store.reconcile("j", "t")).status == "queued"


async def test_an_autojump_moves_durable_time(autojump_clock: MockClock) -> None:
    clock = DurableClock(trio_clock=autojump_clock)
    due = clock.instant(3600)
    await trio.sleep(3600)
    assert clock.instant() == due


# -- the invariants -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("breakage", "complaint"),
    [
        ("update {jobs} set hint = 'lowered' where id = 'head'", "nobody will find it"),
        ("update {jobs} set owner = null where id = 'runs'", "running without owner"),
        ("update {jobs} set lease_until = null where id = 'runs'", "running without lease_until"),
        ("update {jobs} set token = null where id = 'runs'", "running without token"),
        ("update {jobs} set state = 'waiting' where id = 'head'", "state is 'waiting'"),
        ("update {jobs} set outcome = 'fine' where id = 'ended'", "outcome is 'fine'"),
        ("update {jobs} set reason = 'r' where id = 'ended'", "with reason 'r'"),
        ("update {jobs} set settled_at = null where id = 'ended'", "settled_at None"),
        ("update {jobs} set settled_group = 99 where id = 'ended'", "beyond the counter"),
        ("update {jobs} set payload = '{' where id = 'head'", "not JSON"),
        ("update {jobs} set priority = 'high' where id = 'head'", "priority is 'high'"),
        ("update {jobs} set recovery_count = 7 where id = 'head'", "7 recoveries of"),
        ("update {jobs} set attempt_open = 1 where id = 'head'", "open attempt"),
        (
            "drop index watchdog_jobs_single_flight;"
            " update {jobs} set state = 'running', hint = null, token = 'u', owner = 'o',"
            " lease_until = 5 where id in ('head', 'next')",
            "2 jobs run at once",
        ),
        (
            "update {jobs} set queue = 'r', state = 'running', hint = null, token = 't',"
            " owner = 'o', lease_until = 5 where id = 'head'",
            "token of a live claim 't' is there twice",
        ),
    ],
)
async def test_a_broken_invariant_is_found_and_named(breakage: str, complaint: str) -> None:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        async with open_store(connection) as store:
            await store.enqueue(Job("z", id="ended"))
            claimed = (await store.claim("z", "t0")).job
            assert claimed is not None
            await store.decide("ended", "t0", DONE)
            await store.enqueue(Job("a", id="runs"))
            await store.claim("a", "t")
            for id in ("head", "next"):
                await store.enqueue(Job("b", id=id, queue="q"))
            check_invariants(store)
            check_invariants(connection)
            connection.execute("pragma ignore_check_constraints = 1")
            connection.executescript(breakage.replace("{jobs}", "watchdog_jobs"))
            problems = broken_invariants(store)
            assert any(complaint in problem for problem in problems), problems
            with pytest.raises(AssertionError, match="invariants broken"):
                check_invariants(FaultyStore(store))


async def test_invariants_are_checked_in_a_file_by_its_path_or_its_store(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    async with open_store(path) as store:
        await store.enqueue(Job("a"))
        for database in (store, path, str(path), FaultyStore(store)):
            assert broken_invariants(database) == []
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("update watchdog_jobs set hint = 'lowered'")
            connection.commit()
        for database in (store, path, str(path), FaultyStore(store)):
            assert len(broken_invariants(database)) == 1


# -- makers and checks ----------------------------------------------------------------------------


async def test_a_strangers_store_is_checked_with_a_few_lines() -> None:
    class Strangers(StoreMaker):
        @asynccontextmanager
        async def _open(self, options: Any) -> AsyncGenerator[tuple[Store, DurableClock]]:
            clock = DurableClock()
            async with open_store(":memory:", clock=clock, **options) as store:
                yield store, clock

        def __call__(self, **options: Any) -> Any:
            return self._open(options)

    async def needs_much(_: StoreMaker) -> None:
        raise AssertionError("not run")

    open_store_ = Strangers()
    left_out = [
        check.__name__ for check in testing.STORE_CHECKS if missing_capabilities(check, open_store_)
    ]
    assert "two_stores_share_one_order" in left_out
    assert len(left_out) < len(testing.STORE_CHECKS) / 5
    for check in testing.STORE_CHECKS[:3]:
        assert check.__name__ not in left_out
        await check(open_store_)
    mine = store_check("beside", "raw_sql")(needs_much)
    assert missing_capabilities(mine, open_store_) == ["beside", "raw_sql"]
    assert needs_much not in testing.STORE_CHECKS
    async with open_store_() as (store, _):
        for lacking in (open_store_.execute, open_store_.break_rows):
            with pytest.raises(NotImplementedError):
                await lacking(store, "select 1")
        with pytest.raises(NotImplementedError):
            open_store_.beside(store)


async def test_a_check_fails_on_a_store_that_breaks_its_promise() -> None:
    class Forgetful(InlineStore):
        """Loses the last job of every batch."""

        async def submit(self, *asked: w.Wish[Any]) -> list[Any]:
            return await super().submit(
                *(
                    w.EnqueueMany(wish.jobs[:-1]) if isinstance(wish, w.EnqueueMany) else wish
                    for wish in asked
                )
            )

    class Makers(StoreMaker):
        @asynccontextmanager
        async def _open(self, options: Any) -> AsyncGenerator[tuple[Store, DurableClock]]:
            clock = DurableClock()
            async with open_store(":memory:", clock=clock, **options) as store:
                store.__class__ = Forgetful
                yield store, clock

        def __call__(self, **options: Any) -> Any:
            return self._open(options)

    failed: list[str] = []
    # But for those that draw whole histories, which take a while each.
    checks = [c for c in testing.STORE_CHECKS if not c.__module__.endswith("_checks_whole")]
    for check in checks:
        if not missing_capabilities(check, Makers()):
            try:
                await check(Makers())
            except Exception:
                failed.append(check.__name__)
    assert "many_are_admitted_in_order_or_none_at_all" in failed
    assert len(failed) < len(checks) / 2


# -- lanes under test -----------------------------------------------------------------------------


def example(function: Any) -> dict[str, Any]:
    """What the example in a docstring defines."""
    text = inspect.getdoc(function)
    assert text is not None
    _, _, rest = text.partition("::\n\n")
    lines: list[str] = []
    for line in rest.splitlines():
        if line and not line.startswith(" "):
            break
        lines.append(line)
    namespace = {name: getattr(trio_watchdog, name) for name in trio_watchdog.__all__}
    namespace |= {name: getattr(testing, name) for name in testing.__all__}
    exec(textwrap.dedent("\n".join(lines)), namespace)
    return namespace


async def test_the_example_of_open_test_watchdog_works(autojump_clock: MockClock) -> None:
    await example(open_test_watchdog)["test_mail_is_sent_again_after_a_failure"]()


async def test_the_example_works_without_a_mock_clock() -> None:
    await example(open_test_watchdog)["test_mail_is_sent_again_after_a_failure"]()


def test_the_example_of_run_lanes_works() -> None:
    lanes = Lanes()

    @lanes.lane("report")
    async def report(job: Any) -> None:
        assert isinstance(job.payload["customer"], int)

    namespace = example(run_lanes)
    namespace["lanes"] = lanes
    namespace["test_a_report_is_written_for_each_customer"]()


def lanes_of(*names: str, **options: Any) -> tuple[Lanes, list[tuple[str, float]]]:
    """Lanes that note what they run, and when."""
    lanes, ran = Lanes(), list[tuple[str, float]]()

    async def note(job: Any) -> None:
        ran.append((job.id, round(trio.current_time(), 1)))

    for name in names:
        lanes.lane(name, **options)(note)
    return lanes, ran


def test_jobs_of_a_queue_run_in_order_and_deferred_ones_take_no_time() -> None:
    lanes, ran = lanes_of("a", "b")
    clock = DurableClock()
    jobs = [
        Job("a", id="1", queue="q"),
        Job("b", id="2", queue="q"),
        Job("a", id="a year later", not_before=clock.instant(365 * 86400)),
        Job("a", id="3", queue="q", priority=-1),
    ]
    ended = run_lanes(lanes, jobs)
    assert [job.id for job in ended] == ["1", "2", "3", "a year later"]
    assert {job.outcome for job in ended} == {"completed"}
    assert [id for id, _ in ran] == ["1", "2", "3", "a year later"]


def test_retries_recoveries_and_failures_end_as_they_would() -> None:
    lanes = Lanes()
    delays: list[float] = []

    @lanes.lane("a", retry=RetryPolicy(3, delay=60))
    async def fail(job: Any) -> None:
        delays.append(trio.current_time())
        raise ValueError("no")

    (job,) = run_lanes(lanes, [Job("a")])
    assert (job.outcome, job.attempt_count) == ("failed", 3)
    assert "ValueError: no" in (job.reason or "")
    gaps = [later - earlier for earlier, later in itertools.pairwise(delays)]
    assert 60 <= gaps[0] < 61
    assert 120 <= gaps[1] < 121


def test_a_handler_may_enqueue_and_wait_for_other_jobs() -> None:
    lanes = Lanes()

    async def main() -> list[str]:
        async with open_test_watchdog() as watchdog:

            async def parent(job: Any) -> None:
                await watchdog.enqueue(Job("child", id="child"))
                await trio.sleep(3600)
                assert (await watchdog.wait_settled("child")).outcome == "completed"

            async def child(job: Any) -> None:
                await trio.sleep(60)

            lanes.lane("parent")(parent)
            lanes.lane("child")(child)
            await watchdog.start_lanes(lanes)
            await watchdog.enqueue(Job("parent", id="parent"))
            await watchdog.run_until_idle()
            return [job.id for job in await watchdog.settled()]

    assert trio.run(main, clock=MockClock(autojump_threshold=0)) == ["child", "parent"]


async def test_advance_runs_what_falls_due_and_no_more(autojump_clock: MockClock) -> None:
    lanes, ran = lanes_of("a")
    async with open_test_watchdog(lanes) as watchdog:
        for seconds in (10, 20, 30):
            due = watchdog.clock.instant(seconds)
            await watchdog.enqueue(Job("a", id=f"{seconds}", not_before=due))
        await watchdog.run_due()
        assert ran == []
        await watchdog.advance(20)
        assert [id for id, _ in ran] == ["10", "20"]
        await watchdog.run_until_idle()
        assert [id for id, _ in ran] == ["10", "20", "30"]
        assert [job.id for job in await watchdog.settled()] == ["10", "20", "30"]
        check_invariants(watchdog.store)


async def test_jobs_of_lanes_that_are_not_there_stay_where_they_are(
    autojump_clock: MockClock,
) -> None:
    lanes, ran = lanes_of("a")
    async with open_test_watchdog(lanes) as watchdog:
        await watchdog.enqueue(Job("elsewhere", id="stays"))
        await watchdog.enqueue(Job("a", id="goes", not_before=watchdog.clock.instant(600)))
        await watchdog.run_until_idle()
        assert [id for id, _ in ran] == ["goes"]
        job = await watchdog.read("stays")
        assert job is not None
        assert job.state == "queued"


async def test_a_job_that_goes_on_for_ever_is_an_error_and_no_hang(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trio_watchdog.testing._inline.JUMP_LIMIT", 50)
    lanes = Lanes()

    @lanes.lane("a")
    async def again(job: Any) -> Retry:
        return Retry(after=60)

    async with open_test_watchdog(lanes) as watchdog:
        await watchdog.enqueue(Job("a"))
        with pytest.raises(RuntimeError, match="50 jumps"):
            await watchdog.run_until_idle()


async def test_a_lane_under_test_meets_a_store_that_fails(autojump_clock: MockClock) -> None:
    lanes, ran = lanes_of("a")
    async with open_test_watchdog(lanes) as watchdog:
        assert isinstance(watchdog, InlineWatchdog)
        watchdog.store.fail("decide", when="after")
        watchdog.store.fail("claim", times=2)
        await watchdog.enqueue(Job("a", id="j"))
        await watchdog.run_until_idle()
        job = await watchdog.read("j")
        assert job is not None
        assert job.state == "settled"
        assert len(ran) == 1


def test_handlers_in_threads_are_tested_in_real_time() -> None:
    lanes = Lanes()
    lanes.lane("a", retry=RetryPolicy(2, delay=3600))(thread_handler(in_a_thread))
    tried.clear()
    (job,) = run_lanes(lanes, [Job("a", {"n": 1})], virtual_time=False)
    assert (job.outcome, job.attempt_count) == ("completed", 2)


tried: list[int] = []


def in_a_thread(job: Any) -> None:
    tried.append(job.payload["n"])
    if len(tried) == 1:
        raise OSError("not yet")


def test_an_error_in_the_test_comes_out_as_itself_however_early() -> None:
    async def main(checkpoints: int) -> None:
        async with open_test_watchdog():
            for _ in range(checkpoints):
                await trio.lowlevel.checkpoint()
            raise KeyError

    for n in range(40):
        with pytest.raises(KeyError):
            trio.run(main, n % 4, clock=MockClock(autojump_threshold=0))


def test_the_package_itself_does_not_load_its_test_kit() -> None:
    code = (
        "import sys, trio_watchdog; "
        "print([m for m in sys.modules if 'testing' in m and 'watchdog' in m])"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(trio_watchdog.__file__).parent.parent,
    )
    assert loaded.stdout.strip() == "[]"
    # And the kit does without the drivers of other databases.
    code = (
        "import sys, trio_watchdog.testing; "
        "print({'hypothesis', 'psycopg', 'trio_asyncio'} & set(sys.modules))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(trio_watchdog.__file__).parent.parent,
    )
    assert loaded.stdout.strip() == "set()"


def test_everything_public_has_a_docstring() -> None:
    for name in testing.__all__:
        value: Any = getattr(testing, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), name
