"""What the store checks need to know about a kind of store."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from types import ModuleType
from typing import Any, Literal, TypeVar

from .._payload import PAYLOAD_LIMIT
from .._store import Project, Store
from ._clock import DurableClock

Capability = Literal["beside", "step", "raw_sql"]
"""What a maker may offer beyond opening a store.

``beside``: further stores on the same database, by `StoreMaker.beside`. ``step``: the clock's
wall time can be set without leases noticing. ``raw_sql``: statements by hand, by
`StoreMaker.execute`, and rows that the database's own checks would refuse, by
`StoreMaker.break_rows`.
"""


class StoreMaker(ABC):
    """Opens stores of one kind, each on a fresh database with a clock that a test can move.

    Subclass it to run `STORE_CHECKS` on a store of yours::

        class MyStores(StoreMaker):
            def __call__(self, *, project=None, payload_limit=PAYLOAD_LIMIT):
                return self._open(project, payload_limit)

            @asynccontextmanager
            async def _open(self, project, payload_limit):
                clock = DurableClock()
                async with open_my_store(clock=clock, project=project, ...) as store:
                    yield store, clock


        @pytest.mark.parametrize("check", STORE_CHECKS)
        async def test_my_store(check):
            open_store = MyStores()
            if missing := missing_capabilities(check, open_store):
                pytest.skip(f"needs {missing}")
            await check(open_store)
    """

    can: frozenset[Capability] = frozenset()
    """The capabilities; checks that need others are to be left out."""

    @abstractmethod
    def __call__(
        self, *, project: Project | None = None, payload_limit: int = PAYLOAD_LIMIT
    ) -> AbstractAsyncContextManager[tuple[Store, DurableClock]]:
        """A store on a fresh, empty database, and the clock that judges its instants."""

    def beside(self, store: Store) -> AbstractAsyncContextManager[Store]:
        """Another store on the database of ``store``, with the same clock."""
        raise NotImplementedError("this maker lacks the capability 'beside'")

    async def execute(
        self, store: Store, sql: str, parameters: Mapping[str, Any] | None = None
    ) -> list[tuple[Any, ...]]:
        """Rows of one statement, run and committed on the store's database by hand.

        ``{jobs}`` in the statement is the table; parameters are spelled ``:name``. The database's
        refusal to take a row is raised as the driver raises it.
        """
        raise NotImplementedError("this maker lacks the capability 'raw_sql'")

    async def break_rows(
        self, store: Store, sql: str, parameters: Mapping[str, Any] | None = None
    ) -> None:
        """As `execute`, with as many of the database's own checks switched off as it allows."""
        raise NotImplementedError("this maker lacks the capability 'raw_sql'")


StoreCheck = Callable[[StoreMaker], Awaitable[None]]
"""A promise of every store; its name is the sentence that says what is promised."""

C = TypeVar("C", bound=StoreCheck)

_needs: dict[StoreCheck, frozenset[Capability]] = {}
_checks: list[StoreCheck] = []


def store_check(*needs: Capability) -> Callable[[C], C]:
    """Add an async function to the suite, with the capabilities that it needs."""

    def add(check: C) -> C:
        _needs[check] = frozenset(needs)
        _checks.append(check)
        return check

    return add


def checks_of(*modules: ModuleType) -> tuple[StoreCheck, ...]:
    """The checks that these modules added, in the order of the source."""
    return tuple(
        check for module in modules for check in _checks if check.__module__ == module.__name__
    )


def missing_capabilities(check: StoreCheck, open_store: StoreMaker) -> list[Capability]:
    """What ``check`` needs and ``open_store`` does not offer; empty if it can be run."""
    return sorted(_needs.get(check, frozenset()) - open_store.can)
