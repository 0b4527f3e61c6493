"""Judges a soak by its ledger alone: what contradicts the promises, and how much was done.

Who asked for a job, who ran it, and who read that it was settled wrote so into the ledger, each for
itself. Lines of the soak, beside those of `tests/process/worker.py`:

* ``asked`` and ``admitted``: before and after an admission. ``expects``: the outcome that the
  handler is told to bring about; ``recoveries``: how many the job may have, None if it has none,
  and in which ``window``, None if in all its life;
  ``due``: not before, where one clock judges all. ``rolled_back``: an admission that was undone.
* ``begin`` also tells how many attempts there may be, ``of``, and how often the job was
  ``recovered`` by then, in the present window.
* ``cancel``: the answer to a cancellation.
* ``failing`` and ``lane_failed``: before a lane is failed, and each answer. ``reason`` is another
  one for each call; ``jobs``: those that it settled; ``more``: whether some were left.
* ``purging`` and ``purged``: before and after the jobs that wait in a queue are deleted.
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
from tests.soak.terms import ATTEMPTS, LEASE, TIME_LIMIT

CLAIM_AGE = 2 * LEASE * SECOND
"""How long before a handler's begin its job was claimed, at most: with one renewal in between."""

CANCEL_LATE = 10 * SECOND
"""How long a handler may run on after its cancellation, or its lane's end, is durable. Its worker
hears of it at the next renewal, or else its lease ends; the rest is for a busy machine."""

LIMIT_LATE = 2 * SECOND
"""How long a handler may run on after its time limit. No other process has to be heard of it, and
only the machine may be busy."""

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


# -- what was done to many jobs at once -----------------------------------------------------------


@define
class LaneFailing:
    """A call that failed all jobs of a lane."""

    lane: str
    asked_at: int
    over_at: float = math.inf
    """When the answer said that none were left."""
    told: set[str] = field(factory=set[str])


def lane_failings(ledger: Ledger) -> dict[str, LaneFailing]:
    """By the reason that jobs get from it."""
    found: dict[str, LaneFailing] = {}
    for line in ledger.lines("failing"):
        found[line.facts["reason"]] = LaneFailing(line.facts["lane"], line.at)
    for line in ledger.lines("lane_failed"):
        call = found[line.facts["reason"]]
        call.told.update(line.facts["jobs"])
        if not line.facts["more"]:
            call.over_at = line.at
    return found


@frozen
class Purge:
    """A call that deleted what waited in a queue."""

    asked_at: int
    over_at: float
    count: int | None
    """None: it is not known, since there was no answer, or an earlier one may be lost."""

    def may_have_taken(self, story: Story) -> bool:
        """Whether the job was there, and nobody worked on it after the call."""
        return (
            self.count != 0
            and story.asked is not None
            and story.asked.at < self.over_at
            and all(surely_alive_at(run) < self.over_at for run in story.runs)
        )


def purges(ledger: Ledger) -> defaultdict[str | None, list[Purge]]:
    """By queue. A queue is purged by one call after the other."""
    found = defaultdict[str | None, list[Purge]](list)
    begun: dict[str | None, Line] = {}
    for line in ledger.lines():
        if line.kind == "purging":
            begun[line.queue] = line
        elif line.kind == "purged":
            asked_at = begun.pop(line.queue).at
            count = None if was_away(ledger, asked_at, line.at) else line.facts["count"]
            found[line.queue].append(Purge(asked_at, line.at, count))
    for queue, line in begun.items():
        found[queue].append(Purge(line.at, math.inf, None))
    return found


def was_away(ledger: Ledger, since: float, until: float) -> bool:
    """Whether the server was away meanwhile, so that an answer may have been lost."""
    starts = [line.at for line in ledger.lines("start")]
    outages = itertools.zip_longest(ledger.lines("stop"), starts, fillvalue=math.inf)
    return any(stop.at <= until and since <= start for stop, start in outages)


def surely_alive_at(run: Execution) -> int:
    """The end, if nobody cut it short, or else the last sign of life but one: the last may be the
    one step that a thawed process takes.
    """
    if run.end is not None and run.end.facts["reason"] is None:
        return run.end.at
    return run.beats[-2] if len(run.beats) > 1 else run.begin.at


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
    failed_by: LaneFailing | None = None
    """If it was settled with its lane."""

    @property
    def end(self) -> dict[str, Any]:
        return self.settled[0][1].facts

    @property
    def rank(self) -> tuple[int, int]:
        """Where it stands in its queue."""
        return -self.end["priority"], self.end["sequence"]


def stories(ledger: Ledger) -> dict[str, Story]:
    found: dict[str, Story] = {}
    failings = lane_failings(ledger)
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
                story.failed_by = failings.get(line.facts["reason"])
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
    found, failings, purged = stories(ledger), lane_failings(ledger), purges(ledger)
    voided = {id: story.failed_by.asked_at for id, story in found.items() if story.failed_by}
    problems = [
        *settled_once(found.values(), purged),
        *purged_astray(found.values(), purged, ledger),
        *overlaps(ledger, voided),
    ]
    if problems:
        # What follows takes it for granted that each job has one end.
        found = {id: story for id, story in found.items() if len(story.settled) == 1}
    problems += too_many_runs(found.values())
    problems += recoveries_miscounted(found.values(), troubles(ledger))
    problems += wrong_outcomes(found.values())
    problems += lanes_failed_astray(found, failings)
    problems += overrun(found.values(), moments(ledger, "freeze"))
    problems += out_of_turn(found.values())
    problems += stopped_too_late(found.values(), failings.values(), moments(ledger, "freeze"))
    problems += hooks_astray(found.values())
    problems += leaks(ledger)
    return problems


def settled_once(
    all: Iterable[Story], purged: defaultdict[str | None, list[Purge]]
) -> Iterator[str]:
    """Every admitted job is settled exactly once, unless it was purged, and nothing else is."""
    for story in all:
        if len(story.settled) > 1:
            yield f"{story.id} is in the settled feed {len(story.settled)} times"
        if story.settled and story.asked is None:
            undone = ", and its admission was rolled back" if story.rolled_back else ""
            yield f"{story.id} is settled, and nobody asked for it{undone}"
        is_open = story.admitted is not None and not story.settled
        queue = None if story.admitted is None else story.admitted.queue
        if is_open and not any(purge.may_have_taken(story) for purge in purged[queue]):
            yield f"{story.id} was admitted and is not settled: {told(story)}"
        if story.runs and story.asked is None:
            yield f"{story.id} ran, and nobody asked for it"


def purged_astray(
    all: Iterable[Story], purged: defaultdict[str | None, list[Purge]], ledger: Ledger
) -> Iterator[str]:
    """As many jobs are gone from a queue as the purges said."""
    gone, doubtful = Counter[str | None](), Counter[str | None]()
    for story in all:
        if story.asked is None or story.rolled_back or not purged[story.asked.queue]:
            continue
        queue, admitted = story.asked.queue, story.admitted
        if admitted is None:
            # It may have been there: then its admission's answer was lost.
            doubtful[queue] += not story.settled
            continue
        gone[queue] += not story.settled
        # It may have been purged, and then admitted again, since the first answer was lost.
        doubtful[queue] += was_away(ledger, story.asked.at, admitted.at)
    for queue, calls in purged.items():
        count = sum(purge.count or 0 for purge in calls)
        is_known = not any(purge.count is None for purge in calls)
        if gone[queue] > count and is_known:
            yield f"queue {queue}: {gone[queue]} jobs are gone, and {count} were purged"
        if count > gone[queue] + doubtful[queue]:
            yield f"queue {queue}: {count} jobs were purged, and {gone[queue]} are gone"


def too_many_runs(all: Iterable[Story]) -> Iterator[str]:
    """No more executions than retries, hand-offs and recoveries make necessary."""
    for story in all:
        if not story.settled or story.asked is None:
            continue
        again = sum(returned_to_queue(run) for run in story.runs)
        recovered, budget = story.end["recovery_count"], story.asked.facts["recoveries"] or 0
        if recovered > budget:
            yield f"{story.id} was recovered {recovered} times of {budget}"
        if story.runs and (window := window_of(story)) < math.inf:
            # The end tells of the last window only. The first begins after the job was asked for,
            # and each of the others when the one before is over.
            life = story.runs[-1].begin.at - story.asked.at + EARLY
            recovered = budget * (1 + int(life / window))
        if len(story.runs) > 1 + again + recovered:
            yield (
                f"{story.id} ran {len(story.runs)} times, after {again} retries and hand-offs and"
                f" {recovered} recoveries: {told(story)}"
            )
        if any(run.begin.facts["attempt"] > ATTEMPTS for run in story.runs):
            yield f"{story.id} had more than {ATTEMPTS} attempts: {told(story)}"


def returned_to_queue(run: Execution) -> bool:
    """Whether an execution asked for another one, or was stopped by the runtime."""
    if run.end is None:
        return False
    if is_timed_out(run):
        return run.begin.facts["of"] is not None
    return run.end.facts["how"] in ("retry", "raised") or run.end.facts["reason"] == "shutdown"


def is_timed_out(run: Execution) -> bool:
    return run.end is not None and run.end.facts["reason"] == "timeout"


def window_of(story: Story) -> float:
    """Nanoseconds within which recoveries count."""
    window = None if story.asked is None else story.asked.facts.get("window")
    return math.inf if window is None else window * SECOND


def troubles(ledger: Ledger) -> list[int]:
    """When something was done that a claim may be lost by."""
    return sorted(line.at for kind in ("kill", "freeze", "stop") for line in ledger.lines(kind))


def recoveries_miscounted(all: Iterable[Story], troubles: Sequence[int]) -> Iterator[str]:
    """Each recovery counts within its window, and none after it.

    When a window began is not known, but that it was after the begin of the execution that was
    recovered, and before the begin of the next one.
    """
    for story in all:
        window = window_of(story)
        if not story.settled or not story.runs or story.asked is None or window == math.inf:
            # Without a window, how many there are is all that counts.
            continue
        earliest = story.asked.at
        latest = story.runs[0].begin.at
        points = [(run.begin.at, run.begin.facts["recovered"]) for run in story.runs]
        points.append((story.settled[0][1].at, story.end["recovery_count"]))
        attempts = [run.begin.facts["attempt"] for run in story.runs]
        # As if there were one more, so that one that nobody saw begin shows.
        attempts.append(story.end["attempt_count"] + 1)
        for place, run in enumerate(story.runs):
            (_, before), (at, after) = points[place : place + 2]
            is_last, is_again = run is story.runs[-1], returned_to_queue(run)
            is_fresh = after < before or (after == before and not is_last and not is_again)
            if is_fresh and (before == 0 or at - earliest < window - EARLY):
                yield f"{story.id} was recovered, and it did not count: {told(story)}"
            alive_at = surely_alive_at(run)
            lost = bisect.bisect(troubles, at) - bisect.bisect(troubles, alive_at)
            # Claims may be lost before a handler begins, and then more than one recovery lies here;
            # some of them have counted an attempt.
            is_plain = lost <= 1 and not is_again and attempts[place + 1] <= attempts[place] + 1
            is_counted = after > before or (is_last and story.end["outcome"] == "interrupted")
            if before and is_counted and is_plain and alive_at - latest > window + EARLY:
                yield f"{story.id} was recovered too long ago for that to count: {told(story)}"
            if is_fresh or before == 0:
                earliest = run.begin.at
            if is_fresh or before == 0 or (lost and not is_plain):
                latest = at


HOWS = {
    "completed": {"none", "complete"},
    "failed": {"fail", "raised", "retry", "timeout"},
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
            # A lane that is failed takes the cancelled ones with it.
            if status == "recorded" and outcome != "cancelled" and not story.failed_by:
                yield f"{story.id} is {outcome}, and its cancellation was recorded"
            if status == "decided" and known != outcome:
                yield f"{story.id} is {outcome}, and was said to be decided as {known}"
            # Missing it may be after it was read as settled: then it can be pruned.
            if status == "missing" and cancel.at < story.settled[0][1].at:
                yield f"{story.id} was admitted, and missing when it was to be cancelled"
        hows = {how(run) for run in story.runs}
        if outcome == facts["expects"] and hows & HOWS[outcome]:
            continue
        is_excused = (
            (outcome == "cancelled" and story.end["cancellation"] is not None)
            or (
                outcome == "interrupted"
                and story.end["recovery_count"] == (facts["recoveries"] or 0)
            )
            or (outcome == "failed" and story.end["attempt_count"] == ATTEMPTS)
            or (outcome == "failed" and story.failed_by is not None)
            or (outcome == "failed" and has_timed_out_for_good(story))
        )
        if not is_excused:
            yield (
                f"{story.id} is {outcome} ({story.end['reason']}), expected {facts['expects']}: "
                + (told(story))
            )


def how(run: Execution) -> str | None:
    """How an execution ended; what it says after its time limit does not count."""
    if run.end is None:
        return None
    return "timeout" if is_timed_out(run) else run.end.facts["how"]


def has_timed_out_for_good(story: Story) -> bool:
    """Whether the last execution took too long, on a slow machine perhaps, and was the only try."""
    last = story.runs[-1] if story.runs else None
    return last is not None and is_timed_out(last) and last.begin.facts["of"] is None


def lanes_failed_astray(found: dict[str, Story], failings: dict[str, LaneFailing]) -> Iterator[str]:
    """A lane that is failed takes what is queued or runs in it, and nothing else."""
    for story in found.values():
        call = story.failed_by
        if call is None or story.asked is None:
            continue
        lane = story.asked.facts["lane"]
        if lane != call.lane:
            yield f"{story.id} of the lane {lane} was failed with the lane {call.lane}"
        if story.settled[0][1].at < call.asked_at or story.asked.at > call.over_at:
            yield f"{story.id} was failed with its lane at another time: {told(story)}"
        if story.hooks:
            yield f"{story.id} was failed with its lane after its decision: {told(story)}"
    for reason, call in failings.items():
        for id in call.told & found.keys():
            if (end := found[id].end)["reason"] != reason:
                yield f"{id} is {end['outcome']} ({end['reason']}), and was said to be failed"


def overrun(all: Iterable[Story], frozen: defaultdict[int, list[int]]) -> Iterator[str]:
    """Whoever passes the time limit is stopped, and ends by that if it was the last try."""
    limit = int(TIME_LIMIT * SECOND)
    for story in all:
        if story.asked is None or story.asked.facts["lane"] != "limited":
            continue
        for run in story.runs:
            late = run.begin.at + limit + LIMIT_LATE
            is_frozen = any(run.begin.at < at < late for at in frozen[run.begin.pid])
            if not is_frozen and any(beat > late for beat in run.beats):
                yield f"{story.id} worked on long after its time limit: {told(story)}"
        if not story.settled:
            continue
        last, reason = story.runs[-1] if story.runs else None, story.end["reason"] or ""
        is_by_limit = f"timed out after {TIME_LIMIT:g} s" in reason
        if is_by_limit and (
            last is None or last.end is None or last.end.at - last.begin.at < limit - EARLY
        ):
            yield f"{story.id} had time left, and {reason}: {told(story)}"
        if last is None or not is_timed_out(last) or story.failed_by:
            continue
        outcome = story.end["outcome"]
        is_last = last.begin.facts["attempt"] == story.end["attempt_count"]
        if outcome in ("completed", "outcome_unknown") or (
            outcome == "failed" and is_last and not is_by_limit
        ):
            yield f"{story.id} is {outcome} ({reason}), and had timed out: {told(story)}"


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
            run.end.at
            for run, story in runs
            if run.end is not None and run.end.facts["reason"] is None and not story.failed_by
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


def stopped_too_late(
    all: Iterable[Story], failings: Iterable[LaneFailing], frozen: defaultdict[int, list[int]]
) -> Iterator[str]:
    """Once a cancellation is durable no handler begins, and one that runs is soon stopped.

    Nor when its lane was failed, and it had been admitted by then.
    """
    lanes = defaultdict[str, list[LaneFailing]](list)
    for call in failings:
        lanes[call.lane].append(call)
    for story in all:
        ats: list[float] = [line.at for line in story.cancels if line.facts["status"] == "recorded"]
        if story.asked is not None and story.admitted is not None:
            calls = lanes[story.asked.facts["lane"]]
            ats += [call.over_at for call in calls if call.asked_at > story.admitted.at]
        if not ats:
            continue
        limit = min(ats) + CANCEL_LATE
        for run in story.runs:
            # A frozen process may take a step when it is thawed; `overlaps` counts these.
            if any(run.begin.at - CLAIM_AGE < at < limit for at in frozen[run.begin.pid]):
                continue
            if run.begin.at > limit:
                yield f"{story.id} began long after it was cancelled or failed: {told(story)}"
            elif any(beat > limit for beat in run.beats):
                yield f"{story.id} worked on long after it was cancelled or failed: {told(story)}"


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
        "timed out": sum(is_timed_out(run) for story in found.values() for run in story.runs),
        "cancelled": len(ledger.lines("cancel", status="recorded")),
        "lanes failed": f"{count['failing']}, with"
        f" {sum(story.failed_by is not None for story in found.values())} jobs",
        "purged": sum(line.facts["count"] for line in ledger.lines("purged")),
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
