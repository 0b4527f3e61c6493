"""Every decision, branch by branch and edge by edge."""

from datetime import UTC, datetime
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trio_watchdog._errors import JobConflict
from trio_watchdog._model import (
    INSTANT_LIMIT,
    REASON_LIMIT,
    Cancel,
    CancellationResult,
    Complete,
    Fail,
    Job,
    Outcome,
    OutcomeUnknown,
    QueuedJob,
    Recovery,
    RetryPolicy,
    SettledJob,
    check_reason,
    seconds_to_milliseconds,
)
from trio_watchdog._rules import (
    TRANSITIONS,
    ClaimFacts,
    Requeue,
    Reservation,
    Settle,
    cancellation,
    check_duplicate,
    cut,
    decided,
    disappearance,
    failure_reason,
    hand_off,
    instant_after,
    is_held,
    late_decision,
    late_finish,
    lease_margin,
    reservation,
    retry,
    retry_delay,
)

unhurried = settings(deadline=None)

NOW = 1_800_000_000_000

RUNNING = ClaimFacts(
    id="job",
    queue="queue",
    lane="lane",
    state="running",
    token="ours",
    lease_until=NOW + 1,
    cancellation_id=None,
    outcome=None,
    reason=None,
    attempt_count=0,
    attempt_open=False,
    recovery_count=0,
    window_began_at=None,
    recovery=None,
)
CANCELLED = attrs.evolve(RUNNING, cancellation_id="wish")
SETTLED = attrs.evolve(RUNNING, state="settled", lease_until=None, outcome=Outcome.COMPLETED)


def facts(**changes: Any) -> ClaimFacts:
    return attrs.evolve(RUNNING, **changes)


# -- claims ---------------------------------------------------------------------------------------

NOT_HELD = [
    pytest.param(facts(token="theirs"), id="another token"),
    pytest.param(facts(token=None), id="no token"),
    pytest.param(facts(lease_until=NOW), id="lease ends now"),
    pytest.param(facts(lease_until=NOW - 1), id="lease over"),
    pytest.param(facts(lease_until=None), id="no lease"),
    pytest.param(facts(state="queued"), id="queued"),
    pytest.param(facts(state="completing"), id="completing"),
    pytest.param(facts(state="settled"), id="settled"),
    pytest.param(facts(token="theirs", cancellation_id="wish"), id="another's, and cancelled"),
]


def test_a_claim_is_held_until_the_millisecond_at_which_its_lease_ends() -> None:
    assert is_held(RUNNING, "ours", NOW)
    assert not is_held(RUNNING, "ours", NOW + 1)


@pytest.mark.parametrize("claim", NOT_HELD)
def test_who_does_not_hold_the_claim_changes_nothing(claim: ClaimFacts) -> None:
    policy = RetryPolicy(3)
    assert not is_held(claim, "ours", NOW)
    assert reservation(claim, "ours", policy, NOW, 0.0) == "conflict"
    assert retry(claim, "ours", policy, None, "x", NOW, 0.0) == "conflict"
    assert hand_off(claim, "ours", NOW) == "conflict"


def test_a_recorded_cancellation_refuses_every_way_back_to_queued() -> None:
    for is_open in (False, True):
        claim = attrs.evolve(CANCELLED, attempt_count=1, attempt_open=is_open)
        assert reservation(claim, "ours", RetryPolicy(3), NOW, 0.0) == "cancelled"
        assert retry(claim, "ours", RetryPolicy(3), None, None, NOW, 0.0) == "cancelled"
        assert retry(claim, "ours", None, 0, None, NOW, 0.0) == "cancelled"
        assert hand_off(claim, "ours", NOW) == "cancelled"


# -- reservation ----------------------------------------------------------------------------------


def test_a_reservation_counts_the_attempt_and_says_when_the_next_would_be_due() -> None:
    policy = RetryPolicy(3, delay=10)
    assert reservation(RUNNING, "ours", policy, NOW, 0.0) == Reservation(1, 10_000)
    assert reservation(facts(attempt_count=1), "ours", policy, NOW, 0.0) == Reservation(2, 20_000)
    assert reservation(facts(attempt_count=2), "ours", policy, NOW, 0.0) == Reservation(3, 40_000)


def test_a_reservation_takes_the_jitter_it_is_given() -> None:
    policy = RetryPolicy(3, delay=10, jitter=0.5)
    assert reservation(RUNNING, "ours", policy, NOW, 1.0) == Reservation(1, 5_000)


def test_a_reservation_asked_for_twice_counts_once() -> None:
    claim = facts(attempt_count=2, attempt_open=True)
    policy = RetryPolicy(2, delay=10)
    assert reservation(claim, "ours", policy, NOW, 0.0) == Reservation(2, 20_000)


@pytest.mark.parametrize("used", [3, 4])
def test_without_an_attempt_left_the_job_fails_and_says_how_many_it_had(used: int) -> None:
    answer = reservation(facts(attempt_count=used), "ours", RetryPolicy(3), NOW, 0.0)
    assert answer == Settle(
        Outcome.FAILED,
        f"no attempt left: {used} of 3 attempts used, the last one disappeared",
    )


# -- retry ----------------------------------------------------------------------------------------


def test_a_retry_is_due_by_the_policy() -> None:
    claim = facts(attempt_count=2, attempt_open=True, recovery_count=4, window_began_at=7)
    policy = RetryPolicy(3, delay=10)
    assert retry(claim, "ours", policy, None, "x", NOW, 0.0) == Requeue(20_000, 2, 4, 7)


def test_a_retry_may_name_its_own_delay() -> None:
    claim = facts(attempt_count=1, attempt_open=True)
    for policy in (RetryPolicy(3, delay=10), None):
        assert retry(claim, "ours", policy, 5, None, NOW, 0.0) == Requeue(5, 1, 0, None)
        assert retry(claim, "ours", policy, 0, None, NOW, 0.0) == Requeue(0, 1, 0, None)


def test_without_a_policy_a_retry_is_due_at_once_however_many_there_were() -> None:
    for count in (0, 10**9):
        answer = retry(facts(attempt_count=count), "ours", None, None, "x", NOW, 0.0)
        assert answer == Requeue(0, count + 1, 0, None)


def test_a_retry_counts_an_attempt_that_was_not_reserved() -> None:
    policy = RetryPolicy(2)
    answer = retry(facts(attempt_count=0), "ours", policy, None, "x", NOW, 0.0)
    assert answer == Requeue(1000, 1, 0, None)
    answer = retry(facts(attempt_count=1), "ours", policy, None, "x", NOW, 0.0)
    assert answer == Settle(Outcome.FAILED, "attempt 2 of 2: x")


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("OSError: full", "attempt 3 of 3: OSError: full"),
        (None, "attempt 3 of 3"),
        ("x" * 200, "attempt 3 of 3: " + "x" * 183 + "…"),
    ],
)
def test_after_the_last_attempt_the_job_fails_and_says_why(reason: str | None, told: str) -> None:
    claim = facts(attempt_count=3, attempt_open=True)
    # Not even a delay of its own buys it another.
    for after in (None, 0, 5):
        answer = retry(claim, "ours", RetryPolicy(3), after, reason, NOW, 0.0)
        assert answer == Settle(Outcome.FAILED, told)
    assert check_reason(told)


# -- hand-off -------------------------------------------------------------------------------------


def test_a_hand_off_gives_the_attempt_back_and_spends_no_recovery() -> None:
    recovery = Recovery(1, 60)
    claim = facts(
        attempt_count=2,
        attempt_open=True,
        recovery=recovery,
        recovery_count=1,
        window_began_at=NOW - 1,
    )
    assert hand_off(claim, "ours", NOW) == Requeue(0, 1, 1, NOW - 1)


def test_a_hand_off_before_the_attempt_began_gives_nothing_back() -> None:
    assert hand_off(facts(attempt_count=2), "ours", NOW) == Requeue(0, 2, 0, None)


# -- disappearance --------------------------------------------------------------------------------


def test_a_cancelled_job_that_disappeared_is_cancelled_whatever_its_budget() -> None:
    for recovery in (None, Recovery(0), Recovery(5), Recovery(5, 60)):
        claim = attrs.evolve(CANCELLED, recovery=recovery)
        assert disappearance(claim, NOW) == Settle(Outcome.CANCELLED)


def test_a_job_without_recovery_that_disappeared_is_interrupted() -> None:
    answer = disappearance(facts(recovery_count=0), NOW)
    assert answer == Settle(
        Outcome.INTERRUPTED, "the execution disappeared; no recovery is allowed"
    )


@pytest.mark.parametrize("most", [0, 1, 2, 5])
def test_a_job_is_recovered_as_often_as_its_budget_says(most: int) -> None:
    claim = facts(recovery=Recovery(most), attempt_count=3, attempt_open=True)
    for used in range(most):
        answer = disappearance(attrs.evolve(claim, recovery_count=used), NOW)
        # The attempt stays counted: it may have been the handler that ended the process.
        assert isinstance(answer, Requeue)
        assert (answer.delay, answer.attempt_count, answer.recovery_count) == (0, 3, used + 1)
    for used in (most, most + 1):
        answer = disappearance(attrs.evolve(claim, recovery_count=used), NOW)
        assert answer == Settle(
            Outcome.INTERRUPTED,
            "the execution disappeared; recovery budget exhausted:"
            f" {used} of {most} recoveries used",
        )


def test_without_a_window_the_budget_is_for_life() -> None:
    claim = facts(recovery=Recovery(1), recovery_count=1, window_began_at=0)
    assert disappearance(claim, INSTANT_LIMIT).__class__ is Settle


def test_the_window_begins_at_the_first_recovery() -> None:
    claim = facts(recovery=Recovery(2, 60))
    assert disappearance(claim, NOW) == Requeue(0, 0, 1, NOW)
    claim = attrs.evolve(claim, recovery_count=1, window_began_at=NOW)
    assert disappearance(claim, NOW + 59_999) == Requeue(0, 0, 2, NOW)


# 2.007 and 4.017 are a little more in binary, once they are multiplied by a thousand.
@pytest.mark.parametrize("window", [0.001, 2.007, 4.017, 60, 86_400, 1e9])
def test_a_window_is_over_exactly_when_its_seconds_have_passed(window: float) -> None:
    claim = facts(recovery=Recovery(2, window), recovery_count=2, window_began_at=NOW)
    end = NOW + round(window * 1000)
    exhausted = Settle(
        Outcome.INTERRUPTED,
        "the execution disappeared; recovery budget exhausted:"
        f" 2 of 2 recoveries used within {window:g} s",
    )
    assert disappearance(claim, end - 1) == exhausted
    assert disappearance(claim, end) == Requeue(0, 0, 1, end)
    assert disappearance(claim, end + 1) == Requeue(0, 0, 1, end + 1)


def test_a_window_that_is_over_gives_nothing_to_a_job_without_recoveries() -> None:
    claim = facts(recovery=Recovery(0, 60), recovery_count=0, window_began_at=NOW - 60_000)
    assert disappearance(claim, NOW) == Settle(
        Outcome.INTERRUPTED,
        "the execution disappeared; recovery budget exhausted: 0 of 0 recoveries used within 60 s",
    )


def test_a_clock_that_stepped_back_opens_no_window() -> None:
    claim = facts(recovery=Recovery(1, 60), recovery_count=1, window_began_at=NOW)
    assert disappearance(claim, NOW - 10**9).__class__ is Settle


@unhurried
@given(
    st.integers(0, 4),
    st.none() | st.integers(1, 5_000).map(lambda milliseconds: milliseconds / 1000),
    st.lists(st.integers(0, 2_000), max_size=30),
)
def test_no_window_sees_more_recoveries_than_the_budget(
    most: int, window: float | None, gaps: list[int]
) -> None:
    claim = facts(recovery=Recovery(most, window))
    length = INSTANT_LIMIT if window is None else round(window * 1000)
    now = NOW
    recovered: list[int] = []
    for gap in gaps:
        now += gap
        answer = disappearance(claim, now)
        if isinstance(answer, Settle):
            began_at = claim.window_began_at
            assert most == 0 or (began_at is not None and now - began_at < length)
            break
        recovered.append(now)
        claim = attrs.evolve(
            claim,
            recovery_count=answer.recovery_count,
            window_began_at=answer.window_began_at,
        )
        began_at = claim.window_began_at
        assert began_at is not None
        inside = [instant for instant in recovered if began_at <= instant < began_at + length]
        assert claim.recovery_count <= min(len(inside), most)


# -- time -----------------------------------------------------------------------------------------

seconds = st.floats(0, 1e12).map(lambda value: min(value, 253402300799.0))
policies = st.builds(
    RetryPolicy,
    st.just(1),
    delay=st.floats(0, 1e4) | st.sampled_from([0, 5e-324, 1e-300, 0.0005, 2.007, 1]) | seconds,
    factor=st.floats(1, 10) | st.sampled_from([1, 2, 2.0, 1e11, 1 + 1e-12]),
    max_delay=st.floats(0, 1e5) | st.sampled_from([0, 5e-324, 0.0005, 2.007, 3600]) | seconds,
    jitter=st.floats(0, 1),
)
attempts = st.integers(0, 100) | st.integers(0, 10**12)
jitters = st.floats(0, 1)


@unhurried
@given(policies, attempts, attempts, jitters)
def test_a_retry_delay_grows_up_to_its_limit_and_stays_there(
    policy: RetryPolicy, one: int, other: int, jitter: float
) -> None:
    earlier, later = sorted([one, other])
    first, second = (retry_delay(policy, attempt, jitter) for attempt in (earlier, later))
    assert 0 <= first <= second <= seconds_to_milliseconds(policy.max_delay)


@unhurried
@given(policies, st.floats(1e-300, 1), attempts, jitters)
def test_a_retry_delay_that_shrinks_stays_legal_too(
    policy: RetryPolicy, factor: float, attempt: int, jitter: float
) -> None:
    delay = retry_delay(attrs.evolve(policy, factor=factor), attempt, jitter)
    assert 0 <= delay <= seconds_to_milliseconds(min(policy.max_delay, policy.delay))


@unhurried
@given(policies, attempts, jitters)
def test_jitter_only_shortens_and_by_no_more_than_its_part(
    policy: RetryPolicy, attempt: int, jitter: float
) -> None:
    whole = retry_delay(policy, attempt, 0.0)
    delay = retry_delay(policy, attempt, jitter)
    # A millisecond, since both are rounded up.
    assert whole * (1 - policy.jitter) - 1 <= delay <= whole


@pytest.mark.parametrize(
    ("policy", "delays"),
    [
        (RetryPolicy(9), [1000, 2000, 4000, 8000, 16_000]),
        (RetryPolicy(9, delay=10, factor=1), [10_000, 10_000, 10_000]),
        (RetryPolicy(9, delay=10, factor=3, max_delay=100), [10_000, 30_000, 90_000, 100_000]),
        (RetryPolicy(9, delay=1, max_delay=4), [1000, 2000, 4000, 4000, 4000]),
        (RetryPolicy(9, delay=8, factor=0.5), [8000, 4000, 2000, 1000]),
        (RetryPolicy(9, delay=64, factor=0.25, max_delay=20), [20_000, 16_000, 4000]),
        (RetryPolicy(9, delay=5000, max_delay=3600), [3_600_000, 3_600_000]),
        (RetryPolicy(9, delay=0), [0, 0, 0]),
        (RetryPolicy(9, max_delay=0), [0, 0, 0]),
        (RetryPolicy(9, delay=2.007, max_delay=2.007), [2007, 2007]),
    ],
    ids=str,
)
def test_a_retry_delay_is_the_formula_of_its_policy(policy: RetryPolicy, delays: list[int]) -> None:
    assert [retry_delay(policy, n + 1, 0.0) for n in range(len(delays))] == delays


def test_attempt_counts_that_no_power_survives_are_fine() -> None:
    for attempt in (1024, 1025, 10**4, 10**12, 2**63 - 1):
        assert retry_delay(RetryPolicy(9), attempt, 0.0) == 3_600_000
        assert retry_delay(RetryPolicy(9, delay=1e-300, factor=2), attempt, 0.0) == 3_600_000
        assert retry_delay(RetryPolicy(9, factor=1e-300), attempt, 0.0) in (0, 1)


@pytest.mark.parametrize(
    ("now", "delay", "instant"),
    [
        (NOW, 5, NOW + 5),
        (NOW, 0, NOW),
        (NOW, -5, NOW),
        (-5, 3, 3),
        (INSTANT_LIMIT - 1, 1, INSTANT_LIMIT),
        (INSTANT_LIMIT - 1, 2, INSTANT_LIMIT),
        (NOW, INSTANT_LIMIT, INSTANT_LIMIT),
        (NOW, 10**30, INSTANT_LIMIT),
    ],
)
def test_an_instant_after_a_delay_saturates_and_is_never_earlier(
    now: int, delay: int, instant: int
) -> None:
    assert instant_after(now, delay) == instant


@pytest.mark.parametrize(
    ("lease", "margin"), [(1.0, 0.1), (49.9, 4.99), (50.0, 5.0), (120.0, 5.0), (3600.0, 5.0)]
)
def test_the_margin_of_a_lease_is_a_tenth_but_at_most_five_seconds(
    lease: float, margin: float
) -> None:
    assert lease_margin(lease) == pytest.approx(margin)


# -- decisions ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("decision", "wanted"),
    [
        (Complete(), Settle(Outcome.COMPLETED)),
        (Fail("x"), Settle(Outcome.FAILED, "x")),
        (Cancel(), Settle(Outcome.CANCELLED)),
        (OutcomeUnknown(), Settle(Outcome.OUTCOME_UNKNOWN)),
    ],
)
def test_a_decision_asks_for_its_outcome(decision: Any, wanted: Settle) -> None:
    assert decided(decision) == wanted


COMPLETED = Settle(Outcome.COMPLETED)
FAILED = Settle(Outcome.FAILED, "x")


@pytest.mark.parametrize("state", ["completing", "settled"])
@pytest.mark.parametrize(
    ("changes", "wanted", "answer"),
    [
        ({"outcome": Outcome.COMPLETED}, COMPLETED, "replayed"),
        ({"outcome": Outcome.FAILED, "reason": "x"}, FAILED, "replayed"),
        ({"outcome": Outcome.FAILED, "reason": "y"}, FAILED, "conflict"),
        ({"outcome": Outcome.FAILED, "reason": "x"}, COMPLETED, "conflict"),
        ({"outcome": Outcome.COMPLETED}, FAILED, "conflict"),
        ({"outcome": Outcome.COMPLETED, "token": "theirs"}, COMPLETED, "conflict"),
        ({"outcome": Outcome.COMPLETED, "token": None}, COMPLETED, "conflict"),
        # A cancellation that was recorded first has turned the outcome into its own.
        ({"outcome": Outcome.CANCELLED, "cancellation_id": "wish"}, COMPLETED, "replayed"),
        ({"outcome": Outcome.CANCELLED, "cancellation_id": "wish"}, FAILED, "replayed"),
        (
            {"outcome": Outcome.CANCELLED, "cancellation_id": "wish", "token": "theirs"},
            COMPLETED,
            "conflict",
        ),
        # The handler itself gave it up, and now says something else.
        ({"outcome": Outcome.CANCELLED}, COMPLETED, "conflict"),
        ({"outcome": Outcome.CANCELLED}, Settle(Outcome.CANCELLED), "replayed"),
        ({"outcome": Outcome.FAILED, "reason": "y", "cancellation_id": "w"}, FAILED, "conflict"),
    ],
)
def test_a_late_decision_is_told_what_it_meets(
    state: Any, changes: dict[str, Any], wanted: Settle, answer: str
) -> None:
    claim = attrs.evolve(SETTLED, state=state, **changes)
    assert late_decision(claim, "ours", wanted) == answer


@pytest.mark.parametrize("claim", [RUNNING, facts(state="queued", token=None), CANCELLED])
def test_a_decision_without_the_claim_is_a_conflict(claim: ClaimFacts) -> None:
    # A running row with our token means that the lease has expired.
    assert late_decision(claim, "ours", COMPLETED) == "conflict"


def test_a_decision_about_an_unknown_job_is_missing() -> None:
    assert late_decision(None, "ours", COMPLETED) == "missing"


@pytest.mark.parametrize(
    ("claim", "answer"),
    [
        (None, "missing"),
        (SETTLED, "replayed"),
        (attrs.evolve(SETTLED, token="theirs"), "conflict"),
        (attrs.evolve(SETTLED, token=None), "conflict"),
        (attrs.evolve(SETTLED, state="completing"), "conflict"),
        (RUNNING, "conflict"),
        (facts(state="queued", token=None), "conflict"),
    ],
)
def test_a_late_finish_is_told_what_it_meets(claim: ClaimFacts | None, answer: str) -> None:
    assert late_finish(claim, "ours") == answer


# -- cancellation ---------------------------------------------------------------------------------

DONE = CancellationResult("decided", Outcome.FAILED)
RECORDED, REPLAYED, CONFLICT, MISSING = map(
    CancellationResult, ("recorded", "replayed", "conflict", "missing")
)


@pytest.mark.parametrize(
    ("state", "recorded", "only_if_queued", "is_used_elsewhere", "result"),
    [
        (None, None, False, False, MISSING),
        (None, None, True, True, MISSING),
        ("queued", None, False, False, RECORDED),
        ("queued", None, True, False, RECORDED),
        ("running", None, False, False, RECORDED),
        ("running", None, True, False, CONFLICT),
        ("queued", "wish", True, False, REPLAYED),
        ("running", "wish", False, False, REPLAYED),
        ("running", "wish", True, False, REPLAYED),
        ("completing", "wish", False, False, REPLAYED),
        ("settled", "wish", False, False, REPLAYED),
        ("queued", "other", False, False, CONFLICT),
        ("running", "other", False, False, CONFLICT),
        ("queued", None, False, True, CONFLICT),
        ("running", None, False, True, CONFLICT),
        ("completing", None, False, False, DONE),
        ("completing", "other", True, False, DONE),
        ("settled", None, False, False, DONE),
        ("settled", "other", False, True, DONE),
    ],
)
def test_a_request_to_cancel_is_told_what_it_meets(
    state: Any,
    recorded: str | None,
    only_if_queued: bool,
    is_used_elsewhere: bool,
    result: CancellationResult,
) -> None:
    outcome = Outcome.FAILED if state in ("completing", "settled") else None
    answer = cancellation(
        state, recorded, outcome, "wish", only_if_queued, is_used_elsewhere=is_used_elsewhere
    )
    assert answer == result


# -- duplicates -----------------------------------------------------------------------------------

PRESENT: dict[str, Any] = {
    "id": "j",
    "queue": "ada",
    "lane": "mail",
    "priority": 3,
    "payload": {"a": 1},
    "not_before": None,
    "recovery": Recovery(2, 60),
    "sequence": 1,
    "cancellation_id": None,
    "recovery_count": 0,
    "attempt_count": 0,
}
WANTED: dict[str, Any] = {
    "lane": "mail",
    "payload": {"a": 1},
    "queue": "ada",
    "id": "j",
    "priority": 3,
    "recovery": Recovery(2, 60),
}


def test_the_same_job_again_is_a_duplicate_whatever_its_state_and_time() -> None:
    later = datetime(2030, 1, 1, tzinfo=UTC)
    settled = SettledJob(**PRESENT, outcome=Outcome.FAILED, reason="x", settled_at=later)
    for present in (QueuedJob(**PRESENT), settled):
        for not_before in (None, later):
            check_duplicate(present, '{"a":1}', Job(**WANTED, not_before=not_before))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"queue": "eve"}, "queue 'ada', not 'eve'"),
        ({"lane": "post"}, "lane 'mail', not 'post'"),
        ({"priority": 4}, "priority 3, not 4"),
        ({"recovery": None}, "recovery Recovery(max_recoveries=2, window=60.0), not None"),
        ({"recovery": Recovery(1, 60)}, "not Recovery(max_recoveries=1, window=60.0)"),
        ({"recovery": Recovery(2)}, "not Recovery(max_recoveries=2, window=None)"),
        ({"payload": {"a": 2}}, "another payload"),
        # Equal to Python, but not the same payload.
        ({"payload": {"a": True}}, "another payload"),
        ({"payload": {"a": 1.0}}, "another payload"),
    ],
)
def test_another_job_with_the_id_is_a_conflict_that_names_the_difference(
    changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(JobConflict) as refusal:
        check_duplicate(QueuedJob(**PRESENT), '{"a":1}', Job(**{**WANTED, **changes}))
    assert str(refusal.value).startswith("job 'j' is already there with ")
    assert told in str(refusal.value)


def test_a_window_finer_than_the_store_keeps_is_no_conflict() -> None:
    stored = {**PRESENT, "recovery": Recovery(2, 0.071)}
    check_duplicate(
        QueuedJob(**stored), '{"a":1}', Job(**{**WANTED, "recovery": Recovery(2, 0.0707)})
    )


# -- reasons --------------------------------------------------------------------------------------


class Interrupted(BaseException):
    """Stands for `trio.Cancelled`."""


class MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    def __repr__(self) -> str:
        raise RuntimeError("no text either")


class SlyText(str):
    __slots__ = ()

    def __format__(self, spec: str) -> str:
        raise RuntimeError("no format")

    def __bool__(self) -> bool:
        raise RuntimeError("no truth")


class SlyError(Exception):
    def __str__(self) -> str:
        return SlyText("sly")


class Nameless(type):
    @property
    def __name__(cls) -> str:
        raise RuntimeError("no name")


class NamelessError(Exception, metaclass=Nameless):
    pass


def reason_of(error: BaseException) -> str:
    return check_reason(failure_reason(error, Interrupted))


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("bad value"), "ValueError: bad value"),
        (ValueError(), "ValueError"),
        (ValueError("a", 1), "ValueError: ('a', 1)"),
        (KeyError("k"), "KeyError: 'k'"),
        (ValueError("a\0b"), r"ValueError: a\x00b"),
        (ValueError("cut \ud83d"), r"ValueError: cut \ud83d"),
        (ValueError("\N{GRINNING FACE}"), "ValueError: \N{GRINNING FACE}"),
        (MuteError(), "MuteError: (its text raised RuntimeError)"),
        (SlyError(), "SlyError: sly"),
        (NamelessError("n"), "a type whose name raises: n"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (ValueError("x" * 188), "ValueError: " + "x" * 188),
        (ValueError("x" * 189), "ValueError: " + "x" * 187 + "…"),
        (Interrupted(), "Interrupted"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_reason_names_the_exception(error: BaseException, reason: str) -> None:
    assert reason_of(error) == reason


def group(*errors: BaseException) -> BaseException:
    return BaseExceptionGroup("several", errors)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (group(ValueError("x")), "ValueError: x"),
        (group(ValueError("x"), KeyError("y")), "ValueError: x; KeyError: 'y'"),
        (
            group(Interrupted(), group(OSError("a"), group(Interrupted(), OSError("b")))),
            "OSError: a; OSError: b",
        ),
        (
            group(MuteError(), ValueError("\0")),
            r"MuteError: (its text raised RuntimeError); "
            r"ValueError: \x00",
        ),
        (group(Interrupted()), "BaseExceptionGroup: several (1 sub-exception)"),
    ],
)
def test_the_reason_of_a_group_names_its_leaves_without_cancellations(
    error: BaseException, reason: str
) -> None:
    assert reason_of(error) == reason


@pytest.mark.parametrize("count", [2, 3, 10])
def test_a_long_text_does_not_hide_the_other_leaves(count: int) -> None:
    kinds = [type(f"E{number}", (Exception,), {}) for number in range(count)]
    reason = reason_of(group(*(kind("x" * 1000) for kind in kinds)))
    assert all(f"{kind.__name__}: x" in reason for kind in kinds)
    assert REASON_LIMIT - count <= len(reason) <= REASON_LIMIT


def test_a_group_of_any_size_and_depth_has_a_legal_reason() -> None:
    deep: BaseException = ValueError("deep")
    for _ in range(5000):
        deep = group(deep)
    assert reason_of(deep) == "ExceptionGroup: several (1 sub-exception)"
    many = reason_of(group(*(ValueError(str(number)) for number in range(10_000))))
    assert many == "; ".join(f"ValueError: {number}" for number in range(10))


@unhurried
@given(st.text(st.characters(), max_size=300) | st.text("\0\ud800\udfffé", max_size=300))
def test_any_text_ends_as_a_legal_reason(text: str) -> None:
    assert check_reason(cut(text))
    assert reason_of(ValueError(text))
    assert reason_of(group(ValueError(text), MuteError(), group(Interrupted(), OSError(text))))


def test_no_text_is_a_reason_too() -> None:
    assert cut("") == "no reason given"


def test_a_legal_reason_is_not_changed() -> None:
    for text in ("x", "x" * 200, "two\nlines", "é…"):
        assert cut(text) == text
    assert cut("x" * 201) == "x" * 199 + "…"


# -- states ---------------------------------------------------------------------------------------


def test_nothing_leaves_settled_and_only_admission_begins() -> None:
    assert not [pair for pair in TRANSITIONS if pair[0] == "settled"]
    assert [pair for pair in TRANSITIONS if pair[0] is None] == [(None, "queued")]
    assert ("completing", "queued") not in TRANSITIONS
    assert ("queued", "completing") not in TRANSITIONS
