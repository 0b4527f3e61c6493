"""Before anything else is imported: the test kit's asserts are shown as those of tests are."""

import os
import tempfile

import pytest

pytest.register_assert_rewrite("trio_watchdog.testing", "tests.store.makers")

BYTECODE = pytest.StashKey[tempfile.TemporaryDirectory[str]]()


def pytest_configure(config: pytest.Config) -> None:
    # Where bytecode is not to be kept, each of the hundreds of processes that the tests start would
    # compile the package anew.
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", None) and "PYTHONPYCACHEPREFIX" not in os.environ:
        config.stash[BYTECODE] = tempfile.TemporaryDirectory(prefix="watchdog-bytecode-")
        os.environ["PYTHONPYCACHEPREFIX"] = config.stash[BYTECODE].name


def pytest_unconfigure(config: pytest.Config) -> None:
    if folder := config.stash.get(BYTECODE, None):
        folder.cleanup()
