"""Random ids from a pool of system randomness, so that few requests need a system call."""

from __future__ import annotations

import os
import time

POOL_BYTES = 4096


class _Pool:
    """Unused rest of the last draw. Not safe after a fork; our processes do not fork."""

    def __init__(self) -> None:
        self._bytes = b""
        self._at = 0

    def hex(self, num_bytes: int) -> str:
        """Return `num_bytes` random bytes in hexadecimal."""
        start = self._at
        if start + num_bytes > len(self._bytes):
            self._bytes, start = os.urandom(max(POOL_BYTES, num_bytes)), 0
        self._at = start + num_bytes
        return self._bytes[start : self._at].hex()


_pool = _Pool()
random_hex = _pool.hex
"""Return `num_bytes` random bytes in hexadecimal, for ids; use `secrets` for secrets. For one thread."""


def ordered_hex() -> str:
    """Return a time-ordered id for stored rows: 48 bits of time and 80 random ones, as in a UUID of version 7.

    Rows that are stored together are adjacent in an index, so that an insert touches few pages. For one thread.
    """
    return f"{time.time_ns() // 1_000_000:012x}{random_hex(10)}"
