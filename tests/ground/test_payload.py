"""Payloads: canonical text, every refusal, and what comes back."""

import enum
import json
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trio_watchdog._errors import InvalidJob, StoreInvalid
from trio_watchdog._payload import (
    DEPTH_LIMIT,
    INTEGER_DIGITS_LIMIT,
    PAYLOAD_LIMIT,
    check_payload_size,
    decode_payload,
    encode_payload,
)

unhurried = settings(deadline=None)

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | text
)
payloads = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=12,
)


def turned_round(payload: Any) -> Any:
    """The same payload, every object's keys put in the other order."""
    if isinstance(payload, dict):
        return {key: turned_round(payload[key]) for key in reversed(payload)}
    if isinstance(payload, list):
        return [turned_round(item) for item in payload]
    return payload


def nested(depth: int, wrap: Callable[[Any], Any]) -> Any:
    payload: Any = None
    for _ in range(depth):
        payload = wrap(payload)
    return payload


# -- what is kept ---------------------------------------------------------------------------------


@unhurried
@given(payloads)
def test_a_payload_comes_back_as_it_went(payload: Any) -> None:
    back = decode_payload(encode_payload(payload))
    assert back == payload
    # `==` does not tell 1 from True or 1.0; the second text does.
    assert encode_payload(back) == encode_payload(payload)


@unhurried
@given(payloads)
def test_the_order_of_keys_does_not_show_in_the_text(payload: Any) -> None:
    assert encode_payload(turned_round(payload)) == encode_payload(payload)


@unhurried
@given(payloads, payloads)
def test_different_payloads_have_different_texts(one: Any, other: Any) -> None:
    if one != other:
        assert encode_payload(one) != encode_payload(other)


@pytest.mark.parametrize(
    ("payload", "encoded"),
    [
        (None, "null"),
        ({"b": 1, "a": [True, None, 1.5, "é"]}, '{"a":[true,null,1.5,"é"],"b":1}'),
        ({"ä": 1, "z": 2, "Z": 3, "": 4}, '{"":4,"Z":3,"z":2,"ä":1}'),
        ("\0", '"\\u0000"'),
        ({"\0": "\0"}, '{"\\u0000":"\\u0000"}'),
        ("\N{GRINNING FACE}", '"\N{GRINNING FACE}"'),
        ((1, (2,)), "[1,[2]]"),
        (OrderedDict(b=1, a=2), '{"a":2,"b":1}'),
        (2**64, "18446744073709551616"),
        (1e300, "1e+300"),
        (-0.0, "-0.0"),
    ],
)
def test_the_text_is_canonical(payload: Any, encoded: str) -> None:
    assert encode_payload(payload) == encoded


def test_numbers_that_python_calls_equal_are_different_payloads() -> None:
    assert len({encode_payload(payload) for payload in (1, 1.0, True)}) == 3


def test_enum_members_of_json_types_are_their_values() -> None:
    class Colour(enum.StrEnum):
        RED = "red"

    class Size(enum.IntEnum):
        BIG = 3

    assert encode_payload({Colour.RED: [Colour.RED, Size.BIG]}) == '{"red":["red",3]}'


@pytest.mark.parametrize("sign", [1, -1])
def test_an_integer_may_have_as_many_digits_as_python_reads_back(sign: int) -> None:
    longest = sign * (10**INTEGER_DIGITS_LIMIT - 1)
    assert decode_payload(encode_payload(longest)) == longest
    with pytest.raises(InvalidJob, match=f"payload.* more than {INTEGER_DIGITS_LIMIT} digits"):
        encode_payload(longest + sign)


# -- what is refused ------------------------------------------------------------------------------


class _WithoutRepr:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (float("nan"), "payload is nan, which JSON does not know"),
        ([1, float("inf")], "payload[1] is inf, which JSON does not know"),
        ({"a": [{"b": float("-inf")}]}, "payload['a'][0]['b'] is -inf, which JSON does not know"),
        ("\ud800", r"payload has a lone surrogate: '\ud800'"),
        ({"a": ["ok", "cut \udfff"]}, r"payload['a'][1] has a lone surrogate: 'cut \udfff'"),
        ({"a": {"\udc00": 1}}, r"payload['a'] has a key with a lone surrogate: '\udc00'"),
        ([{1: "x"}], "payload[0] has the key 1, which is not a string"),
        ({None: 1}, "payload has the key None, which is not a string"),
        ({True: 1}, "payload has the key True, which is not a string"),
        ({"a": {2.5: 1}}, "payload['a'] has the key 2.5, which is not a string"),
        ({(1, 2): 1}, "payload has the key (1, 2), which is not a string"),
        ({"a": {1, 2}}, "payload['a'] is of type set, which JSON does not know"),
        ([b"x"], "payload[0] is of type bytes, which JSON does not know"),
        ([(object(),)], "payload[0][0] is of type object, which JSON does not know"),
        ({"n": [10**5000]}, "payload['n'][0] is an integer of more than 4000 digits"),
        ([{10**5000: 1}], "payload[0] has the key <int whose repr raises>, which is not a string"),
        (
            {_WithoutRepr(): 1},
            "payload has the key <_WithoutRepr whose repr raises>, which is not a string",
        ),
        ([0, _WithoutRepr()], "payload[1] is of type _WithoutRepr, which JSON does not know"),
    ],
)
def test_what_json_cannot_hold_is_refused_with_its_path(payload: Any, message: str) -> None:
    with pytest.raises(InvalidJob) as refusal:
        encode_payload(payload)
    assert str(refusal.value) == message


def test_a_message_shows_no_more_of_a_key_than_a_reader_wants() -> None:
    with pytest.raises(InvalidJob) as refusal:
        encode_payload({"k" * 10_000: {"s" * 10_000: "\ud800" * 10_000}})
    assert len(str(refusal.value)) < 500


@pytest.mark.parametrize(
    "wrap", [lambda inner: [inner], lambda inner: {"a": inner}], ids=["arrays", "objects"]
)
def test_nesting_has_a_limit_that_no_recursion_precedes(wrap: Callable[[Any], Any]) -> None:
    deepest = nested(DEPTH_LIMIT, wrap)
    assert decode_payload(encode_payload(deepest)) == deepest
    for depth in (DEPTH_LIMIT + 1, 100_000):
        with pytest.raises(InvalidJob, match=f"deeper than the limit of {DEPTH_LIMIT}"):
            encode_payload(nested(depth, wrap))


def test_siblings_do_not_add_to_the_depth() -> None:
    payload = [nested(DEPTH_LIMIT - 1, lambda inner: [inner]) for _ in range(3)]
    assert decode_payload(encode_payload(payload)) == payload


def test_a_payload_that_contains_itself_is_refused() -> None:
    ring: list[Any] = []
    ring.append(ring)
    with pytest.raises(InvalidJob, match="deeper than the limit"):
        encode_payload(ring)


# -- size -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("letter", ["a", "é", "€", "\N{GRINNING FACE}"])
def test_the_size_limit_counts_bytes_and_is_exact(letter: str) -> None:
    encoded = encode_payload(letter * 1000)
    size = len(encoded.encode())
    check_payload_size(encoded, size + 1)
    check_payload_size(encoded, size)
    with pytest.raises(InvalidJob) as refusal:
        check_payload_size(encoded, size - 1)
    assert str(refusal.value) == f"payload is {size} bytes encoded, over the limit of {size - 1}"


def test_the_limit_is_one_mebibyte_unless_told_otherwise() -> None:
    assert PAYLOAD_LIMIT == 1_048_576


# -- reading back ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stored",
    [
        "",
        "{",
        "nothing",
        "NaN",
        "[Infinity]",
        '{"a":-Infinity}',
        "1e400",
        "[-1e400]",
        "1" * 5000,
        "[" * 100_000,
    ],
    ids=lambda stored: stored[:12] or "nothing at all",
)
def test_stored_text_that_is_not_json_is_reported(stored: str) -> None:
    with pytest.raises(StoreInvalid, match="stored payload is not JSON"):
        decode_payload(stored)


def test_stored_text_is_read_as_json_reads_it() -> None:
    assert decode_payload(' {"a": [1, 1.0, 1e2, "\\u0000"]} ') == {"a": [1, 1.0, 100.0, "\0"]}
    assert json.loads(encode_payload({"a": "\0"})) == {"a": "\0"}
