"""Payloads: canonical JSON text, and every refusal on the way in.

A payload is encoded once, with sorted keys and no spaces, so equal payloads are equal texts.
All checks happen before the text reaches a database, where each would fail differently: NaN is
refused by one, silently changed by another; a lone surrogate cannot be sent at all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from typing import Any, cast

from ._errors import InvalidJob, StoreInvalid, shown, type_name

PAYLOAD_LIMIT = 1024 * 1024
"""Default limit of an encoded payload, in bytes of UTF-8."""

DEPTH_LIMIT = 100
"""How deep arrays and objects may nest. SQLite and Python each give up at depths of their own."""

INTEGER_DIGITS_LIMIT = 4000
"""Digits of an integer. Python refuses to read back more than 4300."""

_INTEGER_LIMIT = 10**INTEGER_DIGITS_LIMIT


def encode_payload(payload: Any) -> str:
    """The canonical JSON text of ``payload``.

    Raises `InvalidJob` for NaN, infinities, lone surrogates, keys that are not strings, values
    that JSON does not know, and nesting deeper than `DEPTH_LIMIT`; the message has the path.
    """
    if not _is_plain(payload):
        _check(payload)
    try:
        return _ENCODER.encode(payload)
    except (TypeError, ValueError) as error:
        raise InvalidJob(f"payload cannot be encoded as JSON: {error}") from error


def _is_plain(payload: Any) -> bool:
    """Whether the payload is of the common kind in which `_check` would find nothing."""
    if type(payload) is not dict:
        return False
    for key, item in cast("dict[Any, Any]", payload).items():
        if type(key) is not str or not key.isascii():
            return False
        if type(item) is str:
            if not item.isascii():
                return False
        elif type(item) is int:
            if not -_INTEGER_LIMIT < item < _INTEGER_LIMIT:
                return False
        elif item is not None and type(item) is not bool:
            return False
    return True


def decode_payload(text: str) -> Any:
    """What `encode_payload` encoded. Raises `StoreInvalid` for text that is not JSON."""
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise StoreInvalid(f"stored payload is not JSON: {error}") from error


def check_payload_size(encoded: str, limit: int) -> None:
    """Raise `InvalidJob` when the encoded text has more than ``limit`` bytes of UTF-8."""
    # A character has at most four bytes, so short texts need no second encoding.
    if len(encoded) * 4 <= limit:
        return
    size = len(encoded.encode())
    if size > limit:
        raise InvalidJob(f"payload is {size} bytes encoded, over the limit of {limit}")


def is_text(value: str) -> bool:
    """Whether both databases can keep the text: no lone surrogate in it."""
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits:.40} is too large for a float")
    return value


# Made once: `json.dumps` and `json.loads` would make one for each text.
_ENCODER = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
)
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)


def _check(payload: Any) -> None:
    # An explicit stack: recursion would end in RecursionError long before a clear message.
    stack: list[Iterator[tuple[int | str, Any]]] = []
    steps: list[int | str] = []
    item: Any = payload
    while True:
        children = _children(item, steps)
        if children is not None:
            if len(stack) >= DEPTH_LIMIT:
                raise InvalidJob(f"payload is nested deeper than the limit of {DEPTH_LIMIT}")
            stack.append(children)
            steps.append(0)
        while stack:
            try:
                steps[-1], item = next(stack[-1])
            except StopIteration:
                stack.pop()
                steps.pop()
            else:
                break
        else:
            return


def _path(steps: Iterable[int | str]) -> str:
    return "payload" + "".join(f"[{shown(step, 40)}]" for step in steps)


def _children(item: Any, steps: list[int | str]) -> Iterator[tuple[int | str, Any]] | None:
    if item is None or isinstance(item, bool):
        return None
    if isinstance(item, str):
        if not is_text(item):
            raise InvalidJob(f"{_path(steps)} has a lone surrogate: {item[:40]!a}")
        return None
    if isinstance(item, int):
        if not -_INTEGER_LIMIT < item < _INTEGER_LIMIT:
            raise InvalidJob(
                f"{_path(steps)} is an integer of more than {INTEGER_DIGITS_LIMIT} digits"
            )
        return None
    if isinstance(item, float):
        if not math.isfinite(item):
            raise InvalidJob(f"{_path(steps)} is {item!r}, which JSON does not know")
        return None
    if isinstance(item, (list, tuple)):
        return enumerate(cast("list[Any]", item))
    if isinstance(item, dict):
        return _object(cast("dict[Any, Any]", item), steps, len(steps))
    raise InvalidJob(f"{_path(steps)} is of type {type_name(item)}, which JSON does not know")


def _object(items: dict[Any, Any], steps: list[int | str], depth: int) -> Iterator[tuple[str, Any]]:
    for key, item in items.items():
        if not isinstance(key, str):
            path = _path(steps[:depth])
            raise InvalidJob(f"{path} has the key {shown(key, 40)}, which is not a string")
        if not is_text(key):
            path = _path(steps[:depth])
            raise InvalidJob(f"{path} has a key with a lone surrogate: {key[:40]!a}")
        yield key, item
