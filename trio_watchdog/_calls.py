"""What operations are made of: calls, and what they did.

An operation is a generator that yields calls and is sent their rows. While it runs it writes down,
in `Effects`, what others will want to know once its transaction has been committed.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from typing import Any, TypeVar

from attrs import define, field, frozen

from . import _statements as sql
from ._rows import Row

T = TypeVar("T")

Parameters = Mapping[str, Any]


@frozen(eq=False)
class Call:
    """A statement to execute, or the caller's own SQL where ``statement`` is text."""

    statement: sql.Statement | str
    parameters: Parameters | Sequence[Any]


Rows = list[Row]
Operation = Generator[Call | tuple[Call, ...], Any, T]
"""Yields one call and is sent its rows, or a tuple of calls that may travel together."""


@define(eq=False)
class Effects:
    """What a transaction did that others want to know, once it has been committed."""

    payload_limit: int
    lockable: int = 0
    """Locks of queues that admissions may still try: of a transaction of ours that ends soon."""
    cancelled: bool = False
    claims: set[str] = field(factory=set[str])
    settled: set[str] = field(factory=set[str])
    transitions: list[tuple[str, str | None]] = field(factory=list[tuple[str, "str | None"]])
    """Queue and settled job id of each transition, in order, for the projector."""
    _now: dict[str, int] = field(factory=dict[str, int])
    _later: dict[str, int] = field(factory=dict[str, int])

    def claimable(self, lane: str, due: int, count: int = 1) -> None:
        """Jobs of the lane may be claimable from ``due`` on; 0 is now."""
        if due > 0:
            self._later[lane] = min(due, self._later.get(lane, due))
        else:
            self._now[lane] = self._now.get(lane, 0) + count

    def claimed(self, lane: str) -> None:
        """A job of the lane is not claimable any more: nobody need be woken for one of those."""
        self._now[lane] = max(self._now.get(lane, 0) - 1, 0)

    @property
    def lanes(self) -> dict[str, int]:
        """Lane to the earliest instant at which a job of it may be claimable; 0 is now."""
        return self._later | {lane: 0 for lane, count in self._now.items() if count}

    @property
    def later(self) -> int | None:
        """The earliest instant at which jobs may be claimable that are not now."""
        return min(self._later.values(), default=None)

    def moved(self, queue: str, settled_id: str | None = None) -> None:
        """Something about the queue changed."""
        self.transitions.append((queue, settled_id))
        if settled_id is not None:
            self.settled.add(settled_id)

    @property
    def concern_others(self) -> bool:
        """Whether another process may have something to do now."""
        return bool(self.lanes or self.cancelled or self.claims)

    def merge(self, other: Effects) -> None:
        """Add what another transaction did."""
        for lane, due in other._later.items():
            self.claimable(lane, due)
        for lane, count in other._now.items():
            self.claimable(lane, 0, count)
        self.cancelled |= other.cancelled
        self.claims |= other.claims
        self.settled |= other.settled


def one(statement: sql.Statement, **parameters: Any) -> Call:
    """A call with named parameters."""
    return Call(statement, parameters)


def many(statement: sql.Statement, rows: Sequence[Sequence[Any]], **parameters: Any) -> Call:
    """A call whose ``{rows}`` are the given ones."""
    return Call(statement, {"rows": json.dumps(rows), **parameters})


def promoted(raised: Rows, effects: Effects) -> None:
    for lane, hint, not_before, _ in raised:
        is_deferred = hint == "deferred" and isinstance(not_before, int)
        effects.claimable(lane, not_before if is_deferred else 0)
