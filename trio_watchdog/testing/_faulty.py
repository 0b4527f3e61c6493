"""A store that fails when it is told to: before a wish takes effect, or after."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import trio
from attrs import define, field

from .. import _operations as operations
from .. import _wishes as wishes
from .._errors import StoreUnavailable
from .._store import Change, Renewer, Store, Vital
from .._wishes import Renewal, Wish

VERBS: dict[str, type[Wish[Any]]] = {
    operation.__name__: kind for kind, operation in operations.OPERATIONS.items()
} | {
    "retry": wishes.RetryJob,
    "wake_state": wishes.ReadWakeState,
}
"""Names of operations, as the store's verbs have them, and the wishes that they stand for."""

Error = Exception | Callable[[], Exception]


@define(eq=False)
class Fault:
    """What `FaultyStore.fail` and `FaultyStore.delay` set up; `remove` takes it back."""

    kind: type[Wish[Any]] | None
    when: Literal["before", "after"]
    on_call: int
    times: int | None
    error: Error | None
    seconds: float
    calls: int = field(default=0, init=False)
    """Matching exchanges seen since it was set up."""
    struck: int = field(default=0, init=False)
    """How often it has struck."""
    is_removed: bool = field(default=False, init=False)

    def remove(self) -> None:
        """Strike no more."""
        self.is_removed = True

    def strikes(self, asked: Sequence[Wish[Any]]) -> bool:
        """Count one exchange with the store, and say whether it is to be hit."""
        if self.is_removed:
            return False
        if self.kind is not None and not any(type(wish) is self.kind for wish in asked):
            return False
        self.calls += 1
        if self.calls < self.on_call:
            return False
        if self.times is not None and self.struck >= self.times:
            return False
        self.struck += 1
        return True

    def raised(self) -> None:
        """Raise a fresh error."""
        if self.error is None:
            return
        if callable(self.error):
            raise self.error()
        copy = type(self.error)(*self.error.args)
        copy.__cause__ = self.error.__cause__
        raise copy


class FaultyStore(Store):
    """Stands in front of a store, counts what is asked, and fails or delays some of it.

    ::

        faulty = FaultyStore(store)
        faulty.fail("decide", when="after")  # the next decision is made, its answer lost
        faulty.fail("claim", on_call=3, times=2)  # the third and fourth claim are refused
        faulty.fail(on_call=k, times=None)  # from the k-th exchange on, everything
        faulty.delay("renew", 5.0)
        ...
        assert faulty.calls["claim"] == 4

    A verb is named as the store's method is; None stands for all. What is hit is the whole
    exchange that the wish is part of, as with a real connection: ``"before"``, nothing of it has
    happened; ``"after"``, all of it has, and nobody was told. Renewals from the renewal thread
    count and fail like those on the loop.
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store = store
        self.owner = store.owner
        self.payload_limit = store.payload_limit
        self.is_joint = store.is_joint
        # The very list, so that whoever listens here hears what the store reports.
        self.on_change = store.on_change
        self.calls: Counter[str] = Counter()
        """How often each operation was asked for."""
        self.exchanges = 0
        """How often the store was asked, whatever for."""
        self._faults: list[Fault] = []

    def fail(
        self,
        verb: str | type[Wish[Any]] | None = None,
        *,
        when: Literal["before", "after"] = "before",
        on_call: int = 1,
        times: int | None = 1,
        error: Error | None = None,
    ) -> Fault:
        """Fail the ``on_call``-th matching exchange from now on, and ``times - 1`` after it.

        ``times`` None: for ever, or until the returned fault is removed. ``error`` is by default
        `StoreUnavailable`; give a callable to have each made anew.
        """
        cause = error or StoreUnavailable(f"made to fail {when} its effect")
        return self._add(Fault(_kind(verb), when, on_call, times, cause, 0.0))

    def delay(
        self,
        verb: str | type[Wish[Any]] | None,
        seconds: float,
        *,
        when: Literal["before", "after"] = "before",
        on_call: int = 1,
        times: int | None = 1,
    ) -> Fault:
        """Keep matching exchanges waiting: their wishes before they are sent, or their answers.

        A wait before is cancellable; one after is not, for the answer must not be lost. It does
        not touch the renewal thread, which must never wait on purpose.
        """
        return self._add(Fault(_kind(verb), when, on_call, times, None, seconds))

    def heal(self) -> None:
        """Remove every fault and delay."""
        for fault in self._faults:
            fault.remove()
        self._faults.clear()

    def _add(self, fault: Fault) -> Fault:
        self._faults.append(fault)
        return fault

    def _count(self, asked: Sequence[Wish[Any]]) -> list[Fault]:
        self.exchanges += 1
        for wish in asked:
            self.calls[operations.OPERATIONS[type(wish)].__name__] += 1
        return [fault for fault in self._faults if fault.strikes(asked)]

    # -- the store's side -------------------------------------------------------------------------

    async def submit(self, *asked: Wish[Any]) -> list[Any]:
        hit = self._count(asked)
        for fault in _of(hit, "before"):
            await trio.lowlevel.checkpoint()
            if fault.seconds:
                await trio.sleep(fault.seconds)
            fault.raised()
        answers = await self.store.submit(*asked)
        for fault in _of(hit, "after"):
            if fault.seconds:
                with trio.CancelScope(shield=True):
                    await trio.sleep(fault.seconds)
            fault.raised()
        return answers

    async def watch(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        await self.store.watch(task_status=task_status)

    def open_renewer(self) -> AbstractContextManager[Renewer] | None:
        opening = self.store.open_renewer()
        return None if opening is None else self._renewer(opening)

    @contextmanager
    def _renewer(self, opening: AbstractContextManager[Renewer]) -> Generator[Renewer]:
        with opening as inner:

            def renew(claims: Sequence[wishes.Renew]) -> Sequence[Renewal]:
                hit = self._count(claims)
                for fault in _of(hit, "before"):
                    fault.raised()
                answers = inner(claims)
                for fault in _of(hit, "after"):
                    fault.raised()
                return answers

            yield renew

    async def dead_owners(self) -> tuple[str, ...]:
        return await self.store.dead_owners()

    def now(self) -> int | None:
        return self.store.now()

    async def vitals(self) -> list[Vital]:
        return await self.store.vitals()

    def report(self, change: Change) -> None:
        self.store.report(change)


def _kind(verb: str | type[Wish[Any]] | None) -> type[Wish[Any]] | None:
    if not isinstance(verb, str):
        return verb
    if verb not in VERBS:
        raise ValueError(f"verb is {verb!r}; one of {', '.join(sorted(VERBS))} is needed")
    return VERBS[verb]


def _of(faults: Sequence[Fault], when: str) -> Iterator[Fault]:
    return (fault for fault in faults if fault.when == when)
