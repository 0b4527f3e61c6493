"""Fresh identities: the one place of the ground floor that draws time and randomness."""

from __future__ import annotations

import secrets
import time

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"


def fresh_id() -> str:
    """A new id of 26 characters that sorts by its time of creation.

    48 bits of milliseconds, then 80 random bits, in Crockford's base 32 (the layout of a ULID),
    so that rows made one after another lie side by side in the unique index.
    """
    value = ((time.time_ns() // 1_000_000) << 80) | secrets.randbits(80)
    return "".join(_ALPHABET[(value >> shift) & 31] for shift in range(125, -1, -5))


def fresh_token() -> str:
    """A claim token or owner identity that nobody can guess: 128 random bits in hexadecimal."""
    return secrets.token_hex(16)
