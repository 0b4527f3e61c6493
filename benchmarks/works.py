"""What is measured: tables of works, and for each work who takes part, with which numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from .contestants import CONTESTANTS, ONLY_ENQUEUE, OURS

Store = Literal["postgres", "sqlite"]
STORES: tuple[Store, ...] = ("postgres", "sqlite")
ALL = {
    store: tuple(name for name in names if name not in ONLY_ENQUEUE)
    for store, names in CONTESTANTS.items()
}


@dataclass(frozen=True)
class Metric:
    key: str
    title: str
    unit: str
    less_is_better: bool = False
    rounds: Literal["all", "first", "later"] = "all"
    """Which rounds it is the median of; with one round, that one."""


@dataclass(frozen=True)
class Entry:
    """One line of a table: who, and which measure with which options."""

    label: str
    contestant: str | None
    measure: str
    options: dict[str, Any]
    prepare: dict[str, Any] | None = None
    """Options of a measure that fills the database once, for all rounds."""
    prepare_measure: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Work:
    name: str
    """What ``--only`` takes."""
    store: Store
    title: str
    metrics: tuple[Metric, ...]
    entries: tuple[Entry, ...]
    rounds: int | None = None
    """Fewer rounds than asked for, where one takes long or varies little."""
    base: str = OURS
    """The line to which ratios are taken."""


@dataclass(frozen=True)
class Sizes:
    one: int
    bulk: int
    drain: int
    lanes: tuple[int, ...]
    cap: float
    samples: int
    backlogs: tuple[int, ...]
    serial: int
    long_serial: int
    keys: int
    many: int
    very_many: int
    crew: int
    flat_drain: int
    shapes: tuple[str, ...]
    idle: float
    bare: int
    pgbench: int
    slower: dict[str, float] = field(default_factory=dict)
    """Contestants that get fewer jobs, since enqueueing them would take too long."""
    everybody: bool = True
    """Whether peers take part in works that have only targets for this project."""

    def count(self, contestant: str, jobs: int) -> int:
        return max(200, int(jobs * self.slower.get(contestant, 1)))


SIZES = {
    "small": Sizes(
        one=400,
        bulk=2000,
        drain=2000,
        lanes=(1, 32),
        cap=1.5,
        samples=12,
        backlogs=(1000, 20_000),
        serial=1000,
        long_serial=2000,
        keys=100,
        many=5000,
        very_many=20_000,
        crew=2000,
        flat_drain=1000,
        shapes=("", "abcd"),
        idle=6.0,
        bare=5000,
        pgbench=500,
        slower={"huey": 0.5, "dbos": 0.1},
        everybody=False,
    ),
    "medium": Sizes(
        one=1500,
        bulk=10_000,
        drain=5000,
        lanes=(1, 32),
        cap=6.0,
        samples=60,
        backlogs=(1000, 100_000),
        serial=5000,
        long_serial=20_000,
        keys=1000,
        many=100_000,
        very_many=300_000,
        crew=6000,
        flat_drain=3000,
        shapes=("", "a", "b", "c", "d", "abcd"),
        idle=20.0,
        bare=10_000,
        pgbench=2500,
        slower={"huey": 0.5, "dbos": 0.1},
    ),
    "full": Sizes(
        one=3000,
        bulk=20_000,
        drain=10_000,
        lanes=(1, 8, 32),
        cap=15.0,
        samples=110,
        backlogs=(1000, 100_000, 1_000_000),
        serial=10_000,
        long_serial=100_000,
        keys=1000,
        many=100_000,
        very_many=1_000_000,
        crew=10_000,
        flat_drain=5000,
        shapes=("", "a", "b", "c", "d", "abcd"),
        idle=60.0,
        bare=20_000,
        pgbench=5000,
        slower={"dbos": 0.2},
    ),
}

RATE = Metric("rate", "rate", "jobs/s")
SHAPES = {
    "": "empty table",
    "a": "a: a blocked queue in front",
    "b": "b: queues of one job",
    "c": "c: deferred, of higher priority",
    "d": "d: history",
    "abcd": "e: all of these",
}


def contestants(store: Store, sizes: Sizes, *, everybody: bool = True) -> tuple[str, ...]:
    return ALL[store] if everybody or sizes.everybody else (OURS,)


def plan(sizes: Sizes, pgbench: str | None) -> list[Work]:
    """All works, in the order in which they run."""
    works: list[Work] = []
    for store in STORES:
        works += [
            enqueue(store, sizes),
            *(drain(store, sizes, lanes, pgbench) for lanes in sizes.lanes),
            pick_up(store, sizes),
            serial(store, sizes),
            long_serial(store, sizes),
            queues(store, sizes),
            waiting(store, sizes),
        ]
        if store == "postgres":
            works += [crew(store, sizes)]
        works += [flat(store, sizes), idle(store, sizes)]
    return works


def enqueue(store: Store, sizes: Sizes) -> Work:
    entries = [
        Entry(
            name,
            name,
            "enqueue",
            {"one": sizes.one, "bulk": sizes.count(name, sizes.bulk), "cap": sizes.cap},
        )
        for name in CONTESTANTS[store]
    ]
    if store == "sqlite":
        options = {"one": sizes.one, "bulk": sizes.bulk}
        note = "1 row per transaction, and 1,000; no check for duplicates but a unique id"
        entries.append(Entry("bare loop", None, "bare_enqueue", options, notes=(note,)))
    metrics = (Metric("one", "one by one", "jobs/s"), Metric("bulk", "in bulk", "jobs/s"))
    return Work("enqueue", store, "enqueue", metrics, tuple(entries))


def drain(store: Store, sizes: Sizes, lanes: int, pgbench: str | None) -> Work:
    entries = [
        Entry(
            name,
            name,
            "drain",
            {"count": sizes.count(name, sizes.drain), "lanes": lanes, "cap": sizes.cap},
        )
        for name in ALL[store]
    ]
    if store == "sqlite" and lanes == 1:
        entries.append(
            Entry("bare loop, 1 job/tx", None, "bare_drain", {"count": sizes.bare // 4, "size": 1})
        )
    if store == "sqlite" and lanes == 32:
        entries.append(
            Entry("bare loop, 100 jobs/tx", None, "bare_drain", {"count": sizes.bare, "size": 100})
        )
    if store == "postgres" and lanes == 32:
        note = "does not bound the number of jobs that run at a time"
        options = {"count": sizes.drain, "lanes": lanes, "cap": sizes.cap}
        entries += [
            Entry(label, "pgqueuer", "drain", {**options, "variant": variant}, notes=(note,))
            for label, variant in (
                ("pgqueuer, its defaults", "defaults"),
                ("pgqueuer, batch of 32", "no limit"),
            )
        ]
    if store == "postgres" and pgbench is not None and lanes in (1, 32):
        clients = 1 if lanes == 1 else 8
        for transactions in (2, 1):
            entries.append(
                Entry(
                    f"pgbench, {clients} client{'s' * (clients > 1)}, {transactions} tx/job",
                    None,
                    "pgbench",
                    {
                        "binary": pgbench,
                        "clients": clients,
                        "count": sizes.pgbench * (1 if clients == 1 else 4),
                        "transactions": transactions,
                    },
                )
            )
    plural = "s" if lanes > 1 else ""
    title = f"drain no-op jobs, {lanes} lane{plural}"
    return Work(f"drain-{lanes}", store, title, (RATE,), tuple(entries))


def pick_up(store: Store, sizes: Sizes) -> Work:
    metrics = tuple(
        Metric(f"{where}_{key}", f"from {text}, {title}", "ms", less_is_better=True)
        for where, text in (("same", "the same process"), ("other", "another process"))
        for key, title in (
            ("p50", "p50"),
            ("p95", "p95"),
            ("p50_after_return", "p50 after enqueue returned"),
        )
    )
    entries = tuple(
        Entry(name, name, "pick_up", {"samples": sizes.samples, "lanes": 1}) for name in ALL[store]
    )
    title = "pick-up from idle, from the call of enqueue to the handler's start"
    return Work("pick-up", store, title, metrics, entries)


def serial(store: Store, sizes: Sizes) -> Work:
    entries = [
        Entry(
            name,
            name,
            "drain",
            {
                "count": sizes.count(name, sizes.serial),
                "lanes": 32,
                "keys": 1,
                "cap": sizes.cap,
            },
        )
        for name in ALL[store]
        if name != "huey"
    ]
    title = f"{sizes.serial:,} jobs in one serial queue, 32 lanes up"
    return Work("serial", store, title, (RATE,), tuple(entries))


def long_serial(store: Store, sizes: Sizes) -> Work:
    count = sizes.long_serial
    options = {"count": count, "lanes": 32, "keys": 1, "cap": 8 * sizes.cap}
    entries = (Entry(OURS, OURS, "drain", options),)
    title = f"{count:,} jobs in one serial queue, 32 lanes up"
    return Work("serial-long", store, title, (RATE,), entries, rounds=1)


def queues(store: Store, sizes: Sizes) -> Work:
    entries = tuple(
        Entry(
            name,
            name,
            "drain",
            {
                "count": sizes.count(name, sizes.drain),
                "lanes": 32,
                "keys": sizes.keys,
                "cap": sizes.cap,
            },
        )
        for name in contestants(store, sizes, everybody=False)
        if name != "huey"
    )
    title = f"{sizes.keys:,} serial queues, 32 lanes"
    return Work("queues", store, title, (RATE,), entries)


def waiting(store: Store, sizes: Sizes) -> Work:
    entries = tuple(
        Entry(
            f"{name}, {level:,} waiting",
            name,
            "waiting",
            {
                "level": level,
                "count": min(level * 9 // 10, sizes.flat_drain),
                "lanes": 32,
                "cap": sizes.cap,
            },
            prepare={"level": level},
            prepare_measure="fill",
        )
        for level in sizes.backlogs
        for name in contestants(store, sizes, everybody=False)
        if name != "dbos" or level <= 1000
    )
    title = "drain while many more jobs wait, 32 lanes"
    base = f"{OURS}, {sizes.backlogs[0]:,} waiting"
    return Work("waiting", store, title, (RATE,), entries, base=base)


def crew(store: Store, sizes: Sizes) -> Work:
    entries = [
        Entry(
            f"{name}, {processes} x {lanes}",
            name,
            "crew",
            {
                "count": sizes.count(name, sizes.crew),
                "processes": processes,
                "lanes": lanes,
                "cap": sizes.cap * 2,
            },
        )
        for processes, lanes in ((1, 32), (4, 8))
        for name in contestants(store, sizes, everybody=False)
    ]
    title = "processes x lanes"
    return Work("crew", store, title, (RATE,), tuple(entries), base=f"{OURS}, 1 x 32")


def flat(store: Store, sizes: Sizes) -> Work:
    metrics = (
        Metric("fresh", "pick-up p50, first round", "ms", less_is_better=True, rounds="first"),
        Metric("p50", "pick-up p50, later", "ms", less_is_better=True, rounds="later"),
        Metric("p95", "pick-up p95, later", "ms", less_is_better=True, rounds="later"),
        RATE,
    )
    entries = []
    for shape in sizes.shapes:
        notes = ()
        if shape == "b":
            notes = ("b: the pick-up is of a job in a lane beside the full one",)
        if len(shape) > 1 and store == "postgres":
            notes = ("e: with another session's transaction open all the while",)
        entries.append(
            Entry(
                SHAPES[shape],
                OURS,
                "flat",
                {
                    "shape": shape,
                    "samples": sizes.samples,
                    "count": sizes.flat_drain,
                    "cap": sizes.cap * 2,
                },
                prepare={"shape": shape, "many": sizes.many, "very_many": sizes.very_many},
                prepare_measure="flat_fill",
                notes=notes,
            )
        )
    title = f"shapes of backlog ({sizes.many:,} in a and b, {sizes.very_many:,} in c and d)"
    return Work("flat", store, title, metrics, tuple(entries), base=SHAPES[""])


def idle(store: Store, sizes: Sizes) -> Work:
    metrics = (
        Metric("cpu", "CPU seconds per minute", "s", less_is_better=True),
        Metric("core", "share of a core", "%", less_is_better=True),
        Metric("statements", "statements per minute", "", less_is_better=True),
    )
    entries = tuple(
        Entry(name, name, "idle", {"seconds": sizes.idle, "lanes": 32})
        for name in contestants(store, sizes, everybody=False)
    )
    return Work("idle", store, "idle with 32 lanes", metrics, entries, rounds=1)
