"""Every pair of operations that can touch one job or queue, in every order of their statements.

And triples, where a third one could come between what two have done. Whatever the order: what all
are answered, and the table that they leave, must be as if one had come after the other. Three
things may be said instead, and asking again must then make up for it: that somebody holds a lock
just now, that there is nothing to claim, that there is more to do. No job may be lost, and a lane
that found nothing because of another must be told by it.

A lock that an actor waits for counts as «not yet». Here a few orders of each pair are drawn by
lot; of triples mostly such as interrupt one actor once, which finds most of what can go wrong.
`python -m tests.postgres.test_interleavings URL SECONDS` goes through as many as time allows, of
pairs and triples.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import outcome
import pytest
import trio
from attrs import define

from tests.postgres.stepping import (
    LEASE,
    NOTES,
    START,
    Actor,
    Play,
    Stage,
    completing,
    open_stage,
    queued,
    running,
)
from tests.postgres.test_races import admitting, cancelling
from trio_watchdog import _wishes as w
from trio_watchdog._errors import StoreUnavailable
from trio_watchdog._model import (
    Admission,
    CancellationResult,
    Job,
    LaneFailure,
    Outcome,
    RetryPolicy,
)
from trio_watchdog._rules import Settle
from trio_watchdog._store import ELSEWHERE

COMPLETED = Settle(Outcome.COMPLETED)

ORDERS = 2
"""Orders drawn for each pair, beside the two in which one comes after the other."""

INTERRUPTED = 40
"""Orders with one interruption at most that are drawn for each triple; it has about a hundred."""

DRAWN = 4
"""Orders of any kind that are drawn for each triple."""

# -- what can happen ------------------------------------------------------------------------------

A = ("A", "tA")

MOVES: dict[str, Callable[[str], Play]] = {
    "claim": lambda me: [w.Claim("l", f"x{me}", "o", LEASE)],
    "claim in lane l2": lambda me: [w.Claim("l2", f"x{me}", "o", LEASE)],
    "claim in any lane": lambda me: [w.Claim(None, f"x{me}", "o", LEASE)],
    "renew": lambda me: [w.Renew(*A, LEASE)],
    "reserve": lambda me: [w.ReserveAttempt(*A, RetryPolicy(3))],
    "reserve the last": lambda me: [w.ReserveAttempt(*A, RetryPolicy(1))],
    "decide": lambda me: [w.Decide(*A, COMPLETED)],
    "decide with a hook": lambda me: [w.Decide(*A, Settle(Outcome.FAILED, "x"), has_hook=True)],
    "decide and claim": lambda me: [w.Decide(*A, COMPLETED), w.Claim("l", f"x{me}", "o", LEASE)],
    "finish": lambda me: [w.FinishCompleting(*A)],
    "retry": lambda me: [w.RetryJob(*A)],
    "retry later": lambda me: [w.RetryJob(*A, RetryPolicy(9))],
    "retry the last time": lambda me: [w.RetryJob(*A, RetryPolicy(1))],
    "retry and claim": lambda me: [w.RetryJob(*A), w.Claim("l", f"x{me}", "o", LEASE)],
    "hand off": lambda me: [w.HandOff(*A)],
    "cancel A": lambda me: [w.Cancel("A", "c1")],
    "cancel B": lambda me: [w.Cancel("B", "c1")],
    "cancel B if queued": lambda me: [w.Cancel("B", "c2", only_if_queued=True)],
    "settle cancelled": lambda me: [w.SettleCancelled()],
    "fail lane": lambda me: [w.FailLane("l", "because")],
    "purge": lambda me: [w.PurgeQueue("q")],
    "reconcile": lambda me: [w.Reconcile(*A)],
    "take completing": lambda me: [w.TakeCompleting(f"y{me}", "o", LEASE)],
    "enqueue before all": lambda me: [w.Enqueue(Job("l", id="H", queue="q", priority=9))],
    "enqueue behind all": lambda me: [w.Enqueue(Job("l", id="Z", queue="q", priority=-9))],
    "enqueue many": lambda me: [
        w.EnqueueMany(
            (Job("l", id="A", queue="q"), Job("l", id="M", queue="q"), Job("l", id="N", queue="q"))
        )
    ],
    "enqueue A again": lambda me: [w.Enqueue(Job("l", id="A", queue="q"))],
    "look at notes": lambda me: NOTES,
    "repair": lambda me: [w.RepairLost("q")],
    "user cancels B": lambda me: cancelling("B", commits=True),
    "user cancels B and rolls back": lambda me: cancelling("B", commits=False),
    "user admits H": lambda me: admitting(Job("l", id="H", queue="q", priority=9), commits=True),
    "user admits H and rolls back": lambda me: admitting(
        Job("l", id="H", queue="q", priority=9), commits=False
    ),
}

ANY = [
    "claim",
    "purge",
    "fail lane",
    "cancel A",
    "cancel B",
    "enqueue before all",
    "enqueue behind all",
]
USERS = [
    "user cancels B",
    "user cancels B and rolls back",
    "user admits H",
    "user admits H and rolls back",
]
HOLDERS = ["renew", "reserve", "decide", "decide with a hook", "retry", "retry later", "hand off"]


@define
class Situation:
    """A table, and what can happen to it."""

    rows: Sequence[Mapping[str, Any]]
    moves: Sequence[str]
    notes: Sequence[str] = ()


B, C = queued("B", "lowered"), queued("C", "lowered")

SITUATIONS = {
    "A runs": Situation(
        [running("A"), B, C],
        [
            *ANY,
            *USERS,
            *HOLDERS,
            "decide and claim",
            "retry and claim",
            "settle cancelled",
            "repair",
        ],
    ),
    "A runs its last attempt": Situation(
        [running("A", attempt_open=0), B],
        ["reserve the last", "retry the last time", "renew", "cancel A", "fail lane", "claim"],
    ),
    "A runs, and B is not lowered": Situation(
        [running("A"), queued("B", "ready"), C],
        ["claim", "claim in any lane", "decide", "retry", "purge", "cancel B", *USERS[:3]],
    ),
    "A runs, and is to be cancelled": Situation(
        [running("A", cancellation_id="c1"), B],
        [*HOLDERS, "cancel B", "fail lane", "settle cancelled", "claim"],
    ),
    "A has disappeared": Situation(
        [running("A", lease_until=START, max_recoveries=1), B],
        ["reconcile", "renew", "decide", "retry", "cancel A", "fail lane", "claim", USERS[1]],
    ),
    "A has disappeared for good": Situation(
        [running("A", lease_until=START), B],
        ["reconcile", "decide", "hand off", "cancel A", "fail lane", "claim", "purge"],
    ),
    "A completes": Situation(
        [completing("A"), B],
        ["finish", "renew", "cancel A", "fail lane", "purge", "claim", *USERS[:2]],
    ),
    "A completes, and nobody sees to it": Situation(
        [completing("A", lease_until=START), B],
        ["finish", "renew", "take completing", "claim"],
    ),
    "A waits": Situation(
        [queued("A", "ready"), B, C],
        [
            *ANY,
            *USERS,
            "claim in any lane",
            "enqueue A again",
            "cancel B if queued",
            "settle cancelled",
        ],
    ),
    "A and B are to be cancelled": Situation(
        [
            queued("A", "ready", cancellation_id="c1"),
            queued("B", "lowered", cancellation_id="c2"),
            C,
        ],
        [
            "settle cancelled",
            "claim",
            "purge",
            "fail lane",
            "enqueue before all",
            "enqueue A again",
        ],
    ),
    "A is to be cancelled": Situation(
        [queued("A", "ready", cancellation_id="c1"), B, C],
        ["settle cancelled", "claim", "purge", "fail lane", "cancel B", *USERS],
    ),
    "A is due by now": Situation(
        [queued("A", "deferred", not_before=START), B],
        ["claim", "claim in any lane", "cancel A", "settle cancelled", "purge", "fail lane"],
    ),
    "A and D are due by now, in two lanes": Situation(
        [
            queued("A", "deferred", not_before=START),
            queued("D", "deferred", not_before=START, lane="l2", queue="d"),
        ],
        ["claim", "claim in lane l2", "claim in any lane"],
    ),
    "A runs, and two lanes wait": Situation(
        [running("A"), queued("B", "lowered", lane="l2"), queued("D", "ready", queue="d")],
        ["claim", "claim in lane l2", "decide", "decide and claim", "retry", "purge", "hand off"],
    ),
    "B waits for a look at the notes": Situation(
        [B, C],
        ["look at notes", "claim", "cancel B", "settle cancelled", "purge", "fail lane", *USERS],
        notes=["q"],
    ),
    "nothing is there": Situation(
        [],
        ["enqueue before all", "user admits H", "user admits H and rolls back", "claim", "purge"],
    ),
}


@define(frozen=True)
class Group:
    """A few moves in a situation, by actors A, B and so on."""

    situation: str
    moves: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.situation}: {' / '.join(self.moves)}"

    @property
    def names(self) -> str:
        return "ABC"[: len(self.moves)]


PAIRS = [
    Group(name, pair)
    for name, situation in SITUATIONS.items()
    for pair in itertools.combinations_with_replacement(situation.moves, 2)
]

FREEING = ["decide", "decide and claim", "retry", "hand off"]

TRIPLES = [
    Group(situation, (other, freeing, claim))
    for situation, others, freeings, claims in (
        # What comes before the next job, or takes it away, while the queue becomes free.
        (
            "A runs",
            [*USERS, "enqueue before all", "cancel A", "cancel B", "purge", "settle cancelled"],
            ["decide"],
            ["claim"],
        ),
        ("A runs", [USERS[0], "enqueue before all"], FREEING[1:], ["claim"]),
        ("A runs, and B is not lowered", [USERS[0], "cancel B"], ["decide"], ["claim"]),
        ("A runs, and two lanes wait", ["claim"], ["decide"], ["claim in lane l2"]),
        ("A completes", USERS[:1], ["finish"], ["claim"]),
        # The queue becomes free because its first jobs go.
        ("A is to be cancelled", [USERS[2], "cancel B"], ["settle cancelled"], ["claim"]),
        (
            "A and B are to be cancelled",
            ["enqueue before all", "purge"],
            ["settle cancelled"],
            ["claim"],
        ),
        ("B waits for a look at the notes", USERS[:1], ["look at notes"], ["claim"]),
    )
    for other in others
    for freeing in freeings
    for claim in claims
]

# -- what is answered -----------------------------------------------------------------------------


def gist(answer: Any) -> Any:
    """What an answer says, without what differs from one play to the next."""
    match answer:
        case outcome.Error(error):
            return type(error).__name__
        case outcome.Value(value):
            return gist(value)
        case Exception():
            return type(answer).__name__
        case list() | tuple():
            return tuple(gist(each) for each in answer)
        case Admission(status) | CancellationResult(status):
            return status
        case w.Claimed(job):
            return None if job is None else job.id
        case LaneFailure(jobs, more):
            return (tuple(sorted(job.id for job in jobs)), more)
        case _:
            return getattr(answer, "id", answer)


def is_open(answer: Any) -> bool:
    """Whether the answer says that asking again may bring more."""
    match answer:
        case LaneFailure(_, more):
            return more
        case w.Renewal(status):
            return status == "locked"
        case w.Reconciled(status):
            return status == "untouched"
        case w.Claimed(job):
            return job is None
        case StoreUnavailable() | None | 0:
            return True
        case _:
            return False


def is_cancelled(answer: Any) -> bool:
    """Whether the answer says that a cancellation is to be obeyed."""
    return isinstance(answer, (w.Reserved, w.Returned)) and answer.status == "cancelled"


def joined(first: Any, second: Any) -> Any:
    """What both answers say together."""
    if isinstance(first, LaneFailure) and isinstance(second, LaneFailure):
        return LaneFailure(first.jobs + second.jobs, second.more)
    if isinstance(first, int):
        return first + second
    return second


# -- a play ---------------------------------------------------------------------------------------


class Broken(AssertionError):
    """What must not happen has happened."""


async def played(
    stage: Stage, group: Group, choose: Callable[[list[Actor]], Actor], *, drains: bool = False
) -> Any:
    """Play the group in the order that ``choose`` says; the answers and the table at the end."""
    situation = SITUATIONS[group.situation]
    await stage.set(*situation.rows, notes=situation.notes)
    moves = dict(zip(group.names, group.moves, strict=True))
    plays = {name: MOVES[move](name) for name, move in moves.items()}
    results = await stage.play(choose, **plays)
    trace = list(stage.trace)

    def broken(what: str) -> Broken:
        return Broken(f"{group}: {what}\nanswers: {results}\n" + "\n".join(trace))

    if lost := await stage.lost():
        raise broken(f"{lost} lost")
    store = stage.players["A"].store
    if await stage.notes():
        # As every process does now and then; it tells everybody when it has raised something.
        await store._look_at_notes()
    answers: dict[str, Any] = {}
    for name, play in plays.items():
        result = results[name]
        values = [result.error] if isinstance(result, outcome.Error) else result.value
        if not isinstance(play, list):
            answers[name] = gist(result)
            continue
        if not isinstance(values, list) or len(values) != len(play):
            values = [result.error] * len(play)
        for index, (wish, answer) in enumerate(zip(play, values, strict=True)):
            if is_cancelled(answer):
                # Whoever holds the claim now writes that down, unless it has been by the same step.
                await store.submit(w.Decide(*A, Settle(Outcome.CANCELLED)))
            if isinstance(wish, w.PurgeQueue):
                # It passes over jobs that somebody's transaction holds.
                hints = {row["id"]: row["hint"] for row in (await stage.rows()).values()}
                here = [row for row in situation.rows if row.get("queue", "q") == "q"]
                if not any(hints.get(row["id"]) for row in here):
                    continue
            elif not is_open(answer):
                continue
            (again,) = await stage.players[name].store.submit(wish)
            values[index] = joined(answer, again)
            is_late = isinstance(wish, w.Claim) and again.job is not None
            if is_late and isinstance(answer, w.Claimed) and not answer.more:
                changes = [each for player in stage.players.values() for each in player.changes]
                is_told = any(each is ELSEWHERE or again.job.lane in each.lanes for each in changes)
                is_users = any("user" in move for other, move in moves.items() if other != name)
                if not is_told and not is_users:
                    raise broken(f"nobody told {name} of {again.job.id}")
        answers[name] = gist(values)
    if lost := await stage.lost():
        raise broken(f"{lost} lost in the end")
    table = {
        id: tuple(row[column] for column in COLUMNS) for id, row in (await stage.rows()).items()
    }
    if drains and (left := await undrainable(stage)):
        raise broken(f"{left} cannot be brought to an end")
    return answers, table, trace


COLUMNS = (
    *("state", "token", "lease_until", "not_before", "attempt_count", "attempt_open"),
    *("recovery_count", "window_began_at", "cancellation_id", "outcome", "reason"),
)


async def undrainable(stage: Stage) -> dict[str, str]:
    """What is left when everything is brought to an end that can be."""
    store = stage.players["A"].store
    stage.clock.now += 10 * LEASE
    left: dict[str, str] = {}
    for turn in range(10):
        states = await stage.states()
        left = {id: state for id, state in states.items() if state != "settled"}
        if not left:
            break
        await store._look_at_notes()
        await store.submit(w.SettleCancelled())
        while (gone := (await store.submit(w.NextRunningClaim()))[0]) is not None:
            await store.submit(w.Reconcile(gone.id, gone.token))
        taken = await store.take_completing(f"z{turn}")
        if taken is not None:
            await store.finish_completing(taken.id, taken.token)
        (claimed,) = await store.submit(w.Claim(None, f"u{turn}", "o", LEASE))
        if claimed.job is not None:
            await store.submit(w.Decide(claimed.job.id, claimed.job.token, COMPLETED))
    return left


async def serial(stage: Stage, group: Group) -> list[Any]:
    """What comes of the group when one comes after the other."""
    ends: list[Any] = []
    for order in itertools.permutations(group.names):

        def choose(ready: list[Actor], order: Sequence[str] = order) -> Actor:
            return min(ready, key=lambda actor: order.index(actor.name))

        answers, table, _ = await played(stage, group, choose)
        ends.append((answers, table))
    return ends


async def check(
    stage: Stage,
    group: Group,
    choose: Callable[[list[Actor]], Actor],
    ends: list[Any],
    **options: Any,
) -> None:
    answers, table, trace = await played(stage, group, choose, **options)
    if (answers, table) not in ends:
        raise Broken(
            f"{group}: not as if one came after the other\n"
            + "\n".join(trace)
            + f"\n{answers}\n{table}\nbut one after the other:"
            + "".join(f"\n{end}" for end in ends)
        )


# -- tests ----------------------------------------------------------------------------------------

STAGES = 3
"""Plays that are on at the same time, each in a schema of its own."""


@pytest.mark.parametrize("situation", SITUATIONS)
async def test_any_two_operations_are_as_if_one_came_first(
    situation: str, quick_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trio_watchdog._postgres.LOCKED_SECONDS", {True: 0.0, False: 0.0})
    pairs = [pair for pair in PAIRS if pair.situation == situation]

    async def work(number: int) -> None:
        async with open_stage(quick_database, f"stage{number}") as stage:
            while pairs:
                pair = pairs.pop()
                lot = random.Random(str(pair))
                ends = await serial(stage, pair)
                for turn in range(ORDERS):
                    await check(stage, pair, lot.choice, ends, drains=not turn)

    async with trio.open_nursery() as nursery:
        for number in range(STAGES):
            nursery.start_soon(work, number)


def once_interrupted(lot: random.Random, names: str) -> Callable[[list[Actor]], Actor]:
    """Each goes on for as long as it can; once, somewhere, another one goes first."""
    orders = [lot.sample(names, len(names)) for _ in range(2)]
    turns = itertools.count()
    point = lot.randint(1, 10)

    def choose(ready: list[Actor]) -> Actor:
        order = orders[next(turns) >= point]
        return min(ready, key=lambda actor: order.index(actor.name))

    return choose


async def test_any_three_operations_on_a_queue_that_becomes_free_are_as_if_in_a_row(
    quick_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trio_watchdog._postgres.LOCKED_SECONDS", {True: 0.0, False: 0.0})
    triples = list(TRIPLES)

    async def work(number: int) -> None:
        async with open_stage(quick_database, f"stage{number}", "ABC") as stage:
            while triples:
                triple = triples.pop()
                lot = random.Random(str(triple))
                ends = await serial(stage, triple)
                for turn in range(INTERRUPTED):
                    choose = once_interrupted(lot, triple.names)
                    await check(stage, triple, choose, ends, drains=not turn % 10)
                for _ in range(DRAWN):
                    await check(stage, triple, lot.choice, ends)

    async with trio.open_nursery() as nursery:
        for number in range(STAGES):
            nursery.start_soon(work, number)


# -- for as long as one likes ---------------------------------------------------------------------


class Orders:
    """All orders of a play, one after the other, without knowing how many steps it has."""

    def __init__(self) -> None:
        self._path: list[tuple[int, int]] = []
        self._depth = 0

    def choose(self, ready: list[Actor]) -> Actor:
        if self._depth == len(self._path):
            self._path.append((0, len(ready)))
        index, _ = self._path[self._depth]
        self._path[self._depth] = (index, len(ready))
        self._depth += 1
        return ready[min(index, len(ready) - 1)]

    def advance(self) -> bool:
        """Go to the next order; False if that was the last."""
        del self._path[self._depth :]
        self._depth = 0
        while self._path:
            index, count = self._path.pop()
            if index + 1 < count:
                self._path.append((index + 1, count))
                return True
        return False


async def explore(url: str, seconds: float, seed: int) -> None:
    """All pairs and triples: all orders if they are few, else as many by lot as time allows."""
    import trio_watchdog._postgres as postgres

    postgres.LOCKED_SECONDS.update({True: 0.0, False: 0.0})
    end = time.monotonic() + seconds
    counts = {"orders": 0, "groups": 0, "complete": 0, "broken": 0}
    groups = PAIRS + TRIPLES
    random.Random(seed).shuffle(groups)
    share = seconds / len(groups) * STAGES

    async def work(number: int) -> None:
        async with open_stage(url, f"explore{number}", "ABC") as stage:
            while groups and time.monotonic() < end:
                group = groups.pop()
                counts["groups"] += 1
                until = time.monotonic() + share
                try:
                    ends = await serial(stage, group)
                    orders = Orders()
                    is_complete = True
                    while True:
                        await check(stage, group, orders.choose, ends, drains=True)
                        counts["orders"] += 1
                        if not orders.advance():
                            break
                        if time.monotonic() > until - share / 2:
                            is_complete = False
                            break
                    counts["complete"] += is_complete
                    lot = random.Random(f"{seed} {group}")
                    while not is_complete and time.monotonic() < until:
                        await check(stage, group, lot.choice, ends, drains=True)
                        counts["orders"] += 1
                except Exception as error:
                    counts["broken"] += 1
                    print(f"---- {group}\n{error!r}\n{error}", flush=True)  # noqa: T201
                    if not isinstance(error, Broken):
                        raise

    async with trio.open_nursery() as nursery:
        for number in range(STAGES):
            nursery.start_soon(work, number)
    print(counts, flush=True)  # noqa: T201


if __name__ == "__main__":
    trio.run(explore, sys.argv[1], float(sys.argv[2]), int(sys.argv[3]) if sys.argv[3:] else 0)
