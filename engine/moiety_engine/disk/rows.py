"""Host memory between the device and the disk: rows of one block each, taken, filled, emptied and returned."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from moiety_engine.runner.kv_swap import HostKv

if TYPE_CHECKING:
    from moiety_engine.disk.records import Buffer
    from moiety_engine.model.batch import KvCache
    from moiety_engine.runner.kv_swap import CopyMark

_STAGING_BYTES = 8 << 20
_MIN_ROWS = 8


class Rows:
    """Staging rows, used by the step loop's thread; the contents of taken rows are the taker's."""

    def __init__(self, kv: KvCache, num_bytes: int) -> None:
        block_bytes = HostKv.bytes_of_a_block(kv)
        self.count = max(_MIN_ROWS, num_bytes // block_bytes)
        self.host = HostKv(kv, self.count, staging_bytes=_STAGING_BYTES)
        self._free = list(range(self.count))
        self._settling: deque[tuple[CopyMark, list[int]]] = deque()

    @property
    def num_free(self) -> int:
        while self._settling and self._settling[0][0].is_over():
            self._free += self._settling.popleft()[1]
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Take `count` rows; the caller has checked that they are free."""
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def release(self, rows: list[int]) -> None:
        self._free += rows

    def view(self, row: int) -> Buffer:
        return self.host.view(row)

    def copy_out(self, pairs: list[tuple[int, int]]) -> CopyMark:
        """Copy pairs (device block, row). The rows are valid once the mark is over."""
        self.host.run(pairs, [])
        return self.host.mark()

    def copy_in(self, pairs: list[tuple[int, int]], rows: list[int]) -> None:
        """Copy pairs (row, device block). All `rows` are free again once that is over, including uncopied ones."""
        self.host.run([], pairs)
        self._settling.append((self.host.mark(), rows))
