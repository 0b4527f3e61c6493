"""What the tests of stores share."""

import pytest

pytest.register_assert_rewrite("trio_watchdog.testing", "tests.store.makers")
