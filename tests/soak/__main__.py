"""``python -m tests.soak --seconds 120 --seed 7 --on both``: load and chaos, and the ledger's word.

Exit code 1 if anything contradicts the promises; then the ledgers and logs are kept.
"""

from __future__ import annotations

import argparse
import logging
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

import trio

from tests.soak.check import Report
from tests.soak.load import open_soak

STORES = ("sqlite", "postgres")
SHOWN = 20
"""Contradictions of a store that are told; the first one tends to explain the others."""


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak",
        description="A mixed load under chaos, judged by a ledger that the handlers write.",
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="how long (default: 120)")
    parser.add_argument("--seed", type=int, help="for the load and the chaos (default: a new one)")
    parser.add_argument("--on", choices=("both", *STORES), default="both")
    parser.add_argument("--rate", type=float, default=15.0, help="jobs a second, on each store")
    parser.add_argument("--keep", action="store_true", help="keep ledgers and logs in any case")
    return parser.parse_args()


async def soak(options: argparse.Namespace, folder: Path) -> dict[str, list[str]]:
    """Run the stores side by side; what is wrong with each."""
    problems: dict[str, list[str]] = {}
    reports: list[Report] = []

    async def run(store: str) -> None:
        (folder / store).mkdir()
        dice = random.Random(f"{options.seed} {store}")
        async with open_soak(store, folder / store, dice, options.rate) as soak:
            reports.append(await soak.run(options.seconds))
        problems[store] = soak.problems

    async with trio.open_nursery() as nursery:
        for store in STORES if options.on == "both" else (options.on,):
            nursery.start_soon(run, store)
    print(*reports, sep="\n")
    return problems


def main() -> int:
    options = parsed()
    # The client tells of each outage that it rides out.
    logging.basicConfig(level=logging.ERROR)
    if options.seed is None:
        options.seed = random.randrange(10**6)
    folder = Path(tempfile.mkdtemp(prefix="watchdog-soak-"))
    print(f"seed {options.seed}, {options.seconds:g} s, in {folder}", flush=True)
    began_at = time.monotonic()
    is_fine = False
    try:
        problems = trio.run(soak, options, folder)
        is_fine = not any(problems.values())
    finally:
        if is_fine and not options.keep:
            shutil.rmtree(folder)
        else:
            print(f"ledgers and logs are in {folder}")
    for store, found in problems.items():
        if found:
            print(f"{store}: {len(found)} contradictions", *found[:SHOWN], sep="\n")
    verdict = "no contradictions" if is_fine else "CONTRADICTIONS"
    print(f"{verdict}; seed {options.seed}, {time.monotonic() - began_at:.0f} s")
    return 0 if is_fine else 1


if __name__ == "__main__":
    sys.exit(main())
