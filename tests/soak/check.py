"""Judges a soak by its ledger alone: what contradicts the promises, and how much was done.

Who asked for a job, who ran it, and who read that it was settled wrote so into the ledger, each for
itself. Lines of the soak, beside those of `tests/process/worker.py`:

* ``asked`` and ``admitted``: before and after an admission. ``expects``: the outcome that the
  handler is told to bring about; ``recoveries``: how many the job may have, None if it has none;
  ``due``: not before, where one clock judges all. ``rolled_back``: an admission that was undone.
* ``cancel``: the answer to a cancellation.
* ``settled``: the settled feed, in its order.
* ``sample``: what a worker has. ``kill``, ``freeze``, ``thaw``, ``terminate``, ``clock``, ``stop``,
  ``start``: what was done to workers and to the server.
"""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from attrs import define, field, frozen

from tests.process.harness import (
    SECOND,
    Execution,
    Ledger,
    Line,
    is_stillborn,
    moments,
    overlaps,
)
from tests.soak.terms import ATTEMPTS, LEASE

CLAIM_AGE = 2 * LEASE * SECOND
"""How long before a handler's begin its job was claimed, at most: with one renewal in between."""

CANCEL_LATE = 10 * SECOND
"""How long a handler may run on after its cancellation is durable. Its worker hears of it at the
next renewal, or else its lease ends; the rest is for a busy machine."""

EARLY = SECOND // 20
"""By how much a handler may begin too early by the ledger: the wall clock is adjusted meanwhile."""

# -- what a worker may have

GROWTH = 4 * 2**20
"""Bytes by which the regression line of a worker's memory may rise over the second half of its
life. In an hour a worker does some 9000 jobs in that half, so half a kilobyte for each is found,
and the allocator's own ups and downs are not."""

LONG_LIFE = 600.0
"""Seconds that a worker has to live for its memory to be judged."""

LIMITS = {"files": 60, "threads": 40, "tasks": 80}
"""At any time. Less than half as many were ever seen: 24 files, 8 threads, 33 tasks."""

DRIFT = 8
"""By how much the median of files, threads or tasks in the last quarter may exceed that of the
second; of workers with enough samples."""

ENOUGH = 24


# -- a job's story ---------------------------------------------------------------------------------


@define
class Story:
    """Everything that the ledger has on one job."""

    id: str
    asked: Line | None = None
    admitted: Line | None = None
    rolled_back: bool = False
    settled: list[tuple[int, Line]] = field(factory=list[tuple[int, Line]])
    """With the place in the feed."""
    runs: list[Execution] = field(factory=list[Execution])
    cancels: list[Line] = field(factory=list[Line])
    hooks: list[Line] = field(factory=list[Line])
    hooked: list[Line] = field(factory=list[Line])

    @property
    def end(self) -> dict[str, Any]:
        return self.settled[0][1].facts

    @property
    def rank(self) -> tuple[int, int]:
        """Where it stands in its queue."""
        return -self.end["priority"], self.end["sequence"]


def stories(ledger: Ledger) -> dict[str, Story]:
    found: dict[str, Story] = {}
    place = 0
    for line in ledger.lines():
        if line.job is None:
            continue
        story = found.setdefault(line.job, Story(line.job))
        match line.kind:
            case "asked":
                # Only the first one can be the one that was admitted earliest.
                story.asked = story.asked or line
            case "admitted":
                story.admitted = story.admitted or line
            case "rolled_back":
                story.rolled_back = True
            case "settled":
                story.settled.append((place, line))
                place += 1
            case "cancel":
                story.cancels.append(line)
            case "hook":
                story.hooks.append(line)
            case "hooked":
                story.hooked.append(line)
            case _:
                pass
    thawed = moments(ledger, "thaw")
    for run in ledger.executions():
        if not is_stillborn(run, thawed[run.begin.pid]):
            found[run.job].runs.append(run)
    return found


# -- what must be true -----------------------------------------------------------------------------


def contradictions(ledger: Ledger) -> list[str]:
    """Everything in the ledger that must not be."""
    found = stories(ledger)
    problems = [
        *settled_once(found.values()),
        *overlaps(ledger),
    ]
    if problems:
        # What follows takes it for granted that each job has one end.
        found = {id: story for id, story in found.items() if len(story.settled) == 1}
    problems += too_many_runs(found.values())
    problems += wrong_outcomes(found.values())
    problems += out_of_turn(found.values())
    problems += cancelled_too_late(found.values(), moments(ledger, "freeze"))
    problems += hooks_astray(found.values())
    problems += leaks(ledger)
    return problems


def settled_once(all: Iterable[Story]) -> Iterator[str]:
    """Every admitted job is settled exactly once, and nothing else is."""
    for story in all:
        if len(story.settled) > 1:
            yield f"{story.id} is in the settled feed {len(story.settled)} times"
        if story.settled and story.asked is None:
            undone = ", and its admission was rolled back" if story.rolled_back else ""
            yield f"{story.id} is settled, and nobody asked for it{undone}"
        if story.admitted is not None and not story.settled:
            yield f"{story.id} was admitted and is not settled: {told(story)}"
        if story.runs and story.asked is None:
            yield f"{story.id} ran, and nobody asked for it"


def too_many_runs(all: Iterable[Story]) -> Iterator[str]:
    """No more executions than retries, hand-offs and recoveries make necessary."""
    for story in all:
        if not story.settled or story.asked is None:
            continue
        again = sum(returned_to_queue(run) for run in story.runs)
        recovered = story.end["recovery_count"]
        if len(story.runs) > 1 + again + recovered:
            yield (
                f"{story.id} ran {len(story.runs)} times, after {again} retries and hand-offs and"
                f" {recovered} recoveries: {told(story)}"
            )
        budget = story.asked.facts["recoveries"] or 0
        if recovered > budget:
            yield f"{story.id} was recovered {recovered} times of {budget}"
        if any(run.begin.facts["attempt"] > ATTEMPTS for run in story.runs):
            yield f"{story.id} had more than {ATTEMPTS} attempts: {told(story)}"


def returned_to_queue(run: Execution) -> bool:
    """Whether an execution asked for another one, or was stopped by the runtime."""
    return run.end is not None and (
        run.end.facts["how"] in ("retry", "raised") or run.end.facts["reason"] == "shutdown"
    )


HOWS = {
    "completed": {"none", "complete"},
    "failed": {"fail", "raised", "retry"},
    "cancelled": {"cancel"},
    "outcome_unknown": {"unknown"},
}
"""How an execution ended that brings about an outcome."""


def wrong_outcomes(all: Iterable[Story]) -> Iterator[str]:
    """Jobs end as their handlers say, unless cancelled, given up on, or out of attempts."""
    for story in all:
        if not story.settled or story.asked is None:
            continue
        outcome, facts = story.end["outcome"], story.asked.facts
        for cancel in story.cancels:
            status, known = cancel.facts["status"], cancel.facts["outcome"]
            if status == "recorded" and outcome != "cancelled":
                yield f"{story.id} is {outcome}, and its cancellation was recorded"
            if status == "decided" and known != outcome:
                yield f"{story.id} is {outcome}, and was said to be decided as {known}"
            # Missing it may be after it was read as settled: then it can be pruned.
            if status == "missing" and cancel.at < story.settled[0][1].at:
                yield f"{story.id} was admitted, and missing when it was to be cancelled"
        hows = {run.end.facts["how"] for run in story.runs if run.end is not None}
        if outcome == facts["expects"] and hows & HOWS[outcome]:
            continue
        is_excused = (
            (outcome == "cancelled" and story.end["cancellation"] is not None)
            or (
                outcome == "interrupted"
                and story.end["recovery_count"] == (facts["recoveries"] or 0)
            )
            or (outcome == "failed" and story.end["attempt_count"] == ATTEMPTS)
        )
        if not is_excused:
            yield (
                f"{story.id} is {outcome} ({story.end['reason']}), expected {facts['expects']}: "
                + (told(story))
            )


def out_of_turn(all: Iterable[Story]) -> Iterator[str]:
    """In each queue the head first: by priority, then by admission; also in the settled feed.

    A begin is judged by the moment of its claim, which the ledger does not know. But it knows some
    earlier one: the job had been asked for, its queue was free, and the claim was still good. A job
    that goes first and was admitted by then must not run later.
    """
    queues = defaultdict[str | None, list[Story]](list)
    for story in all:
        if story.settled and story.asked is not None:
            queues[story.asked.queue].append(story)
    for queue, members in queues.items():
        runs = sorted(
            ((run, story) for story in members for run in story.runs), key=lambda p: p[0].begin.at
        )
        # What ended as it should held the queue until then.
        held = sorted(
            run.end.at for run, _ in runs if run.end is not None and run.end.facts["reason"] is None
        )
        yield from _begun_out_of_turn(queue, members, runs, held)
        ended = [story for story in members if story.runs and is_by_handler(story)]
        ended.sort(key=lambda story: story.runs[-1].begin.at)
        for first, second in itertools.pairwise(ended):
            if first.settled[0][0] > second.settled[0][0]:
                yield f"queue {queue}: the feed has {second.id} before {first.id}, which ran first"


def is_by_handler(story: Story) -> bool:
    """Whether it was certainly the last execution that ended the job."""
    end, outcome = story.runs[-1].end, story.end["outcome"]
    is_decided = outcome in ("completed", "outcome_unknown")
    return is_decided and end is not None and end.facts["how"] in HOWS[outcome]


def _begun_out_of_turn(
    queue: str | None,
    members: Iterable[Story],
    runs: Sequence[tuple[Execution, Story]],
    held: Sequence[int],
) -> Iterator[str]:
    coming = deque(
        sorted(
            ((story.admitted.at, story) for story in members if story.admitted and story.runs),
            key=lambda pair: pair[0],
        )
    )
    left = Counter(story.id for _, story in runs)
    waiting: dict[str, Story] = {}
    for run, story in runs:
        while coming and coming[0][0] < run.begin.at:
            other = coming.popleft()[1]
            waiting[other.id] = other
        left[story.id] -= 1
        assert story.asked is not None
        claimed_at = max(story.asked.at, run.begin.at - CLAIM_AGE)
        if place := bisect.bisect_left(held, run.begin.at):
            claimed_at = max(claimed_at, held[place - 1])
        # Whoever does not run again may have been settled by then.
        waiting = {id: other for id, other in waiting.items() if left[id]}
        for other in waiting.values():
            assert other.admitted is not None
            if other.rank < story.rank and other.admitted.at < claimed_at:
                yield (
                    f"queue {queue}: {story.id} began at {run.begin.at}, before {other.id}, which"
                    f" goes first and was admitted at {other.admitted.at}: {told(other)}"
                )
        due = story.asked.facts.get("due")
        if due is not None and run.begin.at < due - EARLY:
            yield f"{story.id} began {(due - run.begin.at) / SECOND:.3f} s before it was due"


def cancelled_too_late(all: Iterable[Story], frozen: defaultdict[int, list[int]]) -> Iterator[str]:
    """Once a cancellation is durable no handler begins, and one that runs is soon stopped."""
    for story in all:
        ats = [line.at for line in story.cancels if line.facts["status"] == "recorded"]
        if not ats:
            continue
        limit = min(ats) + CANCEL_LATE
        for run in story.runs:
            # A frozen process may take a step when it is thawed; `overlaps` counts these.
            if any(run.begin.at - CLAIM_AGE < at < limit for at in frozen[run.begin.pid]):
                continue
            if run.begin.at > limit:
                yield f"{story.id} began long after it was cancelled: {told(story)}"
            elif any(beat > limit for beat in run.beats):
                yield f"{story.id} worked on long after it was cancelled: {told(story)}"


def hooks_astray(all: Iterable[Story]) -> Iterator[str]:
    """A hook comes after the decision and before the end; a handler never comes after a hook."""
    for story in all:
        if not story.settled:
            continue
        if story.hooks and story.runs and story.runs[-1].begin.at > story.hooks[0].at:
            yield f"{story.id} ran again after its hook had begun: {told(story)}"
        decided = story.runs and story.end["outcome"] in ("completed", "outcome_unknown")
        if story.asked is not None and story.asked.facts["lane"] == "hook" and decided:
            ended = [line.at for line in story.hooked if line.facts["how"] == "returned"]
            if not ended:
                yield f"{story.id} is settled, and its hook has not ended: {told(story)}"
            elif min(ended) > story.settled[0][1].at:
                yield f"{story.id} was settled before its hook had ended: {told(story)}"


def leaks(ledger: Ledger) -> Iterator[str]:
    """What workers have stays within limits, and flat in those that live long."""
    samples = defaultdict[str, list[Line]](list)
    for line in ledger.lines("sample"):
        samples[line.worker].append(line)
    for worker, lines in samples.items():
        for name, limit in LIMITS.items():
            values = [line.facts[name] for line in lines]
            if max(values) > limit:
                yield f"{worker} had {max(values)} {name}; {limit} are allowed"
            if len(values) >= ENOUGH:
                quarter = len(values) // 4
                early = statistics.median(values[quarter : 2 * quarter])
                late = statistics.median(values[-quarter:])
                if late > early + DRIFT:
                    yield f"{worker} went from {early:g} to {late:g} {name}"
        if lines[-1].at - lines[0].at >= LONG_LIFE * SECOND:
            half = lines[len(lines) // 2 :]
            rise = risen([line.at for line in half], [line.facts["memory"] for line in half])
            if rise > GROWTH:
                yield (
                    f"the memory of {worker} rose by {rise / 2**20:.1f} MiB in the second half of"
                    f" its life; {GROWTH / 2**20:g} MiB are allowed"
                )


def risen(times: Sequence[float], values: Sequence[float]) -> float:
    """By how much the regression line rises from the first time to the last."""
    if len(set(times)) < 2:
        return 0.0
    return statistics.linear_regression(times, values).slope * (times[-1] - times[0])


def told(story: Story) -> str:
    """A job in a few words, for people."""
    asked = None if story.asked is None else story.asked.facts
    parts = [f"asked for as {asked}"]
    for run in story.runs:
        end = "no end" if run.end is None else f"{run.end.facts['how']}/{run.end.facts['reason']}"
        last = run.begin.at if run.end is None else run.end.at
        parts.append(
            f"ran in {run.worker} from {run.begin.at} to {last}, attempt"
            f" {run.begin.facts.get('attempt')}, {len(run.beats)} beats: {end}"
        )
    parts += [f"cancel at {line.at}: {line.facts}" for line in story.cancels]
    parts += [f"{line.kind} in {line.worker} at {line.at}" for line in story.hooks + story.hooked]
    parts += [f"settled, seen at {line.at}: {line.facts}" for _, line in story.settled]
    return "; ".join(parts)


# -- how much was done -----------------------------------------------------------------------------


@frozen
class Report:
    """What a soak has done, in numbers."""

    store: str
    facts: dict[str, Any]

    def __str__(self) -> str:
        return "\n".join(
            [f"{self.store}:", *(f"  {name:<12} {value}" for name, value in self.facts.items())]
        )


def report(store: str, ledger: Ledger, kept: int) -> Report:
    """The numbers of one store."""
    found = stories(ledger)
    ends = ledger.lines("settled")
    count = Counter(line.kind for line in ledger.lines())
    outcomes = Counter(line.facts["outcome"] for line in ends)
    times = [line.at for line in ends]
    gap = max((b - a for a, b in itertools.pairwise(times)), default=0) / SECOND
    seconds = (times[-1] - times[0]) / SECOND if times else math.nan
    memory = defaultdict[str, list[int]](list)
    for line in ledger.lines("sample"):
        memory[line.worker].append(line.facts["memory"])
    longest = max(memory, key=lambda worker: len(memory[worker]), default=None)
    drained = len({line.pid for line in ledger.lines("terminate")})
    facts = {
        "admitted": sum(story.admitted is not None for story in found.values()),
        "settled": ", ".join(f"{n} {outcome}" for outcome, n in sorted(outcomes.items())),
        "executions": sum(len(story.runs) for story in found.values()),
        "recovered": sum(line.facts["recovery_count"] for line in ends),
        "retried": sum(returned_to_queue(run) for story in found.values() for run in story.runs),
        "cancelled": len(ledger.lines("cancel", status="recorded")),
        "workers": f"{count['kill']} killed, {count['thaw']} frozen, {drained} drained,"
        f" {count['clock']} clocks set",
        "server": f"{count['stop']} stopped",
        "rows kept": kept,
        "longest gap": f"{gap:.1f} s",
        "speed": f"{len(ends) / seconds:.1f} jobs/s" if seconds else "none",
    }
    if longest is not None:
        first, last = memory[longest][0], memory[longest][-1]
        facts["memory"] = f"{first / 2**20:.1f} MiB to {last / 2**20:.1f} MiB in {longest}"
    return Report(store, facts)
