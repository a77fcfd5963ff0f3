"""A step under construction: the rows taken so far, the chunks, and the prefix blocks that the step will complete."""

from __future__ import annotations

from moiety_engine.scheduling.kv import KvLedger
from moiety_engine.scheduling.plan import Chunk, Plan
from moiety_engine.sequence import Sequence


class Planner:
    """Adds chunks as long as rows and blocks allow. Lives for one step; what it holds may not lose its blocks."""

    def __init__(self, kv: KvLedger, budget: int) -> None:
        self._kv = kv
        self._budget = budget
        self._num_rows = 0
        self._decodes: list[Chunk] = []
        self._prefills: list[Chunk] = []
        self._in_flight: set[bytes] = set()

    @property
    def empty(self) -> bool:
        return not self._decodes and not self._prefills

    @property
    def rows_left(self) -> int:
        return self._budget - self._num_rows

    def will_compute(self, block_hash: bytes | None) -> bool:
        """Whether this step fills the block with this hash, so that it can be hit in the next."""
        return block_hash in self._in_flight

    def add_decode(self, sequence: Sequence) -> bool:
        """One row for a decoding sequence, or for a ghost. False: no row or no block left."""
        if self.rows_left <= 0 or not self._kv.grow(sequence, sequence.num_computed + 1):
            return False
        chunk = Chunk(sequence, 0, False, num_pad=1) if sequence.ghost else Chunk(sequence, 1, True)
        self._decodes.append(chunk)
        self._num_rows += 1
        return True

    def add_prefill(self, sequence: Sequence) -> None:
        """As much of the sequence's uncomputed tokens as rows and free blocks allow, possibly nothing."""
        room = self._kv.room_tokens(sequence) - sequence.num_computed
        num_tokens = min(sequence.num_uncomputed, self.rows_left, room)
        if num_tokens <= 0:
            return
        end = sequence.num_computed + num_tokens
        grown = self._kv.grow(sequence, end)
        assert grown, "room_tokens promised blocks that are not there"
        ends = end == len(sequence.tokens)
        pad = min(max(sequence.num_padded - end, 0), self.rows_left - num_tokens) if ends else 0
        pad = min(pad, len(sequence.blocks) * self._kv.block_size - end)
        self._in_flight.update(self._kv.completed_hashes(sequence, end))
        self._prefills.append(Chunk(sequence, num_tokens, ends, pad))
        self._num_rows += num_tokens + pad

    def finish(self, preempted: list[Sequence]) -> Plan:
        return Plan(self._decodes + self._prefills, len(self._decodes), self._num_rows, preempted)
