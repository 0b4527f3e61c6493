"""Whatever a store is asked, and whatever lies in its table, ends in an answer or a known error."""

# ruff: noqa: PT017  (an error is allowed here, and so is none)

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

import trio
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.tools import anything, examples, instants, numbers, texts
from trio_watchdog import (
    Client,
    Job,
    Recovery,
    RetryPolicy,
    WatchdogError,
    open_client,
)
from trio_watchdog import _wishes as w
from trio_watchdog._model import Outcome
from trio_watchdog._rules import Settle
from trio_watchdog._sqlite import Engine, prepare
from trio_watchdog.testing import DurableClock

DONE = Settle(Outcome.COMPLETED)

# -- arguments ------------------------------------------------------------------------------------


def asked(data: st.DataObject, client: Client) -> Callable[[], Awaitable[Any]]:
    """Some operation of a client with some arguments."""
    text = st.one_of(texts, anything)
    number = st.one_of(numbers, anything)
    draw = data.draw
    return draw(
        st.sampled_from(
            [
                lambda: client.read(draw(text)),
                lambda: client.cancel(draw(text), cancellation_id=draw(text)),
                lambda: client.cancel(
                    "j", cancellation_id=draw(text), only_if_queued=draw(anything)
                ),
                lambda: client.read_queue_head(draw(text)),
                lambda: client.read_latest_settled(draw(text)),
                lambda: client.read_settled(draw(number), draw(text), draw(text)),
                lambda: client.list_jobs(draw(text), draw(text), draw(text), draw(number)),
                lambda: client.fail_lane(draw(text), draw(text)),
                lambda: client.purge_queue(draw(text)),
                lambda: client.wake_state(draw(st.one_of(instants, anything))),
                lambda: client.prune(
                    older_than=draw(number),
                    keep=draw(number),
                    lane=draw(st.one_of(st.none(), text)),
                    queue=draw(st.one_of(st.none(), text)),
                ),
                lambda: client.protect_settled(draw(text), draw(text)),
                lambda: client.release_settled(draw(text)),
                lambda: client.explain(draw(text)),
            ]
        )
    )


async def accept(ask: Callable[[], Awaitable[Any]]) -> None:
    """An answer or one of the documented errors, whose text can be printed."""
    try:
        await ask()
    except WatchdogError as error:
        str(error).encode()
        assert "\n" not in str(error)


@examples(60)
@given(data=st.data())
def test_any_argument_is_answered_or_refused(data: st.DataObject) -> None:
    async def main() -> None:
        async with open_client("sqlite::memory:", retry_for=0) as client:
            await client.enqueue(Job("a", id="j", queue="q"))
            for _ in range(3):
                await accept(asked(data, client))
            # And it goes on.
            assert (await client.enqueue(Job("b"))).status == "queued"

    trio.run(main)


@examples(35)
@given(
    names=st.lists(texts, min_size=5, max_size=5),
    payload=anything,
    priority=st.integers(-(2**53) + 1, 2**53 - 1),
    not_before=st.one_of(st.none(), st.datetimes(timezones=st.just(UTC))),
)
def test_what_was_admitted_comes_back_as_it_was(
    names: list[str], payload: Any, priority: int, not_before: datetime | None
) -> None:
    async def main() -> None:
        lane, queue, id, cancellation_id, reason = names
        try:
            job = Job(lane, payload, queue=queue, id=id, priority=priority, not_before=not_before)
        except WatchdogError:
            return
        async with open_client("sqlite::memory:", retry_for=0) as client:
            assert (await client.enqueue(job)).status == "queued"
            again = await client.enqueue(job)
            assert again.status == "duplicate"
            read = await client.read(id)
            assert read is not None
            assert read == again.job
            assert (read.id, read.queue, read.lane, read.priority) == (id, queue, lane, priority)
            assert Job(lane, read.payload, id=id).encoded == job.encoded
            assert (await client.read_queue_head(queue)).job_id == id
            await accept(lambda: client.cancel(id, cancellation_id=cancellation_id))
            await accept(lambda: client.fail_lane(lane, reason))

    trio.run(main)


# -- rows -----------------------------------------------------------------------------------------

COLUMNS = (
    *("id", "queue", "lane", "priority", "not_before", "max_recoveries", "recovery_window"),
    *("state", "hint", "token", "owner", "lease_until", "attempt_count", "attempt_open"),
    *("recovery_count", "window_began_at", "cancellation_id", "outcome", "reason"),
    *("settled_group", "settled_at", "payload"),
)

cells = st.one_of(
    st.none(),
    st.sampled_from(["queued", "running", "completing", "settled", "ready", "lowered", "deferred"]),
    st.sampled_from(["completed", "failed", "t r", "o", "null", "{", "[" * 150, '"\\ud800"', ""]),
    st.integers(-(2**63), 2**63 - 1),
    st.sampled_from([0, 1, -1, 2**53, 2**63 - 1, 253402300800000]),
    st.floats(allow_nan=False),
    st.binary(max_size=4),
    st.text(st.characters(codec="utf-8"), max_size=4),
    st.just("x" * 300),
)


class World:
    """A table with a job in every situation, and others beside them that must not suffer."""

    def __init__(self) -> None:
        self.connection = sqlite3.connect(":memory:", isolation_level=None)
        prepare(self.connection, "memory")
        self.clock = DurableClock()
        self.engine = Engine(self.connection, self.clock)
        lease = 60_000
        recovery = Recovery(1)
        for id in ("r", "c", "s", "x"):
            self.do(w.Enqueue(Job(f"lane {id}", id=id, queue=f"q {id}", recovery=recovery)))
            if id != "x":
                self.do(w.Claim(f"lane {id}", f"t {id}", "o", lease))
        self.do(w.Decide("c", "t c", DONE, has_hook=True))
        self.do(w.Decide("s", "t s", DONE))
        self.do(w.Cancel("x", "c x"))
        self.do(w.Enqueue(Job("lane r", id="behind", queue="q r")))
        self.do(w.Claim("lane r", "nobody", "o", lease))
        later = self.clock.instant(30)
        self.do(w.Enqueue(Job("lane d", id="d", queue="q d", not_before=later)))
        self.do(w.Enqueue(Job("lane k", id="k", queue="q k")))
        # The innocent.
        self.do(w.EnqueueMany([Job("good", id=f"g{n}", queue=f"qg{n % 2}") for n in range(4)]))
        self.do(w.EnqueueMany([Job("lane k", id="beside", queue="q other")]))

    def do(self, *asked: w.Wish[Any]) -> Any:
        (answer,) = self.ask(*asked)
        assert not isinstance(answer, Exception), answer
        return answer

    def ask(self, *asked: w.Wish[Any]) -> list[Any]:
        answers, _ = self.engine.perform(asked)
        for answer in answers:
            if isinstance(answer, Exception) and not isinstance(answer, WatchdogError):
                raise answer
        return answers

    def spoil(self, id: str, cells: dict[str, Any]) -> bool:
        """Edit a row by hand, if SQLite lets us: what is unique stays so."""
        self.connection.execute("pragma ignore_check_constraints = on")
        assignments = ", ".join(f"{column} = ?" for column in cells)
        try:
            self.connection.execute(
                f"update watchdog_jobs set {assignments} where id = ?", (*cells.values(), id)
            )
        except sqlite3.IntegrityError:
            return False
        finally:
            self.connection.execute("pragma ignore_check_constraints = off")
        return True

    def run_lane(self, lane: str) -> list[str]:
        """Claim and complete what there is; whoever claims must come to an end."""
        order: list[str] = []
        for n in range(60):
            (claimed,) = self.ask(w.Claim(lane, f"run {lane} {n}", "me", 60_000))
            if isinstance(claimed, Exception):
                raise claimed
            if claimed.job is None:
                if claimed.more:
                    continue
                return order
            (recorded,) = self.ask(w.Decide(claimed.job.id, claimed.job.token, DONE))
            assert not isinstance(recorded, Exception), recorded
            order.append(claimed.job.id)
        raise AssertionError(f"lane {lane} is told to look again and again")

    def look_after_all(self, id: str) -> None:
        """What supervisors, readers and callers ask, of this row and of all."""
        self.ask(w.ReadWakeState())
        self.ask(w.SettleCancelled())
        after = 0
        while True:
            (job,) = self.ask(w.NextRunningClaim(after))
            if job is None:
                break
            assert not isinstance(job, Exception), job
            after = job.sequence
            self.ask(w.Reconcile(job.id, job.token))
        for _ in range(20):
            (taken,) = self.ask(w.TakeCompleting("taken", "me", 60_000))
            if taken is None:
                break
            if isinstance(taken, Exception):
                raise taken
            self.ask(w.FinishCompleting(taken.id, "taken"))
        self.ask(w.Renew(id, f"t {id}", 60_000))
        self.ask(w.Inspect(id, f"t {id}"))
        self.ask(w.ReserveAttempt(id, f"t {id}", RetryPolicy(2)))
        self.ask(w.RetryJob(id, f"t {id}", RetryPolicy(2)))
        self.ask(w.HandOff(id, f"t {id}"))
        self.ask(w.Decide(id, f"t {id}", DONE))
        self.ask(w.FinishCompleting(id, f"t {id}"))
        self.ask(w.Cancel(id, f"cancel {id}"))
        for wish in (
            w.Read(id),
            w.ReadQueueHead(f"q {id}"),
            w.ReadLatestSettled(f"q {id}"),
            w.ReadSettled(),
            w.ReadJobs(),
            w.ReadCounts(),
            w.ReadOwners(),
            w.Export(),
            w.CheckRows(),
            w.ReadExpired(),
            w.ReadWaitingOnTime(),
            w.ReadUnserved(),
            w.ReadPlace(id),
            w.ReadLost(),
            w.RepairLost(f"q {id}"),
            w.FailLane(f"lane {id}", "reason"),
            w.PurgeQueue(f"q {id}"),
            w.Prune(keep=0),
        ):
            self.ask(wish)


@examples(70)
@given(
    id=st.sampled_from(["r", "c", "s", "x", "behind", "d", "k"]),
    cells=st.dictionaries(st.sampled_from(COLUMNS), cells, min_size=1, max_size=3),
    time=st.sampled_from([0, 31, 61, 1000]),
)
def test_a_row_edited_into_nonsense_hurts_nobody_else(
    id: str, cells: dict[str, Any], time: int
) -> None:
    world = World()
    with closing(world.connection):
        if not world.spoil(id, cells):
            return
        world.clock.advance(time)
        good = {"g0", "g1", "g2", "g3"}
        # Into the others' lane or queue it may come in their way, as any job may.
        if not {"lane", "queue"} & set(cells):
            assert set(world.run_lane("good")) == good
            assert "beside" in world.run_lane("lane k")
        world.look_after_all(id)
        for lane in ("lane r", "lane c", "lane x", "lane d", "lane k", "good"):
            world.run_lane(lane)
        for name in good - ({cells.get("id")} if isinstance(cells.get("id"), str) else set()):
            if not {"lane", "queue"} & set(cells):
                # Settled, and pruned above.
                assert world.ask(w.Read(name)) == [None]
