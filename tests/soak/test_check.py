"""The judge of the soak finds what it is there to find. Each test takes one true ledger, in which
nothing is wrong, and makes one thing in it wrong.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.process.harness import SECOND, Ledger
from tests.soak.check import LONG_LIFE, contradictions, report


class Book:
    """A ledger in the making; times are seconds."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def write(self, at: float, kind: str, *, pid: int = 0, **facts: Any) -> None:
        line = {"at": int(at * SECOND), "kind": kind, "worker": f"w{pid}", "pid": pid, **facts}
        self.lines.append(line)

    def admit(self, at: float, job: str, *, queue: str = "q", **facts: Any) -> None:
        asked = {"lane": "trio", "expects": "completed", "recoveries": 1, **facts}
        self.write(at, "asked", job=job, queue=queue, **asked)
        self.write(at + 0.01, "admitted", job=job, queue=queue)

    def run(
        self,
        begin: float,
        end: float | None,
        job: str,
        *,
        pid: int = 1,
        token: str | None = None,
        queue: str = "q",
        how: str = "none",
        reason: str | None = None,
        beats: tuple[float, ...] = (),
        attempt: int = 1,
        of: int | None = 8,
        recovered: int = 0,
    ) -> None:
        known = {"pid": pid, "job": job, "queue": queue, "token": token or f"{job}@{begin}"}
        self.write(begin, "begin", **known, attempt=attempt, of=of, recovered=recovered)
        for at in beats:
            self.write(at, "beat", **known)
        if end is not None:
            self.write(end, "end", **known, how=how, reason=reason)

    def settle(self, at: float, job: str, sequence: int, **facts: Any) -> None:
        ended = {
            "outcome": "completed",
            "reason": None,
            "priority": 0,
            "attempt_count": 1,
            "recovery_count": 0,
            "cancellation": None,
            **facts,
        }
        self.write(at, "settled", job=job, sequence=sequence, **ended)

    def problems(self, folder: Path) -> list[str]:
        lines = sorted(self.lines, key=lambda line: line["at"])
        (folder / "ledger").write_text("".join(json.dumps(line) + "\n" for line in lines))
        ledger = Ledger(folder)
        try:
            found = contradictions(ledger)
            assert str(report("a store", ledger, 0))
        finally:
            ledger.close()
        return found

    def without(self, kind: str, job: str) -> None:
        self.lines = [line for line in self.lines if (line["kind"], line.get("job")) != (kind, job)]


@pytest.fixture
def book() -> Book:
    """Four jobs of a queue: one is simple, one retried, one recovered, and one has a hook."""
    book = Book()
    for sequence, job in enumerate(("simple", "retried", "recovered", "hooked")):
        book.admit(sequence / 10, job, lane="hook" if job == "hooked" else "trio")
    book.run(1, 2, "simple")
    book.settle(2.5, "simple", 0)
    book.run(3, 4, "retried", how="raised")
    book.run(4.5, 5, "retried", attempt=2)
    book.settle(5.5, "retried", 1, attempt_count=2)
    book.run(6, None, "recovered", beats=(6.5,))
    book.write(7, "kill", pid=1)
    book.run(12, 13, "recovered", pid=2, attempt=2, recovered=1)
    book.settle(13.5, "recovered", 2, recovery_count=1, attempt_count=2)
    book.run(14, 15, "hooked", pid=2)
    book.write(15.1, "hook", pid=2, job="hooked", token="h", hook=True)
    book.write(15.2, "hooked", pid=2, job="hooked", token="h", hook=True, how="returned")
    book.settle(15.5, "hooked", 3)
    return book


def test_nothing_is_wrong_with_a_true_ledger(book: Book, tmp_path: Path) -> None:
    assert book.problems(tmp_path) == []


def only(problems: list[str], *words: str) -> None:
    (problem,) = problems
    assert all(word in problem for word in words), problem


# -- lost and found --------------------------------------------------------------------------------


def test_a_job_that_was_admitted_and_never_settled_is_lost(book: Book, tmp_path: Path) -> None:
    book.admit(8, "lost", queue="other")
    only(book.problems(tmp_path), "lost", "is not settled")


def test_a_job_that_is_settled_twice_is_found(book: Book, tmp_path: Path) -> None:
    book.settle(20, "simple", 0)
    only(book.problems(tmp_path), "simple", "2 times")


def test_a_job_whose_admission_was_rolled_back_must_not_settle(book: Book, tmp_path: Path) -> None:
    book.write(8, "rolled_back", job="ghost", queue="other")
    assert book.problems(tmp_path) == []
    book.settle(20, "ghost", 9)
    only(book.problems(tmp_path), "ghost", "rolled back")


def test_a_job_that_completed_without_a_run_is_found(book: Book, tmp_path: Path) -> None:
    book.admit(8, "idle", queue="other")
    book.settle(20, "idle", 9)
    only(book.problems(tmp_path), "idle is completed")


# -- too often -------------------------------------------------------------------------------------


def test_a_run_that_nothing_made_necessary_is_found(book: Book, tmp_path: Path) -> None:
    book.run(2.6, 2.7, "simple")
    only(book.problems(tmp_path), "simple ran 2 times")


def test_a_run_after_a_hand_off_is_no_contradiction(book: Book, tmp_path: Path) -> None:
    book.run(0.5, 0.6, "simple", how="cancelled", reason="shutdown")
    assert book.problems(tmp_path) == []


def test_more_recoveries_than_allowed_are_found(book: Book, tmp_path: Path) -> None:
    book.admit(8, "poison", queue="other", recoveries=None)
    book.run(9, 10, "poison", queue="other", pid=3)
    book.settle(11, "poison", 9, recovery_count=1)
    only(book.problems(tmp_path), "poison was recovered 1 times of 0")


def test_more_attempts_than_allowed_are_found(book: Book, tmp_path: Path) -> None:
    book.admit(8, "stubborn", queue="other")
    book.run(9, 10, "stubborn", queue="other", attempt=9)
    book.settle(11, "stubborn", 9)
    only(book.problems(tmp_path), "stubborn", "attempts")


# -- at the same time ------------------------------------------------------------------------------


def test_two_jobs_of_a_queue_at_once_are_found(book: Book, tmp_path: Path) -> None:
    book.without("begin", "hooked")
    book.without("end", "hooked")
    book.run(12.9, 15, "hooked", pid=3)
    only(book.problems(tmp_path), "queue q", "100.000 ms before the end of recovered")


def test_a_run_beside_a_killed_one_is_found_until_the_kill(book: Book, tmp_path: Path) -> None:
    book.run(6.9, 6.95, "recovered", pid=2, how="cancelled", reason="shutdown")
    only(book.problems(tmp_path), "100.000 ms before the end of recovered")


def frozen(book: Book, *late: float) -> None:
    """A process that stands still from 21 to 26, while somebody else takes its job over."""
    book.admit(19, "cold")
    book.run(20, 26.1, "cold", pid=5, beats=(20.5, *late), how="cancelled", reason="lease_lost")
    book.write(21, "freeze", pid=5)
    book.write(26, "thaw", pid=5)
    book.run(25, 27, "cold", pid=6, attempt=2, recovered=1)
    book.settle(28, "cold", 4, recovery_count=1)


def test_one_step_after_a_thaw_is_no_overlap(book: Book, tmp_path: Path) -> None:
    frozen(book, 26.01)
    assert book.problems(tmp_path) == []


def test_a_second_step_after_a_thaw_is_found(book: Book, tmp_path: Path) -> None:
    frozen(book, 26.01, 26.02)
    only(book.problems(tmp_path), "cold", "worked on after it was thawed")


def test_a_begin_right_after_a_thaw_is_none_if_the_lease_was_lost(
    book: Book, tmp_path: Path
) -> None:
    book.write(21, "freeze", pid=5)
    book.write(26, "thaw", pid=5)
    book.admit(19, "cold")
    book.run(26.01, 26.1, "cold", pid=5, beats=(26.02,), how="cancelled", reason="lease_lost")
    book.run(25, 27, "cold", pid=6, attempt=2, recovered=1)
    book.settle(28, "cold", 4, recovery_count=1)
    assert book.problems(tmp_path) == []


# -- out of order ----------------------------------------------------------------------------------


def test_a_later_job_that_ran_before_an_earlier_one_is_found(book: Book, tmp_path: Path) -> None:
    book.admit(19, "first")
    book.admit(19.1, "second")
    book.run(20, 21, "second", pid=2)
    book.settle(21.5, "second", 5)
    book.run(22, 23, "first", pid=2)
    book.settle(23.5, "first", 4)
    only(book.problems(tmp_path), "second began", "before first")


def test_a_lower_priority_that_ran_before_a_higher_one_is_found(book: Book, tmp_path: Path) -> None:
    # Admitted later, but while the queue was still held by another.
    book.admit(19, "holds")
    book.admit(19.1, "low")
    book.admit(20.5, "high")
    book.run(20, 21, "holds", pid=2)
    book.settle(21.1, "holds", 4)
    book.run(21.2, 21.4, "low", pid=2)
    book.settle(21.5, "low", 5)
    book.run(22, 23, "high", pid=2)
    book.settle(23.5, "high", 6, priority=1)
    only(book.problems(tmp_path), "low began", "before high")


def test_a_higher_priority_that_came_after_the_claim_is_in_order(
    book: Book, tmp_path: Path
) -> None:
    book.admit(19, "low")
    book.admit(19.9, "high")
    book.run(20, 21, "low", pid=2)
    book.settle(21.5, "low", 4)
    book.run(22, 23, "high", pid=2)
    book.settle(23.5, "high", 5, priority=1)
    assert book.problems(tmp_path) == []


def test_a_feed_that_tells_the_second_before_the_first_is_found(book: Book, tmp_path: Path) -> None:
    book.without("settled", "simple")
    book.settle(5.6, "simple", 0)
    only(book.problems(tmp_path), "the feed has retried before simple")


def test_a_begin_before_its_time_is_found(book: Book, tmp_path: Path) -> None:
    book.admit(8, "hasty", queue="other", due=10 * SECOND)
    book.run(9.5, 9.8, "hasty", queue="other")
    book.settle(11, "hasty", 9)
    only(book.problems(tmp_path), "0.500 s before it was due")


# -- ends ------------------------------------------------------------------------------------------


def test_a_completed_job_whose_cancellation_was_recorded_is_found(
    book: Book, tmp_path: Path
) -> None:
    book.write(1.5, "cancel", job="simple", status="recorded", outcome=None)
    only(book.problems(tmp_path), "simple is completed, and its cancellation was recorded")


def test_a_decision_that_changed_is_found(book: Book, tmp_path: Path) -> None:
    book.write(2.1, "cancel", job="simple", status="decided", outcome="failed")
    only(book.problems(tmp_path), "simple", "decided as failed")


def test_an_outcome_that_nobody_decided_is_found(book: Book, tmp_path: Path) -> None:
    book.without("settled", "simple")
    book.settle(2.5, "simple", 0, outcome="interrupted")
    only(book.problems(tmp_path), "simple is interrupted", "expected completed")


def test_a_handler_that_works_on_long_after_its_cancellation_is_found(
    book: Book, tmp_path: Path
) -> None:
    book.admit(19, "deaf")
    book.write(20, "cancel", job="deaf", status="recorded", outcome=None)
    book.run(19.5, 40, "deaf", beats=(20.1, 39), how="cancelled", reason="cancellation")
    book.settle(41, "deaf", 4, outcome="cancelled", cancellation="c")
    only(book.problems(tmp_path), "deaf worked on")


# -- lanes that are failed -------------------------------------------------------------------------


def fail_lane(book: Book, at: float, *jobs: str, lane: str = "trio", more: bool = False) -> None:
    """A call and its answer."""
    book.write(at, "failing", lane=lane, reason="gone")
    book.write(at + 0.1, "lane_failed", lane=lane, reason="gone", jobs=list(jobs), more=more)


def failed(book: Book, *jobs: str, **facts: Any) -> None:
    """Jobs in a lane that is failed at 21, one of them while it runs; the next one begins at once.

    Its handler hears of it a second later.
    """
    for sequence, job in enumerate(("voided", "waits", "next"), 4):
        lane = "hook" if job == "next" else "trio"
        book.admit(19 + sequence / 10, job, lane=lane)
    book.run(20, 22, "voided", pid=3, how="cancelled", reason="lane_failed", beats=(21.9,))
    fail_lane(book, 21, *jobs or ("voided", "waits"))
    book.run(21.05, 23, "next", pid=4)
    book.write(23.1, "hooked", pid=4, job="next", token="n", hook=True, how="returned")
    for sequence, job in enumerate(("voided", "waits"), 4):
        ended = {"outcome": "failed", "reason": "gone"} | facts
        book.settle(21.2 + sequence / 100, job, sequence, **ended)
    book.settle(23.5, "next", 6)


def test_a_lane_that_was_failed_is_no_contradiction(book: Book, tmp_path: Path) -> None:
    failed(book)
    assert book.problems(tmp_path) == []


def test_a_cancelled_job_may_be_failed_with_its_lane(book: Book, tmp_path: Path) -> None:
    failed(book)
    book.write(20.5, "cancel", job="waits", status="recorded", outcome=None)
    assert book.problems(tmp_path) == []


def test_a_job_that_begins_too_soon_after_one_that_was_not_failed_is_found(
    book: Book, tmp_path: Path
) -> None:
    failed(book)
    book.lines = [line for line in book.lines if line.get("reason") != "gone"]
    book.settle(24, "voided", 4, outcome="cancelled", cancellation="c")
    book.settle(24, "waits", 5, outcome="cancelled", cancellation="c")
    only(book.problems(tmp_path), "next", "950.000 ms before the end of voided")


def test_a_job_of_another_lane_that_was_failed_is_found(book: Book, tmp_path: Path) -> None:
    book.admit(19, "bystander", queue="other", lane="thread")
    fail_lane(book, 21)
    book.settle(22, "bystander", 4, outcome="failed", reason="gone")
    only(book.problems(tmp_path), "bystander of the lane thread was failed with the lane trio")


def test_a_job_that_was_failed_before_its_lane_is_found(book: Book, tmp_path: Path) -> None:
    book.admit(19, "early", queue="other")
    fail_lane(book, 21)
    book.settle(20, "early", 4, outcome="failed", reason="gone")
    only(book.problems(tmp_path), "early was failed with its lane at another time")


def test_a_job_that_was_failed_with_its_lane_before_it_was_there_is_found(
    book: Book, tmp_path: Path
) -> None:
    fail_lane(book, 21)
    book.admit(22, "late", queue="other")
    book.settle(23, "late", 4, outcome="failed", reason="gone")
    only(book.problems(tmp_path), "late was failed with its lane at another time")


def test_a_decided_job_that_was_failed_is_found(book: Book, tmp_path: Path) -> None:
    failed(book)
    book.write(20.9, "hook", pid=3, job="voided", token="v", hook=True)
    only(book.problems(tmp_path), "voided was failed with its lane after its decision")


def test_a_job_that_was_said_to_be_failed_and_is_not_is_found(book: Book, tmp_path: Path) -> None:
    failed(book, "voided", "waits", "simple")
    only(book.problems(tmp_path), "simple is completed", "was said to be failed")


def test_a_failure_that_no_call_explains_is_found(book: Book, tmp_path: Path) -> None:
    book.admit(19, "struck", queue="other")
    book.settle(22, "struck", 4, outcome="failed", reason="gone")
    only(book.problems(tmp_path), "struck is failed (gone)")


@pytest.mark.parametrize("more", [False, True])
def test_a_job_that_the_failure_of_its_lane_left_behind_is_found(
    book: Book, tmp_path: Path, *, more: bool
) -> None:
    book.admit(19, "spared", queue="other")
    fail_lane(book, 21, more=more)
    book.run(32, 33, "spared", queue="other")
    book.settle(34, "spared", 4)
    problems = book.problems(tmp_path)
    if more:
        assert problems == []
    else:
        only(problems, "spared began long after it was cancelled or failed")


def test_a_handler_that_works_on_long_after_its_lane_was_failed_is_found(
    book: Book, tmp_path: Path
) -> None:
    book.admit(19, "deaf", queue="other")
    fail_lane(book, 21, "deaf")
    book.run(20, 40, "deaf", queue="other", beats=(39,), how="cancelled", reason="lane_failed")
    book.settle(22, "deaf", 4, outcome="failed", reason="gone")
    only(book.problems(tmp_path), "deaf worked on")


# -- purges ----------------------------------------------------------------------------------------


def purge(book: Book, at: float, count: int | None, *, queue: str = "q") -> None:
    """A call and, unless there is no count, its answer."""
    book.write(at, "purging", queue=queue)
    if count is not None:
        book.write(at + 0.1, "purged", queue=queue, count=count)


def test_a_purged_job_is_not_lost(book: Book, tmp_path: Path) -> None:
    book.admit(19, "waits")
    book.admit(19.2, "retries")
    book.run(20, 20.5, "retries", how="retry")
    purge(book, 21, 2)
    assert book.problems(tmp_path) == []


def test_a_job_that_is_gone_and_was_in_another_queue_is_found(book: Book, tmp_path: Path) -> None:
    book.admit(19, "waits", queue="other")
    purge(book, 21, 0)
    only(book.problems(tmp_path), "waits was admitted and is not settled")


def test_a_job_that_came_after_the_purge_is_lost(book: Book, tmp_path: Path) -> None:
    book.admit(19, "waits")
    book.admit(22, "lost")
    purge(book, 21, 2)
    only(book.problems(tmp_path), "lost was admitted and is not settled")


@pytest.mark.parametrize("beats", [(), (20.5,), (20.5, 21.5)])
def test_a_purged_job_that_was_at_work_is_found(
    book: Book, tmp_path: Path, beats: tuple[float, ...]
) -> None:
    book.admit(19, "works")
    purge(book, 21, 1)
    begin = 20.0 if beats else 21.5
    book.run(begin, 23, "works", beats=(*beats, 22.9), how="cancelled", reason="lease_lost")
    problems = book.problems(tmp_path)
    if beats == (20.5,):
        # One step may be that of a process that was thawed.
        assert problems == []
    else:
        only(problems, "works was admitted and is not settled")


def test_a_purged_job_that_came_to_its_own_end_is_found(book: Book, tmp_path: Path) -> None:
    book.admit(19, "works")
    purge(book, 21, 1)
    book.run(20, 21.5, "works")
    only(book.problems(tmp_path), "works was admitted and is not settled")


def test_more_jobs_gone_than_were_purged_are_found(book: Book, tmp_path: Path) -> None:
    book.admit(19, "one")
    book.admit(19.2, "two")
    purge(book, 21, 1)
    only(book.problems(tmp_path), "2 jobs are gone, and 1 were purged")


def test_fewer_jobs_gone_than_were_purged_are_found(book: Book, tmp_path: Path) -> None:
    book.admit(19, "one")
    purge(book, 21, 2)
    only(book.problems(tmp_path), "2 jobs were purged, and 1 are gone")


def test_a_purged_job_may_be_one_whose_admission_was_not_heard_of(
    book: Book, tmp_path: Path
) -> None:
    book.admit(19, "one")
    book.without("admitted", "one")
    purge(book, 21, 1)
    assert book.problems(tmp_path) == []


def test_how_many_were_purged_is_not_known_if_an_answer_was_lost(
    book: Book, tmp_path: Path
) -> None:
    book.admit(19, "one")
    book.write(21.05, "stop", mode="kill")
    book.write(22, "start")
    purge(book, 21, 0)
    purge(book, 23, None)
    assert book.problems(tmp_path) == []


# -- recoveries ------------------------------------------------------------------------------------


def recovered(
    book: Book, *lives: tuple[float, int], end: int, life: float = 1, **facts: Any
) -> None:
    """A job with a window of 5 s, its executions by begin and recoveries so far, and how long each
    of them works.
    """
    book.admit(19, "frail", queue="other", **{"recoveries": 1, "window": 5.0, **facts})
    for attempt, (begin, count) in enumerate(lives, 1):
        last = attempt == len(lives) and end == count
        beats = (begin + life - 0.1, begin + life - 0.05)
        known: dict[str, Any] = {"attempt": attempt, "recovered": count, "pid": 10 + attempt}
        book.run(
            begin, begin + life if last else None, "frail", queue="other", beats=beats, **known
        )
        if not last:
            book.write(begin + life, "kill", pid=10 + attempt)
    facts = {"attempt_count": len(lives), "recovery_count": end}
    book.settle(lives[-1][0] + life + 1, "frail", 4, **facts)


def test_a_recovery_after_its_window_is_over_counts_anew(book: Book, tmp_path: Path) -> None:
    recovered(book, (20, 0), (22, 1), (28, 1), end=1)
    assert book.problems(tmp_path) == []


def test_recoveries_within_a_window_that_do_not_count_are_found(book: Book, tmp_path: Path) -> None:
    recovered(book, (20, 0), (22, 1), (24.5, 1), end=1)
    only(book.problems(tmp_path), "frail was recovered, and it did not count")


def test_a_recovery_that_did_not_count_at_all_is_found(book: Book, tmp_path: Path) -> None:
    recovered(book, (20, 0), (22, 0), end=0)
    only(book.problems(tmp_path), "frail was recovered, and it did not count")


def test_more_runs_than_windows_allow_are_found(book: Book, tmp_path: Path) -> None:
    lives = [(20 + 1.5 * place, 0 if place == 0 else 1) for place in range(5)]
    recovered(book, *lives, end=1)
    assert any("frail ran 5 times" in problem for problem in book.problems(tmp_path))


def test_an_old_recovery_that_still_counts_is_found(book: Book, tmp_path: Path) -> None:
    recovered(book, (20, 0), (30, 1), (40, 2), end=2, recoveries=2, life=6)
    only(book.problems(tmp_path), "frail was recovered too long ago")


def test_a_recovery_within_the_window_counts(book: Book, tmp_path: Path) -> None:
    recovered(book, (20, 0), (22, 1), (24, 2), end=2, recoveries=2)
    assert book.problems(tmp_path) == []


def interrupted(book: Book, last: float, *, attempts: int = 2) -> None:
    """A job whose second execution disappears, so long after its first recovery."""
    recovered(book, (20, 0), (22, 1), end=1)
    book.without("settled", "frail")
    book.without("end", "frail")
    token = next(
        line["token"] for line in book.lines if line.get("recovered") and line["pid"] == 12
    )
    for at in (last, last + 0.01):
        book.write(at, "beat", pid=12, job="frail", queue="other", token=token)
    book.write(last + 0.1, "kill", pid=12)
    book.settle(
        last + 1, "frail", 4, outcome="interrupted", recovery_count=1, attempt_count=attempts
    )


def test_an_interruption_for_a_recovery_within_the_window_is_right(
    book: Book, tmp_path: Path
) -> None:
    interrupted(book, 26.9)
    assert book.problems(tmp_path) == []


def test_an_interruption_after_an_execution_that_nobody_saw_begin_is_not_judged(
    book: Book, tmp_path: Path
) -> None:
    interrupted(book, 27.1, attempts=3)
    assert book.problems(tmp_path) == []


def test_an_interruption_for_an_old_recovery_is_found(book: Book, tmp_path: Path) -> None:
    interrupted(book, 27.1)
    only(book.problems(tmp_path), "frail was recovered too long ago")


# -- time limits -----------------------------------------------------------------------------------

TIMED_OUT = "timed out after 0.6 s"


def limited(book: Book, end: float = 20.6, *, settle: bool = True, **facts: Any) -> None:
    """A job that is to pass its time limit, in the one attempt that it has."""
    book.admit(19, "slow", queue="other", lane="limited", expects="failed")
    ran: dict[str, Any] = {"of": None, "how": "cancelled", "reason": "timeout"}
    settled: dict[str, Any] = {"outcome": "failed", "reason": TIMED_OUT}
    ran |= {name: value for name, value in facts.items() if name in ("of", "how", "beats")}
    settled |= {name: value for name, value in facts.items() if name in ("outcome", "said")}
    settled["reason"] = settled.pop("said", settled["reason"])
    book.run(20, end, "slow", queue="other", **ran)
    if settle:
        book.settle(30, "slow", 4, **settled)


def test_a_job_that_timed_out_is_failed(book: Book, tmp_path: Path) -> None:
    limited(book)
    assert book.problems(tmp_path) == []


def test_a_job_that_says_that_it_completed_and_had_timed_out_is_failed(
    book: Book, tmp_path: Path
) -> None:
    limited(book, how="none")
    assert book.problems(tmp_path) == []


def test_a_job_that_timed_out_and_is_completed_is_found(book: Book, tmp_path: Path) -> None:
    limited(book, how="none", outcome="completed", said=None)
    assert any(
        "slow is completed" in problem and "had timed out" in problem
        for problem in book.problems(tmp_path)
    )


def test_a_job_that_timed_out_and_failed_for_another_reason_is_found(
    book: Book, tmp_path: Path
) -> None:
    limited(book, said="something else")
    only(book.problems(tmp_path), "slow is failed (something else), and had timed out")


def test_a_job_that_timed_out_too_early_is_found(book: Book, tmp_path: Path) -> None:
    limited(book, 20.4)
    only(book.problems(tmp_path), "slow had time left, and timed out")


def test_a_handler_that_works_on_after_its_time_limit_is_found(book: Book, tmp_path: Path) -> None:
    limited(book, 25, beats=(20.5, 22.7))
    only(book.problems(tmp_path), "slow worked on long after its time limit")


@pytest.mark.parametrize("of", [None, 8])
def test_a_job_that_timed_out_runs_again_only_by_its_policy(
    book: Book, tmp_path: Path, of: int | None
) -> None:
    limited(book, settle=False, of=of)
    times_out_again: dict[str, Any] = {"how": "cancelled", "reason": "timeout", "attempt": 2}
    book.run(22, 22.6, "slow", queue="other", of=of, **times_out_again)
    book.settle(30, "slow", 4, outcome="failed", reason=TIMED_OUT, attempt_count=2)
    found = book.problems(tmp_path)
    assert any("slow ran 2 times" in problem for problem in found) == (of is None)


# -- hooks -----------------------------------------------------------------------------------------


def test_a_hook_that_was_left_out_is_found(book: Book, tmp_path: Path) -> None:
    book.without("hooked", "hooked")
    only(book.problems(tmp_path), "its hook has not ended")


def test_a_handler_that_runs_after_its_hook_is_found(book: Book, tmp_path: Path) -> None:
    book.without("hook", "hooked")
    book.write(13.9, "hook", pid=2, job="hooked", token="h", hook=True)
    only(book.problems(tmp_path), "hooked ran again after its hook")


# -- leaks -----------------------------------------------------------------------------------------


def sample(book: Book, seconds: float, **rates: float) -> None:
    """A sample every ten seconds, of something that grows by so much each second."""
    dice = random.Random(1)
    for at in range(0, int(seconds) + 1, 10):
        has = {"memory": 60 * 2**20 + dice.randrange(2**20), "files": 20, "threads": 10}
        has["tasks"] = 30
        grown = {name: value + int(rates.get(name, 0) * at) for name, value in has.items()}
        book.write(100 + at, "sample", pid=1, **grown)


def test_a_flat_worker_is_no_leak(book: Book, tmp_path: Path) -> None:
    sample(book, 3000)
    assert book.problems(tmp_path) == []


def test_memory_that_grows_is_found_in_a_worker_that_lives_long(book: Book, tmp_path: Path) -> None:
    sample(book, LONG_LIFE, memory=20 * 2**10)
    only(book.problems(tmp_path), "memory of w1 rose by")


def test_memory_of_a_worker_that_lives_for_a_short_time_is_not_judged(
    book: Book, tmp_path: Path
) -> None:
    sample(book, LONG_LIFE - 10, memory=20 * 2**10)
    assert book.problems(tmp_path) == []


@pytest.mark.parametrize("name", ["files", "threads", "tasks"])
def test_handles_threads_and_tasks_that_grow_are_found(
    book: Book, tmp_path: Path, name: str
) -> None:
    sample(book, 500, **{name: 0.05})
    only(book.problems(tmp_path), "w1 went from", name)


@pytest.mark.parametrize("name", ["files", "threads", "tasks"])
def test_a_heap_of_handles_threads_or_tasks_is_found_at_once(
    book: Book, tmp_path: Path, name: str
) -> None:
    has = {"memory": 1, "files": 20, "threads": 10, "tasks": 30, name: 101}
    book.write(100, "sample", pid=1, **has)
    only(book.problems(tmp_path), "w1 had 101", name)
