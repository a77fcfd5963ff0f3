"""Token bitmasks in memory shared by the core and a stepping process, with marks of the operation in progress.

Layout: a header of 64-bit counters, then rows of `num_words` 32-bit words. The stepping process writes the marks before
each operation, so that after its death the core knows which operation it died in.
"""

from __future__ import annotations

import ctypes
import mmap
import os

_HEADER_BYTES = 4096
_OPERATIONS, _STATE, _GRAMMAR, _GRAMMAR_BESIDE = 0, 1, 2, 3  # indices in the header
_FIRST_ROWS = 64
_NAME = "moiety-grammar-masks"


class MaskBuffer:
    """One process's view of the buffer. The core creates and grows it; the stepping process follows."""

    def __init__(self, num_words: int, fd: int | None = None) -> None:
        """Map the buffer.

        `fd`: a buffer that the other process has created, owned by this object; None creates a new one.
        """
        self.row_bytes = 4 * num_words
        self.fd = os.memfd_create(_NAME, os.MFD_CLOEXEC) if fd is None else fd
        self._num_rows = 0
        if fd is None:
            os.ftruncate(self.fd, _HEADER_BYTES + _FIRST_ROWS * self.row_bytes)
        self._map()

    def reserve(self, num_rows: int) -> None:
        """Grow the buffer to `num_rows` rows. Earlier addresses and views become stale."""
        if num_rows <= self._num_rows:
            return
        needed = _HEADER_BYTES + num_rows * self.row_bytes
        if os.fstat(self.fd).st_size < needed:
            os.ftruncate(self.fd, _HEADER_BYTES + 2 * num_rows * self.row_bytes)
        self._map()

    def rows(self, num_rows: int) -> memoryview:
        """Return the bytes of the first masks, one after the other."""
        return memoryview(self._memory)[_HEADER_BYTES : _HEADER_BYTES + num_rows * self.row_bytes]

    def row_address(self, index: int) -> int:
        """Return the address of one mask in this process. Valid until the next `reserve`."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._memory)) + _HEADER_BYTES + index * self.row_bytes

    @property
    def operations_total(self) -> int:
        """Number of operations that the stepping process has begun or ended."""
        return self._header[_OPERATIONS]

    @property
    def state_in_progress(self) -> int:
        """Id of the request's state that is being stepped; 0: none."""
        return self._header[_STATE]

    @property
    def grammars_in_progress(self) -> tuple[int, int]:
        """Ids of the grammars that are being compiled, for a step and beside the steps; 0: none."""
        return self._header[_GRAMMAR], self._header[_GRAMMAR_BESIDE]

    def mark_state(self, state_id: int) -> None:
        """Mark the state that is being stepped from now on; 0: none."""
        self._header[_STATE] = state_id
        self._header[_OPERATIONS] += 1

    def mark_grammar(self, grammar_id: int, *, beside: bool) -> None:
        """Mark the grammar that is being compiled from now on, for a step or beside the steps; 0: none."""
        self._header[_GRAMMAR_BESIDE if beside else _GRAMMAR] = grammar_id
        if not beside:
            self._header[_OPERATIONS] += 1

    def close(self) -> None:
        """Close the descriptor. The memory is freed with its last view."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _map(self) -> None:
        size = os.fstat(self.fd).st_size
        self._memory = mmap.mmap(self.fd, size)
        self._header = memoryview(self._memory)[:_HEADER_BYTES].cast("Q")
        self._num_rows = (size - _HEADER_BYTES) // self.row_bytes
