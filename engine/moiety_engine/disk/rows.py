"""Host memory between the device and the disk: rows of one block or piece of a state, taken, filled and returned."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moiety_engine.disk.state_rows import HostKvWithStates
from moiety_engine.runner.kv_swap import CopyMark, HostKv

if TYPE_CHECKING:
    from moiety_engine.disk.records import Buffer
    from moiety_engine.model.batch import KvCache

_STAGING_BYTES = 8 << 20
_MIN_ROWS = 8


def num_rows(block_bytes: int, num_bytes: int) -> int:
    """Return the number of rows in `num_bytes` of host memory."""
    return max(_MIN_ROWS, num_bytes // block_bytes)


def host_rows(kv: KvCache, count: int) -> HostKv:
    """Allocate the memory of `count` rows. Raises RuntimeError where memory is short, as torch does."""
    kind = HostKvWithStates if kv.num_state_slots else HostKv
    return kind(kv, count, staging_bytes=_STAGING_BYTES)


class Rows:
    """Staging rows, used by the step loop's thread; the contents of taken rows are the taker's."""

    def __init__(self, host: HostKv | None, count: int, block_bytes: int) -> None:
        """Create the rows. `host` is their memory on this rank; None if only other ranks have their blocks."""
        self.count, self.block_bytes, self.host = count, block_bytes, host
        self._free = list(range(count))
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

    def view(self, row: int) -> Buffer | RankRow:
        """Return the row as the folder takes it, after its copies were queued."""
        assert self.host is not None, "rows of other ranks have no memory here"
        return self.host.view(row)

    def copy_out(self, pairs: list[tuple[int, int]]) -> CopyMark:
        """Copy pairs (device block, row). The rows are valid once the mark is over."""
        return self._copy(pairs, [])

    def copy_in(self, pairs: list[tuple[int, int]], rows: list[int]) -> None:
        """Copy pairs (row, device block). All `rows` are free again once that is over, including uncopied ones."""
        self._settling.append((self._copy([], pairs), rows))

    def _copy(self, outs: list[tuple[int, int]], ins: list[tuple[int, int]]) -> CopyMark:
        if self.host is None:
            return CopyMark(None)
        self.host.run(outs, ins)
        return self.host.mark()


@dataclass(frozen=True, slots=True)
class RankRow:
    """A row on all ranks of a group, valid there after `num_copies` copies of the rows `rows_id`.

    `own` is its memory on this rank, if this rank has blocks of the group.
    """

    rows_id: int
    num_copies: int
    row: int
    own: Buffer | None


class RankRows(Rows):
    """Rows that every rank of a group has, with its own part of the blocks; rank 0 numbers them."""

    def __init__(
        self,
        host: HostKv | None,
        count: int,
        block_bytes: int,
        rows_id: int,
        send_copies: Callable[[int, list[tuple[int, int]], list[tuple[int, int]]], None],
    ) -> None:
        """Create rank 0's view. `send_copies(rows_id, outs, ins)` lets the other ranks of the group copy, too."""
        super().__init__(host, count, block_bytes)
        self._rows_id, self._send_copies = rows_id, send_copies
        self._num_copies = 0

    def view(self, row: int) -> RankRow:
        own = None if self.host is None else self.host.view(row)
        return RankRow(self._rows_id, self._num_copies, row, own)

    def _copy(self, outs: list[tuple[int, int]], ins: list[tuple[int, int]]) -> CopyMark:
        self._num_copies += 1
        self._send_copies(self._rows_id, outs, ins)
        return super()._copy(outs, ins)
