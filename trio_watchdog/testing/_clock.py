"""One clock for both worlds: the store's instants and, if wanted, Trio's deadlines."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from trio.testing import MockClock

from .._model import to_instant

TICK = 0.001
"""The smallest step of durable time, in seconds: a store keeps whole milliseconds."""

DEFAULT_START = datetime(2031, 7, 5, 12, 0, tzinfo=UTC)
"""Far from the present, so that code that asks the host's clock by mistake is found out."""


class DurableClock:
    """What judges due times and leases in a test; it moves when it is told to.

    Give it to a store that runs inline: ``open_store(connection, clock=clock)``. Alone, it stands
    still between calls of `advance`. With ``trio_clock``, the run's `trio.testing.MockClock`, the
    two are one: `advance` moves leases, due times and Trio deadlines together, and so do
    autojumps::

        mock_clock = trio.testing.MockClock(autojump_threshold=0)
        clock = DurableClock(trio_clock=mock_clock)
        ...
        trio.run(main, clock=mock_clock)

    Due times are judged by wall time and leases by a time that nobody can set; `step` moves the
    one and not the other, as an administrator or NTP would.
    """

    def __init__(
        self, start: datetime = DEFAULT_START, *, trio_clock: MockClock | None = None
    ) -> None:
        self._start = round(start.timestamp() * 1000)
        self._trio_clock = trio_clock
        self._trio_start = 0.0 if trio_clock is None else trio_clock.current_time()
        self._advanced = 0
        self._stepped = 0

    def now(self) -> int:
        """The instant that judges due times, in milliseconds since the epoch."""
        return self.lease_now() + self._stepped

    def lease_now(self) -> int:
        """The instant that judges leases, in milliseconds since the epoch."""
        elapsed = self._advanced
        if self._trio_clock is not None:
            # Rounded: the sum of a few floats must not end one tick before the exact instant.
            elapsed += round((self._trio_clock.current_time() - self._trio_start) * 1000)
        return self._start + elapsed

    def instant(self, after: float = 0.0) -> datetime:
        """The aware datetime ``after`` seconds from now, for a job's ``not_before``."""
        return to_instant(self.now()) + timedelta(milliseconds=round(after * 1000))

    def advance(self, seconds: float) -> None:
        """Let time pass, for durable instants and for Trio's deadlines if it is tied to them."""
        milliseconds = round(seconds * 1000)
        if milliseconds < 0:
            raise ValueError(f"seconds is {seconds!r}; time goes on, and only `step` turns it back")
        if self._trio_clock is None:
            self._advanced += milliseconds
        else:
            self._trio_clock.jump(milliseconds / 1000)

    def advance_to(self, instant: datetime) -> None:
        """Let time pass until ``instant``, exactly; nothing happens when it is past."""
        missing = (instant - to_instant(self.now())) / timedelta(milliseconds=1)
        self.advance(max(0, round(missing)) / 1000)

    def step(self, seconds: float) -> None:
        """Set the wall clock forward or back; leases and deadlines do not notice."""
        self._stepped += round(seconds * 1000)
