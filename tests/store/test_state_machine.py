"""Random histories on real stores, compared after each step with a model that is slow."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from copy import deepcopy
from typing import Any

import pytest
import trio
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.kinds import KINDS, THEMSELVES
from tests.store.makers import KnownMaker
from tests.store.model import Model, Row
from trio_watchdog import _operations as operations
from trio_watchdog import _wishes as w
from trio_watchdog._errors import JobConflict
from trio_watchdog._model import INSTANT_LIMIT, Job, Outcome, Recovery, RetryPolicy, to_instant
from trio_watchdog._rules import TRANSITIONS, Settle
from trio_watchdog._store import Change, Store
from trio_watchdog._wishes import Wish

LANES = ("a", "b", "c")
LEASE = 10_000

lanes = st.sampled_from(LANES)
queues = st.sampled_from(("p", "q", "r", "s"))
priorities = st.integers(-1, 1)
delays = st.sampled_from((None, None, None, 0, 1, 5_000, LEASE, INSTANT_LIMIT))
recoveries = st.sampled_from((None, Recovery(0), Recovery(1), Recovery(2, 15), Recovery(1, 10)))
policies = st.sampled_from(
    (
        None,
        RetryPolicy(1),
        RetryPolicy(2, delay=0),
        RetryPolicy(3, delay=5),
        RetryPolicy(9, delay=1, factor=7, max_delay=20, jitter=0.5),
    )
)
jitters = st.sampled_from((0.0, 0.25, 1.0))
settles = st.sampled_from(
    (
        Settle(Outcome.COMPLETED),
        Settle(Outcome.COMPLETED),
        Settle(Outcome.FAILED, "it broke"),
        Settle(Outcome.CANCELLED),
        Settle(Outcome.OUTCOME_UNKNOWN),
    )
)
pick = st.integers(0, 50)
leases = st.sampled_from((1, 2_000, LEASE))


class History(RuleBasedStateMachine):
    """What is claimed, decided, cancelled and so on, in any order."""

    maker: KnownMaker
    connections: int
    """Stores that take turns, as several processes would."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = AsyncExitStack()
        self.stores: list[Store] = []
        self.changes: list[Change] = []
        self.model = Model()
        self.numbers = itertools.count(1)
        self.tokens: list[tuple[str, str]] = []
        """Every claim there ever was: id and token."""
        self.rows: list[dict[str, Any]] = []
        """The table, as it was left."""
        self.exchanges = 0
        self.settled_in: dict[str, int] = {}
        """The exchange that settled a job."""
        trio.from_thread.run(self.open_stores)

    async def open_stores(self) -> None:
        store, self.clock = await self.opened.enter_async_context(self.maker())
        self.stores.append(store)
        while len(self.stores) < self.connections:
            self.stores.append(await self.opened.enter_async_context(self.maker.beside(store)))
        for each in self.stores:
            each.on_change.append(self.changes.append)

    def teardown(self) -> None:
        trio.from_thread.run(self.opened.aclose)

    @initialize(busy=st.booleans())
    def open(self, busy: bool) -> None:
        """Some histories begin with a table that has something in it."""
        if busy:
            jobs = [Job(lane, queue="p", priority=n) for n in (0, 1) for lane in LANES]
            self.ask(w.EnqueueMany(jobs))
            self.claim_in("c")

    # -- asking both ------------------------------------------------------------------------------

    def perform(self, *asked: Wish[Any]) -> list[Any]:
        before = {row["id"]: row for row in self.rows}
        self.stores.reverse()
        self.changes.clear()
        self.exchanges += 1
        answers, self.rows = trio.from_thread.run(self.submit, asked)
        for row in self.rows:
            if row["state"] == "settled":
                self.settled_in.setdefault(row["id"], self.exchanges)
        self.check_transitions(before)
        self.check_nobody_is_left_asleep(before)
        return answers

    async def submit(self, asked: Sequence[Wish[Any]]) -> tuple[list[Any], list[dict[str, Any]]]:
        store = self.stores[0]
        return await store.submit(*asked), await self.maker.rows(store)

    def ask(self, *asked: Wish[Any]) -> list[Any]:
        """Answers of the store, which must be those of the model."""
        answers = self.perform(*asked)
        self.model.sequences = {row["id"]: row["sequence"] for row in self.rows}
        if len(asked) > 1 and not self.maker.has_one_writer:
            self.find_order(asked, answers)
            self.compare()
            return answers
        expected = self.model.apply(asked, self.clock.now(), self.clock.lease_now())
        for wish, given, wanted in zip(asked, answers, expected, strict=True):
            answer = given
            if isinstance(wanted, JobConflict):
                assert isinstance(answer, JobConflict), (wish, answer)
            elif isinstance(wish, w.Claim) and wanted.job is None:
                # Whether it should look again is the store's affair, as long as it ends.
                assert answer.job is None, (wish, answer)
                if answer.more:
                    self.ask(wish)
            elif isinstance(wish, w.Claim):
                if answer.job is None and answer.more:
                    # Not found yet, so the model claimed too early: it will be found.
                    answer = self.insist(wish)
                assert answer.job == wanted.job, (wish, answer)
                self.tokens.append((wanted.job.id, wish.token))
            else:
                assert answer == wanted, wish
        self.compare()
        return answers

    def find_order(self, asked: Sequence[Wish[Any]], answers: Sequence[Any]) -> None:
        """Steps of operations that travel together alternate: as if they had come in some order."""
        before = self.model
        jobs = {row["id"]: (row["state"], row["token"], row["outcome"]) for row in self.rows}
        usual = [n for _, positions in operations.plan(asked) for n in positions]
        others = itertools.permutations(range(len(asked)))
        for order in itertools.chain([usual], others):
            self.model = deepcopy(before)
            try:
                for n in order:
                    (wanted,) = self.model.apply(
                        [asked[n]], self.clock.now(), self.clock.lease_now()
                    )
                    assert answers[n] == wanted
            except AssertionError:
                continue
            rows = {r.job.id: (r.state, r.token, r.outcome) for r in self.model.rows.values()}
            if rows == jobs:
                return
        raise AssertionError(f"there is no order in which {asked} are answered {answers}")

    def insist(self, wish: w.Claim) -> w.Claimed:
        for _ in range(10):
            (answer,) = self.perform(wish)
            if answer.job is not None or not answer.more:
                return answer
        raise AssertionError("a claim was told to look again, 10 times")

    def check_transitions(self, before: dict[str, Any]) -> None:
        for row in self.rows:
            id, state = row["id"], row["state"]
            was = before[id]["state"] if id in before else None
            # Some operations pass two transitions in one statement or one exchange.
            reached = {was}
            for _ in range(4):
                reached |= {to for origin in reached for o, to in TRANSITIONS if o == origin}
            assert state in reached, f"{id} went from {was} to {state}"

    def check_nobody_is_left_asleep(self, before: dict[str, Any]) -> None:
        """A job that has become first of a free queue, and that nobody looked for, is told of."""
        told: dict[str, int] = {}
        for change in self.changes:
            for lane, due in change.lanes.items():
                told[lane] = min(due, told.get(lane, due))
        queues: dict[str, list[dict[str, Any]]] = {}
        for row in self.rows:
            if row["state"] != "settled":
                queues.setdefault(row["queue"], []).append(row)
        for rows in queues.values():
            head = min(rows, key=lambda row: (-row["priority"], row["sequence"]))
            is_free = all(row["state"] == "queued" for row in rows)
            if not is_free or head["cancellation_id"] is not None:
                continue
            was = before.get(head["id"])
            was_hidden = was is None or was["state"] != "queued" or was["hint"] == "lowered"
            if was_hidden or was["not_before"] > head["not_before"]:
                due = told.get(head["lane"], INSTANT_LIMIT + 1)
                assert due <= max(head["not_before"], self.clock.now()), (
                    f"lane {head['lane']} was not told of {head['id']}"
                )

    def compare(self) -> None:
        """Everything that can be read, read both ways."""
        self.model.now, self.model.lease_now = self.clock.now(), self.clock.lease_now()
        names = [*self.model.queues(), "nobody's"]
        asked: list[Wish[Any]] = [
            w.ReadJobs(limit=1000),
            w.ReadSettled(limit=256),
            w.ReadSettled(lane="a"),
            w.ReadSettled(2),
            w.ReadWakeState(),
            w.ReadWakeState(self.clock.now() + 5_000),
            w.NextRunningClaim(),
            *[w.ReadQueueHead(name) for name in names],
            *[w.ReadLatestSettled(name) for name in names],
        ]
        (jobs, *answers), broken = trio.from_thread.run(self.read, asked)
        assert jobs[::-1] == sorted(
            (row.stored() for row in self.model.rows.values()), key=lambda job: job.sequence
        )
        if not self.maker.has_one_writer:
            self.adopt_order([job.id for job in answers[0].jobs])
        expected = self.model.apply(asked[1:], self.clock.now(), self.clock.lease_now())
        for wish, answer, wanted in zip(asked[1:], answers, expected, strict=True):
            if isinstance(wish, w.ReadSettled):
                assert answer.jobs == wanted.jobs
            else:
                assert answer == wanted, wish
        assert broken == []

    async def read(self, asked: Sequence[Wish[Any]]) -> tuple[list[Any], list[str]]:
        # Some other transaction of the server, such as its own upkeep, may hide the last of the
        # settled jobs for a moment.
        for _ in range(100):
            answers = await self.stores[0].submit(*asked)
            if len(answers[1].jobs) == len(self.model.feed):
                break
            await trio.sleep(0.02)
        return answers, await self.maker.broken(self.stores[0])

    def adopt_order(self, feed: list[str]) -> None:
        """What settles in one exchange settles in an order of the store's own."""
        assert sorted(feed) == sorted(self.model.feed)
        assert feed == sorted(feed, key=lambda id: self.settled_in[id])
        self.model.feed = feed

    # -- choosing ---------------------------------------------------------------------------------

    def row(self, n: int, *states: str) -> Row | None:
        """One of the rows in these states, preferring those that are newer."""
        rows = [row for row in self.model.rows.values() if not states or row.state in states]
        return rows[-1 - n % len(rows)] if rows else None

    def held(self, n: int, *states: str) -> tuple[str, str]:
        """A claim: mostly one that is live, now and then one that is old or stolen."""
        if n % 7 == 0 and self.tokens:
            return self.tokens[n % len(self.tokens)]
        row = self.row(n, *states)
        if row is None:
            return ("missing", "token")
        return (row.job.id, row.token if row.token is not None and n % 11 else "stolen")

    def fresh(self, prefix: str) -> str:
        return f"{prefix}{next(self.numbers)}"

    def job(
        self, lane: str, queue: str, priority: int, delay: int | None, recovery: Recovery | None
    ) -> Job:
        due = None if delay is None else to_instant(self.clock.now() + delay)
        return Job(
            lane,
            queue,
            id=self.fresh("j"),
            queue=queue,
            priority=priority,
            not_before=due,
            recovery=recovery,
        )

    # -- steps ------------------------------------------------------------------------------------

    @rule(lane=lanes, queue=queues, priority=priorities, delay=delays, recovery=recoveries)
    def enqueue(self, **fields: Any) -> None:
        self.ask(w.Enqueue(self.job(**fields)))

    @rule(
        rows=st.lists(st.tuples(lanes, queues, priorities, delays, recoveries), max_size=8),
        clash=st.sampled_from((None, None, None, "duplicate", "conflict")),
        n=pick,
    )
    def enqueue_many(self, rows: Sequence[Any], clash: str | None, n: int) -> None:
        jobs = [self.job(*fields) for fields in rows]
        there = self.row(n)
        if clash is not None and there is not None:
            job = there.job
            payload = job.payload if clash == "duplicate" else "another"
            jobs.append(
                Job(
                    job.lane,
                    payload,
                    id=job.id,
                    queue=job.queue,
                    priority=job.priority,
                    recovery=job.recovery,
                )
            )
        self.ask(w.EnqueueMany(jobs))

    def claim_in(self, lane: str, lease: int = LEASE, counts: bool = True) -> None:
        self.ask(w.Claim(lane, self.fresh("t"), "owner", lease, counts))

    @rule(lane=lanes, lease=leases, counts=st.booleans())
    def claim(self, lane: str, lease: int, counts: bool) -> None:
        self.claim_in(lane, lease, counts)

    @rule(asked=st.lists(lanes, min_size=2, max_size=6))
    def claim_many(self, asked: Sequence[str]) -> None:
        # Whoever is told to look again does so alone: a claim that is not found at once is
        # compared when it is found, so the wishes of one exchange must not depend on each other.
        tokens = [(lane, self.fresh("t")) for lane in asked]
        wishes = [w.Claim(lane, token, "owner", LEASE) for lane, token in tokens]
        answers = self.perform(*wishes)
        got = {
            wish.token: answer.job
            for wish, answer in zip(wishes, answers, strict=True)
            if answer.job is not None
        }
        for wish, answer in zip(wishes, answers, strict=True):
            wanted = self.model.apply([wish], self.clock.now(), self.clock.lease_now())[0].job
            if answer.job is None and answer.more:
                job = self.insist(wish).job
            else:
                job = got.get(wish.token)
            assert job == wanted
            if job is not None:
                self.tokens.append((job.id, wish.token))
        self.compare()

    @rule(without=st.sets(lanes, max_size=2))
    def claim_any_lane(self, without: set[str]) -> None:
        wish = w.Claim(None, self.fresh("t"), "owner", LEASE, without=tuple(sorted(without)))
        job = self.insist(wish).job
        self.model.now, self.model.lease_now = self.clock.now(), self.clock.lease_now()
        allowed = {
            rows[0].job.id: rows[0]
            for lane in LANES
            if lane not in without and (rows := self.model.claimable(lane))
        }
        assert (job is None) == (not allowed)
        if job is not None:
            # Which lane it takes is its own affair; in the lane it takes the first.
            assert job == self.model.claim_row(allowed[job.id], wish)
            self.tokens.append((job.id, wish.token))
        self.compare()

    @precondition(lambda self: self.tokens)
    @rule(n=pick)
    def claim_again(self, n: int) -> None:
        id, token = self.tokens[n % len(self.tokens)]
        row = self.model.rows.get(id)
        if row is not None and row.state == "running" and row.token == token:
            self.ask(w.Claim(row.job.lane, token, "owner", LEASE, again=True))

    @rule(n=pick, lease=leases)
    def renew(self, n: int, lease: int) -> None:
        self.ask(w.Renew(*self.held(n, "running", "completing"), lease))

    @rule(n=pick)
    def inspect(self, n: int) -> None:
        self.ask(w.Inspect(*self.held(n)))

    @rule(n=pick, policy=policies, jitter=jitters)
    def reserve(self, n: int, policy: RetryPolicy | None, jitter: float) -> None:
        if policy is not None:
            self.ask(w.ReserveAttempt(*self.held(n, "running"), policy, jitter))

    @rule(
        n=pick,
        policy=policies,
        after=st.sampled_from((None, None, 0, 3_000)),
        reason=st.sampled_from((None, "ValueError: no", "x" * 300)),
        jitter=jitters,
        has_hook=st.booleans(),
    )
    def retry(self, n: int, **options: Any) -> None:
        self.ask(w.RetryJob(*self.held(n, "running"), **options))

    @rule(n=pick)
    def hand_off(self, n: int) -> None:
        self.ask(w.HandOff(*self.held(n, "running")))

    @rule(n=pick, settle=settles, has_hook=st.booleans())
    def decide(self, n: int, settle: Settle, has_hook: bool) -> None:
        self.ask(w.Decide(*self.held(n, "running"), settle, has_hook))

    @rule(n=pick, settle=settles, has_hook=st.booleans())
    def decide_late(self, n: int, settle: Settle, has_hook: bool) -> None:
        if self.tokens:
            self.ask(w.Decide(*self.tokens[n % len(self.tokens)], settle, has_hook))

    @rule(n=pick)
    def finish(self, n: int) -> None:
        self.ask(w.FinishCompleting(*self.held(n, "completing")))

    @rule(
        named=st.sampled_from((None, ("a",), ("a", "b"), ())),
        without=st.sampled_from(((), ("b",))),
        dead=st.sampled_from(((), (), ("owner",))),
    )
    def take_completing(self, named: Any, without: Any, dead: Any) -> None:
        token = self.fresh("t")
        (job,) = self.ask(w.TakeCompleting(token, "taker", LEASE, named, without, dead))
        if job is not None:
            self.tokens.append((job.id, token))

    @rule(n=pick, only_if_queued=st.booleans(), used=st.booleans())
    def cancel(self, n: int, only_if_queued: bool, used: bool) -> None:
        row = self.row(n)
        id = "missing" if row is None else row.job.id
        known = sorted(
            row.cancellation_id for row in self.model.rows.values() if row.cancellation_id
        )
        cancellation = known[n % len(known)] if used and known else self.fresh("c")
        self.ask(w.Cancel(id, cancellation, only_if_queued))

    @rule(lane=st.one_of(st.none(), lanes), limit=st.sampled_from((1, 256)))
    def settle_cancelled(self, lane: str | None, limit: int) -> None:
        self.ask(w.SettleCancelled(lane, limit))

    @rule(lane=lanes)
    def fail_lane(self, lane: str) -> None:
        self.ask(w.FailLane(lane, "the lane is broken"))

    @rule(queue=queues)
    def purge(self, queue: str) -> None:
        self.ask(w.PurgeQueue(queue))

    @rule(age=st.sampled_from((0, 1, 5_000)))
    def prune(self, age: int) -> None:
        self.ask(w.Prune(self.clock.now() - age))

    @rule(dead=st.sampled_from(((), (), ("owner",))))
    def supervise(self, dead: tuple[str, ...]) -> None:
        (job,) = self.ask(w.NextRunningClaim(0, dead))
        if job is not None:
            self.ask(w.NextRunningClaim(job.sequence, dead))
            self.ask(w.Reconcile(job.id, job.token, dead))

    @rule(n=pick)
    def reconcile_a_live_claim(self, n: int) -> None:
        self.ask(w.Reconcile(*self.held(n, "running")))

    @rule(
        kinds=st.lists(
            st.sampled_from(
                ("decide", "finish", "retry", "hand off", "cancel", "renew", "enqueue", "settle")
            ),
            min_size=2,
            max_size=6,
        ),
        settle=settles,
        policy=policies,
        n=pick,
        lane=lanes,
        queue=queues,
    )
    def exchange(
        self,
        kinds: Sequence[str],
        settle: Settle,
        policy: RetryPolicy | None,
        n: int,
        lane: str,
        queue: str,
    ) -> None:
        """Several tasks that ask at the same time, for the same jobs or for different ones."""
        asked: list[Wish[Any]] = []
        for m, kind in enumerate(kinds):
            held = self.held(n + m // 2, "running")
            match kind:
                case "decide":
                    asked.append(w.Decide(*held, settle, m % 2 == 0))
                case "finish":
                    asked.append(w.FinishCompleting(*self.held(n + m, "completing")))
                case "retry":
                    asked.append(w.RetryJob(*held, policy))
                case "hand off":
                    asked.append(w.HandOff(*held))
                case "cancel":
                    asked.append(w.Cancel(held[0], self.fresh("c")))
                case "renew":
                    asked.append(w.Renew(*held, LEASE))
                case "settle":
                    asked.append(w.SettleCancelled())
                case _:
                    asked.append(w.Enqueue(self.job(lane, queue, m % 2, None, None)))
        self.ask(*asked)

    # -- time -------------------------------------------------------------------------------------

    @rule(n=pick, ticks=st.sampled_from((-1, 0, 0, 1)))
    def go_to_an_edge(self, n: int, ticks: int) -> None:
        """Random amounts of time seldom land on the instant itself."""
        edges = [edge for edge in self.model.edges() if edge < INSTANT_LIMIT - 10**12]
        if edges:
            edge = edges[n % min(len(edges), 3)]
            self.clock.advance(max(0, edge + ticks - self.clock.lease_now()) / 1000)
            self.compare()

    @rule(milliseconds=st.sampled_from((1, 1_000, 60_000)))
    def advance(self, milliseconds: int) -> None:
        self.clock.advance(milliseconds / 1000)
        self.compare()

    @rule(seconds=st.sampled_from((1, 3600)))
    def wall_clock_is_set_forward(self, seconds: int) -> None:
        self.clock.step(seconds)
        self.compare()


@pytest.mark.parametrize("kind", THEMSELVES)
async def test_no_history_tells_a_store_from_the_model(
    kind: str, maker_of: Callable[[str], KnownMaker]
) -> None:
    def run() -> None:
        history = type(
            "History",
            (History,),
            # A database in memory has no second connection.
            {"maker": maker_of(kind), "connections": 1 if kind == "memory" else 2},
        )
        share = KINDS[kind].share
        examples = int(os.environ.get("WATCHDOG_EXAMPLES", "80")) // share
        # To find a shorter history takes some hundred more: where each is slow, take the first.
        skipped = {Phase.shrink, Phase.explain} if share > 2 else set[Phase]()
        run_state_machine_as_test(
            history,
            settings=settings(
                max_examples=examples,
                phases=[phase for phase in Phase if phase not in skipped],
                stateful_step_count=40,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )

    await trio.to_thread.run_sync(run)
