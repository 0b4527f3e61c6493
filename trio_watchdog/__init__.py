"""A durable job runtime for Trio: jobs are rows, lanes are tasks, and a lost lease is a cancelled
scope.

::

    async with open_watchdog("sqlite:jobs.db") as watchdog:
        await watchdog.start_lane("mail", send_mail, retry=RetryPolicy(max_attempts=5))
        await watchdog.enqueue(Job("mail", {"to": "ada@example.org"}, queue="ada"))
"""

from __future__ import annotations

from ._borrowed import enqueue_statement, transactional
from ._client import Client, open_client
from ._converter import converter
from ._doctor import Finding
from ._errors import (
    ClaimUnavailable,
    ExecutionFailed,
    InvalidJob,
    JobConflict,
    LivenessUnavailable,
    SettlementRejected,
    StoreInvalid,
    StoreUnavailable,
    WakeUnavailable,
    WatchdogError,
)
from ._handlers import asyncio_handler, thread_handler
from ._lane import OTHERS, Lane, Lanes, LaneStatistics
from ._model import (
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
)
from ._retention import Retention
from ._watchdog import Watchdog, WatchdogStatistics, open_watchdog

__all__ = [
    "OTHERS",
    "Admission",
    "Attempt",
    "Cancel",
    "CancellationResult",
    "ClaimUnavailable",
    "Client",
    "Complete",
    "CompletingJob",
    "ExecutionFailed",
    "Fail",
    "Finding",
    "InvalidJob",
    "Job",
    "JobConflict",
    "Lane",
    "LaneFailure",
    "LaneStatistics",
    "Lanes",
    "LivenessUnavailable",
    "Outcome",
    "OutcomeUnknown",
    "QueueHead",
    "QueueTransition",
    "QueuedJob",
    "Recovery",
    "Retention",
    "Retry",
    "RetryPolicy",
    "RunningJob",
    "SettledJob",
    "SettledPage",
    "SettlementRejected",
    "StoreInvalid",
    "StoreUnavailable",
    "TickResult",
    "WakeState",
    "WakeUnavailable",
    "Watchdog",
    "WatchdogError",
    "WatchdogStatistics",
    "asyncio_handler",
    "converter",
    "enqueue_statement",
    "open_client",
    "open_watchdog",
    "thread_handler",
    "transactional",
]
