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
    ) -> None:
        known = {"pid": pid, "job": job, "queue": queue, "token": token or f"{job}@{begin}"}
        self.write(begin, "begin", **known, attempt=attempt)
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
    book.run(12, 13, "recovered", pid=2, attempt=2)
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
    book.run(25, 27, "cold", pid=6, attempt=2)
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
    book.run(25, 27, "cold", pid=6, attempt=2)
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
