"""Every public value to and from plain JSON data, with cattrs.

Structuring is strict, because JSON has types of its own: ``"3"`` is no integer, 1 is no boolean,
a string is no list of characters, and a key that nobody reads is a mistake. What does not fit is
told in one line with path, value and expectation, not in a tree of exceptions.

A job of the store carries its ``state``, and what a handler may return its ``decision``, so that
a union such as `StoredJob` structures back by it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    MutableSequence,
    Sequence,
)
from collections.abc import MutableSet as AbstractMutableSet
from collections.abc import Set as AbstractSet
from datetime import date, datetime
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, overload

import attrs
from cattrs import BaseValidationError, Converter, ForbiddenExtraKeysError
from cattrs.errors import (
    AttributeValidationNote,
    IterableValidationError,
    IterableValidationNote,
    StructureHandlerNotFoundError,
)
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn, override

from ._errors import InvalidJob, shown
from ._model import (
    PRIORITY_LIMIT,
    Admission,
    Attempt,
    Cancel,
    CancellationResult,
    Complete,
    CompletingJob,
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
    TickResult,
    WakeState,
    check_instant,
    check_integer,
    check_reason,
    check_text,
)
from ._payload import decode_payload, encode_payload

T = TypeVar("T")

_Hook = Callable[[Any, Any], Any]

_PROBLEMS_SHOWN = 5
"""How many things that do not fit one message names; the reader fixes them one by one anyway."""


class _Misfit(ValueError):
    """A value of the wrong kind. The text goes on where its path ends: ``is 'x', not ...``."""


def _wrong_kind(value: Any, wanted: str) -> _Misfit:
    return _Misfit(f"is {shown(value)}, not {wanted}")


class WatchdogConverter(Converter):
    """A cattrs converter that refuses in one line: `structure` raises `InvalidJob`."""

    @overload
    def structure(self, obj: Any, cl: type[T]) -> T: ...
    @overload
    def structure(self, obj: Any, cl: Any) -> Any: ...
    def structure(self, obj: Any, cl: Any) -> Any:
        """``obj`` (JSON data) as a value of type ``cl``, or `InvalidJob`."""
        # The fields of a class, or of a member of a union, speak for themselves.
        path = "" if _is_class(cl) or _is_union(cl) else "value"
        return self._structured(obj, cl, path, _name(cl) if _is_class(cl) else "value")

    def structure_payload(self, payload: Any, cls: Any) -> Any:
        """As `structure`; the message calls the whole ``payload``."""
        return self._structured(payload, cls, "payload", "payload")

    def _structured(self, obj: Any, cl: Any, path: str, subject: str) -> Any:
        try:
            return super().structure(obj, cl)
        except StructureHandlerNotFoundError:
            raise  # The type is at fault, not the data.
        except Exception as error:
            problems = list(_problems(error, path, subject))
            text = "; ".join(problems[:_PROBLEMS_SHOWN])
            if len(problems) > _PROBLEMS_SHOWN:
                text += f"; and {len(problems) - _PROBLEMS_SHOWN} more"
            raise InvalidJob(text) from error


# -- messages -------------------------------------------------------------------------------------


def _problems(error: BaseException, path: str, subject: str) -> Iterator[str]:
    """What did not fit, a line each, from the exception groups that cattrs raises."""
    if isinstance(error, InvalidJob) and isinstance(
        error.__cause__, (BaseValidationError, _Misfit)
    ):
        # A class that refers to itself is structured by `structure` inside of `structure`.
        error = error.__cause__
    if isinstance(error, BaseValidationError):
        for part in cast("tuple[Exception, ...]", error.exceptions):
            yield from _problems(part, path + _step(part, path), subject)
        return
    if isinstance(error, _Misfit):
        yield f"{path or subject} {error}"
    elif isinstance(error, ForbiddenExtraKeysError):
        keys = ", ".join(sorted(shown(key, 40) for key in error.extra_fields)[:_PROBLEMS_SHOWN])
        yield f"{path or subject} has no field {keys}"
    elif isinstance(error, KeyError) and _step(error, path):
        yield f"{path} is missing"
    else:
        # The first argument is the text: attrs' validators put the whole attribute behind it.
        text = error.args[0] if error.args and isinstance(error.args[0], str) else str(error)
        text = " ".join(text.split()) or type(error).__name__
        yield f"{path}: {text}" if path else text


def _step(error: BaseException, path: str) -> str:
    for note in getattr(error, "__notes__", ()):
        if isinstance(note, AttributeValidationNote):
            return f".{note.name}" if path else note.name
        if isinstance(note, IterableValidationNote):
            return f"[{shown(note.index, 40)}]"
    return ""


# -- values without parts -------------------------------------------------------------------------


def _to_string(value: Any, cls: Any) -> Any:
    # cattrs asks here for every subclass of `str` too, such as a `StrEnum`.
    if issubclass(cls, Enum):
        return _to_member(value, cls)
    if not isinstance(value, str):
        raise _wrong_kind(value, "a string")
    return value if cls is str else cls(value)


def _to_integer(value: Any, cls: Any) -> Any:
    if issubclass(cls, Enum):
        return _to_member(value, cls)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong_kind(value, "an integer")
    return value if cls is int else cls(value)


def _to_float(value: Any, cls: Any) -> Any:
    if issubclass(cls, Enum):
        return _to_member(value, cls)
    # JSON has one kind of number: 3 is how many of its writers put 3.0.
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _wrong_kind(value, "a number")
    try:
        number = float(value)
    except OverflowError:
        number = float("inf")
    if number - number != 0:
        raise _wrong_kind(value, "a finite number")
    return number if cls is float else cls(number)


def _to_boolean(value: Any, _: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong_kind(value, "true or false")
    return value


def _to_none(value: Any, _: Any) -> None:
    if value is not None:
        raise _wrong_kind(value, "null")


def _to_member(value: Any, cls: Any) -> Any:
    try:
        member: Enum | None = cls(value)
    except (ValueError, TypeError):
        member = None
    if member is None or not _is_like(value, member.value):
        allowed = ", ".join(shown(choice.value) for choice in cls)
        raise _Misfit(f"is {shown(value)}; {allowed} are allowed")
    return member


def _to_literal(value: Any, cls: Any) -> Any:
    for choice in get_args(cls):
        plain = choice.value if isinstance(choice, Enum) else choice
        if plain == value and _is_like(value, plain):
            return choice
    allowed = ", ".join(shown(choice) for choice in get_args(cls))
    raise _Misfit(f"is {shown(value)}; {allowed} are allowed")


def _is_like(value: Any, example: Any) -> bool:
    # To Python 1, 1.0 and True are equal, and True is an integer.
    return isinstance(value, type(example)) and isinstance(value, bool) == isinstance(example, bool)


def _to_datetime(value: Any, _: Any) -> datetime:
    if not isinstance(value, str):
        raise _wrong_kind(value, "an ISO 8601 instant")
    try:
        instant = datetime.fromisoformat(value)
    except ValueError:
        raise _wrong_kind(value, "an ISO 8601 instant") from None
    if instant.tzinfo is None:
        raise _Misfit(f"is {shown(value)}, which has no offset; give it one, such as Z or +02:00")
    return instant


def _to_date(value: Any, _: Any) -> date:
    if isinstance(value, str):
        try:
            return date.fromisoformat(value)
        except ValueError:
            pass
    raise _wrong_kind(value, "an ISO 8601 date")


def _to_bytes(value: Any, _: Any) -> bytes:
    raise _Misfit(f"is {shown(value)}; JSON data holds no bytes")


def _from_datetime(value: datetime) -> str:
    if value.tzinfo is None or value.utcoffset() is None:
        raise InvalidJob(f"{value!r} is a naive datetime; give it a time zone")
    return value.isoformat()


def _plain_string(value: str) -> Any:
    if isinstance(value, Enum):
        return value.value
    return str.__str__(value)


def _plain_integer(value: int) -> Any:
    return value if isinstance(value, bool) else int(value)


def _plain_payload(payload: Any) -> Any:
    """A copy that shares nothing and has lists for tuples; refuses what is not JSON."""
    try:
        encoded = encode_payload(payload)
    except InvalidJob:
        # A handler's job has the payload as its lane's class, if the lane has one.
        encoded = encode_payload(converter.unstructure(payload))
    return decode_payload(encoded)


# -- arrays, objects and unions -------------------------------------------------------------------

_ARRAYS: dict[Any, Callable[[list[Any]], Any]] = {
    list: list,
    Sequence: tuple,
    MutableSequence: list,
    tuple: tuple,
    deque: deque,
    set: set,
    AbstractMutableSet: set,
    frozenset: frozenset,
    AbstractSet: frozenset,
}

_MAPPINGS = (dict, Mapping, MutableMapping)


def _origin(cls: Any) -> Any:
    return get_origin(cls) or cls


def _is_array(cls: Any) -> bool:
    return _origin(cls) in _ARRAYS


def _is_mapping(cls: Any) -> bool:
    return _origin(cls) in _MAPPINGS


def _is_typed_dict(cls: Any) -> bool:
    # By its mark: `typing` and `typing_extensions` each know only their own.
    return hasattr(_origin(cls), "__required_keys__")


def _is_class(cls: Any) -> bool:
    origin = _origin(cls)
    return isinstance(origin, type) and (attrs.has(origin) or dataclasses.is_dataclass(origin))


def _is_union(cls: Any) -> bool:
    return get_origin(cls) in (Union, UnionType)


def _require_array(value: Any) -> Sequence[Any]:
    # A tuple is what Python code puts for an array; a string is never one.
    if not isinstance(value, (list, tuple)):
        raise _wrong_kind(value, "an array")
    return cast("Sequence[Any]", value)


def _require_object(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise _wrong_kind(value, "an object")
    return cast("dict[Any, Any]", value)


def _parts(values: Iterable[tuple[Any, Any, _Hook, Any]], title: str, cls: Any) -> list[Any]:
    """Structure each (index, value, hook, type); raise all that failed in one group."""
    made: list[Any] = []
    errors: list[Exception] = []
    for index, value, hook, kind in values:
        try:
            made.append(hook(value, kind))
        except Exception as error:
            error.add_note(IterableValidationNote(f"{title} at {index!r}", index, kind))
            errors.append(error)
    if errors:
        # `ExceptionGroup.__new__` takes two arguments, cattrs' subclass a third.
        group: Any = IterableValidationError
        raise group(f"While structuring an {title}", errors, cls)
    return made


def _array_hook(cls: Any, to: Converter) -> _Hook:
    origin, kinds = _origin(cls), get_args(cls)
    if origin is tuple and kinds and kinds[-1] is not Ellipsis:
        return _fixed_array_hook(cls, to, kinds)
    make = _ARRAYS[origin]
    kind = kinds[0] if kinds else Any
    hook = to.get_structure_hook(kind)

    def structure(value: Any, _: Any) -> Any:
        items = enumerate(_require_array(value))
        return make(_parts(((index, item, hook, kind) for index, item in items), "array", cls))

    return structure


def _fixed_array_hook(cls: Any, to: Converter, kinds: tuple[Any, ...]) -> _Hook:
    hooks = [to.get_structure_hook(kind) for kind in kinds]

    def structure(value: Any, _: Any) -> Any:
        items = _require_array(value)
        if len(items) != len(kinds):
            raise _Misfit(f"has {len(items)} items, not {len(kinds)}")
        return tuple(_parts(zip(range(len(kinds)), items, hooks, kinds, strict=True), "array", cls))

    return structure


def _mapping_hook(cls: Any, to: Converter) -> _Hook:
    key_kind, kind = get_args(cls) or (Any, Any)
    key_hook, hook = to.get_structure_hook(key_kind), to.get_structure_hook(kind)

    def key(text: Any) -> Any:
        try:
            return key_hook(text, key_kind)
        except _Misfit as error:
            raise _Misfit(f"has a key that {error}") from None

    def structure(value: Any, _: Any) -> Any:
        source = _require_object(value)
        keys = [key(text) for text in source]
        items = _parts(((text, item, hook, kind) for text, item in source.items()), "object", cls)
        return dict(zip(keys, items, strict=True))

    return structure


def _typed_dict_hook(cls: Any, to: Converter) -> _Hook:
    inner = cast("_Hook", to.gen_structure_typeddict(cls))  # pyright: ignore[reportUnknownMemberType]
    return lambda value, kind: inner(_require_object(value), kind)


def _class_hook(cls: Any, to: Converter) -> _Hook:
    if attrs.has(_origin(cls)):
        attrs.resolve_types(_origin(cls))  # Older cattrs gives up on ``Box[int]``.
    inner = to.gen_structure_attrs_fromdict(cls)
    return lambda value, kind: inner(_require_object(value), kind)


def _union_hook(cls: Any, to: Converter) -> _Hook:
    # What the application registered for the union goes first; cattrs keeps those hooks apart.
    registered: dict[Any, _Hook] = getattr(to, "_union_struct_registry", {})
    if cls in registered:
        return registered[cls]
    kinds = tuple(kind for kind in get_args(cls) if kind is not NoneType)
    is_optional = NoneType in get_args(cls)
    one_of = _tagged_hook(kinds, to) if _is_tagged(kinds) else _trial_hook(kinds, to)
    return lambda value, kind: None if value is None and is_optional else one_of(value, kind)


def _is_tagged(kinds: tuple[Any, ...]) -> bool:
    return all(_is_ours(kind) for kind in kinds) and (
        len({_TAGS[kind][0] if kind in _TAGS else None for kind in kinds} - {None}) == 1
    )


def _tagged_hook(kinds: tuple[Any, ...], to: Converter) -> _Hook:
    name, _ = _TAGS[kinds[0]]
    members = {_TAGS[kind][1]: (to.get_structure_hook(kind), kind) for kind in kinds}
    allowed = ", ".join(map(repr, members))

    def structure(value: Any, _: Any) -> Any:
        source = _require_object(value)
        if name not in source:
            raise _Misfit(f"has no {name!r}; {allowed} are allowed")
        text = source[name]
        if not isinstance(text, str) or text not in members:
            raise _Misfit(f"has the {name} {shown(text)}; {allowed} are allowed")
        hook, kind = members[text]
        return hook(source, kind)

    return structure


def _trial_hook(kinds: tuple[Any, ...], to: Converter) -> _Hook:
    # Every hook is strict, so the first that does not refuse is the right one; except that
    # to `float` 3 is fine, and to `float | int` it is to stay an integer.
    kinds = tuple(sorted(kinds, key=lambda kind: kind is float))
    hooks = [(kind, to.get_structure_hook(kind)) for kind in kinds]
    names = ", ".join(map(_name, kinds))

    def structure(value: Any, _: Any) -> Any:
        failures: list[tuple[Any, Exception]] = []
        for kind, hook in hooks:
            try:
                return hook(value, kind)
            except Exception as error:
                failures.append((kind, error))
        # Members of the right kind have more to say than those that were refused at sight.
        told = [pair for pair in failures if not isinstance(pair[1], _Misfit)]
        if len(kinds) == 1 or len(told) == 1:
            raise (told or failures)[0][1]
        details = "; ".join(
            f"{_name(kind)}: {problem}"
            for kind, error in told
            for problem in _problems(error, "", "the object")
        )
        raise _Misfit(f"is {shown(value)}, none of {names}" + (f" ({details})" if details else ""))

    return structure


def _name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind)


# -- our own classes ------------------------------------------------------------------------------

_TAGS: dict[Any, tuple[str, str]] = {
    QueuedJob: ("state", "queued"),
    RunningJob: ("state", "running"),
    CompletingJob: ("state", "completing"),
    SettledJob: ("state", "settled"),
    Complete: ("decision", "complete"),
    Fail: ("decision", "fail"),
    Cancel: ("decision", "cancel"),
    OutcomeUnknown: ("decision", "outcome_unknown"),
    Retry: ("decision", "retry"),
}
"""What tells the members of a union apart: a key of the data, and its value."""

_CHECKED_WHEN_MADE = (Job, Recovery, RetryPolicy, Fail, Retry, Complete, Cancel, OutcomeUnknown)

_CHECKED_HERE = (
    Attempt,
    QueuedJob,
    RunningJob,
    CompletingJob,
    SettledJob,
    Admission,
    CancellationResult,
    QueueHead,
    QueueTransition,
    LaneFailure,
    WakeState,
    TickResult,
    SettledPage,
)
"""What only a store makes, from rows that it has checked; JSON data can come from anywhere."""

_OURS = frozenset[Any](_CHECKED_WHEN_MADE + _CHECKED_HERE)

_LIMITS: dict[str, Callable[[Any, str], object]] = {
    **dict.fromkeys(("id", "queue", "lane", "token", "cancellation_id", "job_id"), check_text),
    **dict.fromkeys(("not_before", "lease_until", "settled_at", "next_wake_at"), check_instant),
    "reason": lambda value, _: check_reason(value),
    "priority": lambda value, name: check_integer(value, name, -PRIORITY_LIMIT, PRIORITY_LIMIT),
    "sequence": lambda value, name: check_integer(value, name, 1, 2**63 - 1),
    "recovery_count": lambda value, name: check_integer(value, name, 0, 2**63 - 1),
    "attempt_count": lambda value, name: check_integer(value, name, 0, 2**63 - 1),
    "max_attempts": lambda value, name: check_integer(value, name, 1, PRIORITY_LIMIT),
    "payload": lambda value, _: encode_payload(value),
}
"""By the name of the field: the limits of section 2 of the specification."""


def _is_ours(cls: Any) -> bool:
    return isinstance(cls, type) and cls in _OURS


def _overrides(cls: type) -> Any:
    names = {attribute.name for attribute in attrs.fields(cls)}
    overrides: dict[str, Any] = {}
    if "execution" in names:  # The live side of a job stays in its process.
        overrides["execution"] = override(omit=True)
    if "payload" in names:
        overrides["payload"] = override(unstruct_hook=_plain_payload)
    return overrides


def _our_hook(cls: Any, to: Converter) -> _Hook:
    inner: _Hook = make_dict_structure_fn(cls, to, **_overrides(cls))
    tag = _TAGS.get(cls)
    is_checked = cls in _CHECKED_WHEN_MADE

    def structure(value: Any, _: Any) -> Any:
        source = _require_object(value)
        if tag is not None:
            source = _untagged(source, *tag)
        made = inner(source, cls)
        if not is_checked:
            _check(made)
        return made

    return structure


def _untagged(source: dict[Any, Any], name: str, wanted: str) -> dict[Any, Any]:
    if name not in source:
        raise _Misfit(f"has no {name!r}, which is to be {wanted!r}")
    if source[name] != wanted:
        raise _Misfit(f"has the {name} {shown(source[name])}, not {wanted!r}")
    return {key: value for key, value in source.items() if key != name}


def _our_unstructure_hook(cls: Any, to: Converter) -> Callable[[Any], dict[str, Any]]:
    inner: Callable[[Any], dict[str, Any]] = make_dict_unstructure_fn(cls, to, **_overrides(cls))
    if cls is Job:
        # What was encoded is the job, even if somebody changed the list that it was made from.
        return lambda job: {**inner(job), "payload": decode_payload(job.encoded)}
    if cls not in _TAGS:
        return inner
    name, text = _TAGS[cls]
    return lambda value: {name: text, **inner(value)}


def _check(made: Any) -> None:
    attribute: attrs.Attribute[Any]
    for attribute in made.__attrs_attrs__:
        check = _LIMITS.get(attribute.name)
        value = getattr(made, attribute.name)
        if check is not None and (value is not None or attribute.name == "payload"):
            check(value, attribute.name)
    has_reason = getattr(made, "reason", None) is not None
    if has_reason and made.outcome not in (Outcome.FAILED, Outcome.INTERRUPTED):
        raise InvalidJob(
            f"reason is {shown(made.reason)}, and the outcome {made.outcome};"
            " only failed and interrupted come with a reason"
        )
    if isinstance(made, CancellationResult) and (made.status == "decided") == (
        made.outcome is None
    ):
        raise InvalidJob(
            f"outcome is {shown(made.outcome and str(made.outcome))}, and the status"
            f" {made.status!r}; decided, and nothing else, comes with an outcome"
        )
    if isinstance(made, QueueHead) and (made.state == "idle") != (made.job_id is None):
        raise InvalidJob(
            f"job_id is {shown(made.job_id)}, and the state {made.state!r};"
            " idle, and nothing else, comes without a job"
        )


# -- the converter --------------------------------------------------------------------------------


def _new_converter() -> WatchdogConverter:
    new = WatchdogConverter(
        forbid_extra_keys=True,
        unstruct_collection_overrides={tuple: list, set: list, frozenset: list, deque: list},
    )
    for kind, to_kind in (
        (str, _to_string),
        (int, _to_integer),
        (float, _to_float),
        (bool, _to_boolean),
        (bytes, _to_bytes),
        (NoneType, _to_none),
        (datetime, _to_datetime),
        (date, _to_date),
        (Enum, _to_member),
    ):
        new.register_structure_hook(kind, to_kind)
    new.register_unstructure_hook(str, _plain_string)
    new.register_unstructure_hook(int, _plain_integer)
    new.register_unstructure_hook(datetime, _from_datetime)
    new.register_unstructure_hook(date, date.isoformat)
    new.register_structure_hook_func(lambda kind: get_origin(kind) is Literal, _to_literal)

    # The factory that is registered last is asked first.
    new.register_structure_hook_factory(_is_class, _class_hook)
    new.register_structure_hook_factory(_is_typed_dict, _typed_dict_hook)
    new.register_structure_hook_factory(_is_mapping, _mapping_hook)
    new.register_structure_hook_factory(_is_array, _array_hook)
    new.register_structure_hook_factory(_is_union, _union_hook)
    new.register_structure_hook_factory(_is_ours, _our_hook)
    new.register_unstructure_hook_factory(_is_ours, _our_unstructure_hook)
    return new


converter = _new_converter()
"""Converts every public value to and from plain JSON data, and raises `InvalidJob`.

``converter.unstructure(value)`` gives dicts, lists, strings, numbers, booleans and None, and
``converter.structure(data, SettledJob)`` the value again, checked. Hooks for the application's
own types may be registered, as with any cattrs converter; typed payloads then use them too.
"""


def structure_payload(payload: Any, cls: Any) -> Any:
    """A job's JSON payload as a value of ``cls``: an attrs class, a dataclass, a `TypedDict`...

    Raises `InvalidJob` with one line that says where what was expected, and what was found.
    """
    return converter.structure_payload(payload, cls)


def check_payload_class(cls: Any) -> None:
    """Raise `TypeError` if no payload could be structured to ``cls``, whatever it is."""
    try:
        hash(cls)
        # None need not fit.
        with contextlib.suppress(InvalidJob):
            structure_payload(None, cls)
    except (TypeError, StructureHandlerNotFoundError) as error:
        raise TypeError(
            f"payload is {cls!r:.80}, to which nothing can be structured: {error}"
        ) from error
