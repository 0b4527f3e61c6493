"""Fresh identities: the one place of the ground floor that draws time and randomness."""

from __future__ import annotations

import os
import secrets
import time

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_PAIRS = [first + second for first in _ALPHABET for second in _ALPHABET]
_SHIFTS = tuple(range(120, -1, -10))

_last = 0


def fresh_id() -> str:
    """A new id of 26 characters that sorts by its time of creation.

    48 bits of milliseconds, then 80 random bits, in Crockford's base 32 (the layout of a ULID),
    so that rows made one after another lie side by side in the unique index. Within a millisecond,
    and while the clock goes back, each is a random step after the one before.
    """
    global _last  # noqa: PLW0603 (there is one order of ids in a process)
    drawn = int.from_bytes(os.urandom(10), "big")
    value = ((time.time_ns() // 1_000_000) << 80) | drawn
    if value <= _last:
        # Two threads may come here at once: then only their order is left to chance.
        value = _last + 1 + (drawn >> 16)
    _last = value
    return "".join([_PAIRS[(value >> shift) & 1023] for shift in _SHIFTS])


def fresh_token() -> str:
    """A claim token or owner identity that no other ever has: 128 random bits in hexadecimal."""
    return secrets.token_hex(16)
