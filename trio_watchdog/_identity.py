"""Fresh identities: the one place of the ground floor that draws time and randomness."""

from __future__ import annotations

import os
import time
from random import Random

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_PAIRS = [first + second for first in _ALPHABET for second in _ALPHABET]

# Seeded by the system with more bits than anybody needs; asking it each time is a system call.
_random = Random()  # noqa: S311 - identities have to differ, they are no secrets
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_random.seed)


def fresh_id() -> str:
    """A new id of 26 characters that sorts by its time of creation.

    48 bits of milliseconds, then 80 random bits, in Crockford's base 32 (the layout of a ULID),
    so that rows made one after another lie side by side in the unique index.
    """
    value = ((time.time_ns() // 1_000_000) << 80) | _random.getrandbits(80)
    return "".join([_PAIRS[(value >> shift) & 1023] for shift in range(120, -1, -10)])


def fresh_token() -> str:
    """A claim token or owner identity that no other ever has: 128 random bits in hexadecimal."""
    return f"{_random.getrandbits(128):032x}"
