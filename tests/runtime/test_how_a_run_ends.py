"""The table of ends: what left the handler, times why its scope was cancelled."""

from __future__ import annotations

import logging

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from trio_watchdog import (
    Cancel,
    Complete,
    CompletingJob,
    Fail,
    Job,
    OutcomeUnknown,
    QueuedJob,
    Recovery,
    Retry,
    RetryPolicy,
    RunningJob,
    SettledJob,
)
from trio_watchdog._rules import Settle
from trio_watchdog._run import Again, GiveBack, Left, conclude

# -- no cause -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "outcome", "reason"),
    [
        (None, "completed", None),
        (Complete(), "completed", None),
        (Fail("no stamps"), "failed", "no stamps"),
        (Cancel(), "cancelled", None),
        (OutcomeUnknown(), "outcome_unknown", None),
    ],
)
async def test_what_the_handler_says_is_how_the_job_ends(open_it, ends, said, outcome, reason):
    async def handler(job: RunningJob):
        return said

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler)
        await watchdog.enqueue(Job("mail", id="x"))
        settled = await watchdog.wait_settled("x")
    assert (settled.outcome, settled.reason) == (outcome, reason)
    assert ends.causes("x") == [outcome]


async def test_a_value_that_is_no_decision_fails_the_job_with_a_readable_reason(open_it, ends):
    async def handler(job: RunningJob):
        return 42

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler, retry=RetryPolicy(3))
        await watchdog.enqueue(Job("mail", id="x"))
        settled = await watchdog.wait_settled("x")
    assert settled.outcome == "failed"
    assert settled.reason.startswith("the handler returned a value of type int; allowed are None")


async def test_an_exception_without_a_policy_fails_the_job_with_its_type_and_text(open_it, ends):
    async def handler(job: RunningJob):
        raise ValueError("no stamps")

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler)
        await watchdog.enqueue(Job("mail", id="x"))
        settled = await watchdog.wait_settled("x")
    assert (settled.outcome, settled.reason) == ("failed", "ValueError: no stamps")
    (record,) = ends.of("x")
    assert record.levelno == logging.WARNING
    assert record.exc_info[0] is ValueError


async def test_a_group_fails_the_job_with_its_leaves_and_without_cancellations(open_it, ends):
    async def handler(job: RunningJob):
        async def fail(error):
            raise error

        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail, ValueError("no stamps"))
            nursery.start_soon(fail, KeyError("address"))
            nursery.start_soon(trio.sleep_forever)

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler)
        await watchdog.enqueue(Job("mail", id="x"))
        settled = await watchdog.wait_settled("x")
    assert "ValueError: no stamps" in settled.reason
    assert "KeyError: 'address'" in settled.reason
    assert "Cancelled" not in settled.reason


async def test_an_exception_that_cannot_be_shown_still_ends_the_job(open_it):
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("hush")

        __repr__ = __str__

    async def handler(job: RunningJob):
        raise Mute("\0\ud800")

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler)
        await watchdog.enqueue(Job("mail", id="x"))
        settled = await watchdog.wait_settled("x")
    assert settled.reason == "Mute: (its text raised RuntimeError)"


async def test_a_cancelled_of_another_scope_is_a_failure_of_the_handler(open_it):
    async def handler(job: RunningJob):
        with trio.CancelScope() as scope:
            scope.cancel()
            try:
                await trio.sleep_forever()
            except trio.Cancelled as error:
                kept = error
        raise kept

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler)
        await watchdog.enqueue(Job("mail", id="x"))
        settled = await watchdog.wait_settled("x")
    assert settled.outcome == "failed"
    assert "Cancelled of another scope" in settled.reason


async def test_a_handler_that_is_not_async_fails_its_job_and_says_so(open_it):
    def handler(job: RunningJob):
        return Complete()

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler)
        await watchdog.enqueue(Job("mail", id="x"))
        settled = await watchdog.wait_settled("x")
    assert settled.outcome == "failed"
    assert "the handler is not async: it returned Complete()" in settled.reason


async def test_one_failing_job_leaves_its_siblings_and_other_lanes_alone(open_it):
    async def fails(job: RunningJob):
        raise ValueError

    async def sleeps(job: RunningJob):
        await trio.sleep(1)

    async with open_it() as watchdog:
        await watchdog.start_lane("good", sleeps, workers=2)
        await watchdog.start_lane("bad", fails)
        await watchdog.enqueue_many(
            [Job("good", id="a"), Job("bad", id="b"), Job("good", id="c"), Job("bad", id="d")]
        )
        outcomes = [(await watchdog.wait_settled(id)).outcome for id in "abcd"]
    assert outcomes == ["completed", "failed", "completed", "failed"]


# -- cancelled ------------------------------------------------------------------------------------


async def ends_by_itself(started, job):
    """Ends at once when cancelled: only cancellations leave it."""
    started.set()
    await trio.sleep_forever()


async def swallows(started, job):
    """Suppresses its cancellation and claims success."""
    started.set()
    try:
        await trio.sleep_forever()
    except trio.Cancelled:
        return Complete()


async def fails_in_teardown(started, job):
    """A real error takes the place of its cancellation."""
    started.set()
    try:
        await trio.sleep_forever()
    finally:
        raise ValueError("in teardown")


async def fails_in_a_nursery(started, job):
    """A group of cancellations and an error."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fails_in_teardown, started, job)
        nursery.start_soon(trio.sleep_forever)


MANNERS = pytest.mark.parametrize(
    "manner",
    [ends_by_itself, swallows, fails_in_teardown, fails_in_a_nursery],
    ids=lambda manner: manner.__name__,
)


@MANNERS
async def test_cancel_ends_a_running_job_as_cancelled(open_it, ends, manner):
    started = trio.Event()
    reasons = []

    async def handler(job: RunningJob):
        try:
            return await manner(started, job)
        finally:
            reasons.append(job.cancel_reason)

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler, retry=RetryPolicy(5))
        await watchdog.enqueue(Job("mail", id="x"))
        await started.wait()
        assert (await watchdog.cancel("x")).status == "recorded"
        settled = await watchdog.wait_settled("x")
    assert (settled.outcome, settled.reason) == ("cancelled", None)
    assert reasons == ["cancellation"]
    assert ends.causes("x") == ["cancellation"]


@MANNERS
async def test_cancelling_the_jobs_scope_ends_it_as_cancelled_and_durably(open_it, ends, manner):
    started = trio.Event()
    reasons = []

    async def handler(job: RunningJob):
        try:
            return await manner(started, job)
        finally:
            reasons.append(job.cancel_reason)

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler, retry=RetryPolicy(5))
        await watchdog.enqueue(Job("mail", id="x"))
        await started.wait()
        (job,) = watchdog.running()
        job.cancel_scope.cancel()
        settled = await watchdog.wait_settled("x")
    assert settled.outcome == "cancelled"
    assert settled.cancellation_id is not None
    assert reasons == ["cancellation"]
    assert ends.causes("x") == ["cancellation"]


async def test_a_scope_cancelled_after_the_last_checkpoint_still_cancels_the_job(open_it):
    async def handler(job: RunningJob):
        job.cancel_scope.cancel()
        return Complete()

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler)
        await watchdog.enqueue(Job("mail", id="x"))
        assert (await watchdog.wait_settled("x")).outcome == "cancelled"


@MANNERS
async def test_failing_the_lane_ends_a_running_job_as_failed_by_its_reason(open_it, ends, manner):
    started = trio.Event()
    ended = trio.Event()
    reasons = []

    async def handler(job: RunningJob):
        try:
            return await manner(started, job)
        finally:
            reasons.append(job.cancel_reason)
            ended.set()

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler)
        await watchdog.enqueue(Job("mail", id="x"))
        await started.wait()
        failure = await watchdog.fail_lane("mail", "the post office burned down")
        assert [job.id for job in failure.jobs] == ["x"]
        await ended.wait()
        await watchdog.wait_idle()
        settled = await watchdog.read("x")
    assert settled.outcome == "failed"
    assert settled.reason == "the post office burned down"
    assert reasons == ["lane_failed"]
    assert ends.causes("x") == ["lane_failed"]


@MANNERS
async def test_after_a_lost_lease_nothing_is_recorded(open_it, store, ends, manner, until):
    started = trio.Event()
    reasons = []

    async def handler(job: RunningJob):
        try:
            return await manner(started, job)
        finally:
            reasons.append(job.cancel_reason)

    async with open_it(lease=30, heartbeat=10) as watchdog:
        await watchdog.start_lane("mail", handler)
        await watchdog.enqueue(Job("mail", id="x"))
        await started.wait()
        store.fail("renew", times=None)
        began = trio.current_time()
        await until(lambda: ends.of("x"))
        # The lease less its margin, and not later: nobody else may have the job before.
        assert trio.current_time() - began <= 27.5
        assert isinstance(await watchdog.read("x"), RunningJob)
    assert reasons == ["lease_lost"]
    assert ends.causes("x") == ["lease_lost"]


@pytest.mark.parametrize("way", ["told", "expired"])
async def test_a_lost_lease_beats_every_other_cause(open_it, store, ends, way):
    started = trio.Event()
    reasons = []

    async def handler(job: RunningJob):
        started.set()
        try:
            await trio.sleep_forever()
        finally:
            reasons.append(job.cancel_reason)
            with trio.CancelScope(shield=True):
                await trio.sleep(40)
            reasons.append(job.cancel_reason)

    async with open_it(lease=30) as watchdog:
        await watchdog.start_lane("mail", handler)
        await watchdog.enqueue(Job("mail", id="x"))
        await started.wait()
        await watchdog.cancel("x")
        await wait_all_tasks_blocked()
        if way == "told":
            await store.fail_lane("mail", "and nobody told the claim")
        else:
            store.fail("renew", times=None)
        settled = await watchdog.wait_settled("x")
        await watchdog.wait_idle()
    assert settled.outcome == ("failed" if way == "told" else "cancelled")
    if way == "told":
        assert ends.causes("x") == ["lease_lost"]
    else:
        assert reasons == ["cancellation", "lease_lost"]
        # The claim is over; the supervisor settles it, by the cancellation that is recorded.
        assert ends.causes("x") == ["lease_lost"]


@MANNERS
async def test_a_timeout_is_a_failure_of_the_attempt_that_names_the_limit(open_it, ends, manner):
    reasons = []

    async def handler(job: RunningJob):
        try:
            return await manner(trio.Event(), job)
        finally:
            reasons.append(job.cancel_reason)

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler, timeout=2.5)
        await watchdog.enqueue(Job("mail", id="x"))
        settled = await watchdog.wait_settled("x")
    assert settled.outcome == "failed"
    assert settled.reason.startswith("timed out after 2.5 s")
    assert ("ValueError: in teardown" in settled.reason) == ("fails" in manner.__name__)
    assert reasons == ["timeout"]
    assert ends.causes("x") == ["timeout"]


@MANNERS
async def test_a_run_cut_short_by_a_stop_is_handed_off(open_it, store, ends, manner):
    started = trio.Event()
    reasons = []

    async def handler(job: RunningJob):
        try:
            return await manner(started, job)
        finally:
            reasons.append(job.cancel_reason)

    async with open_it(grace=3) as watchdog:
        await watchdog.start_lane("mail", handler, retry=RetryPolicy(2))
        await watchdog.enqueue(Job("mail", id="x", recovery=Recovery(0)))
        await started.wait()
        began = trio.current_time()
    assert trio.current_time() - began == pytest.approx(3)
    job = await store.read("x")
    assert isinstance(job, QueuedJob)
    assert (job.attempt_count, job.recovery_count) == (0, 0)
    assert reasons == ["shutdown"]
    assert ends.causes("x") == ["shutdown"]


# -- whose deadline -------------------------------------------------------------------------------


async def test_the_programs_own_deadline_is_a_time_limit(open_it, ends):
    async def handler(job: RunningJob):
        job.cancel_scope.deadline = trio.current_time() + 4
        await trio.sleep_forever()

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler)
        await watchdog.enqueue(Job("mail", id="x"))
        settled = await watchdog.wait_settled("x")
    assert (settled.outcome, settled.reason) == ("failed", "timed out after 4 s")


async def test_a_time_limit_survives_renewals(open_it):
    async def handler(job: RunningJob):
        job.cancel_scope.deadline = trio.current_time() + 35
        await trio.sleep_forever()

    async with open_it(lease=30, heartbeat=10) as watchdog:
        await watchdog.start_lane("mail", handler)
        await watchdog.enqueue(Job("mail", id="x"))
        settled = await watchdog.wait_settled("x")
    assert settled.reason == "timed out after 35 s"


async def test_the_deadline_shows_the_end_of_the_lease_and_renewal_moves_it(open_it):
    seen = []

    async def handler(job: RunningJob):
        for _ in range(3):
            seen.append(job.cancel_scope.deadline - trio.current_time())
            await trio.sleep(10.5)

    async with open_it(lease=30, heartbeat=10) as watchdog:
        await watchdog.start_lane("mail", handler)
        await watchdog.enqueue(Job("mail", id="x"))
        await watchdog.wait_settled("x")
    # A tenth of the lease is the margin.
    assert seen == pytest.approx([27.0, 26.5, 26.0], abs=0.2)


async def test_no_deadline_of_the_programs_outlives_the_lease(open_it, store, ends, until):
    async def handler(job: RunningJob):
        job.cancel_scope.deadline = trio.current_time() + 1000
        await trio.sleep_forever()

    async with open_it(lease=30, heartbeat=10) as watchdog:
        await watchdog.start_lane("mail", handler)
        store.fail("renew", times=None)
        await watchdog.enqueue(Job("mail", id="x"))
        await until(lambda: ends.of("x"))
        assert trio.current_time() < 28
    assert ends.causes("x") == ["lease_lost"]


async def test_a_renewal_clamps_a_deadline_that_is_later_than_the_lease(open_it):
    async def handler(job: RunningJob):
        job.cancel_scope.deadline = trio.current_time() + 1000
        await trio.sleep(11)
        return Fail(f"{job.cancel_scope.deadline - trio.current_time():.0f}")

    async with open_it(lease=30, heartbeat=10) as watchdog:
        await watchdog.start_lane("mail", handler)
        await watchdog.enqueue(Job("mail", id="x"))
        assert (await watchdog.wait_settled("x")).reason == "26"


async def test_a_handler_that_ends_before_the_loop_notices_its_deadline_is_believed(open_it):
    async def handler(job: RunningJob):
        clock = trio.lowlevel.current_clock()
        assert isinstance(clock, MockClock)
        # A block of the loop, in mock time: no checkpoint until the return.
        clock.jump(5)
        return Complete()

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler, timeout=2)
        await watchdog.enqueue(Job("mail", id="x"))
        assert (await watchdog.wait_settled("x")).outcome == "completed"


async def test_slow_cleanup_past_the_limit_does_not_turn_a_cancel_into_a_timeout(open_it, ends):
    started = trio.Event()

    async def handler(job: RunningJob):
        started.set()
        try:
            await trio.sleep_forever()
        finally:
            with trio.move_on_after(5, shield=True):
                await trio.sleep(4)

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler, timeout=2)
        await watchdog.enqueue(Job("mail", id="x"))
        await started.wait()
        watchdog.running()[0].cancel_scope.cancel()
        assert (await watchdog.wait_settled("x")).outcome == "cancelled"
    assert ends.causes("x") == ["cancellation"]


async def test_a_cancel_stands_though_the_handler_returns_past_the_limit(open_it, ends):
    started = trio.Event()

    async def handler(job: RunningJob):
        started.set()
        with trio.CancelScope(shield=True):
            await trio.sleep(4)

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler, timeout=2, retry=RetryPolicy(3))
        await watchdog.enqueue(Job("mail", id="x"))
        await started.wait()
        watchdog.running()[0].cancel_scope.cancel()
        assert (await watchdog.wait_settled("x")).outcome == "cancelled"
    assert ends.causes("x") == ["cancellation"]


async def test_a_limit_stands_though_the_handler_cancels_something_of_its_own(open_it, ends):
    async def handler(job: RunningJob):
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.sleep_forever)
                await trio.sleep(4)
                nursery.cancel_scope.cancel()
        await trio.sleep_forever()

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler, timeout=2)
        await watchdog.enqueue(Job("mail", id="x"))
        assert (await watchdog.wait_settled("x")).outcome == "failed"
    assert ends.causes("x") == ["timeout"]


async def test_the_programs_cancel_is_durable_while_the_handler_still_cleans_up(open_it):
    started = trio.Event()

    async def handler(job: RunningJob):
        started.set()
        try:
            await trio.sleep_forever()
        finally:
            with trio.move_on_after(60, shield=True):
                await trio.sleep(50)

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler)
        await watchdog.enqueue(Job("mail", id="x"))
        await started.wait()
        watchdog.running()[0].cancel_scope.cancel()
        await trio.sleep(6)
        job = await watchdog.read("x")
        assert isinstance(job, RunningJob)
        assert job.cancellation_id is not None


async def test_an_error_that_a_cancellation_replaced_is_in_the_log(open_it, ends):
    started = trio.Event()

    class Resource:
        async def __aenter__(self):
            return self

        async def __aexit__(self, *error):
            await trio.lowlevel.checkpoint()

    async def handler(job: RunningJob):
        async with Resource():
            started.set()
            try:
                await trio.sleep_forever()
            finally:
                raise ValueError("the real one")

    async with open_it() as watchdog:
        await watchdog.start_lane("mail", handler)
        await watchdog.enqueue(Job("mail", id="x"))
        await started.wait()
        await watchdog.cancel("x")
        await watchdog.wait_settled("x")
        await watchdog.wait_idle()
    (record,) = ends.of("x")
    assert "ValueError: the real one" in record.getMessage()


# -- the table itself -----------------------------------------------------------------------------

RETURNED = Left("nonsense")
RAISED = Left(error=ValueError("no stamps"))
CANCELLED = Left(is_cancelled=True)
POLICY = RetryPolicy(3)


@pytest.mark.parametrize("policy", [None, POLICY])
@pytest.mark.parametrize("left", [RETURNED, RAISED, CANCELLED])
def test_a_cause_decides_whatever_left_the_handler(left, policy):
    assert conclude(left, "lease_lost", policy, "") is None
    assert conclude(left, "lane_failed", policy, "") is None
    assert conclude(left, "cancellation", policy, "") == Settle("cancelled")
    assert conclude(left, "shutdown", policy, "") == GiveBack()
    timed_out = conclude(left, "timeout", policy, "timed out")
    reason = "timed out; ValueError: no stamps" if left is RAISED else "timed out"
    assert timed_out == (Settle("failed", reason) if policy is None else Again(reason))


def test_a_retry_goes_by_what_the_handler_asks():
    assert conclude(Left(Retry()), None, None, "") == Again(None)
    assert conclude(Left(Retry(1.5, "busy")), None, POLICY, "") == Again("busy", 1500)
    assert conclude(RAISED, None, POLICY, "") == Again("ValueError: no stamps")


def test_states_are_told_apart_by_their_classes():
    assert {kind.state for kind in (QueuedJob, RunningJob, CompletingJob, SettledJob)} == {
        "queued",
        "running",
        "completing",
        "settled",
    }
