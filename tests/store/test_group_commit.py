"""Many tasks, one exchange at a time: shared commits, and nobody forgotten."""

from __future__ import annotations

import contextlib
import random
import sqlite3
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import pytest
import trio
import trio.testing

from trio_watchdog import OTHERS, RunningJob, open_watchdog
from trio_watchdog import _wishes as w
from trio_watchdog._errors import JobConflict, StoreUnavailable
from trio_watchdog._exchange import EXCHANGE_LIMIT, Exchange
from trio_watchdog._model import Job, Outcome
from trio_watchdog._open import open_store
from trio_watchdog._rules import Settle
from trio_watchdog._sqlite import FileStore
from trio_watchdog._store import Store
from trio_watchdog._wishes import Wish
from trio_watchdog.testing import check_invariants


class Desk:
    """Answers wishes when it is told to, and remembers what it was asked."""

    def __init__(self, share: int | None = None) -> None:
        self.exchanges: list[list[str]] = []
        self.gates: list[trio.Event] = []
        self.error: BaseException | None = None
        self.exchange = Exchange(self.perform, share=share)

    async def perform(self, asked: Sequence[Wish[Any]]) -> list[str]:
        self.exchanges.append([cast("w.Read", wish).id for wish in asked])
        gate = trio.Event()
        self.gates.append(gate)
        # With a limit, so that a test that fails does not hang as well.
        with trio.fail_after(10, shield=True):
            await gate.wait()
        if self.error is not None:
            raise self.error
        return [f"answer {cast('w.Read', wish).id}" for wish in asked]

    async def ask(self, *ids: str) -> list[str]:
        return await self.exchange.submit([w.Read(id) for id in ids])


class Asker:
    """A task that asks, and what came of it."""

    def __init__(self, desk: Desk, nursery: trio.Nursery, *ids: str) -> None:
        self.scope = trio.CancelScope()
        self.answers: list[str] | None = None
        self.error: BaseException | None = None
        self.is_done = False
        nursery.start_soon(self._run, desk, ids)

    async def _run(self, desk: Desk, ids: Sequence[str]) -> None:
        with self.scope:
            try:
                self.answers = await desk.ask(*ids)
            except Exception as error:
                self.error = error
        self.is_done = True


async def settle_down() -> None:
    await trio.testing.wait_all_tasks_blocked()


# -- who is answered, and when --------------------------------------------------------------------


async def test_whoever_asks_alone_is_answered_without_delay(
    mock_clock: trio.testing.MockClock,
) -> None:
    async def perform(asked: Sequence[Wish[Any]]) -> list[int]:
        return list(range(len(asked)))

    exchange = Exchange(perform)
    for _ in range(3):
        assert await exchange.submit([w.Read("j"), w.Read("k")]) == [0, 1]
    assert trio.current_time() == mock_clock.current_time() == 0


async def test_those_who_ask_meanwhile_go_together_in_the_next_exchange(
    nursery: trio.Nursery,
) -> None:
    desk = Desk()
    first = Asker(desk, nursery, "a")
    await settle_down()
    assert desk.exchanges == [["a"]]
    others = [Asker(desk, nursery, f"{n}", f"{n}'") for n in range(5)]
    await settle_down()
    assert len(desk.exchanges) == 1
    desk.gates[0].set()
    await settle_down()
    assert first.answers == ["answer a"]
    assert sorted(desk.exchanges[1]) == sorted(f"{n}{q}" for n in range(5) for q in ("", "'"))
    desk.gates[1].set()
    await settle_down()
    for n, other in enumerate(others):
        assert other.answers == [f"answer {n}", f"answer {n}'"]


async def test_tasks_that_ask_in_the_same_turn_share_the_first_exchange(
    nursery: trio.Nursery,
) -> None:
    desk = Desk()
    for n in range(10):
        Asker(desk, nursery, f"{n}")
    await settle_down()
    assert len(desk.exchanges) == 1
    assert len(desk.exchanges[0]) == 10
    desk.gates[0].set()


async def test_tasks_that_were_answered_together_go_together_again() -> None:
    sizes: list[int] = []

    async def perform(asked: Sequence[Wish[Any]]) -> list[None]:
        sizes.append(len(asked))
        await trio.lowlevel.cancel_shielded_checkpoint()
        return [None] * len(asked)

    exchange = Exchange(perform)

    async def ask_on() -> None:
        for _ in range(100):
            await exchange.submit([w.Read("j")])

    async with trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(ask_on)
    assert sizes == [8] * 100


async def test_ctrl_c_strikes_between_exchanges_and_not_within() -> None:
    """Others may share it, and would wait for ever."""
    is_protected: list[bool] = []

    async def perform(asked: Sequence[Wish[Any]]) -> list[None]:
        is_protected.append(trio.lowlevel.currently_ki_protected())
        await trio.lowlevel.cancel_shielded_checkpoint()
        return [None] * len(asked)

    exchange = Exchange(perform)
    assert not trio.lowlevel.currently_ki_protected()
    await exchange.submit([w.Read("j")])
    assert is_protected == [True]


async def test_of_many_tasks_one_half_is_answered_while_the_other_works(
    nursery: trio.Nursery,
) -> None:
    askers: list[Asker] = []
    done: list[int] = []

    class Watching(Desk):
        async def perform(self, asked: Sequence[Wish[Any]]) -> list[str]:
            done.append(sum(asker.is_done for asker in askers))
            return await super().perform(asked)

    desk = Watching(share=3)
    askers += [Asker(desk, nursery, f"{n}") for n in range(10)]
    for gate in range(2):
        await settle_down()
        desk.gates[gate].set()
    await settle_down()
    # The second half is sent before an answer to the first is acted upon.
    assert [len(exchange) for exchange in desk.exchanges] == [5, 5]
    assert done == [0, 0]
    assert all(asker.answers == [f"answer {n}"] for n, asker in enumerate(askers))


async def test_of_few_tasks_none_waits_for_the_answers_of_others(nursery: trio.Nursery) -> None:
    desk = Desk(share=3)
    first = Asker(desk, nursery, "first")
    await settle_down()
    Asker(desk, nursery, "another")
    await settle_down()
    desk.gates[0].set()
    await settle_down()
    assert first.is_done
    assert desk.exchanges == [["first"], ["another"]]
    desk.gates[1].set()


async def test_a_leader_goes_home_with_its_answer_and_hands_the_lead_over(
    nursery: trio.Nursery,
) -> None:
    desk = Desk()
    askers: list[Asker] = []
    # Somebody always asks anew: whoever led first must not lead for ever.
    for n in range(6):
        askers.append(Asker(desk, nursery, f"{n}"))
        await settle_down()
        if n:
            desk.gates[-1].set()
            await settle_down()
            assert [asker.is_done for asker in askers] == [True] * n + [False]
    desk.gates[-1].set()
    await settle_down()
    assert all(asker.is_done for asker in askers)
    assert desk.exchanges == [[f"{n}"] for n in range(6)]


async def test_an_exchange_has_a_limit_and_a_large_request_is_not_split(
    nursery: trio.Nursery,
) -> None:
    desk = Desk()
    Asker(desk, nursery, "first")
    await settle_down()
    large = Asker(desk, nursery, *[f"{n}" for n in range(EXCHANGE_LIMIT + 5)])
    # In this order: tasks that start together begin in any.
    await settle_down()
    small = Asker(desk, nursery, "small")
    desk.gates[0].set()
    await settle_down()
    assert len(desk.exchanges[1]) == EXCHANGE_LIMIT + 5
    desk.gates[1].set()
    await settle_down()
    assert large.answers is not None
    assert large.answers[-1] == f"answer {EXCHANGE_LIMIT + 4}"
    assert desk.exchanges[2] == ["small"]
    desk.gates[2].set()
    await settle_down()
    assert small.answers == ["answer small"]


# -- cancellation ---------------------------------------------------------------------------------


async def test_who_is_cancelled_before_the_wish_was_taken_up_has_done_nothing(
    nursery: trio.Nursery,
) -> None:
    desk = Desk()
    Asker(desk, nursery, "first")
    await settle_down()
    stays, goes = Asker(desk, nursery, "stays"), Asker(desk, nursery, "goes")
    await settle_down()
    goes.scope.cancel()
    await settle_down()
    # At once, and not when the exchange under way has ended.
    assert goes.is_done
    assert goes.scope.cancelled_caught
    desk.gates[0].set()
    await settle_down()
    assert desk.exchanges == [["first"], ["stays"]]
    desk.gates[1].set()
    await settle_down()
    assert stays.answers == ["answer stays"]


@pytest.mark.parametrize("which", [0, 1], ids=["the leader", "a follower"])
async def test_who_is_cancelled_after_the_wish_was_taken_up_keeps_the_answer(
    nursery: trio.Nursery, which: int
) -> None:
    desk = Desk()
    askers = [Asker(desk, nursery, "0"), Asker(desk, nursery, "1")]
    await settle_down()
    assert sorted(desk.exchanges[0]) == ["0", "1"]
    askers[which].scope.cancel()
    await settle_down()
    assert not askers[which].is_done
    desk.gates[0].set()
    await settle_down()
    assert [asker.answers for asker in askers] == [["answer 0"], ["answer 1"]]
    assert not askers[which].scope.cancelled_caught


async def test_a_cancelled_leader_leaves_the_lead_to_somebody(nursery: trio.Nursery) -> None:
    desk = Desk()
    leader = Asker(desk, nursery, "leader")
    await settle_down()
    followers = [Asker(desk, nursery, f"{n}") for n in range(3)]
    await settle_down()
    leader.scope.cancel()
    # And so is the one that would be the next to lead.
    followers[0].scope.cancel()
    await settle_down()
    desk.gates[0].set()
    await settle_down()
    assert sorted(desk.exchanges[1]) == ["1", "2"]
    desk.gates[1].set()
    await settle_down()
    assert [follower.answers for follower in followers] == [None, ["answer 1"], ["answer 2"]]


async def test_the_next_leader_may_be_cancelled_in_the_very_moment_of_the_handover(
    nursery: trio.Nursery,
) -> None:
    desk = Desk()
    Asker(desk, nursery, "leader")
    await settle_down()
    heir = Asker(desk, nursery, "heir")
    last = Asker(desk, nursery, "last")
    await settle_down()
    # In one turn of the loop: the exchange ends, and the cancellation arrives.
    desk.gates[0].set()
    heir.scope.cancel()
    await settle_down()
    for gate in desk.gates:
        gate.set()
    await settle_down()
    for gate in desk.gates:
        gate.set()
    await settle_down()
    assert heir.is_done
    assert last.answers == ["answer last"]


async def test_who_is_cancelled_already_asks_nothing(nursery: trio.Nursery) -> None:
    desk = Desk()
    with trio.CancelScope() as scope:
        scope.cancel()
        await desk.ask("a")
    assert scope.cancelled_caught
    assert desk.exchanges == []
    asker = Asker(desk, nursery, "b")
    await settle_down()
    desk.gates[0].set()
    await settle_down()
    assert asker.answers == ["answer b"]


# -- errors ---------------------------------------------------------------------------------------


async def test_an_error_reaches_all_who_asked_each_with_a_copy_of_its_own(
    nursery: trio.Nursery,
) -> None:
    desk = Desk()
    desk.error = StoreUnavailable("the disk is gone")
    desk.error.__cause__ = OSError("EIO")
    askers = [Asker(desk, nursery, f"{n}") for n in range(3)]
    await settle_down()
    desk.gates[0].set()
    await settle_down()
    for asker in askers:
        assert type(asker.error) is StoreUnavailable
        assert str(asker.error) == "the disk is gone"
        assert isinstance(asker.error.__cause__, OSError)
    assert len({id(asker.error) for asker in askers}) == 3
    # And the desk is open again.
    desk.error = None
    asker = Asker(desk, nursery, "again")
    await settle_down()
    desk.gates[1].set()
    await settle_down()
    assert asker.answers == ["answer again"]


async def test_even_an_error_of_ours_leaves_nobody_waiting(nursery: trio.Nursery) -> None:
    desk = Desk()
    desk.error = AssertionError("a bug")
    askers = [Asker(desk, nursery, f"{n}") for n in range(3)]
    await settle_down()
    desk.gates[0].set()
    await settle_down()
    assert [repr(asker.error) for asker in askers] == ["AssertionError('a bug')"] * 3


# -- any interleaving -----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_no_wake_up_is_lost_whoever_is_cancelled_whenever(seed: int) -> None:
    rng = random.Random(seed)
    performed: Counter[str] = Counter()
    answered: set[str] = set()
    withdrawn: set[str] = set()
    is_busy = False

    async def perform(asked: Sequence[Wish[Any]]) -> list[str]:
        nonlocal is_busy
        assert not is_busy, "two exchanges at a time"
        is_busy = True
        with trio.CancelScope(shield=True):
            for _ in range(rng.randrange(4)):
                await trio.lowlevel.checkpoint()
        is_busy = False
        ids = [cast("w.Read", wish).id for wish in asked]
        performed.update(ids)
        if rng.random() < 0.1:
            raise StoreUnavailable("now and then")
        return ids

    async def ask(exchange: Exchange, name: str) -> None:
        for m in range(rng.randint(1, 4)):
            ids = [f"{name}.{m}.{i}" for i in range(rng.randint(1, 3))]
            with trio.CancelScope() as scope:
                scopes.append(scope)
                try:
                    answers = await exchange.submit([w.Read(id) for id in ids])
                except StoreUnavailable:
                    answers = ids
                assert answers == ids
                answered.update(ids)
            if scope.cancelled_caught:
                withdrawn.update(ids)
            for _ in range(rng.randrange(3)):
                await trio.lowlevel.checkpoint()

    async def disturb() -> None:
        for _ in range(60):
            await trio.lowlevel.checkpoint()
            if scopes and rng.random() < 0.4:
                rng.choice(scopes[-8:]).cancel()

    async def main() -> None:
        exchange = Exchange(perform)
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(disturb)
                for n in range(rng.randint(1, 12)):
                    nursery.start_soon(ask, exchange, f"{n}")
        # And the exchange is as good as new.
        with contextlib.suppress(StoreUnavailable):
            assert await exchange.submit([w.Read("last")]) == ["last"]

    scopes: list[trio.CancelScope] = []
    trio.run(main)
    assert set(performed) - {"last"} == answered
    assert max(performed.values()) == 1
    # Withdrawn means never done.
    assert not withdrawn & set(performed)


# -- on a real file -------------------------------------------------------------------------------


def count_commits(store: Store) -> list[str]:
    """A list that grows with each transaction of the store."""
    commits: list[str] = []

    def trace(statement: str) -> None:
        if statement == "commit":
            commits.append(statement)

    cast("FileStore", store)._engine.connection.set_trace_callback(trace)
    return commits


async def test_busy_tasks_share_their_commits(tmp_path: Path) -> None:
    async with open_store(tmp_path / "jobs.db") as store:
        commits = count_commits(store)

        async def work(n: int) -> None:
            for m in range(10):
                await store.enqueue(Job(f"lane {n}", m))
                claimed = (await store.claim(f"lane {n}", f"{n}.{m}")).job
                assert claimed is not None
                assert claimed.payload == m
                done = Settle(Outcome.COMPLETED)
                assert (await store.decide(claimed.id, f"{n}.{m}", done)).status == "recorded"

        async with trio.open_nursery() as nursery:
            for n in range(32):
                nursery.start_soon(work, n)
        # 960 verbs; in lock step they would be 30 transactions.
        assert len(commits) < 200
        check_invariants(store)


async def test_a_job_is_admitted_and_claimed_in_one_transaction_if_a_lane_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transactions: list[set[type]] = []
    perform = FileStore._perform

    def watched(self: FileStore, asked: Sequence[Wish[Any]]) -> Any:
        transactions.append({type(wish) for wish in asked})
        return perform(self, asked)

    monkeypatch.setattr(FileStore, "_perform", watched)
    ran: list[str] = []

    async def handler(job: RunningJob) -> None:
        ran.append(job.id)

    async with open_watchdog(tmp_path / "jobs.db") as watchdog:
        await watchdog.start_lane("a", handler)
        await watchdog.start_lane(OTHERS, handler)
        for lane in ("a", "any"):
            await watchdog.wait_idle()
            transactions.clear()
            admission = await watchdog.enqueue(Job(lane))
            assert admission.status == "queued"
            await watchdog.wait_settled(admission.job.id)
            assert {w.Enqueue, w.Claim} in transactions
            assert ran.pop() == admission.job.id
        await watchdog.wait_idle()
        transactions.clear()
        # Nobody waits for these.
        await watchdog.enqueue(Job("a", not_before=datetime(2100, 1, 1, tzinfo=UTC)))
        assert {w.Enqueue} in transactions


async def test_a_lone_task_commits_each_verb_before_it_goes_on(tmp_path: Path) -> None:
    async with open_store(tmp_path / "jobs.db") as store:
        commits = count_commits(store)
        for n in range(5):
            await store.enqueue(Job("a"))
            assert len(commits) == n + 1
            with closing(sqlite3.connect(tmp_path / "jobs.db")) as other:
                rows = other.execute("select count(*) from watchdog_jobs").fetchone()
                assert rows == (n + 1,)


async def test_a_wish_that_fails_hurts_nobody_it_shares_a_commit_with(tmp_path: Path) -> None:
    async with open_store(tmp_path / "jobs.db") as store:
        await store.enqueue(Job("a", 1, id="taken"))
        refused: list[int] = []

        async def enqueue(n: int) -> None:
            if n % 5 == 0:
                with pytest.raises(JobConflict):
                    await store.enqueue_many([Job("a", id=f"never {n}"), Job("a", 2, id="taken")])
                refused.append(n)
            else:
                assert (await store.enqueue(Job("a", n, id=f"{n}"))).status == "queued"

        async with trio.open_nursery() as nursery:
            for n in range(50):
                nursery.start_soon(enqueue, n)
        assert len(refused) == 10
        jobs = await store.ask(w.ReadJobs(limit=1000))
        assert {job.id for job in jobs} == {"taken", *(f"{n}" for n in range(50) if n % 5)}


@pytest.mark.parametrize("seed", range(8))
async def test_cancelled_means_not_done_and_answered_means_done(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    done: set[str] = set()
    cancelled: set[str] = set()
    async with open_store(tmp_path / "jobs.db", synchronous="normal") as store:

        async def enqueue(id: str) -> None:
            with trio.move_on_after(rng.choice((0, 0.0005, 0.002, 0.01, 1))) as scope:
                await store.enqueue(Job("a", id=id))
                done.add(id)
            if scope.cancelled_caught:
                cancelled.add(id)

        async with trio.open_nursery() as nursery:
            for n in range(200):
                nursery.start_soon(enqueue, f"{n}")
                if rng.random() < 0.2:
                    await trio.lowlevel.checkpoint()
        assert done.isdisjoint(cancelled)
        assert len(done) + len(cancelled) == 200
        jobs = await store.ask(w.ReadJobs(limit=1000))
        assert {job.id for job in jobs} == done


async def test_a_blocked_loop_delays_answers_and_loses_none(tmp_path: Path) -> None:
    async with open_store(tmp_path / "jobs.db") as store:
        answers: list[str] = []

        async def enqueue() -> None:
            answers.append((await store.enqueue(Job("a"))).status)

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(enqueue)
            await trio.lowlevel.checkpoint()
            await trio.lowlevel.checkpoint()
            with closing(sqlite3.connect(":memory:")) as connection:
                # A handler that forgets to await.
                connection.execute(
                    "with recursive n(i) as (select 1 union all select i + 1 from n"
                    " where i < 2000000) select max(i) from n"
                )
        assert answers == ["queued"] * 5
