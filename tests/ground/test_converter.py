"""Public values to JSON data and back, and payloads to the application's own classes."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, timedelta, timezone
from typing import Annotated, Any, Generic, Literal, NewType, TypedDict, TypeVar

import attrs
import pytest
from cattrs.errors import StructureHandlerNotFoundError
from cattrs.strategies import configure_tagged_union
from hypothesis import given, settings
from hypothesis import strategies as st

from trio_watchdog._converter import converter, structure_payload
from trio_watchdog._errors import InvalidJob
from trio_watchdog._model import (
    DURATION_LIMIT,
    PRIORITY_LIMIT,
    Admission,
    Attempt,
    Cancel,
    CancellationResult,
    Complete,
    CompletingJob,
    Decision,
    Fail,
    Job,
    LaneFailure,
    Outcome,
    OutcomeUnknown,
    QueuedJob,
    QueueHead,
    QueueTransition,
    Recovery,
    Retry,
    RetryPolicy,
    RunningJob,
    SettledJob,
    SettledPage,
    StoredJob,
    TickResult,
    WakeState,
)

unhurried = settings(deadline=None)

# -- one of each ----------------------------------------------------------------------------------

INSTANT = datetime(2026, 9, 1, 12, 30, 0, 250000, tzinfo=timezone(timedelta(hours=2)))

FIELDS: dict[str, Any] = {
    "id": "job",
    "queue": "ada",
    "lane": "mail",
    "priority": -3,
    "payload": {"to": ["ada", None, True, 1, 1.5, "\0"]},
    "not_before": INSTANT,
    "recovery": Recovery(2, 60),
    "sequence": 7,
    "cancellation_id": "wish",
    "recovery_count": 1,
    "attempt_count": 2,
}
JSON_FIELDS = {
    **FIELDS,
    "not_before": "2026-09-01T12:30:00.250000+02:00",
    "recovery": {"max_recoveries": 2, "window": 60.0},
}

QUEUED = QueuedJob(**FIELDS)
RUNNING = RunningJob(**FIELDS, token="secret", lease_until=INSTANT)
COMPLETING = CompletingJob(
    **FIELDS, token="secret", lease_until=INSTANT, outcome=Outcome.COMPLETED, reason=None
)
SETTLED = SettledJob(**FIELDS, outcome=Outcome.FAILED, reason="x", settled_at=INSTANT)
JSON_SETTLED = {
    "state": "settled",
    **JSON_FIELDS,
    "outcome": "failed",
    "reason": "x",
    "settled_at": "2026-09-01T12:30:00.250000+02:00",
}

EACH = [
    (
        Job("mail", (1, [2]), id="job", queue="ada", not_before=INSTANT, recovery=Recovery(1)),
        {
            "lane": "mail",
            "payload": [1, [2]],
            "queue": "ada",
            "id": "job",
            "priority": 0,
            "not_before": "2026-09-01T12:30:00.250000+02:00",
            "recovery": {"max_recoveries": 1, "window": None},
        },
    ),
    (Recovery(2, 0.5), {"max_recoveries": 2, "window": 0.5}),
    (
        RetryPolicy(5, delay=2, jitter=1),
        {"max_attempts": 5, "delay": 2, "factor": 2.0, "max_delay": 3600.0, "jitter": 1},
    ),
    (Attempt(1, 3), {"count": 1, "max_attempts": 3}),
    (Attempt(1), {"count": 1, "max_attempts": None}),
    (QUEUED, {"state": "queued", **JSON_FIELDS}),
    (
        RUNNING,
        {
            "state": "running",
            **JSON_FIELDS,
            "token": "secret",
            "lease_until": "2026-09-01T12:30:00.250000+02:00",
        },
    ),
    (
        COMPLETING,
        {
            "state": "completing",
            **JSON_FIELDS,
            "token": "secret",
            "lease_until": "2026-09-01T12:30:00.250000+02:00",
            "outcome": "completed",
            "reason": None,
        },
    ),
    (SETTLED, JSON_SETTLED),
    (Outcome.OUTCOME_UNKNOWN, "outcome_unknown"),
    (Complete(), {"decision": "complete"}),
    (Fail("x"), {"decision": "fail", "reason": "x"}),
    (Cancel(), {"decision": "cancel"}),
    (OutcomeUnknown(), {"decision": "outcome_unknown"}),
    (Retry(), {"decision": "retry", "after": None, "reason": None}),
    (Retry(2.5, "x"), {"decision": "retry", "after": 2.5, "reason": "x"}),
    (Admission("duplicate", SETTLED), {"status": "duplicate", "job": JSON_SETTLED}),
    (CancellationResult("recorded"), {"status": "recorded", "outcome": None}),
    (
        CancellationResult("decided", Outcome.CANCELLED),
        {"status": "decided", "outcome": "cancelled"},
    ),
    (QueueHead("idle"), {"state": "idle", "job_id": None, "cancellation_requested": False}),
    (
        QueueTransition("ada", QueueHead("running", "job", True), SETTLED),
        {
            "queue": "ada",
            "head": {"state": "running", "job_id": "job", "cancellation_requested": True},
            "settled": JSON_SETTLED,
        },
    ),
    (LaneFailure((SETTLED,), True), {"jobs": [JSON_SETTLED], "more": True}),
    (WakeState(True), {"pending": True, "next_wake_at": None}),
    (
        TickResult("ran", "job", WakeState(False, INSTANT)),
        {
            "action": "ran",
            "job_id": "job",
            "wake": {"pending": False, "next_wake_at": "2026-09-01T12:30:00.250000+02:00"},
        },
    ),
    (SettledPage((SETTLED, SETTLED), "7"), {"jobs": [JSON_SETTLED] * 2, "cursor": "7"}),
    (SettledPage((), None), {"jobs": [], "cursor": None}),
]
each = pytest.mark.parametrize(
    ("value", "data"), EACH, ids=[type(value).__name__ for value, _ in EACH]
)


def is_plain(data: Any) -> bool:
    """Whether all of it is of JSON's types: no tuple, no subclass such as a `StrEnum`."""
    if type(data) is dict:
        return all(type(key) is str and is_plain(item) for key, item in data.items())
    if type(data) is list:
        return all(map(is_plain, data))
    return data is None or type(data) in (str, int, float, bool)


def refusal_of(data: Any, cls: Any, structure: Any = converter.structure) -> str:
    with pytest.raises(InvalidJob) as refusal:
        structure(data, cls)
    message = str(refusal.value)
    assert "\n" not in message
    return message


@each
def test_a_value_becomes_plain_json_data(value: Any, data: Any) -> None:
    assert converter.unstructure(value) == data
    assert is_plain(converter.unstructure(value))


@each
def test_a_value_comes_back_as_it_went(value: Any, data: Any) -> None:
    through_text = json.loads(json.dumps(converter.unstructure(value)))
    back = converter.structure(through_text, type(value))
    assert back == value
    assert type(back) is type(value)
    assert converter.unstructure(back) == data


def test_every_public_value_is_in_the_table() -> None:
    assert {type(value) for value, _ in EACH} == {
        *(Job, Recovery, RetryPolicy, Attempt),
        *(QueuedJob, RunningJob, CompletingJob, SettledJob),
        *(Outcome, Complete, Fail, Cancel, OutcomeUnknown, Retry),
        *(Admission, CancellationResult, QueueHead, QueueTransition),
        *(LaneFailure, WakeState, TickResult, SettledPage),
    }


@each
def test_a_key_that_nobody_reads_is_refused(value: Any, data: Any) -> None:
    if isinstance(data, dict):
        message = refusal_of({**data, "colour": "red"}, type(value))
        assert message == f"{type(value).__name__} has no field 'colour'"


@each
def test_a_value_is_not_made_of_something_else(value: Any, data: Any) -> None:
    for wrong in (None, 3, [], "x", [data]):
        message = refusal_of(wrong, type(value))
        assert message.startswith((f"{type(value).__name__} is ", "value is "))


@each
def test_a_field_without_a_default_cannot_be_left_out(value: Any, data: Any) -> None:
    for field in attrs.fields(type(value)) if attrs.has(type(value)) else ():
        if field.default is attrs.NOTHING and field.init:
            rest = {name: item for name, item in data.items() if name != field.name}
            assert refusal_of(rest, type(value)) == f"{field.name} is missing"


# -- any of each ----------------------------------------------------------------------------------

names = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=256
)
reasons = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=200
)
durations = st.floats(0, DURATION_LIMIT) | st.integers(0, 10**9)
payloads = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=5,
)
instants = st.builds(
    lambda wall, offset: wall.replace(tzinfo=timezone(timedelta(seconds=offset))),
    st.datetimes(datetime(1970, 1, 2), datetime(9999, 12, 31)),  # noqa: DTZ001
    st.integers(-86_399, 86_399),
)
priorities = st.integers(-PRIORITY_LIMIT, PRIORITY_LIMIT)
counts = st.integers(0, 2**63 - 1)
recoveries = st.none() | st.builds(
    Recovery,
    st.integers(0, PRIORITY_LIMIT),
    st.none() | st.floats(0, DURATION_LIMIT, exclude_min=True),
)
stored: dict[str, Any] = {
    "id": names,
    "queue": names,
    "lane": names,
    "priority": priorities,
    "payload": payloads,
    "not_before": st.none() | instants,
    "recovery": recoveries,
    "sequence": st.integers(1, 2**63 - 1),
    "cancellation_id": st.none() | names,
    "recovery_count": counts,
    "attempt_count": counts,
}
claimed: dict[str, Any] = {**stored, "token": names, "lease_until": instants}
ends = st.one_of(
    st.tuples(st.sampled_from([Outcome.FAILED, Outcome.INTERRUPTED]), reasons),
    st.tuples(st.sampled_from(Outcome), st.none()),
)


def ended(cls: Any, fields: dict[str, Any]) -> st.SearchStrategy[Any]:
    return st.builds(
        lambda end, rest: cls(**rest, outcome=end[0], reason=end[1]),
        ends,
        st.fixed_dictionaries(fields),
    )


settled = ended(SettledJob, {**stored, "settled_at": instants})
jobs_of_the_store = st.one_of(
    st.builds(QueuedJob, **stored),
    st.builds(RunningJob, **claimed, execution=st.none()),
    ended(CompletingJob, claimed),
    settled,
)
decisions = st.one_of(
    st.just(Complete()), st.builds(Fail, reasons), st.just(Cancel()), st.just(OutcomeUnknown())
)
retries = st.builds(Retry, st.none() | durations, st.none() | reasons)
heads = st.just(QueueHead("idle")) | st.builds(
    QueueHead, st.sampled_from(["queued", "running"]), names, st.booleans()
)
wakes = st.builds(WakeState, st.booleans(), st.none() | instants)
anything = st.one_of(
    st.builds(
        Job,
        names,
        payloads,
        queue=names,
        id=names,
        priority=priorities,
        not_before=st.none() | instants,
        recovery=recoveries,
    ),
    st.builds(
        RetryPolicy,
        st.integers(1, PRIORITY_LIMIT),
        delay=durations,
        factor=st.floats(1e-9, 1e9),
        max_delay=durations,
        jitter=st.floats(0, 1) | st.integers(0, 1),
    ),
    st.builds(Admission, st.sampled_from(["queued", "duplicate"]), jobs_of_the_store),
    st.builds(QueueTransition, names, heads, st.none() | settled),
    st.builds(LaneFailure, st.lists(settled, max_size=2).map(tuple), st.booleans()),
    st.builds(
        TickResult,
        st.sampled_from(["completed", "reconciled", "ran", "idle"]),
        st.none() | names,
        wakes,
    ),
    st.builds(SettledPage, st.lists(settled, max_size=2).map(tuple), st.none() | names),
)


@unhurried
@given(anything)
def test_the_way_there_and_back_is_the_identity(value: Any) -> None:
    data = converter.unstructure(value)
    assert is_plain(data)
    assert converter.structure(json.loads(json.dumps(data)), type(value)) == value


@unhurried
@given(jobs_of_the_store)
def test_a_stored_job_finds_its_class_by_its_state(job: StoredJob) -> None:
    data = converter.unstructure(job)
    assert data["state"] == job.state
    back = converter.structure(data, StoredJob)
    assert back == job
    assert type(back) is type(job)


@unhurried
@given(decisions | retries)
def test_what_a_handler_returns_finds_its_class_by_its_decision(value: Any) -> None:
    data = converter.unstructure(value)
    back = converter.structure(data, Decision | Retry)
    assert back == value
    assert type(back) is type(value)


# -- what is left out, and what is not shared -----------------------------------------------------


def test_the_live_side_of_a_running_job_stays_here() -> None:
    live: Any = object()
    data = converter.unstructure(attrs.evolve(RUNNING, execution=live))
    assert "execution" not in data
    assert converter.structure(data, RunningJob).execution is None
    refusal_of({**data, "execution": None}, RunningJob)


def test_the_encoded_payload_is_left_out_and_made_again() -> None:
    data = converter.unstructure(Job("mail", {"b": 1, "a": 2}))
    assert "encoded" not in data
    assert converter.structure(data, Job).encoded == '{"a":2,"b":1}'


def test_a_job_may_be_written_by_hand_with_its_defaults_left_out() -> None:
    job = converter.structure({"lane": "mail", "id": "j"}, Job)
    assert job == Job("mail", id="j")
    assert converter.structure({"lane": "mail"}, Job).id != job.id


def test_data_and_value_share_nothing() -> None:
    job = attrs.evolve(QUEUED, payload={"to": ["ada"]})
    data = converter.unstructure(job)
    data["payload"]["to"].append("eve")
    assert job.payload == {"to": ["ada"]}


def test_what_was_encoded_is_the_job() -> None:
    payload = ["ada"]
    job = Job("mail", payload)
    payload.append("eve")
    assert converter.unstructure(job)["payload"] == ["ada"]


def test_an_enum_member_given_as_text_becomes_plain_text() -> None:
    class Lane(enum.StrEnum):
        MAIL = "mail"

    data = converter.unstructure(Job(Lane.MAIL, {"lane": Lane.MAIL}, priority=Size.LARGE))
    assert is_plain(data)
    assert (data["lane"], data["payload"], data["priority"]) == ("mail", {"lane": "mail"}, 2)


def test_a_tuple_in_a_stored_payload_becomes_a_list() -> None:
    job = attrs.evolve(QUEUED, payload={"a": ((1,), Size.SMALL)})
    data = converter.unstructure(job)
    assert is_plain(data)
    assert data["payload"] == {"a": [[1], 1]}


def test_a_payload_of_the_lanes_class_becomes_what_it_was_made_from() -> None:
    @attrs.frozen
    class Letter:
        to: str
        sent: datetime

    text = {"to": "ada", "sent": "2026-01-01T00:00:00+00:00"}
    letter = converter.structure(text, Letter)
    assert converter.unstructure(attrs.evolve(QUEUED, payload=letter))["payload"] == text
    assert converter.unstructure(attrs.evolve(QUEUED, payload=[letter]))["payload"] == [text]


def test_what_json_cannot_hold_does_not_get_out() -> None:
    with pytest.raises(InvalidJob, match=r"^payload\['a'\] is nan"):
        converter.unstructure(attrs.evolve(QUEUED, payload={"a": float("nan")}))
    with pytest.raises(InvalidJob, match="is a naive datetime"):
        converter.unstructure(WakeState(True, datetime(2026, 1, 1)))  # noqa: DTZ001


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # The wrong type is never made into the right one.
        ({"priority": "3"}, "priority is '3', not an integer"),
        ({"priority": 3.0}, "priority is 3.0, not an integer"),
        ({"priority": True}, "priority is True, not an integer"),
        ({"priority": None}, "priority is None, not an integer"),
        ({"lane": 3}, "lane is 3, not a string"),
        ({"lane": None}, "lane is None, not a string"),
        ({"lane": ["m"]}, "lane is ['m'], not a string"),
        ({"cancellation_id": 3}, "cancellation_id is 3, not a string"),
        ({"settled_at": 0}, "settled_at is 0, not an ISO 8601 instant"),
        ({"settled_at": None}, "settled_at is None, not an ISO 8601 instant"),
        ({"settled_at": "soon"}, "settled_at is 'soon', not an ISO 8601 instant"),
        (
            {"settled_at": "2026-09-01T12:30:00"},
            "settled_at is '2026-09-01T12:30:00', which has no offset;"
            " give it one, such as Z or +02:00",
        ),
        ({"recovery": 3}, "recovery is 3, not an object"),
        (
            {"recovery": {"max_recoveries": 1, "window": "60"}},
            "recovery.window is '60', not a number",
        ),
        (
            {"recovery": {"max_recoveries": 1, "window": True}},
            "recovery.window is True, not a number",
        ),
        ({"recovery": {"window": 1}}, "recovery.max_recoveries is missing"),
        ({"recovery": {"max_recoveries": 1, "w": 1}}, "recovery has no field 'w'"),
        (
            {"outcome": "done"},
            "outcome is 'done'; 'completed', 'failed', 'cancelled', 'outcome_unknown',"
            " 'interrupted' are allowed",
        ),
        ({"outcome": 1}, "outcome is 1; 'completed', "),
        ({"state": "queued"}, "SettledJob has the state 'queued', not 'settled'"),
        # The limits of the specification.
        ({"id": ""}, "id has 0 characters; 1 to 256 are allowed"),
        ({"queue": "x" * 257}, "queue has 257 characters; 1 to 256 are allowed"),
        ({"lane": "a\0"}, r"lane is 'a\x00': NUL and lone surrogates cannot be stored"),
        ({"cancellation_id": ""}, "cancellation_id has 0 characters"),
        ({"priority": 2**53}, "priority is 9007199254740992; -9007199254740991 to"),
        ({"sequence": 0}, "sequence is 0; 1 to 9223372036854775807 are allowed"),
        ({"recovery_count": -1}, "recovery_count is -1; 0 to 9223372036854775807 are allowed"),
        ({"attempt_count": 2**63}, "attempt_count is 9223372036854775808; 0 to"),
        ({"reason": "x" * 201}, "reason has 201 characters; 1 to 200 are allowed"),
        ({"reason": ""}, "reason has 0 characters; 1 to 200 are allowed"),
        ({"not_before": "1969-12-31T23:59:59.999Z"}, "not_before is 1969-12-31T23:59:59.999000+"),
        (
            {"recovery": {"max_recoveries": -1}},
            "recovery: max_recoveries is -1; 0 to 9007199254740991 are allowed",
        ),
        ({"recovery": {"max_recoveries": 1, "window": 0}}, "recovery: window is 0.0 seconds; more"),
        ({"payload": {"a": [float("nan")]}}, "payload['a'][0] is nan, which JSON does not know"),
        ({"payload": {"a": {1: 2}}}, "payload['a'] has the key 1, which is not a string"),
        ({"payload": {"a": "\ud800"}}, r"payload['a'] has a lone surrogate: '\ud800'"),
        (
            {"outcome": "completed"},
            "reason is 'x', and the outcome completed;"
            " only failed and interrupted come with a reason",
        ),
        # Several at once.
        (
            {"lane": 3, "priority": "x", "colour": 1},
            "lane is 3, not a string; priority is 'x', not an integer; SettledJob has no field"
            " 'colour'",
        ),
    ],
)
def test_data_that_does_not_fit_is_refused_with_field_value_and_limit(
    changes: dict[str, Any], message: str
) -> None:
    assert refusal_of({**JSON_SETTLED, **changes}, SettledJob).startswith(message)


@pytest.mark.parametrize(
    ("data", "cls", "message"),
    [
        ({"pending": 1}, WakeState, "pending is 1, not true or false"),
        ({"pending": "true"}, WakeState, "pending is 'true', not true or false"),
        ({"lane": "mail", "payload": b"x"}, Job, "payload is of type bytes, which JSON does not"),
        ({"lane": ""}, Job, "lane has 0 characters; 1 to 256 are allowed"),
        ({"lane": "mail", "id": None}, Job, "id is None, not a string"),
        ({"lane": "mail", "encoded": "null"}, Job, "Job has no field 'encoded'"),
        ({"max_attempts": 1, "delay": "1"}, RetryPolicy, "delay is '1', not a number"),
        ({"max_attempts": 1, "delay": 10**400}, RetryPolicy, "delay is 1000"),
        ({"max_attempts": 1, "jitter": 2}, RetryPolicy, "jitter is 2.0; 0 to 1 are allowed"),
        ({"max_attempts": 0}, RetryPolicy, "max_attempts is 0; 1 to"),
        ({"count": 1, "max_attempts": 0}, Attempt, "max_attempts is 0; 1 to"),
        ({"count": -1}, Attempt, "count is -1; 0 to"),
        ({"status": "ok"}, CancellationResult, "status is 'ok'; 'recorded', 'replayed', "),
        ({"status": "decided"}, CancellationResult, "outcome is None, and the status 'decided'"),
        (
            {"status": "missing", "outcome": "failed"},
            CancellationResult,
            "outcome is 'failed', and the status 'missing'",
        ),
        ({"state": "idle", "job_id": "x"}, QueueHead, "job_id is 'x', and the state 'idle'"),
        ({"state": "queued"}, QueueHead, "job_id is None, and the state 'queued'"),
        ({"state": "queued", "job_id": ""}, QueueHead, "job_id has 0 characters"),
        ({"jobs": "abc", "cursor": None}, SettledPage, "jobs is 'abc', not an array"),
        ({"jobs": {}, "more": False}, LaneFailure, "jobs is {}, not an array"),
        (
            {"jobs": [JSON_SETTLED, {**JSON_SETTLED, "lane": 3}], "cursor": None},
            SettledPage,
            "jobs[1].lane is 3, not a string",
        ),
        (
            {"jobs": [JSON_SETTLED, {**JSON_SETTLED, "lane": ""}], "cursor": None},
            SettledPage,
            "jobs[1]: lane has 0 characters; 1 to 256 are allowed",
        ),
        (
            {"status": "queued", "job": {**JSON_SETTLED, "recovery": {"max_recoveries": "1"}}},
            Admission,
            "job.recovery.max_recoveries is '1', not an integer",
        ),
        (
            {"status": "queued", "job": {**JSON_SETTLED, "state": "gone"}},
            Admission,
            "job has the state 'gone'; 'queued', 'running', 'completing', 'settled' are allowed",
        ),
        ({}, StoredJob, "value has no 'state'; 'queued', 'running', 'completing', 'settled' are"),
        ({"state": ["queued"]}, StoredJob, "value has the state ['queued']; 'queued', "),
        ([], StoredJob, "value is [], not an object"),
        ({"reason": "x"}, Fail, "Fail has no 'decision', which is to be 'fail'"),
        ({"decision": "cancel"}, Fail, "Fail has the decision 'cancel', not 'fail'"),
        ({"decision": "fail"}, Decision, "reason is missing"),
        ({"decision": "fail", "reason": ""}, Decision, "reason has 0 characters"),
        ({"decision": "retry"}, Decision, "value has the decision 'retry'; 'complete', "),
        ({"decision": "retry", "after": -1}, Retry, "after is -1.0 seconds; 0 to"),
        ([{"decision": "cancel"}, 3], list[Cancel], "value[1] is 3, not an object"),
    ],
)
def test_every_class_refuses_what_does_not_fit(data: Any, cls: Any, message: str) -> None:
    assert refusal_of(data, cls).startswith(message)


def test_a_message_names_the_first_of_many_problems_and_counts_the_rest() -> None:
    message = refusal_of(["x"] * 100_000, list[int])
    assert message.startswith("value[0] is 'x', not an integer; value[1] is")
    assert message.endswith("value[4] is 'x', not an integer; and 99995 more")


def test_a_message_shows_no_more_of_a_value_than_a_reader_wants() -> None:
    assert len(refusal_of({"lane": ["x" * 10_000]}, Job)) < 120
    assert len(refusal_of({"x" * 10_000: 1}, Complete)) < 120


def test_the_original_errors_are_the_cause() -> None:
    with pytest.raises(InvalidJob) as refusal:
        converter.structure({"lane": 3}, Job)
    assert isinstance(refusal.value.__cause__, ExceptionGroup)


def test_a_null_union_of_stored_jobs_takes_null() -> None:
    assert converter.structure(None, StoredJob | None) is None
    assert converter.structure(JSON_SETTLED, StoredJob | None) == SETTLED


# -- payloads -------------------------------------------------------------------------------------

T = TypeVar("T")
UserId = NewType("UserId", str)


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Size(enum.IntEnum):
    SMALL = 1
    LARGE = 2


@attrs.frozen
class Item:
    name: str
    count: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    price: float | None = None


@dataclasses.dataclass
class Order:
    items: list[Item]
    by: UserId = UserId("nobody")
    when: datetime | None = None
    day: date | None = None
    colour: Colour = Colour.RED
    size: Size = Size.SMALL
    kind: Literal["gift", 1, None] = None
    notes: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    place: tuple[float, float] = (0.0, 0.0)
    tags: frozenset[str] = frozenset()
    either: int | str = 0
    number: float | int = 0
    extra: Any = None
    level: Annotated[int, "metres"] = 0


class Letter(TypedDict):
    to: str
    copies: int


class LooseLetter(TypedDict, total=False):
    to: str
    copies: int


@attrs.frozen
class Tree:
    value: int
    children: list[Tree] = attrs.field(factory=list)


@attrs.frozen
class Box(Generic[T]):
    content: T


@attrs.frozen
class Circle:
    radius: float


@attrs.frozen
class Square:
    side: float


@attrs.frozen
class Drawing:
    shape: Circle | Square
    note: Circle | str | None = None


FULL_ORDER = {
    "items": [{"name": "a"}, {"name": "b", "count": 2, "price": 3}],
    "by": "ada",
    "when": "2026-09-01T12:30:00Z",
    "day": "2026-09-01",
    "colour": "blue",
    "size": 2,
    "kind": "gift",
    "notes": {"a": ["x", "y"]},
    "place": [1, 2.5],
    "tags": ["x"],
    "either": "text",
    "number": 3,
    "extra": {"any": [None]},
    "level": 3,
}


@pytest.mark.parametrize(
    ("payload", "cls", "value"),
    [
        ({"items": []}, Order, Order([])),
        (
            FULL_ORDER,
            Order,
            Order(
                items=[Item("a"), Item("b", 2, 3.0)],
                by=UserId("ada"),
                when=datetime(2026, 9, 1, 12, 30, tzinfo=UTC),
                day=date(2026, 9, 1),
                colour=Colour.BLUE,
                size=Size.LARGE,
                kind="gift",
                notes={"a": ("x", "y")},
                place=(1.0, 2.5),
                tags=frozenset({"x"}),
                either="text",
                number=3,
                extra={"any": [None]},
                level=3,
            ),
        ),
        ({"to": "ada", "copies": 2}, Letter, {"to": "ada", "copies": 2}),
        ({"to": "ada"}, LooseLetter, {"to": "ada"}),
        ({"a": [1, None]}, dict, {"a": [1, None]}),
        ({"a": [1, None]}, dict[str, Any], {"a": [1, None]}),
        ({"red": 1}, dict[Colour, int], {Colour.RED: 1}),
        ([1, "x", None], list, [1, "x", None]),
        ([1, 2], list[int], [1, 2]),
        ([1, 2], tuple[int, ...], (1, 2)),
        ({"value": 1, "children": [{"value": 2}]}, Tree, Tree(1, [Tree(2)])),
        ({"content": 1}, Box[int], Box(1)),
        ({"shape": {"side": 1}}, Drawing, Drawing(Square(1.0))),
        ({"shape": {"radius": 1}, "note": "n"}, Drawing, Drawing(Circle(1.0), "n")),
        (3, int, 3),
        (None, None, None),
        ({"a": 1}, Any, {"a": 1}),
        ({"state": "x", "a": 1}, dict[str, int | str], {"state": "x", "a": 1}),
    ],
)
def test_a_payload_becomes_the_class_of_its_lane(payload: Any, cls: Any, value: Any) -> None:
    made = structure_payload(payload, cls)
    assert made == value
    assert type(made) is type(value)


def test_an_integer_stays_one_where_both_numbers_are_allowed() -> None:
    made = structure_payload({"items": [], "number": 3}, Order)
    assert type(made.number) is int
    assert type(structure_payload({"items": [], "number": 3.0}, Order).number) is float


def test_a_value_of_the_applications_own_becomes_a_payload_and_comes_back() -> None:
    order = structure_payload(FULL_ORDER, Order)
    data = converter.unstructure(order)
    assert is_plain(data)
    assert structure_payload(Job("mail", data).payload, Order) == order


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"items": 3}, "payload.items is 3, not an array"),
        ({"items": "abc"}, "payload.items is 'abc', not an array"),
        ({"items": {"name": "a"}}, "payload.items is {'name': 'a'}, not an array"),
        ({"items": ["a"]}, "payload.items[0] is 'a', not an object"),
        ({"items": [{"name": 1}]}, "payload.items[0].name is 1, not a string"),
        ({"items": [{}]}, "payload.items[0].name is missing"),
        ({"items": [{"name": "a", "count": "2"}]}, "payload.items[0].count is '2', not an integer"),
        ({"items": [{"name": "a", "count": 0}]}, "payload.items[0]: 'count' must be >= 1: 0"),
        ({"items": [{"name": "a", "price": "2"}]}, "payload.items[0].price is '2', not a number"),
        ({"by": 3}, "payload.by is 3, not a string"),
        ({"when": 3}, "payload.when is 3, not an ISO 8601 instant"),
        ({"when": "2026-09-01T12:30"}, "payload.when is '2026-09-01T12:30', which has no offset"),
        ({"day": "2026-13-01"}, "payload.day is '2026-13-01', not an ISO 8601 date"),
        ({"colour": "green"}, "payload.colour is 'green'; 'red', 'blue' are allowed"),
        ({"colour": ["red"]}, "payload.colour is ['red']; 'red', 'blue' are allowed"),
        ({"size": True}, "payload.size is True; 1, 2 are allowed"),
        ({"size": 1.0}, "payload.size is 1.0; 1, 2 are allowed"),
        ({"size": 3}, "payload.size is 3; 1, 2 are allowed"),
        ({"kind": True}, "payload.kind is True; 'gift', 1, None are allowed"),
        ({"kind": 1.0}, "payload.kind is 1.0; 'gift', 1, None are allowed"),
        ({"notes": []}, "payload.notes is [], not an object"),
        ({"notes": {"a": "x"}}, "payload.notes['a'] is 'x', not an array"),
        ({"notes": {"a": ["x", 1]}}, "payload.notes['a'][1] is 1, not a string"),
        ({"place": [1]}, "payload.place has 1 items, not 2"),
        ({"place": [1, "2"]}, "payload.place[1] is '2', not a number"),
        ({"tags": "x"}, "payload.tags is 'x', not an array"),
        ({"either": 1.5}, "payload.either is 1.5, none of int, str"),
        ({"either": None}, "payload.either is None, none of int, str"),
        ({"either": True}, "payload.either is True, none of int, str"),
        ({"level": "3"}, "payload.level is '3', not an integer"),
        ({"colours": "red"}, "payload has no field 'colours'"),
    ],
)
def test_a_payload_that_does_not_fit_says_where_and_what_was_expected(
    changes: dict[str, Any], message: str
) -> None:
    told = refusal_of({"items": [], **changes}, Order, structure_payload)
    assert told.startswith(message)


@pytest.mark.parametrize(
    ("payload", "cls", "message"),
    [
        (None, Order, "payload is None, not an object"),
        ("x", Order, "payload is 'x', not an object"),
        ({}, Order, "payload.items is missing"),
        ([], dict, "payload is [], not an object"),
        ("abc", list, "payload is 'abc', not an array"),
        ({"a": 1}, list[str], "payload is {'a': 1}, not an array"),
        ({"a": "1"}, dict[str, int], "payload['a'] is '1', not an integer"),
        ({"1": "a"}, dict[int, str], "payload has a key that is '1', not an integer"),
        ([1, "x"], list[int], "payload[1] is 'x', not an integer"),
        ({"to": "ada"}, Letter, "payload.copies is missing"),
        ({"to": "ada", "copies": "2"}, Letter, "payload.copies is '2', not an integer"),
        ({"to": "a", "copies": 1, "x": 1}, Letter, "payload has no field 'x'"),
        ([["to", "ada"]], Letter, "payload is [['to', 'ada']], not an object"),
        ({"copies": True}, LooseLetter, "payload.copies is True, not an integer"),
        (
            {"value": 1, "children": [{"value": 2, "children": [{"value": "3"}, 4]}]},
            Tree,
            "payload.children[0].children[0].value is '3', not an integer;"
            " payload.children[0].children[1] is 4, not an object",
        ),
        ({"content": "x"}, Box[int], "payload.content is 'x', not an integer"),
        ({"shape": 3}, Drawing, "payload.shape is 3, none of Circle, Square"),
        (
            {"shape": {"radius": "1"}},
            Drawing,
            "payload.shape is {'radius': '1'}, none of Circle, Square (Circle: radius is '1',"
            " not a number; Square: side is missing; Square: the object has no field 'radius')",
        ),
        (
            {"shape": {"side": 1}, "note": {"radius": "1"}},
            Drawing,
            "payload.note.radius is '1', not a number",
        ),
        ("x", bytes, "payload is 'x'; JSON data holds no bytes"),
        (float("nan"), float, "payload is nan, not a finite number"),
        (10**400, float, "payload is 1000"),
        (1, type(None), "payload is 1, not null"),
    ],
)
def test_other_payloads_that_do_not_fit_say_so_too(payload: Any, cls: Any, message: str) -> None:
    told = refusal_of(payload, cls, structure_payload)
    assert told.startswith(message)


def test_what_the_applications_own_class_raises_is_told_in_one_line() -> None:
    @attrs.frozen
    class Picky:
        name: str

        def __attrs_post_init__(self) -> None:
            if not self.name:
                raise ValueError
            raise ValueError(f"no room\n  for {self.name}", 3)

    assert refusal_of({"name": "a"}, Picky, structure_payload) == "payload: no room for a"
    assert refusal_of({"name": ""}, Picky, structure_payload) == "payload: ValueError"


def test_a_class_that_cannot_be_made_from_json_is_the_programs_fault() -> None:
    with pytest.raises(StructureHandlerNotFoundError, match="complex"):
        structure_payload(3, complex)


def test_an_application_may_teach_the_converter_its_own_types() -> None:
    class Money:
        def __init__(self, cents: int) -> None:
            self.cents = cents

    @attrs.frozen
    class Bill:
        total: Money
        shape: Circle | Square

    own = converter.copy()
    own.register_structure_hook(Money, lambda cents, _: Money(own.structure(cents, int)))
    made = own.structure_payload(
        {"total": 5, "shape": {"side": 1}}, attrs.resolve_types(Bill, localns=locals())
    )
    assert made.total.cents == 5
    with pytest.raises(InvalidJob, match=r"^payload\.total is '5', not an integer$"):
        own.structure_payload({"total": "5", "shape": {"side": 1}}, Bill)


def test_a_union_that_the_application_registered_goes_first() -> None:
    own = converter.copy()
    assert own.structure_payload({"side": 1}, Circle | Square) == Square(1.0)
    configure_tagged_union(Circle | Square, own, tag_name="kind")
    assert own.structure_payload({"kind": "Square", "side": 1}, Circle | Square) == Square(1.0)
    with pytest.raises(InvalidJob, match="has no field 'kind'"):
        converter.structure_payload({"kind": "Square", "side": 1}, Square)
