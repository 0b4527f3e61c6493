"""A store as a list of rows in memory: the specification, read slowly.

Built from `_rules`; nothing here knows of SQL, hints or sets. Each wish is applied alone, in the
order in which an exchange runs them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, cast

from attrs import define, evolve

from trio_watchdog import _operations as operations
from trio_watchdog import _rules as rules
from trio_watchdog import _wishes as w
from trio_watchdog._errors import JobConflict
from trio_watchdog._model import (
    INSTANT_LIMIT,
    Admission,
    CancellationResult,
    CompletingJob,
    Job,
    LaneFailure,
    Outcome,
    QueuedJob,
    QueueHead,
    RunningJob,
    SettledJob,
    SettledPage,
    StoredJob,
    WakeState,
    to_instant,
    to_milliseconds,
)

State = Literal["queued", "running", "completing", "settled"]

SETTLE_TOGETHER = {"decide", "finish_completing", "retry_job", "reserve_attempt"}
"""Operations whose wishes of one exchange settle at once: in the feed by admission."""


@define
class Row:
    """One job."""

    job: Job
    sequence: int
    not_before: int
    state: State = "queued"
    token: str | None = None
    owner: str | None = None
    lease_until: int | None = None
    attempt_count: int = 0
    attempt_open: bool = False
    recovery_count: int = 0
    window_began_at: int | None = None
    cancellation_id: str | None = None
    outcome: Outcome | None = None
    reason: str | None = None
    settled_at: int | None = None

    @property
    def is_live(self) -> bool:
        return self.state in ("running", "completing")

    @property
    def place(self) -> tuple[int, int]:
        return (-self.job.priority, self.sequence)

    def facts(self) -> rules.ClaimFacts:
        return rules.ClaimFacts(
            id=self.job.id,
            queue=self.job.queue,
            lane=self.job.lane,
            state=self.state,
            token=self.token,
            lease_until=self.lease_until,
            cancellation_id=self.cancellation_id,
            outcome=self.outcome,
            reason=self.reason,
            attempt_count=self.attempt_count,
            attempt_open=self.attempt_open,
            recovery_count=self.recovery_count,
            window_began_at=self.window_began_at,
            recovery=self.job.recovery,
        )

    def stored(self) -> StoredJob:
        job = self.job
        common: dict[str, Any] = {
            "id": job.id,
            "queue": job.queue,
            "lane": job.lane,
            "priority": job.priority,
            "payload": job.payload,
            "not_before": to_instant(self.not_before) if self.not_before else None,
            "recovery": job.recovery,
            "sequence": self.sequence,
            "cancellation_id": self.cancellation_id,
            "recovery_count": self.recovery_count,
            "attempt_count": self.attempt_count,
        }
        if self.state == "queued":
            return QueuedJob(**common)
        if self.state == "settled":
            return SettledJob(
                **common,
                outcome=cast("Outcome", self.outcome),
                reason=self.reason,
                settled_at=to_instant(cast("int", self.settled_at)),
            )
        live = {"token": self.token, "lease_until": to_instant(cast("int", self.lease_until))}
        if self.state == "running":
            return RunningJob(**common, **cast("Any", live))
        return CompletingJob(
            **common,
            **cast("Any", live),
            outcome=cast("Outcome", self.outcome),
            reason=self.reason,
        )


class Model:
    """All jobs, and what becomes of wishes."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}
        self.feed: list[str] = []
        """Ids of settled jobs, in the order of settling."""
        self.sequence = 0
        self.sequences: dict[str, int] = {}
        """What the database made of new rows: higher with each, and with gaps."""
        self.now = 0
        self.lease_now = 0

    # -- looking ----------------------------------------------------------------------------------

    def queue(self, name: str) -> list[Row]:
        """The queue's unsettled rows, in the order in which they will run."""
        rows = [row for row in self.rows.values() if row.job.queue == name]
        unsettled = [row for row in rows if row.state != "settled"]
        return sorted(unsettled, key=lambda row: (not row.is_live, row.place))

    def queues(self) -> list[str]:
        return sorted({row.job.queue for row in self.rows.values()})

    def heads(self) -> list[Row]:
        """First rows of queues in which nothing runs."""
        firsts = [rows[0] for name in self.queues() if (rows := self.queue(name))]
        return [row for row in firsts if row.state == "queued"]

    def claimable(self, lane: str) -> list[Row]:
        return sorted(
            (
                row
                for row in self.heads()
                if row.job.lane == lane
                and row.cancellation_id is None
                and row.not_before <= self.now
            ),
            key=lambda row: row.place,
        )

    def wake_state(self, now: int | None) -> WakeState:
        at = self.now if now is None else now
        lease_at = self.lease_now + at - self.now
        pending = False
        instants: list[int] = []
        for row in self.rows.values():
            if row.state in ("queued", "running") and row.cancellation_id is not None:
                pending = True
            if row.is_live:
                remaining = cast("int", row.lease_until) - lease_at
                pending |= row.state == "completing" or remaining <= 0
                instants += [at + remaining] if remaining > 0 else []
        for row in self.heads():
            pending |= row.not_before <= at
            if row.not_before > at and row.cancellation_id is None:
                instants.append(row.not_before)
        return WakeState(pending, to_instant(min(instants)) if instants else None)

    def edges(self) -> list[int]:
        """The instants, by the clock of leases, at which something changes by itself."""
        offset = self.lease_now - self.now
        edges: set[int] = set()
        for row in self.rows.values():
            if row.is_live:
                edges.add(cast("int", row.lease_until))
            if row.state == "queued":
                edges.add(row.not_before + offset)
            recovery = row.job.recovery
            if row.window_began_at is not None and recovery is not None and recovery.window:
                edges.add(row.window_began_at + round(recovery.window * 1000))
        return sorted(edge for edge in edges if edge > self.lease_now)

    # -- applying ---------------------------------------------------------------------------------

    def apply(self, asked: Sequence[w.Wish[Any]], now: int, lease_now: int) -> list[Any]:
        """What becomes of the wishes of one exchange, in their places."""
        self.now, self.lease_now = now, lease_now
        answers: list[Any] = [None] * len(asked)
        for kind, positions in operations.plan(asked):
            known = len(self.feed)
            for position in positions:
                answers[position] = getattr(self, kind.__name__)(asked[position])
            if kind.__name__ in SETTLE_TOGETHER:
                together = sorted(self.feed[known:], key=lambda id: self.rows[id].sequence)
                self.feed[known:] = together
        return answers

    def held(self, id: str, token: str) -> Row | None:
        row = self.rows.get(id)
        if row is not None and row.token == token and row.is_live:
            return row if cast("int", row.lease_until) > self.lease_now else None
        return None

    def settle(self, row: Row, settle: rules.Settle) -> None:
        row.state = "settled"
        row.outcome, row.reason = settle.outcome, settle.reason
        row.owner = row.lease_until = None
        row.attempt_open = False
        row.settled_at = self.now
        self.feed.append(row.job.id)

    def give_back(self, row: Row, to: rules.Requeue, *, keeps: bool = False) -> None:
        row.state = "queued"
        row.token = row.owner = row.lease_until = None
        row.attempt_open = False
        row.attempt_count, row.recovery_count = to.attempt_count, to.recovery_count
        row.window_began_at = to.window_began_at
        if not keeps:
            row.not_before = min(self.now + to.delay, INSTANT_LIMIT)

    # Operations, by the names of those in `_operations`.

    def enqueue(self, wish: w.Enqueue) -> Admission | JobConflict:
        job = wish.job
        row = self.rows.get(job.id)
        if row is not None:
            try:
                rules.check_duplicate(row.stored(), row.job.encoded, job)
            except JobConflict as error:
                return error
            return Admission("duplicate", row.stored())
        sequence = self.sequences.get(job.id, self.sequence + 1)
        assert sequence > self.sequence
        self.sequence = sequence
        due = 0 if job.not_before is None else to_milliseconds(job.not_before)
        row = self.rows[job.id] = Row(job, self.sequence, due)
        return Admission("queued", row.stored())

    def enqueue_many(self, wish: w.EnqueueMany) -> list[Admission] | JobConflict:
        before = {id: evolve(row) for id, row in self.rows.items()}
        sequence = self.sequence
        answers: list[Admission] = []
        for job in wish.jobs:
            answer = self.enqueue(w.Enqueue(job))
            if isinstance(answer, JobConflict):
                self.rows, self.sequence = before, sequence
                return answer
            answers.append(answer)
        return answers

    def cancel(self, wish: w.Cancel) -> CancellationResult:
        row = self.rows.get(wish.id)
        result = rules.cancellation(
            None if row is None else row.state,
            None if row is None else row.cancellation_id,
            None if row is None else row.outcome,
            wish.cancellation_id,
            wish.only_if_queued,
            is_used_elsewhere=any(
                other.cancellation_id == wish.cancellation_id and other is not row
                for other in self.rows.values()
            ),
        )
        if result.status == "recorded":
            assert row is not None
            row.cancellation_id = wish.cancellation_id
        return result

    def settle_cancelled(self, wish: w.SettleCancelled) -> list[str]:
        found = [
            row
            for row in self.rows.values()
            if row.state == "queued"
            and row.cancellation_id is not None
            and wish.lane in (None, row.job.lane)
        ]
        found = sorted(found, key=lambda row: row.sequence)[: wish.limit]
        for row in found:
            self.settle(row, rules.Settle(Outcome.CANCELLED))
        return [row.job.id for row in found]

    def fail_lane(self, wish: w.FailLane) -> LaneFailure:
        found = sorted(
            (
                row
                for row in self.rows.values()
                if row.job.lane == wish.lane and row.state in ("queued", "running")
            ),
            key=lambda row: (row.state == "queued", row.sequence),
        )
        # Within one transaction the feed is in the order of admission.
        for row in sorted(found[:256], key=lambda row: row.sequence):
            self.settle(row, rules.Settle(Outcome.FAILED, wish.reason))
        jobs = tuple(cast("SettledJob", row.stored()) for row in found[:256])
        return LaneFailure(jobs, len(found) > 256)

    def purge_queue(self, wish: w.PurgeQueue) -> int:
        gone = [row for row in self.queue(wish.queue) if row.state == "queued"]
        for row in gone:
            del self.rows[row.job.id]
        return len(gone)

    def prune(self, wish: w.Prune) -> int:
        gone = [
            id
            for id in self.feed
            if cast("int", self.rows[id].settled_at) < cast("int", wish.before)
        ][: wish.limit]
        for id in gone:
            del self.rows[id]
            self.feed.remove(id)
        return len(gone)

    def read(self, wish: w.Read) -> StoredJob | None:
        row = self.rows.get(wish.id)
        return None if row is None else row.stored()

    def read_queue_head(self, wish: w.ReadQueueHead) -> QueueHead:
        rows = self.queue(wish.queue)
        if not rows:
            return QueueHead("idle")
        state = "running" if rows[0].is_live else "queued"
        return QueueHead(state, rows[0].job.id, rows[0].cancellation_id is not None)

    def read_latest_settled(self, wish: w.ReadLatestSettled) -> SettledJob | None:
        ids = [id for id in self.feed if self.rows[id].job.queue == wish.queue]
        return cast("SettledJob", self.rows[ids[-1]].stored()) if ids else None

    def read_settled(self, wish: w.ReadSettled) -> SettledPage:
        assert wish.after is None
        ids = [id for id in self.feed if wish.lane in (None, self.rows[id].job.lane)]
        jobs = [cast("SettledJob", self.rows[id].stored()) for id in ids[: wish.limit]]
        return SettledPage(tuple(jobs), None)

    def read_wake_state(self, wish: w.ReadWakeState) -> WakeState:
        return self.wake_state(wish.now)

    def claim(self, wish: w.Claim) -> w.Claimed:
        if wish.again:
            for row in self.rows.values():
                if row.state == "running" and row.token == wish.token:
                    return w.Claimed(cast("RunningJob", row.stored()))
        assert wish.lane is not None
        rows = self.claimable(wish.lane)
        return w.Claimed(self.claim_row(rows[0], wish) if rows else None)

    def claim_row(self, row: Row, wish: w.Claim) -> RunningJob:
        row.state, row.token, row.owner = "running", wish.token, wish.owner
        row.lease_until = self.lease_now + wish.lease
        row.attempt_count += wish.counts
        row.attempt_open = wish.counts
        return cast("RunningJob", row.stored())

    def look(self, id: str, token: str) -> w.Renewal:
        row = self.held(id, token)
        if row is not None:
            return w.Renewal("held", row.cancellation_id is not None)
        row = self.rows.get(id)
        is_failed = row is not None and row.token == token and row.state == "settled"
        return w.Renewal(
            "lost",
            settled_as_failed=is_failed and cast("Row", row).outcome is Outcome.FAILED,
        )

    def renew(self, wish: w.Renew) -> w.Renewal:
        answer = self.look(wish.id, wish.token)
        if answer.status == "held":
            self.rows[wish.id].lease_until = self.lease_now + wish.lease
        return answer

    def inspect(self, wish: w.Inspect) -> w.Renewal:
        return self.look(wish.id, wish.token)

    def reserve_attempt(self, wish: w.ReserveAttempt) -> w.Reserved:
        row = self.rows.get(wish.id)
        if row is None:
            return w.Reserved("conflict")
        count = row.attempt_count
        verdict = rules.reservation(
            row.facts(), wish.token, wish.policy, self.lease_now, wish.jitter
        )
        if isinstance(verdict, rules.Reservation):
            row.attempt_count, row.attempt_open = verdict.attempt_count, True
            row.not_before = rules.instant_after(self.now, verdict.delay)
            return w.Reserved("reserved", verdict.attempt_count)
        if isinstance(verdict, rules.Settle):
            self.settle(row, verdict)
            return w.Reserved("settled", count, verdict.reason)
        return w.Reserved(verdict)

    def retry_job(self, wish: w.RetryJob) -> w.Returned:
        row = self.rows.get(wish.id)
        if row is None:
            return w.Returned("missing")
        verdict = rules.retry(
            row.facts(),
            wish.token,
            wish.policy,
            wish.after,
            wish.reason,
            self.lease_now,
            wish.jitter,
        )
        if isinstance(verdict, rules.Requeue):
            self.give_back(row, verdict)
            return w.Returned("queued", attempt_count=verdict.attempt_count)
        if isinstance(verdict, rules.Settle):
            self.decide(w.Decide(wish.id, wish.token, verdict, wish.has_hook))
            return w.Returned("completing" if wish.has_hook else "settled", verdict.reason)
        return w.Returned(verdict)

    def hand_off(self, wish: w.HandOff) -> w.Returned:
        row = self.rows.get(wish.id)
        if row is None:
            return w.Returned("missing")
        verdict = rules.hand_off(row.facts(), wish.token, self.lease_now)
        if isinstance(verdict, rules.Requeue):
            self.give_back(row, verdict)
            return w.Returned("queued", attempt_count=verdict.attempt_count)
        return w.Returned(verdict)

    def decide(self, wish: w.Decide) -> w.Recorded:
        row = self.held(wish.id, wish.token)
        if row is None or row.state != "running":
            row = self.rows.get(wish.id)
            facts = None if row is None else row.facts()
            status = rules.late_decision(facts, wish.token, wish.settle)
            stands = None
            if status == "replayed" and row is not None and row.outcome is not None:
                stands = rules.Settle(row.outcome, row.reason)
            return w.Recorded(status, stands)
        stands = wish.settle
        if row.cancellation_id is not None:
            stands = rules.Settle(Outcome.CANCELLED)
        if wish.has_hook:
            row.state, row.attempt_open = "completing", False
            row.outcome, row.reason = stands.outcome, stands.reason
        else:
            self.settle(row, stands)
        return w.Recorded("recorded", stands)

    def finish_completing(self, wish: w.FinishCompleting) -> str:
        row = self.rows.get(wish.id)
        if row is None or row.state != "completing" or row.token != wish.token:
            return rules.late_finish(None if row is None else row.facts(), wish.token)
        self.settle(row, rules.Settle(cast("Outcome", row.outcome), row.reason))
        return "settled"

    def disappeared(self, state: State, dead: Sequence[str]) -> Iterator[Row]:
        """Live rows in this state whose owner is gone, oldest first."""
        rows = [row for row in self.rows.values() if row.state == state]
        for row in sorted(rows, key=lambda row: row.sequence):
            if cast("int", row.lease_until) <= self.lease_now or row.owner in dead:
                yield row

    def take_completing(self, wish: w.TakeCompleting) -> CompletingJob | None:
        for row in self.disappeared("completing", wish.dead):
            is_named = wish.lanes is None or row.job.lane in wish.lanes
            if is_named and row.job.lane not in wish.without:
                row.token, row.owner = wish.token, wish.owner
                row.lease_until = self.lease_now + wish.lease
                return cast("CompletingJob", row.stored())
        return None

    def next_running_claim(self, wish: w.NextRunningClaim) -> RunningJob | None:
        for row in self.disappeared("running", wish.dead):
            if row.sequence > wish.after:
                return cast("RunningJob", row.stored())
        return None

    def reconcile(self, wish: w.Reconcile) -> w.Reconciled:
        for row in self.disappeared("running", wish.dead):
            if row.job.id == wish.id and row.token == wish.token:
                verdict = rules.disappearance(row.facts(), self.lease_now)
                if isinstance(verdict, rules.Settle):
                    self.settle(row, verdict)
                    return w.Reconciled("settled", verdict)
                self.give_back(row, verdict, keeps=True)
                return w.Reconciled("queued")
        return w.Reconciled("untouched")
