"""Several statements and their commit in one trip to the server and back.

psycopg's own pipeline makes a cursor and adapts parameters for each statement, which costs more
than the server needs to execute it. A store's statements are few and known: they are prepared once
for each connection, and their parameters and results are texts and numbers. So this module sends
them through libpq itself. All that lies between two synchronisation points is one transaction.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from attrs import define, field, frozen
from psycopg import errors
from psycopg.pq import ExecStatus

from ._psycopg import TrioConnection, Wait

if TYPE_CHECKING:
    from psycopg.abc import PQGen
    from psycopg.pq.abc import PGconn, PGresult

_NAMED = re.compile(r"%\(([a-z_]+)\)s")

_INTEGERS = (20, 21, 23, 26)
_DECODERS: dict[int, Callable[[bytes], Any]] = {
    16: lambda value: value == b"t",
    701: float,
    **dict.fromkeys(_INTEGERS, int),
}
"""By type; everything else is text."""


@frozen
class Numbered:
    """A statement with ``$1`` for its parameters, and their names in order."""

    text: bytes
    names: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> Numbered:
        """From a text with ``%(name)s``."""
        names: dict[str, int] = {}
        numbered = _NAMED.sub(lambda m: f"${names.setdefault(m[1], len(names) + 1)}", text)
        return cls(numbered.encode(), tuple(names))


@define(eq=False)
class Prepared:
    """What one connection has prepared. ``None`` as a connection's: prepare nothing."""

    names: dict[str, tuple[bytes, Numbered]] = field(factory=dict[str, "tuple[bytes, Numbered]"])
    count: int = 0


@frozen(eq=False)
class Result:
    """Rows of one statement, and how many rows it changed."""

    rows: list[tuple[Any, ...]]
    changed: int


async def trip(
    connection: TrioConnection[Any],
    prepared: Prepared | None,
    statements: Sequence[tuple[str, Mapping[str, Any]]],
) -> list[Result]:
    """Execute the statements in one transaction, which is committed when this returns.

    Raises psycopg's error of the first one that failed; then nothing has happened. Cancelled, it
    leaves the connection as `TrioConnection.wait` says.
    """
    async with connection.lock:
        return await connection.wait(_trip_gen(connection.pgconn, prepared, statements))


def _trip_gen(
    pgconn: PGconn,
    prepared: Prepared | None,
    statements: Sequence[tuple[str, Mapping[str, Any]]],
) -> PQGen[list[Result]]:
    known = {} if prepared is None else dict(prepared.names)
    fresh: dict[str, tuple[bytes, Numbered]] = {}
    sends: list[Callable[[], None]] = []
    # Results that only say that a statement was prepared, by position.
    preparations: set[int] = set()
    # All is made ready before anything is sent: a value that cannot be must not leave half a trip.
    for text, parameters in statements:
        if prepared is None:
            numbered = Numbered.of(text)
            values = _values(numbered, parameters)
            sends.append(partial(pgconn.send_query_params, numbered.text, values))
            continue
        if text not in known:
            # A new name each time: a failed trip leaves its preparations in the dark.
            prepared.count += 1
            known[text] = fresh[text] = (b"w%d" % prepared.count, Numbered.of(text))
            preparations.add(len(sends))
            sends.append(partial(pgconn.send_prepare, known[text][0], known[text][1].text))
        name, numbered = known[text]
        sends.append(partial(pgconn.send_query_prepared, name, _values(numbered, parameters)))
    pgconn.enter_pipeline_mode()
    for send in sends:
        send()
    pgconn.pipeline_sync()
    results = yield from _results(pgconn)
    pgconn.exit_pipeline_mode()
    failed = [result for result in results if result.status == ExecStatus.FATAL_ERROR]
    if failed:
        raise errors.error_from_result(failed[0])
    if prepared is not None:
        prepared.names |= fresh
    return [_decoded(result) for index, result in enumerate(results) if index not in preparations]


def _values(numbered: Numbered, parameters: Mapping[str, Any]) -> list[bytes | None]:
    values: list[bytes | None] = []
    for name in numbered.names:
        value = parameters[name]
        values.append(None if value is None else str(value).encode())
    return values


def _results(pgconn: PGconn) -> PQGen[list[PGresult]]:
    """All results up to the synchronisation point, while what is left to send is sent."""
    results: list[PGresult] = []
    is_sent = pgconn.flush() == 0
    while True:
        ready = yield (Wait.R if is_sent else Wait.RW)
        if not is_sent:
            is_sent = pgconn.flush() == 0
        # None: whoever winds up a cancelled trip has taken up this generator in the middle.
        if not ready or not ready & Wait.R:
            continue
        pgconn.consume_input()
        while not pgconn.is_busy():
            result = pgconn.get_result()
            if result is None:
                # Ends one statement's results; a second one means that nothing is there yet.
                result = pgconn.get_result() if not pgconn.is_busy() else None
                if result is None:
                    break
            if result.status == ExecStatus.PIPELINE_SYNC:
                _tell_notifies(pgconn)
                return results
            results.append(result)


def _tell_notifies(pgconn: PGconn) -> None:
    while (notification := pgconn.notifies()) is not None:
        if pgconn.notify_handler is not None:
            pgconn.notify_handler(notification)


def _decoded(result: PGresult) -> Result:
    decoders = [_DECODERS.get(result.ftype(column)) for column in range(result.nfields)]
    rows: list[tuple[Any, ...]] = []
    for row in range(result.ntuples):
        values: list[Any] = []
        for column, decode in enumerate(decoders):
            value = result.get_value(row, column)
            if value is None:
                values.append(None)
            elif decode is None:
                values.append(value.decode())
            else:
                values.append(decode(value))
        rows.append(tuple(values))
    return Result(rows, result.command_tuples or 0)


__all__ = ["Numbered", "Prepared", "Result", "trip"]
