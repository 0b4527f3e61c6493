"""``python -m benchmarks``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from .bare import pgbench_binary
from .contestants import CONTESTANTS
from .harness import Outcome, Runner, databases, surroundings
from .report import about, as_json, table, target_table, targets
from .works import SIZES, STORES, Entry, Work, plan

QUICK_SECONDS = 165.0
"""On a slow or busy machine ``--quick`` leaves out what would begin later than that."""


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="The same work on this project and on its peers, as ratios in one run.",
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, one round: 3 minutes")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="works, by name or its beginning (see --list)"
    )
    parser.add_argument("--on", choices=STORES, help="one store only")
    parser.add_argument(
        "--who", nargs="+", metavar="NAME", help="these lines only, by their beginnings"
    )
    parser.add_argument("--sizes", choices=SIZES, default=None, help="default: full")
    parser.add_argument("--rounds", type=int, help="default: 3, with --quick 1")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--list", action="store_true", help="tell the names of the works, and end")
    return parser.parse_args(arguments)


def chosen(options: argparse.Namespace) -> list[Work]:
    sizes = SIZES[options.sizes or ("small" if options.quick else "full")]
    works = [
        work
        for work in plan(sizes, pgbench_binary())
        if (options.on is None or work.store == options.on)
        and (options.only is None or any(work.name.startswith(name) for name in options.only))
    ]
    if options.who is not None:

        def is_wanted(entry: Entry) -> bool:
            names = (entry.label, entry.contestant or "")
            return any(name.startswith(tuple(options.who)) for name in names)

        works = [replace(work, entries=tuple(filter(is_wanted, work.entries))) for work in works]
    return [work for work in works if work.entries]


def main() -> int:
    options = parsed()
    works = chosen(options)
    if options.list:
        for work in works:
            print(f"{work.store:9} {work.name:12} {work.title}")
        return 0
    if not works:
        print("no such work; see --list", file=sys.stderr)
        return 2
    rounds = options.rounds or (1 if options.quick else 3)
    began = time.monotonic()
    everything: list[Outcome] = []
    figures = []
    with databases() as made:
        machine = surroundings(made.folder)
        versions = {
            name: found
            for places in CONTESTANTS.values()
            for name, place in places.items()
            if (found := place.version) is not None
        }
        print(
            f"Python {machine['python']}, SQLite {machine['sqlite']}, {machine['cores']} cores,"
            f" write and fsync of a page {machine['fsync_us']:.0f} us, load {machine['load']:.1f}"
        )
        if machine["load"] > 0.5:
            print("Others work on this machine: the figures are worth less, and so are ratios.")
        print(", ".join(f"{name} {found}" for name, found in versions.items()))
        print("Median, ratio to this project, least..most of the rounds.\n", flush=True)

        def say(line: str) -> None:
            print(f"[{time.monotonic() - began:6.1f}] {line}", file=sys.stderr, flush=True)

        runner = Runner(made, say)
        try:
            for work in works:
                if options.quick and time.monotonic() - began > QUICK_SECONDS:
                    print(f"{work.store}: {work.title}: left out, for time is up")
                    continue
                outcomes = runner.work(work, rounds)
                everything += outcomes
                figures += as_json(outcomes)
                print(table(outcomes) + "\n", flush=True)
        except KeyboardInterrupt:
            say("interrupted; what is here so far:")
        machine["server"] = None if made.server is None else server_version(made.admin)
    reached = targets(everything)
    for text in (about(everything), target_table(reached) if reached else ""):
        if text:
            print(text + "\n")
    print(f"{time.monotonic() - began:.0f} s in all")
    if options.json is not None:
        document = {
            "at": datetime.now(UTC).isoformat(),
            "surroundings": machine,
            "versions": versions,
            "rounds": rounds,
            "figures": figures,
            "targets": [{**target.__dict__, "is_met": target.is_met} for target in reached],
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if any(outcome.error not in (None, "not installed") for outcome in everything) else 0


def server_version(url: str) -> str:
    import psycopg

    with psycopg.connect(url) as connection:
        row = connection.execute("show server_version").fetchone()
        assert row is not None
        return str(row[0])


if __name__ == "__main__":
    sys.exit(main())
