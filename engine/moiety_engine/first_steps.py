"""Keys of the requests whose first token a core is computing, in memory that outlives the core.

A core that dies in the first step of a request may have died because of that request. The core writes the keys before
each of these steps; the server reads them after the core's death.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from itertools import islice

MAX_KEYS = 4095
_BYTES = 8 * (MAX_KEYS + 2)
_NAME = "moiety-first-steps"
_IS_OPEN, _COUNT, _FIRST = 0, 1, 2  # indices of 64-bit words


class FirstSteps:
    """One process's view of the memory. The server creates it and passes its descriptor to the core."""

    def __init__(self, fd: int | None = None) -> None:
        """Map the memory. `fd`: the server's memory, owned by this object; None creates new memory."""
        self.fd = os.memfd_create(_NAME, os.MFD_CLOEXEC) if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, _BYTES)
        self._words = memoryview(mmap.mmap(self.fd, _BYTES)).cast("Q")
        if fd is not None:
            self._words[_IS_OPEN] = 1

    def write(self, keys: Iterable[int]) -> None:
        """Record the requests whose first token is being computed from now on. Keys beyond MAX_KEYS are dropped."""
        kept_keys = list(islice(keys, MAX_KEYS))
        self._words[_COUNT] = 0
        for i, key in enumerate(kept_keys, _FIRST):
            self._words[i] = key
        self._words[_COUNT] = len(kept_keys)

    def read(self) -> frozenset[int] | None:
        """Return the keys that the core wrote last; None if it has never opened the memory."""
        if not self._words[_IS_OPEN]:
            return None
        return frozenset(self._words[_FIRST : _FIRST + self._words[_COUNT]])

    def close(self) -> None:
        """Close the descriptor. The memory is freed with the object."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
