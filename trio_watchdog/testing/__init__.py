"""For tests: of stores, of the runtime, and of your own lanes.

`open_test_watchdog` and `run_lanes` run jobs inline, on a store in memory and in virtual time.
`STORE_CHECKS` is what every store promises, as functions that a stranger can run on a stranger's
store. `FaultyStore` fails when it is told to, `DurableClock` is one clock for durable instants and
Trio's deadlines, and `check_invariants` looks for what must never be true of the table.

Nothing here is imported by ``trio_watchdog`` itself. The checks are written with plain ``assert``;
for pytest's explanations call ``pytest.register_assert_rewrite("trio_watchdog.testing")`` first.
"""

from . import (
    _checks_admission,
    _checks_claims,
    _checks_endings,
    _checks_others,
    _checks_reading,
    _checks_whole,
)
from ._clock import TICK, DurableClock
from ._faulty import VERBS, Fault, FaultyStore
from ._inline import InlineWatchdog, open_test_watchdog, run_lanes
from ._invariants import broken_invariants, broken_rows, check_invariants
from ._store_maker import (
    Capability,
    StoreCheck,
    StoreMaker,
    checks_of,
    missing_capabilities,
    store_check,
)

STORE_CHECKS: tuple[StoreCheck, ...] = checks_of(
    _checks_admission,
    _checks_claims,
    _checks_endings,
    _checks_others,
    _checks_reading,
    _checks_whole,
)
"""What every store promises. Each takes a `StoreMaker`; its name says what is promised."""

__all__ = [
    "STORE_CHECKS",
    "TICK",
    "VERBS",
    "Capability",
    "DurableClock",
    "Fault",
    "FaultyStore",
    "InlineWatchdog",
    "StoreCheck",
    "StoreMaker",
    "broken_invariants",
    "broken_rows",
    "check_invariants",
    "missing_capabilities",
    "open_test_watchdog",
    "run_lanes",
    "store_check",
]
