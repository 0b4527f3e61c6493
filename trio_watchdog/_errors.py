"""The error tree.

::

    WatchdogError                     kind
    ├── StoreUnavailable              store_unavailable     the database is out of reach or locked
    ├── StoreInvalid                  store_invalid         the database holds or was given nonsense
    │   ├── InvalidJob (ValueError)                         a value breaks a limit
    │   └── JobConflict                                     the id is taken by a different job
    ├── ClaimUnavailable              claim_unavailable     a claim could not be kept
    ├── ExecutionFailed               execution_failed      a handler could not be run at all
    ├── SettlementRejected            settlement_rejected   a projector or hook refused a transition
    ├── WakeUnavailable               wake_unavailable      change detection does not work
    └── LivenessUnavailable           liveness_unavailable  ``is_alive`` raised

A refusal that callers plan for (``conflict``, ``replayed``) is a value, never one of these.
The original exception, if there is one, is the ``__cause__``.
"""

from __future__ import annotations

from typing import ClassVar, Literal

ErrorKind = Literal[
    "store_unavailable",
    "store_invalid",
    "claim_unavailable",
    "execution_failed",
    "settlement_rejected",
    "wake_unavailable",
    "liveness_unavailable",
]


def shown(value: object, limit: int = 80) -> str:
    """A value for a message: one line, cut at ``limit``, whatever its ``repr`` does."""
    try:
        text = repr(value).replace("\n", " ")
    except Exception:  # An integer of more than 4300 digits is enough.
        text = f"<{type_name(value)} whose repr raises>"
    return text if len(text) <= limit else text[: limit - 1] + "…"


def type_name(value: object) -> str:
    """The name of a value's type, whatever its metaclass does."""
    try:
        return str(type(value).__name__)
    except Exception:  # A property of the metaclass may raise anything.
        return "a type whose name raises"


class WatchdogError(Exception):
    """Base of everything this package raises on purpose."""

    kind: ClassVar[ErrorKind]


class StoreUnavailable(WatchdogError):
    """The database could not be reached, or stayed locked; trying again later may help."""

    kind = "store_unavailable"


class StoreInvalid(WatchdogError):
    """The database is foreign, corrupt, or of another version; trying again will not help."""

    kind = "store_invalid"


class InvalidJob(StoreInvalid, ValueError):
    """A value breaks a limit; the message names the value and the limit."""


class JobConflict(StoreInvalid):
    """The id belongs to a job that differs in queue, lane, priority, payload or recovery."""


class ClaimUnavailable(WatchdogError):
    """A claim is no longer ours.

    Logged, as the record's first argument, and never raised: the supervisor decides about the job.
    """

    kind = "claim_unavailable"


class ExecutionFailed(WatchdogError):
    """A handler could not be run at all, or broke the rules of its lane."""

    kind = "execution_failed"


class SettlementRejected(WatchdogError):
    """A projector raised, so the transition it was told about was rolled back."""

    kind = "settlement_rejected"


class WakeUnavailable(WatchdogError):
    """Changes made elsewhere cannot be noticed except by the slow poll.

    Logged, as the record's first argument, and never raised: work goes on, and so do the attempts.
    """

    kind = "wake_unavailable"


class LivenessUnavailable(WatchdogError):
    """``is_alive`` raised, so nothing was decided about the claim.

    Logged, as the record's first argument, and never raised: it is asked again later.
    """

    kind = "liveness_unavailable"
