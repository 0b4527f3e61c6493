"""How long settled jobs are kept, and their deletion a few at a time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from attrs import field, frozen

from ._errors import InvalidJob, shown
from ._model import (
    PRIORITY_LIMIT,
    check_integer,
    check_seconds,
    check_text,
    seconds_to_milliseconds,
)
from ._wishes import Prune

PRUNE_LIMIT = 500
"""Jobs looked at in one transaction: a few milliseconds, in which others wait on SQLite."""


@frozen
class Retention:
    """Which settled jobs go: those older than ``older_than`` seconds, or beyond the last ``keep``.

    One of the two is needed. With both, only what is older *and* beyond the count goes; for either,
    give two retentions. Of one ``lane`` or one ``queue``, or of all jobs. Given to `open_watchdog`,
    it is carried out every ``every`` seconds (more or less, so that processes do not march in
    step), in transactions of a few hundred jobs. What a reader protects, by
    `Client.protect_settled`, stays.

    An id whose job has gone can be admitted again. Raises `InvalidJob` for values out of range.
    """

    older_than: float | None = None
    keep: int | None = None
    lane: str | None = field(default=None, kw_only=True)
    queue: str | None = field(default=None, kw_only=True)
    every: float = field(default=60.0, kw_only=True)

    def __attrs_post_init__(self) -> None:
        if self.older_than is None and self.keep is None:
            raise InvalidJob("neither older_than nor keep is given; one of them says what goes")
        if self.older_than is not None:
            check_seconds(self.older_than, "older_than")
        if self.keep is not None:
            check_integer(self.keep, "keep", 0, PRIORITY_LIMIT)
        if self.lane is not None and self.queue is not None:
            raise InvalidJob(
                f"lane {shown(self.lane)} and queue {shown(self.queue)} are both given;"
                " name one of them, or neither for all jobs"
            )
        for name in ("lane", "queue"):
            value: str | None = getattr(self, name)
            if value is not None:
                check_text(value, name)
        check_seconds(self.every, "every", positive=True)


async def prune(ask: Callable[[Prune], Awaitable[int]], retention: Retention, now: int) -> int:
    """Delete what ``retention`` lets go at ``now`` (ms), batch by batch; says how many jobs."""
    before = None
    if retention.older_than is not None:
        # What is exactly so old goes.
        before = now - seconds_to_milliseconds(retention.older_than) + 1
    wish = Prune(before, retention.keep, retention.lane, retention.queue, PRUNE_LIMIT)
    total = 0
    while True:
        count = await ask(wish)
        total += count
        # Fewer than were looked at: the rest has to stay. Not merely none, for while jobs settle
        # there is always one more beyond `keep`; not merely fewer, for somebody may lock a few.
        if count <= PRUNE_LIMIT // 2:
            return total
