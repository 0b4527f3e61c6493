"""Whatever is passed in ends in a value or in `InvalidJob`, and never in anything else."""

from __future__ import annotations

import math
import random
from typing import Any, get_args
from urllib.parse import quote

import pytest
from attrs import fields
from hypothesis import given
from hypothesis import strategies as st

import trio_watchdog
from tests.fuzz.tools import anything, examples, instants, json_data, numbers, texts, through_json
from trio_watchdog import (
    Admission,
    CancellationResult,
    CompletingJob,
    Fail,
    Finding,
    InvalidJob,
    Job,
    LaneFailure,
    Outcome,
    QueuedJob,
    QueueHead,
    QueueTransition,
    Recovery,
    Retention,
    Retry,
    RetryPolicy,
    RunningJob,
    SettledJob,
    SettledPage,
    TickResult,
    WakeState,
    converter,
)
from trio_watchdog import _rules as rules
from trio_watchdog._cli import redact
from trio_watchdog._errors import shown
from trio_watchdog._model import REASON_LIMIT, StoredJob, to_instant, to_milliseconds
from trio_watchdog._operations import job_from_columns
from trio_watchdog._payload import decode_payload, encode_payload
from trio_watchdog._statements import Dialect, channel


def refused_or_made(make: Any) -> Any:
    """What was made, or None; a refusal has to be one line that can be printed."""
    try:
        return make()
    except InvalidJob as error:
        message = str(error)
        assert message
        assert "\n" not in message
        message.encode()
        return None


# -- jobs and policies ----------------------------------------------------------------------------


@examples(120)
@given(payload=anything)
def test_any_payload_is_json_or_refused(payload: Any) -> None:
    job = refused_or_made(lambda: Job("a", payload))
    if job is None:
        return
    encoded = job.encoded
    assert encode_payload(decode_payload(encoded)) == encoded
    assert converter.structure(through_json(converter.unstructure(job)), Job) == job


@examples(90)
@given(
    lane=st.one_of(texts, anything),
    queue=st.one_of(texts, anything),
    id=st.one_of(texts, anything),
    priority=st.one_of(numbers, anything),
    not_before=st.one_of(st.none(), instants, anything),
    recovery=st.one_of(st.none(), anything),
)
def test_any_job_is_made_or_refused(**fields: Any) -> None:
    lane = fields.pop("lane")
    job = refused_or_made(lambda: Job(lane, **fields))
    if job is None:
        return
    for name in ("lane", "queue", "id"):
        assert 1 <= len(getattr(job, name)) <= 256
        getattr(job, name).encode()
    if job.not_before is not None:
        again = to_instant(to_milliseconds(job.not_before))
        assert again >= job.not_before or again.year == 9999
    assert converter.structure(through_json(converter.unstructure(job)), Job) == job


@examples(90)
@given(data=st.data())
def test_any_policy_is_made_or_refused_and_never_gives_nonsense(data: st.DataObject) -> None:
    numeric = st.one_of(numbers, anything)
    policy = refused_or_made(
        lambda: RetryPolicy(
            data.draw(numeric),
            delay=data.draw(numeric),
            factor=data.draw(numeric),
            max_delay=data.draw(numeric),
            jitter=data.draw(numeric),
        )
    )
    if policy is not None:
        attempt = data.draw(st.integers(1, 10**9))
        delay = rules.retry_delay(policy, attempt, data.draw(st.floats(0, 1)))
        assert 0 <= delay <= math.ceil(policy.max_delay * 1000) + 1
    for make in (
        lambda: Recovery(data.draw(numeric), data.draw(numeric)),
        lambda: Retry(data.draw(numeric), data.draw(st.one_of(st.none(), texts))),
        lambda: Fail(data.draw(anything)),
        lambda: Retention(data.draw(numeric), data.draw(numeric), lane=data.draw(anything)),
    ):
        refused_or_made(make)


# -- reasons --------------------------------------------------------------------------------------


def exceptions() -> st.SearchStrategy[BaseException]:
    class Awkward(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

    class NoString(Exception):
        def __str__(self) -> Any:
            return 5  # noqa: PLE0307 (that is the point)

    plain = st.builds(
        lambda kind, arguments: kind(*arguments),
        st.sampled_from([ValueError, KeyError, OSError, Exception, Awkward, NoString, SystemExit]),
        st.lists(anything, max_size=2),
    )
    return st.recursive(
        plain,
        lambda inner: st.builds(BaseExceptionGroup, st.just("group"), st.lists(inner, min_size=1)),
        max_leaves=6,
    )


@examples(90)
@given(error=exceptions())
def test_any_exception_gives_a_legal_reason(error: BaseException) -> None:
    reason = rules.failure_reason(error, KeyboardInterrupt)
    assert 1 <= len(reason) <= REASON_LIMIT
    assert "\0" not in reason
    reason.encode()
    Fail(reason)


@examples(60)
@given(text=texts)
def test_any_text_can_be_cut_to_a_legal_reason(text: str) -> None:
    Fail(rules.cut(text))


@examples(60)
@given(value=anything)
def test_anything_can_be_shown_in_a_message(value: Any) -> None:
    text = shown(value)
    assert len(text) <= 80
    assert "\n" not in text


# -- cursors, rows of a SELECT --------------------------------------------------------------------


@examples(90)
@given(
    after=st.one_of(
        anything,
        st.from_regex(r"[0-9]{0,25}\.?[0-9]{0,25}"),
        st.builds(lambda n: "9" * n + "." + "9" * n, st.integers(0, 5000)),
    )
)
def test_any_cursor_is_read_or_refused(after: Any) -> None:
    position = refused_or_made(lambda: rules.feed_position(after))
    if position is not None and after is not None:
        group, sequence = position
        assert 0 <= group < 2**63
        assert 0 <= sequence < 2**63


COLUMNS = ("lane", "payload", "queue", "id", "priority", "not_before", "recovery")


@examples(120)
@given(
    row=st.one_of(
        st.dictionaries(st.sampled_from([*COLUMNS, "max_recoveries", "window"]), anything),
        st.fixed_dictionaries(
            {"lane": texts},
            optional={
                "payload": st.one_of(texts, json_data),
                "priority": numbers,
                "not_before": st.one_of(texts, instants, instants.map(lambda at: at.isoformat())),
                "recovery": st.one_of(texts, json_data),
                "max_recoveries": numbers,
                "window": numbers,
            },
        ),
        st.dictionaries(texts, json_data, max_size=3),
    )
)
def test_any_row_of_a_select_is_a_job_or_refused(row: dict[str, Any]) -> None:
    refused_or_made(lambda: job_from_columns(row))


# -- JSON -----------------------------------------------------------------------------------------

PUBLIC = [
    value
    for name in trio_watchdog.__all__
    if isinstance(value := getattr(trio_watchdog, name), type)
    and hasattr(value, "__attrs_attrs__")
    and value.__module__ in {"trio_watchdog._model", "trio_watchdog._retention"}
]

ROOTS = (Finding, StoredJob, *PUBLIC)


@pytest.mark.parametrize("cls", ROOTS, ids=lambda cls: getattr(cls, "__name__", "StoredJob"))
@examples(15)
@given(data=st.data())
def test_any_json_is_a_value_or_refused(cls: Any, data: st.DataObject) -> None:
    names = sorted({f.name for c in (get_args(cls) or (cls,)) for f in fields(c)})
    document = data.draw(
        st.one_of(
            json_data,
            st.dictionaries(st.sampled_from([*names, "state", "decision", "other"]), json_data),
        )
    )
    value = refused_or_made(lambda: converter.structure(document, cls))
    if value is not None:
        again = through_json(converter.unstructure(value))
        assert converter.structure(again, cls) == value


def jobs_of_a_store() -> tuple[st.SearchStrategy[Any], st.SearchStrategy[Any]]:
    """Jobs that are not settled, and those that are."""
    name = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=9)
    instant = st.integers(0, 253402300799999).map(to_instant)
    common: dict[str, st.SearchStrategy[Any]] = {
        "id": name,
        "queue": name,
        "lane": name,
        "priority": st.integers(-(2**53) + 1, 2**53 - 1),
        "payload": json_data,
        "not_before": st.one_of(st.none(), instant),
        "recovery": st.one_of(
            st.none(), st.builds(Recovery, st.integers(0, 9), st.none() | st.floats(0.001, 1e9))
        ),
        "sequence": st.integers(1, 2**53),
        "cancellation_id": st.one_of(st.none(), name),
        "recovery_count": st.integers(0, 9),
        "attempt_count": st.integers(0, 9),
    }
    live = {"token": name, "lease_until": instant}
    bad = (Outcome.FAILED, Outcome.INTERRUPTED)
    well = {"outcome": st.sampled_from([o for o in Outcome if o not in bad]), "reason": st.none()}
    badly = {"outcome": st.sampled_from(bad), "reason": name}
    unsettled = st.one_of(
        st.builds(QueuedJob, **common),
        st.builds(RunningJob, **common, **live),
        st.builds(CompletingJob, **common, **live, **well),
        st.builds(CompletingJob, **common, **live, **badly),
    )
    settled = st.one_of(
        st.builds(SettledJob, **common, **well, settled_at=instant),
        st.builds(SettledJob, **common, **badly, settled_at=instant),
    )
    return unsettled, settled


unsettled_jobs, settled_jobs = jobs_of_a_store()


@examples(25)
@given(
    job=unsettled_jobs,
    settled=settled_jobs,
    instant=st.one_of(st.none(), st.integers(0, 2**47).map(to_instant)),
    flag=st.booleans(),
    outcome=st.sampled_from(Outcome),
    seconds=st.floats(0, 1e9),
)
def test_every_value_goes_through_json_and_back(
    job: Any, settled: Any, instant: Any, flag: bool, outcome: Outcome, seconds: float
) -> None:
    head = QueueHead("running", job.id, flag)
    wake = WakeState(flag, instant)
    values: list[tuple[Any, Any]] = [
        (job, StoredJob),
        (Admission("duplicate", job), Admission),
        (settled, StoredJob),
        (CancellationResult("decided", outcome), CancellationResult),
        (head, QueueHead),
        (QueueTransition(job.queue, head, settled), QueueTransition),
        (LaneFailure((settled,), True), LaneFailure),
        (SettledPage((settled, settled), "1.2"), SettledPage),
        (TickResult("ran", job.id, wake), TickResult),
        (Finding("warning", "rows", job.id), Finding),
        (Retention(seconds, 3, queue=job.queue), Retention),
    ]
    for value, cls in values:
        assert converter.structure(through_json(converter.unstructure(value)), cls) == value


# -- names in SQL, passwords ----------------------------------------------------------------------


@examples(60)
@given(schema=st.text(st.characters(exclude_characters="\0"), min_size=1, max_size=63))
def test_any_schema_name_is_quoted_so_that_it_stays_a_name(schema: str) -> None:
    table = Dialect("postgres", schema).table("jobs")
    body = table.removesuffix(".jobs").removeprefix("U&")
    assert body[0] == body[-1] == '"'
    assert '"' not in body[1:-1]
    assert "%" not in table
    assert ":" not in table
    name = channel(schema)
    assert 1 <= len(name) <= 63
    assert name.isascii()
    assert name.replace("_", "").isalnum()


@examples(90)
@given(
    password=st.text(st.characters(exclude_categories=["Cs", "Z", "Cc"]), min_size=6, max_size=20),
    rest=st.sampled_from(["host/db", "h:5432/db?x=1", "a,b/db", "[::1]/db"]),
)
def test_no_password_gets_through(password: str, rest: str) -> None:
    # Letters that no other part of the text has.
    secret = "".join(random.Random(password).sample("QWXZJK", 6)) + password
    url = f"postgresql://ada:{quote(secret, safe='')}@{rest}"
    for text in (url, f"cannot connect to {url}: refused", f"no user with {secret!r} there"):
        hidden = redact(text, url)
        assert secret not in hidden
        assert quote(secret, safe="") not in hidden
