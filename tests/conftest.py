"""Before anything else is imported: the test kit's asserts are shown as those of tests are."""

import pytest

pytest.register_assert_rewrite("trio_watchdog.testing", "tests.store.makers")
