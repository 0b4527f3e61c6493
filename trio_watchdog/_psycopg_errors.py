"""psycopg's errors as ours, and which of them are worth another try."""

from __future__ import annotations

import re

import psycopg

from ._errors import StoreInvalid, StoreUnavailable, WatchdogError
from ._operations import Locked

_UNAVAILABLE = ("08", "40", "53", "55", "57", "58")
"""Classes of SQLSTATE that say something of the moment, not of what was asked."""

_READ_ONLY = "25006"
"""A standby, or an administrator's switch."""

_TOO_SLOW = ("25P03", "25P04")
"""The server ended a session that left its transaction idle or open for too long: the network."""

_GONE = ("08", "53100", "53300", "57P", _READ_ONLY, *_TOO_SLOW)
"""SQLSTATEs that would meet every other statement, too."""

_MISUSED = (psycopg.ProgrammingError, psycopg.DataError, psycopg.NotSupportedError)
"""Without an SQLSTATE: psycopg itself cannot send what it was given, or read what came back."""

_ADVICE = {
    "42501": "grant the role what the page on PostgreSQL lists",
    "42P01": "open the database once with open_client, or name its schema",
    "3D000": "create the database first",
    # Statements that were prepared are not there, or others are: it was another server session.
    "26000": "behind a pooler of transactions open with prepare=False and listen=False",
    "42P05": "behind a pooler of transactions open with prepare=False and listen=False",
}

_OUR_TABLE = re.compile(r"\.(jobs|meta|readers|recheck)\b")
"""How the server names our tables, always with their schema, in any language."""

_CONNECTING = {
    r'database ".*" does not exist': "create the database first",
    r"password authentication failed|no password supplied": "check user and password in the URL",
    r"too many (clients|connections)|connection slots": "use fewer processes, or a pooler",
}
"""What went wrong while connecting has no SQLSTATE, only words; these are the common ones."""


def store_error(error: psycopg.Error, doing: str) -> WatchdogError:
    """The project's error for one of psycopg's: unavailable if waiting may help, else invalid."""
    state = error.sqlstate or ""
    is_unavailable = (
        isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError))
        or state.startswith((*_UNAVAILABLE, _READ_ONLY, *_TOO_SLOW))
        or is_stale(error)
        or not (state or isinstance(error, _MISUSED))
    )
    text = " ".join(str(error).split())
    is_callers = state == "42P01" and not _OUR_TABLE.search(error.diag.message_primary or "")
    if state in _ADVICE and not is_callers:
        text += f"; {_ADVICE[state]}"
    elif not state:
        text += "".join(
            f"; {advice}" for words, advice in _CONNECTING.items() if re.search(words, text)
        )
    kind = StoreUnavailable if is_unavailable else StoreInvalid
    if isinstance(error, psycopg.errors.LockNotAvailable):
        kind = Locked
    wrapped = kind(f"PostgreSQL, while {doing}: {text}")
    wrapped.__cause__ = error
    return wrapped


def is_refusal(error: Exception) -> bool:
    """Whether the server has answered, and refused what was asked rather than everything."""
    cause = error.__cause__
    return (
        isinstance(cause, psycopg.Error)
        and cause.sqlstate is not None
        and not cause.sqlstate.startswith(_GONE)
    )


def is_lost_race(error: psycopg.Error) -> bool:
    """A deadlock, or another claim was first: nothing has happened, and the same may go well."""
    if isinstance(error, (psycopg.errors.DeadlockDetected, psycopg.errors.SerializationFailure)):
        return True
    return _violates(error, "jobs_single_flight")


def is_stale(error: BaseException | None) -> bool:
    """As `is_lost_race`; or what was read before is no longer true, so read it again."""
    if not isinstance(error, psycopg.Error):
        return False
    return is_lost_race(error) or _violates(error, "jobs_cancellation")


def _violates(error: psycopg.Error, constraint: str) -> bool:
    return (
        isinstance(error, psycopg.errors.UniqueViolation)
        and error.diag.constraint_name == constraint
    )
