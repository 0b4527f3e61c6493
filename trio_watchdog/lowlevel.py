"""Wishes, operations, statements and dialects, for people who write a store or a loop of their own.

`operations` answers wishes as generators of calls, `statements` has their SQL, `rules` every
decision; a store executes them. `Exchange` collects the wishes of many tasks. `open_store` opens
what a ``database`` argument names. `TrioConnection` is psycopg on Trio, from the extra `postgres`.
"""

from typing import TYPE_CHECKING, Any

from . import _operations as operations
from . import _rules as rules
from . import _statements as statements
from . import _wishes as wishes
from ._exchange import Exchange
from ._open import open_store
from ._operations import Call, Effects, Operation
from ._statements import Dialect, Statement

if TYPE_CHECKING:
    from ._psycopg import TrioConnection

__all__ = [
    "Call",
    "Dialect",
    "Effects",
    "Exchange",
    "Operation",
    "Statement",
    "TrioConnection",
    "open_store",
    "operations",
    "rules",
    "statements",
    "wishes",
]


def __getattr__(name: str) -> Any:
    # Not before it is asked for: the module needs psycopg.
    if name == "TrioConnection":
        from ._psycopg import TrioConnection

        return TrioConnection
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
