"""What the fuzz tests share: how long they go on, and what anybody might pass in.

By themselves they try the same few examples each time. ``WATCHDOG_FUZZ=30`` tries thirty times as
many, and others each time.
"""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

FACTOR = float(os.environ.get("WATCHDOG_FUZZ", "0"))


def examples(count: int) -> settings:
    """Settings for ``count`` examples, or for others and more when time is given."""
    return settings(
        max_examples=max(1, int(count * (FACTOR or 1))),
        derandomize=not FACTOR,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        # What was found is a test of its own, and not a file beside the tests.
        database=None,
    )


class Unprintable:
    """An object that helps nobody who wants to describe it."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


class Text(str):
    """A string of somebody's own class."""

    __slots__ = ()


class Many(dict[Any, Any]):
    """A mapping of somebody's own class."""


SPECIAL = (
    *(
        "",
        "\0",
        "a\0b",
        "\ud800",
        "\udfff x",
        "😀" * 300,
        "e\u0301",
        "\u202e",
        "\x1b[2J",
        "x" * 256,
    ),
    *("x" * 257, "x" * 10_000, "'", '"', "'; drop table watchdog_jobs; --", "%s", "{}", "\\", "%"),
    *("null", "true", "NaN", "-0", "1e999", "\n", "\r\n", " ", "\u2028", "NULL", "../..", "\ufeff"),
)

texts = st.one_of(
    st.sampled_from(SPECIAL),
    st.text(max_size=20),
    st.text(st.characters(), max_size=300),  # surrogates too
    st.builds(Text, st.text(max_size=5)),
)

numbers = st.one_of(
    st.integers(),
    st.sampled_from([0, 1, -1, 2**31, 2**53 - 1, 2**53, 2**63 - 1, 2**63, -(2**63)]),
    # Python itself refuses to write it down, and so does Hypothesis.
    st.just(4400).map(lambda digits: 10**digits),
    st.floats(),
    st.sampled_from([0.0, -0.0, 1e-9, 1e308, float("inf"), float("-inf"), float("nan")]),
    st.booleans(),
    st.decimals(allow_nan=True),
)

instants = st.one_of(
    st.datetimes(),
    st.datetimes(timezones=st.just(UTC)),
    st.datetimes(timezones=st.just(timezone(timedelta(hours=-23, minutes=-59)))),
    st.sampled_from(
        [
            datetime(1970, 1, 1, tzinfo=UTC),
            datetime(1969, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
            datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
            datetime.max.replace(tzinfo=timezone(timedelta(hours=-12))),
            datetime.min.replace(tzinfo=timezone(timedelta(hours=12))),
        ]
    ),
)

leaves = st.one_of(
    st.none(),
    texts,
    numbers,
    instants,
    st.binary(max_size=5),
    st.builds(Unprintable),
    st.builds(object),
    st.just(Decimal("1.5")),
    st.sampled_from([type, len, ..., NotImplemented]),
)

anything = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.dictionaries(texts, inner, max_size=4),
        st.dictionaries(st.one_of(st.none(), st.integers(), texts), inner, max_size=3).map(Many),
        st.sets(st.integers(), max_size=2),
    ),
    max_leaves=12,
)
"""What a program could pass by mistake."""

json_data = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=20),
        st.sampled_from(
            [text for text in SPECIAL if "\ud800" not in text and "\udfff" not in text]
        ),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.text(max_size=8), inner, max_size=4),
    ),
    max_leaves=12,
)
"""What a JSON document can hold."""


def through_json(value: Any) -> Any:
    """The value as a reader on the other side would have it."""
    return json.loads(json.dumps(value))
