"""What the load, the workers and the judge have agreed on."""

from __future__ import annotations

import signal

from trio_watchdog import Retention

LEASE = 4.0
"""Seconds. A worker stops a tenth of that before its lease ends, and a machine that is busy with
two stores, a server and six workers may well take a worker's time away for some tenths of a second.
"""

HEARTBEAT = 1.0

ATTEMPTS = 8
"""Of every lane's policy. More than a payload asks for, since crashes take attempts, too."""

TIME_LIMIT = 0.6
"""Seconds of the lane that has one."""

OVERRUN = 5.0
"""Seconds that a handler works which is to be stopped by its time limit: long enough to see that it
was not."""

RETENTION = Retention(older_than=20.0, keep=300, every=10.0)
"""Short, so that pruning runs beside everything else, and an hour needs no more room than a minute.
The reader protects what it has not read."""

RIGHT, AHEAD, BEHIND = signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2
"""What a worker's wall clock is set to by these signals."""

TRY_LATER = 75
"""Exit code of a worker that could not open the database, since the server was away. Whoever starts
it (a service manager elsewhere, the soak here) starts it again. `EX_TEMPFAIL`, elsewhere."""
