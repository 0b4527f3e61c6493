"""The contract of a store, for people who write one. `trio_watchdog.testing` has its proof."""

from ._store import ELSEWHERE, Change, Level, Project, Renewer, Store, Vital
from ._wishes import Wish

__all__ = ["ELSEWHERE", "Change", "Level", "Project", "Renewer", "Store", "Vital", "Wish"]
