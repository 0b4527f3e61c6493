"""Due jobs start without polling delay, and those who wait are told."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trio_watchdog import Job, RunningJob, StoreInvalid, WakeState, Watchdog
from trio_watchdog._calls import Effects
from trio_watchdog._model import INSTANT_LIMIT, Outcome, to_instant
from trio_watchdog._rules import Settle
from trio_watchdog._store import ELSEWHERE, Change
from trio_watchdog._wake import Alarm, Bell, Doorbell


async def nothing(job: RunningJob):
    return None


@contextmanager
def untold(store) -> Generator[None]:
    """What the store does in here it tells nobody, as if another process had done it."""
    listeners, store.store.on_change[:] = list(store.on_change), []
    yield
    store.store.on_change[:] = listeners


def soon(store, seconds: float) -> datetime:
    return to_instant(store.now()) + timedelta(seconds=seconds)


async def test_a_job_that_is_enqueued_here_starts_at_once(open_it):
    at = []

    async def handler(job: RunningJob):
        at.append(trio.current_time())

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler)
        await trio.sleep(2)
        began = trio.current_time()
        await watchdog.enqueue(Job("mail"))
        await watchdog.wait_idle()
    assert at == [began]


async def test_deferred_jobs_start_when_they_are_due(open_it, store):
    at = {}

    async def handler(job: RunningJob):
        at[job.id] = trio.current_time()

    async with open_it(poll=1000) as watchdog:
        await watchdog.start_lane("mail", handler)
        began = trio.current_time()
        for seconds in (300, 3.5, 0.25, 100, 3.52):
            await watchdog.enqueue(Job("mail", id=str(seconds), not_before=soon(store, seconds)))
        await watchdog.wait_settled("300")
    for id, instant in at.items():
        assert 0 <= instant - began - float(id) < 0.01, id


async def test_a_job_due_in_the_past_starts_now(open_it):
    async with open_it() as watchdog:
        await watchdog.start_lane("mail", nothing)
        began = trio.current_time()
        await watchdog.enqueue(Job("mail", id="x", not_before=datetime(1999, 1, 1, tzinfo=UTC)))
        await watchdog.wait_settled("x")
        assert trio.current_time() == began


async def test_a_store_whose_clock_is_behind_what_it_tells_is_not_asked_in_a_hot_loop(
    open_it, store, monkeypatch
):
    async with open_it(poll=1000) as watchdog:
        await watchdog.start_lane("mail", nothing)
        await watchdog.wait_idle()
        ahead = store.now
        # What the process believes is two seconds ahead of what judges.
        monkeypatch.setattr(watchdog._runtime.doorbell.alarm, "_now", lambda: ahead() + 2000)
        await watchdog.enqueue(Job("mail", id="x", not_before=soon(store, 10)))
        before = store.exchanges
        began = trio.current_time()
        await watchdog.wait_settled("x")
        assert 9.99 < trio.current_time() - began < 10.2
        assert store.exchanges - before < 150


async def test_what_others_enqueue_starts_when_the_store_notices(open_it, store):
    async with open_it() as watchdog:
        await watchdog.start_lane("mail", nothing)
        await watchdog.wait_idle()
        with untold(store):
            await store.enqueue(Job("mail", id="x"))
        began = trio.current_time()
        store.report(ELSEWHERE)
        await watchdog.wait_settled("x")
        assert trio.current_time() - began < 0.1


async def test_without_any_notification_the_slow_poll_finds_what_is_due(open_it, store):
    async with open_it(poll=5) as watchdog:
        await watchdog.start_lane("mail", nothing)
        await watchdog.wait_idle()
        with untold(store):
            await store.enqueue(Job("mail", id="x"))
        began = trio.current_time()
        await watchdog.wait_settled("x")
        assert trio.current_time() - began < 5.1


async def test_a_settlement_that_nobody_tells_of_is_seen_within_a_second(open_it, store):
    async with open_it(poll=1000) as watchdog, trio.open_nursery() as nursery:
        await watchdog.enqueue(Job("mail", id="x"))
        seen_at: list[float] = []

        async def wait() -> None:
            await watchdog.wait_settled("x")
            seen_at.append(trio.current_time())

        nursery.start_soon(wait)
        await trio.sleep(300.3)
        with untold(store):
            await store.claim("mail", "t")
            await store.decide("x", "t", Settle(Outcome.COMPLETED))
        settled_at = trio.current_time()
        await trio.sleep(1.01)
        assert seen_at
        assert seen_at[0] - settled_at <= 1


@pytest.mark.parametrize("pause", [1, 0.05])
async def test_the_slow_poll_comes_although_the_supervisor_is_rung_all_the_time(
    open_it, store, pause
):
    async def ring_on(watchdog: Watchdog):
        while True:
            admission = await watchdog.enqueue(Job("other"))
            await watchdog.cancel(admission.job.id)
            await trio.sleep(pause)

    async with open_it(poll=5) as watchdog, trio.open_nursery() as nursery:
        await watchdog.start_lane("mail", nothing)
        await watchdog.wait_idle()
        nursery.start_soon(ring_on, watchdog)
        await trio.sleep(0.5)
        with untold(store):
            await store.enqueue(Job("mail", id="x"))
        with trio.fail_after(5.5):
            await watchdog.wait_settled("x")
        nursery.cancel_scope.cancel()


async def test_a_cancel_by_others_reaches_the_handler_when_the_store_notices(open_it, store):
    started = trio.Event()

    async def handler(job: RunningJob):
        started.set()
        await trio.sleep_forever()

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler)
        await watchdog.enqueue(Job("mail", id="x"))
        await started.wait()
        with untold(store):
            await store.cancel("x", "c")
        began = trio.current_time()
        store.report(ELSEWHERE)
        await watchdog.wait_settled("x")
        assert trio.current_time() - began < 0.1


async def test_many_rings_from_others_cost_few_inspections_and_none_is_lost(open_it, store):
    started = trio.Event()

    async def handler(job: RunningJob):
        started.set()
        await trio.sleep_forever()

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler)
        await watchdog.enqueue(Job("mail", id="x"))
        await started.wait()
        before = store.calls["inspect"]
        for _ in range(100):
            store.report(ELSEWHERE)
            await trio.sleep(0.001)
        assert store.calls["inspect"] - before <= 4
        await trio.sleep(1)
        store.report(ELSEWHERE)
        await wait_all_tasks_blocked()
        with untold(store):
            await store.cancel("x", "c")
        store.report(ELSEWHERE)
        with trio.fail_after(0.2):
            await watchdog.wait_settled("x")


async def test_wait_settled_refuses_an_unknown_job(open_it):
    async with open_it() as watchdog:
        with pytest.raises(StoreInvalid, match="no job 'nobody'"):
            await watchdog.wait_settled("nobody")


async def test_wait_settled_is_told_by_any_way_to_settle(open_it):
    async with open_it() as watchdog:
        await watchdog.enqueue_many([Job("mail", id="a"), Job("fax", id="b")])
        results = {}

        async def wait(id):
            results[id] = (await watchdog.wait_settled(id)).outcome

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait, "a")
            nursery.start_soon(wait, "a")
            nursery.start_soon(wait, "b")
            await trio.sleep(1)
            await watchdog.fail_lane("fax", "out of paper")
            await watchdog.start_lane("mail", nothing)
        assert results == {"a": "completed", "b": "failed"}


async def test_wait_idle_waits_for_runs_and_due_jobs_and_not_for_later_ones(open_it, store):
    async def handler(job: RunningJob):
        await trio.sleep(3)

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler)
        await watchdog.enqueue_many([Job("mail"), Job("mail"), Job("nobody")])
        await watchdog.enqueue(Job("mail", not_before=soon(store, 1000)))
        began = trio.current_time()
        await watchdog.wait_idle()
        assert trio.current_time() - began == pytest.approx(6, abs=0.2)
        await watchdog.wait_idle()


async def test_on_wake_is_told_each_change_of_the_wake_state(open_it, store):
    told: list[WakeState] = []

    async def on_wake(state: WakeState):
        told.append(state)

    async with open_it(on_wake=on_wake) as watchdog:
        await trio.sleep(1)
        due = soon(store, 100)
        await watchdog.enqueue(Job("mail", not_before=due))
        await trio.sleep(1)
        await watchdog.enqueue(Job("mail"))
        await trio.sleep(1)
        await watchdog.fail_lane("mail", "enough")
        await trio.sleep(1)
    assert told == [
        WakeState(False, None),
        WakeState(False, due),
        WakeState(True, due),
        WakeState(False, None),
    ]


async def test_an_on_wake_that_raises_is_logged_and_stops_nothing(open_it, caplog):
    def on_wake(state: WakeState):
        raise ValueError("no alarm clock")

    async with open_it(on_wake=on_wake) as watchdog:
        await watchdog.start_lane("mail", nothing)
        await watchdog.enqueue(Job("mail", id="x"))
        await watchdog.wait_settled("x")
        await watchdog.wait_idle()
    assert "no alarm clock" in caplog.text


# -- the doorbell itself --------------------------------------------------------------------------


async def test_a_ring_between_the_look_and_the_wait_is_not_lost():
    bell = Bell()
    ticket = bell.ticket
    bell.ring()
    await bell.wait(ticket)
    with trio.move_on_after(1) as scope:
        await bell.wait(bell.ticket)
    assert scope.cancelled_caught


async def test_a_ring_wakes_one_and_a_ring_for_all_wakes_all():
    bell = Bell()
    woken = []

    async def wait(n):
        await bell.wait(bell.ticket)
        woken.append(n)

    async with trio.open_nursery() as nursery:
        for n in range(4):
            nursery.start_soon(wait, n)
        await wait_all_tasks_blocked()
        assert bell.waiting == 4
        bell.ring()
        assert bell.waiting == 3
        await wait_all_tasks_blocked()
        assert len(woken) == 1
        bell.ring_all()
    assert sorted(woken) == [0, 1, 2, 3]


async def test_the_alarm_goes_off_at_its_instant_and_reads_the_clock_each_minute():
    reads = []

    def now():
        reads.append(trio.current_time())
        # A durable clock at half the speed of Trio's.
        return int(trio.current_time() * 500)

    alarm = Alarm(now)
    began = trio.current_time()
    alarm.arm(int(began * 500) + 150_000)
    await alarm.wait()
    assert trio.current_time() - began == pytest.approx(300, abs=0.01)
    assert max(b - a for a, b in pairwise(reads)) <= 60


async def test_the_alarm_keeps_the_earliest_instant_and_is_armed_while_it_waits():
    alarm = Alarm(lambda: int(trio.current_time() * 1000))
    began = int(trio.current_time() * 1000)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(alarm.wait)
        await trio.sleep(1)
        alarm.arm(began + 50_000)
        alarm.arm(began + 3_000)
        alarm.arm(began + 70_000)
    assert trio.current_time() * 1000 - began == pytest.approx(3000, abs=2)


async def test_a_clock_that_cannot_be_told_leaves_the_alarm_to_the_poll():
    alarm = Alarm(lambda: None)
    alarm.arm(1)
    with trio.move_on_after(1000) as scope:
        await alarm.wait()
    assert scope.cancelled_caught


@pytest.mark.parametrize(
    "change",
    [
        Change({}),
        Change({"mail": 0, "fäx\n": 5}),
        Change({"mail": 7}, cancelled=True, claims=frozenset(("a", "b")), later=7),
    ],
)
def test_what_others_are_told_of_a_change_is_what_they_hear(change: Change):
    assert Change.heard(change.told()) == change
    assert Change.heard(change.told().encode()) == change


@pytest.mark.parametrize(
    "told",
    [
        "",
        b"",
        b"\0",
        b"\xff\xfe",
        "[" * 100_000,
        "null",
        "[]",
        "[{}, false, []]",
        "[[], false, [], null]",
        '[{"mail": "soon"}, false, [], null]',
        '[{"mail": 0}, false, 5, null]',
        '[{"mail": NaN}, false, [], null]',
        '[{"mail": Infinity}, false, [], null]',
        '[{"mail": -1}, false, [], null]',
        f'[{{"mail": 1{400 * "0"}}}, false, [], null]',
        f"[{{}}, false, [], {INSTANT_LIMIT + 1}]",
        Change({f"lane {n}": n for n in range(1000)}).told(),
        Change({}, claims=frozenset(map(str, range(1000)))).told(),
    ],
)
def test_what_is_not_understood_or_too_long_to_tell_may_be_anything(told: str | bytes):
    assert Change.heard(told) is ELSEWHERE


def test_a_change_has_what_is_due_later_beside_what_is_due_now():
    effects = Effects(0)
    for due in (30, 0, 20):
        effects.claimable("mail", due)
    change = Change.of(effects)
    assert (change.lanes, change.later) == ({"mail": 0}, 20)
    doorbell = Doorbell(lambda: None)
    mail = doorbell.lane("mail")
    doorbell.hear(change)
    assert (mail.ticket, doorbell.alarm.instant) == (1, 20)


@pytest.mark.parametrize(("due", "rings"), [(0, 1), (99, 1), (100, 1), (101, 0)])
def test_what_has_become_due_meanwhile_rings_at_once(due: int, rings: int):
    doorbell = Doorbell(lambda: 100)
    mail = doorbell.lane("mail")
    doorbell.hear(Change({"mail": due}))
    assert mail.ticket == rings


def test_changes_ring_those_whom_they_concern():
    doorbell = Doorbell(lambda: 0)
    mail, others = doorbell.lane("mail"), doorbell.lane(None)
    doorbell.hear(Change({"mail": 0}))
    assert (mail.ticket, others.ticket, doorbell.supervisor.ticket) == (1, 0, 0)
    doorbell.hear(Change({"fax": 0}))
    assert (mail.ticket, others.ticket) == (1, 1)
    doorbell.hear(Change({}, cancelled=True, claims=frozenset("x")))
    assert doorbell.supervisor.ticket == 1
    assert doorbell.take_claims() == (frozenset("x"), False)
    doorbell.hear(ELSEWHERE)
    assert (mail.ticket, others.ticket, doorbell.supervisor.ticket) == (2, 2, 2)
    assert doorbell.take_claims() == (frozenset(), True)
    assert doorbell.changes_heard == 4
