"""Random ids by the dozen: the system's randomness, asked for so rarely that it costs no request a system call."""

from __future__ import annotations

import os
import time

POOL_BYTES = 4096


class _Pool:
    """What of the last draw is not used yet. A process that forks must not go on with it, and ours do not fork."""

    def __init__(self) -> None:
        self._bytes = b""
        self._at = 0

    def take(self, num_bytes: int) -> bytes:
        start = self._at
        if start + num_bytes > len(self._bytes):
            self._bytes, start = os.urandom(max(POOL_BYTES, num_bytes)), 0
        self._at = start + num_bytes
        return self._bytes[start : self._at]


_pool = _Pool()


def random_hex(num_bytes: int) -> str:
    """Of so many random bytes, for ids; secrets come from `secrets`. For one thread."""
    return _pool.take(num_bytes).hex()


def ordered_hex() -> str:
    """For ids that are kept: 48 bits of the time and 80 random ones, as in a UUID of version 7. What is stored together
    then stands together in an index, so that storing it touches few of its pages. For one thread."""
    return f"{time.time_ns() // 1_000_000:012x}{_pool.take(10).hex()}"
