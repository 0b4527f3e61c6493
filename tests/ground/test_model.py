"""The values: limits, instants and durations, and what they compare by."""

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trio_watchdog import _errors, _identity
from trio_watchdog._errors import InvalidJob, JobConflict, StoreInvalid, WatchdogError, shown
from trio_watchdog._identity import fresh_id, fresh_token
from trio_watchdog._model import (
    DURATION_LIMIT,
    INSTANT_LIMIT,
    PRIORITY_LIMIT,
    Attempt,
    Fail,
    Job,
    Outcome,
    QueuedJob,
    Recovery,
    Retry,
    RetryPolicy,
    RunningJob,
    check_text,
    seconds_to_milliseconds,
    to_instant,
    to_milliseconds,
)

unhurried = settings(deadline=None)

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
LAST = datetime(9999, 12, 31, 23, 59, 59, 999000, tzinfo=UTC)
MILLISECOND = timedelta(milliseconds=1)

FIELDS: dict[str, Any] = {
    "id": "job",
    "queue": "queue",
    "lane": "lane",
    "priority": 0,
    "payload": None,
    "not_before": None,
    "recovery": None,
    "sequence": 1,
    "cancellation_id": None,
    "recovery_count": 0,
    "attempt_count": 0,
}


def refusal_of(make: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(InvalidJob) as refusal:
        make(*args, **kwargs)
    message = str(refusal.value)
    assert "\n" not in message
    assert len(message) < 300
    return message


# -- text -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["lane", "queue", "id"])
@pytest.mark.parametrize("letter", ["x", "é", "\N{GRINNING FACE}", "\n"])
def test_a_name_has_1_to_256_characters(field: str, letter: str) -> None:
    fields = {"lane": "mail"}
    for length in (1, 256):
        assert getattr(Job(**{**fields, field: letter * length}), field) == letter * length
    for length in (0, 257):
        message = refusal_of(Job, **{**fields, field: letter * length})
        assert message == f"{field} has {length} characters; 1 to 256 are allowed"


@pytest.mark.parametrize("field", ["lane", "queue", "id"])
@pytest.mark.parametrize("value", [3, b"x", ["x"], True, 10**5000], ids=shown)
def test_a_name_is_a_string(field: str, value: Any) -> None:
    message = refusal_of(Job, **{"lane": "mail", field: value})
    assert message == f"{field} is {shown(value)}, not a string"


@pytest.mark.parametrize("value", ["a\0b", "\0", "\ud800", "a\udfff"])
def test_a_name_holds_only_what_both_databases_can_keep(value: str) -> None:
    message = refusal_of(check_text, value, "token")
    assert message == f"token is {value!a}: NUL and lone surrogates cannot be stored"


def test_a_lane_is_not_optional() -> None:
    assert refusal_of(Job, None) == "lane is None, not a string"


@pytest.mark.parametrize("make", [Fail, lambda reason: Retry(reason=reason)], ids=["fail", "retry"])
def test_a_reason_has_1_to_200_characters(make: Any) -> None:
    for length in (1, 200):
        assert make("x" * length).reason == "x" * length
    for length in (0, 201):
        message = refusal_of(make, "x" * length)
        assert message == f"reason has {length} characters; 1 to 200 are allowed"
    assert refusal_of(make, 3) == "reason is 3, not a string"
    assert refusal_of(make, "a\0").startswith(r"reason is 'a\x00': NUL")
    assert refusal_of(make, "\ud800").startswith(r"reason is '\ud800': NUL and lone surrogates")


# -- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("priority", [0, 1, -1, PRIORITY_LIMIT, -PRIORITY_LIMIT])
def test_a_priority_is_any_integer_that_json_readers_keep_exact(priority: int) -> None:
    assert PRIORITY_LIMIT == 9007199254740991
    assert Job("mail", priority=priority).priority == priority


@pytest.mark.parametrize("priority", [2**53, -(2**53), 10**5000, -(10**5000)], ids=shown)
def test_a_priority_beyond_the_limit_is_refused(priority: int) -> None:
    message = refusal_of(Job, "mail", priority=priority)
    limits = "-9007199254740991 to 9007199254740991 are allowed"
    assert message == f"priority is {shown(priority)}; {limits}"


@pytest.mark.parametrize("priority", ["3", 3.0, True, None])
def test_a_priority_is_not_made_of_something_else(priority: Any) -> None:
    assert refusal_of(Job, "mail", priority=priority) == f"priority is {priority!r}, not an integer"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Recovery(-1), "max_recoveries is -1; 0 to 9007199254740991 are allowed"),
        (lambda: Recovery(True), "max_recoveries is True, not an integer"),
        (lambda: Recovery(1.0), "max_recoveries is 1.0, not an integer"),  # type: ignore[arg-type]
        (lambda: Recovery(1, 0), "window is 0 seconds; more than 0 to 253402300799.999 are"),
        (lambda: Recovery(1, -0.5), "window is -0.5 seconds; more than 0"),
        (lambda: Recovery(1, float("nan")), "window is nan seconds; more than 0"),
        (lambda: Recovery(1, float("inf")), "window is inf seconds; more than 0"),
        (lambda: Recovery(1, 10**5000), "window is <int whose repr raises> seconds; more than 0"),
        (lambda: Recovery(1, True), "window is True, not a number of seconds"),
        (lambda: Recovery(1, "5"), "window is '5', not a number of seconds"),  # type: ignore[arg-type]
        (lambda: RetryPolicy(0), "max_attempts is 0; 1 to 9007199254740991 are allowed"),
        (lambda: RetryPolicy(1, delay=-1), "delay is -1 seconds; 0 to 253402300799.999 are"),
        (lambda: RetryPolicy(1, max_delay=-1), "max_delay is -1 seconds; 0 to"),
        (lambda: RetryPolicy(1, factor=0), "factor is 0; more than 0 to"),
        (lambda: RetryPolicy(1, factor=float("nan")), "factor is nan; more than 0 to"),
        (lambda: RetryPolicy(1, jitter=1.5), "jitter is 1.5; 0 to 1 are allowed"),
        (lambda: RetryPolicy(1, jitter=-0.5), "jitter is -0.5; 0 to 1 are allowed"),
        (lambda: RetryPolicy(1, jitter="1"), "jitter is '1', not a number"),  # type: ignore[arg-type]
        (lambda: Retry(-1), "after is -1 seconds; 0 to 253402300799.999 are allowed"),
        (lambda: Retry(float("inf")), "after is inf seconds; 0 to"),
        (lambda: Retry(DURATION_LIMIT * 1.001), "after is 2536557031"),
        (lambda: Attempt(-1), "count is -1; 0 to 9007199254740991 are allowed"),
    ],
)
def test_a_number_beyond_its_limit_is_refused_with_value_and_limit(make: Any, message: str) -> None:
    assert refusal_of(make).startswith(message)


def test_numbers_at_their_limits_are_fine() -> None:
    assert Recovery(0).max_recoveries == 0
    assert Recovery(1, 1e-9).window == 0.001
    assert Recovery(1, DURATION_LIMIT).window == DURATION_LIMIT
    assert RetryPolicy(1, delay=0, max_delay=0, jitter=1).jitter == 1
    assert Retry(0).after == 0


@unhurried
@given(st.integers(1, INSTANT_LIMIT))
def test_a_window_that_went_through_the_store_compares_equal(milliseconds: int) -> None:
    recovery = Recovery(1, milliseconds / 1000)
    assert recovery.window == milliseconds / 1000
    stored = seconds_to_milliseconds(recovery.window)
    assert Recovery(1, stored / 1000) == recovery


@unhurried
@given(st.floats(0, DURATION_LIMIT, exclude_min=True))
def test_a_window_is_whole_milliseconds_and_never_none(seconds: float) -> None:
    recovery = Recovery(1, seconds)
    assert recovery.window
    assert seconds <= recovery.window
    assert Recovery(1, recovery.window) == recovery


def test_a_recovery_is_a_recovery() -> None:
    assert refusal_of(Job, "mail", recovery=3) == "recovery is 3, not a Recovery"


@pytest.mark.parametrize(
    ("count", "max_attempts", "is_last"),
    [(1, None, False), (10**9, None, False), (1, 2, False), (2, 2, True), (3, 2, True)],
)
def test_the_last_attempt_knows_it(count: int, max_attempts: int | None, is_last: bool) -> None:
    assert Attempt(count, max_attempts).is_last is is_last


# -- instants and durations -----------------------------------------------------------------------


def test_a_naive_instant_is_refused() -> None:
    naive = datetime(2026, 1, 1)  # noqa: DTZ001
    assert "is datetime.datetime(2026, 1, 1, 0, 0), a naive datetime; give it a time zone" in (
        refusal_of(Job, "mail", not_before=naive)
    )


@pytest.mark.parametrize("value", [0, 1.5, "2026-01-01T00:00:00Z", EPOCH.date()])
def test_an_instant_is_a_datetime(value: Any) -> None:
    message = refusal_of(Job, "mail", not_before=value)
    assert message == f"not_before is {value!r}, not a datetime"


def test_not_before_is_never_negative() -> None:
    assert Job("mail", not_before=EPOCH).not_before == EPOCH
    too_early = EPOCH - timedelta(microseconds=1)
    message = refusal_of(Job, "mail", not_before=too_early)
    assert message == f"not_before is {too_early.isoformat()}; nothing before 1970 is allowed"
    # The same wall clock elsewhere is another instant.
    east, west = timezone(timedelta(hours=1)), timezone(timedelta(hours=-1))
    refusal_of(Job, "mail", not_before=datetime(1970, 1, 1, tzinfo=east))
    assert to_milliseconds(datetime(1970, 1, 1, tzinfo=west)) == 3_600_000


@pytest.mark.parametrize(
    "instant",
    [
        LAST,
        LAST + timedelta(microseconds=1),
        datetime.max.replace(tzinfo=UTC),
        datetime.max.replace(tzinfo=timezone(timedelta(hours=-23, minutes=-59))),
    ],
)
def test_the_far_future_saturates(instant: datetime) -> None:
    assert Job("mail", not_before=instant).not_before == instant
    assert to_milliseconds(instant) == INSTANT_LIMIT
    assert to_instant(INSTANT_LIMIT) == LAST


@pytest.mark.parametrize("milliseconds", [INSTANT_LIMIT + 1, 2**63 - 1, 10**30])
def test_an_instant_beyond_every_datetime_reads_as_the_last(milliseconds: int) -> None:
    assert to_instant(milliseconds) == LAST


def test_an_instant_before_the_epoch_reads_as_the_epoch() -> None:
    assert to_instant(-1) == EPOCH


@unhurried
@given(st.integers(0, INSTANT_LIMIT))
def test_an_instant_of_the_store_comes_back_as_it_went(milliseconds: int) -> None:
    assert to_milliseconds(to_instant(milliseconds)) == milliseconds


@unhurried
@given(
    st.datetimes(datetime(1971, 1, 1), datetime(9998, 1, 1)),  # noqa: DTZ001
    st.integers(-1439, 1439),
)
def test_an_instant_is_stored_less_than_a_millisecond_late_and_never_early(
    wall: datetime, offset: int
) -> None:
    instant = wall.replace(tzinfo=timezone(timedelta(minutes=offset)))
    assert timedelta(0) <= to_instant(to_milliseconds(instant)) - instant < MILLISECOND


@pytest.mark.parametrize(
    ("seconds", "milliseconds"),
    [
        (0, 0),
        (-1.5, 0),
        (1e-300, 1),
        (0.0001, 1),
        (0.001, 1),
        (0.0010001, 2),
        # In binary, a thousand times this is a little more.
        (2.007, 2007),
        (1, 1000),
        (3600.0, 3_600_000),
        (DURATION_LIMIT, INSTANT_LIMIT),
        (1e300, INSTANT_LIMIT),
        (float("inf"), INSTANT_LIMIT),
    ],
)
def test_a_duration_is_rounded_up_and_saturates(seconds: float, milliseconds: int) -> None:
    assert seconds_to_milliseconds(seconds) == milliseconds


@unhurried
@given(st.integers(0, INSTANT_LIMIT))
def test_a_duration_of_the_store_comes_back_as_it_went(milliseconds: int) -> None:
    assert seconds_to_milliseconds(milliseconds / 1000) == milliseconds


@unhurried
@given(st.floats(0, 2 * DURATION_LIMIT), st.floats(0, 2 * DURATION_LIMIT))
def test_a_longer_duration_is_never_stored_as_a_shorter_one(one: float, other: float) -> None:
    shorter, longer = sorted([one, other])
    assert seconds_to_milliseconds(shorter) <= seconds_to_milliseconds(longer)


# -- jobs -----------------------------------------------------------------------------------------


def test_a_job_needs_nothing_but_a_lane() -> None:
    job = Job("mail")
    assert (job.lane, job.payload, job.priority) == ("mail", None, 0)
    assert (job.not_before, job.recovery) == (None, None)


def test_a_job_without_a_queue_waits_for_nobody() -> None:
    one, other = Job("mail"), Job("mail")
    assert one.id != other.id
    assert (one.queue, other.queue) == (one.id, other.id)
    assert Job("mail", id="given").queue == "given"
    assert Job("mail", id="given", queue="ada").queue == "ada"


def test_fresh_ids_sort_by_the_time_they_were_made(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_800_000_000_000_000_000

    def time_ns() -> int:
        nonlocal now
        now += 1_000_000
        return now

    monkeypatch.setattr(_identity.time, "time_ns", time_ns)
    ids = [fresh_id() for _ in range(200)]
    assert ids == sorted(ids)
    assert {len(id) for id in ids} == {26}


def test_fresh_ids_and_tokens_do_not_repeat() -> None:
    assert len({fresh_id() for _ in range(1000)}) == 1000
    assert len({fresh_token() for _ in range(1000)}) == 1000
    assert check_text(fresh_token(), "token")


def test_jobs_compare_by_their_payload_as_it_is_stored() -> None:
    def job(payload: Any) -> Job:
        return Job("mail", payload, id="j")

    assert job({"a": 1, "b": (2,)}) == job({"b": [2], "a": 1})
    assert hash(job({"a": 1})) == hash(job({"a": 1}))
    assert job(1) != job(True)
    assert job(1) != job(1.0)
    assert job({"a": 1}) != job({"a": 2})
    assert Job("mail", id="j", priority=1) != Job("mail", id="j")


def test_a_job_is_encoded_when_it_is_made() -> None:
    payload = {"to": ["ada"]}
    job = Job("mail", payload)
    payload["to"].append("eve")
    assert job.encoded == '{"to":["ada"]}'


def test_a_job_with_an_illegal_payload_is_not_made() -> None:
    assert refusal_of(Job, "mail", {"a": float("nan")}).startswith("payload['a'] is nan")


@pytest.mark.parametrize("value", [Job("mail"), Recovery(1), RetryPolicy(1), Fail("x")])
def test_values_do_not_change(value: Any) -> None:
    name = attrs.fields(type(value))[0].name
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        setattr(value, name, getattr(value, name))


def test_an_outcome_is_its_text() -> None:
    assert Outcome.OUTCOME_UNKNOWN == "outcome_unknown"
    assert {str(outcome) for outcome in Outcome} == {
        "completed",
        "failed",
        "cancelled",
        "outcome_unknown",
        "interrupted",
    }


def test_a_running_job_that_was_only_read_has_no_live_side() -> None:
    job = RunningJob(**FIELDS, token="secret", lease_until=EPOCH)
    for look in (
        lambda: job.cancel_scope,
        lambda: job.cancel_reason,
        lambda: job.attempt,
        job.checkpoint,
    ):
        with pytest.raises(RuntimeError, match="'job' was read from the store"):
            look()


def test_a_running_job_that_runs_here_shows_its_live_side() -> None:
    class Live:
        cancel_scope = object()
        cancel_reason = "timeout"
        attempt = Attempt(2)
        checks = 0
        refreshed = 0

        def checkpoint(self) -> None:
            self.checks += 1

        def refresh(self) -> None:
            self.refreshed += 1

    live = Live()
    execution: Any = live
    job = RunningJob(**FIELDS, token="secret", lease_until=EPOCH, execution=execution)
    assert job.cancel_scope is live.cancel_scope
    assert live.refreshed == 1
    assert (job.cancel_reason, job.attempt) == ("timeout", Attempt(2))
    job.checkpoint()
    assert live.checks == 1
    assert job == attrs.evolve(job, execution=None)


def test_ids_are_ordered_as_they_were_given_out() -> None:
    ids = [Job("mail").id for _ in range(2000)]
    assert ids == sorted(set(ids))


def test_a_token_does_not_show_in_logs() -> None:
    assert "secret" not in repr(RunningJob(**FIELDS, token="secret", lease_until=EPOCH))


def test_the_state_is_on_every_job() -> None:
    assert QueuedJob(**FIELDS).state == "queued"


# -- errors ---------------------------------------------------------------------------------------


def test_there_is_one_error_per_kind() -> None:
    kinds = {error.kind: error for error in WatchdogError.__subclasses__()}
    assert kinds == {
        "store_unavailable": _errors.StoreUnavailable,
        "store_invalid": _errors.StoreInvalid,
        "claim_unavailable": _errors.ClaimUnavailable,
        "execution_failed": _errors.ExecutionFailed,
        "settlement_rejected": _errors.SettlementRejected,
        "wake_unavailable": _errors.WakeUnavailable,
        "liveness_unavailable": _errors.LivenessUnavailable,
    }


def test_an_invalid_job_is_a_value_error_and_a_conflict_is_not() -> None:
    assert (InvalidJob.kind, JobConflict.kind) == ("store_invalid", "store_invalid")
    assert issubclass(InvalidJob, (StoreInvalid, ValueError))
    assert issubclass(InvalidJob, ValueError)
    assert not issubclass(JobConflict, ValueError)


def test_a_shown_value_is_one_short_line() -> None:
    class Tall:
        def __repr__(self) -> str:
            return "a\nb"

    assert shown(Tall()) == "a b"
    assert shown("x" * 1000) == "'" + "x" * 78 + "…"
    assert shown("x" * 78) == repr("x" * 78)
    assert shown(10**5000) == "<int whose repr raises>"
