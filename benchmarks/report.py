"""Tables for people, JSON for machines, and what became of the targets."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .contestants import OURS
from .harness import Outcome
from .works import STORES


def number(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def spread(values: Sequence[float]) -> str:
    return f"{number(min(values))}..{number(max(values))}" if len(values) > 1 else ""


def table(outcomes: Sequence[Outcome]) -> str:
    """One work: for each metric a line per contestant, with the ratio to the base line."""
    work = outcomes[0].work
    lines = [f"{work.store}: {work.title}"]
    base = next((outcome for outcome in outcomes if outcome.entry.label == work.base), None)
    width = max(len(outcome.entry.label) for outcome in outcomes)
    for metric in work.metrics:
        lines.append(f"  {metric.title} ({metric.unit})" if metric.unit else f"  {metric.title}")
        of_base = None if base is None else base.figure(metric.key)
        for outcome in outcomes:
            label = f"    {outcome.entry.label:{width}}"
            figure = outcome.figure(metric.key)
            if figure is None:
                lines.append(f"{label}  {outcome.error or '-'}")
                continue
            ratio = f"{figure / of_base:8.2f}" if of_base else " " * 8
            line = f"{label}  {number(figure):>10}  {ratio}  {spread(outcome.chosen(metric.key))}"
            lines.append(line.rstrip())
    lines += [f"  * {note}" for note in notes(outcomes)]
    return "\n".join(lines)


def notes(outcomes: Sequence[Outcome]) -> list[str]:
    """What happened while measuring."""
    found = [f"{outcome.entry.label}: {note}" for outcome in outcomes for note in outcome.notes]
    for key, what in (("fsync_us", "an fsync"), ("cpu_us", "a computation")):
        costs = {
            outcome.entry.label: statistics.median(pace[key] for pace in outcome.paces)
            for outcome in outcomes
            if outcome.paces
        }
        least = min(costs.values(), default=0.0)
        slow = [
            f"{label} ({cost / least:.1f})" for label, cost in costs.items() if cost > 2 * least
        ]
        if slow:
            found.append(f"before these, {what} took so many times the least: {', '.join(slow)}")
    return list(dict.fromkeys(found))


def about(outcomes: Sequence[Outcome]) -> str:
    """What one must know of the contestants in order to compare."""
    found = {
        (outcome.work.store, outcome.entry.contestant): outcome.about
        for outcome in outcomes
        if outcome.about
    }
    lines = ["how the peers were used, and what their figures do not say"]
    for (store, name), texts in found.items():
        lines += [f"  {name} on {store}: {text}" for text in texts]
    return "\n".join(lines) if found else ""


def as_json(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for outcome in outcomes:
        base = next((o for o in outcomes if o.entry.label == outcome.work.base), None)
        for metric in outcome.work.metrics:
            figure = outcome.figure(metric.key)
            of_base = None if base is None else base.figure(metric.key)
            rows.append(
                {
                    "store": outcome.work.store,
                    "work": outcome.work.name,
                    "title": outcome.work.title,
                    "who": outcome.entry.label,
                    "contestant": outcome.entry.contestant,
                    "metric": metric.key,
                    "unit": metric.unit,
                    "values": outcome.values.get(metric.key, []),
                    "figure": figure,
                    "ratio": figure / of_base if figure is not None and of_base else None,
                    "options": outcome.entry.options,
                    "paces": outcome.paces,
                    "notes": outcome.notes,
                    "error": outcome.error,
                }
            )
    return rows


# -- targets --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    title: str
    ratio: float
    wanted: float
    at_most: bool = False

    @property
    def is_met(self) -> bool:
        return self.ratio <= self.wanted if self.at_most else self.ratio >= self.wanted


class Figures:
    """Medians by store, work and line."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        self.outcomes = outcomes

    def __call__(self, store: str, work: str, who: str, metric: str = "rate") -> float | None:
        for outcome in self.outcomes:
            at = (outcome.work.store, outcome.work.name, outcome.entry.label)
            if at == (store, work, who):
                return outcome.figure(metric)
        return None

    def peers(self, store: str, work: str, metric: str = "rate") -> list[float]:
        found = [
            outcome.figure(metric)
            for outcome in self.outcomes
            if (outcome.work.store, outcome.work.name) == (store, work)
            # Not their variants, which do other work.
            and outcome.entry.contestant == outcome.entry.label != OURS
        ]
        return [value for value in found if value is not None]


def targets(outcomes: Sequence[Outcome]) -> list[Target]:
    """This project's aims, as far as this run measured what they need."""
    figure = Figures(outcomes)
    found: list[Target] = []

    def at_least(wanted: float, title: str, value: float | None, other: float | None) -> None:
        if value is not None and other:
            found.append(Target(title, value / other, wanted))

    def at_most(wanted: float, title: str, value: float | None, other: float | None) -> None:
        if value is not None and other:
            found.append(Target(title, value / other, wanted, at_most=True))

    def ours(store: str, work: str, metric: str = "rate") -> float | None:
        return figure(store, work, OURS, metric)

    def fastest(work: str, metric: str = "rate") -> float | None:
        return max(figure.peers("postgres", work, metric), default=None)

    for lanes, wanted, who in ((32, 0.4, "100 jobs/tx"), (1, 0.6, "1 job/tx")):
        work, bare = f"drain-{lanes}", f"bare loop, {who}"
        title = f"sqlite: drain, {lanes} at a time / {bare}"
        at_least(wanted, title, ours("sqlite", work), figure("sqlite", work, bare))
    for lanes, times, wanted, who in (
        (32, 2, 2, "8 clients, 2 tx/job"),
        (1, 4, 0.7, "1 client, 1 tx/job"),
    ):
        work, mine = f"drain-{lanes}", ours("postgres", f"drain-{lanes}")
        title = f"postgres: drain, {lanes} at a time / "
        at_least(times, f"{title}fastest peer", mine, fastest(work))
        at_least(
            wanted, f"{title}pgbench, {who}", mine, figure("postgres", work, f"pgbench, {who}")
        )
    for store in STORES:
        for work in ("serial", "serial-long"):
            title = f"{store}: {work} queue, 32 lanes / 1 lane without order"
            at_least(0.5, title, ours(store, work), ours(store, "drain-1"))
        title = f"{store}: many serial queues / without order"
        at_least(0.8, title, ours(store, "queues"), ours(store, "drain-32"))
    for metric, title in (("one", "one by one"), ("bulk", "in bulk")):
        bare = figure("sqlite", "enqueue", "bare loop", metric)
        mine = ours("sqlite", "enqueue", metric)
        at_least(0.5, f"sqlite: enqueue {title} / bare loop", mine, bare)
        mine, peer = ours("postgres", "enqueue", metric), fastest("enqueue", metric)
        at_least(1, f"postgres: enqueue {title} / fastest peer", mine, peer)
    mine = ours("postgres", "pick-up", "other_p50")
    peer = min(figure.peers("postgres", "pick-up", "other_p50"), default=None)
    at_most(0.5, "postgres: pick-up from another process, p50 / fastest peer", mine, peer)
    mine = ours("sqlite", "pick-up", "other_p50")
    at_most(1, "sqlite: pick-up from another process, p50 / 3 ms", mine, 3.0)
    many, one = (figure("postgres", "crew", f"{OURS}, {size}") for size in ("4 x 8", "1 x 32"))
    at_least(1, "postgres: 4 processes x 8 lanes / 1 x 32", many, one)
    for outcome in outcomes:
        store, base, shape = outcome.work.store, outcome.work.base, outcome.entry.label
        if outcome.work.name == "flat" and shape != base:
            for metric, title in (("fresh", "pick-up p50, first round"), ("p50", "pick-up p50")):
                delay = figure(store, "flat", base, metric)
                at_most(1.5, f"{store}: {title}, {shape} / empty", outcome.figure(metric), delay)
            rate = figure(store, "flat", base)
            at_most(1.5, f"{store}: drain, empty / {shape}", rate, outcome.figure("rate"))
    for store in STORES:
        at_most(1, f"{store}: share of a core when idle / 1 %", ours(store, "idle", "core"), 1.0)
    return found


def target_table(found: Sequence[Target]) -> str:
    lines = ["targets (ratios of medians in this run)"]
    for target in found:
        sign = "<=" if target.at_most else ">="
        met = "met" if target.is_met else "MISSED"
        wanted = f"{sign} {target.wanted:g}"
        lines.append(f"  {target.title:68} {target.ratio:7.2f}  {wanted:>7}  {met}")
    return "\n".join(lines)
