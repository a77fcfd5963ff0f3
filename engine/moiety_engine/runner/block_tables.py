"""The block tables of sequences as arrays, kept from step to step: turning long lists into arrays anew would take more
of a step's time than everything else."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moiety_engine.sequence import Sequence

_SMALLEST = 16  # blocks
_FEW = 512  # rows that are kept whoever they belong to


@dataclass(slots=True)
class _TableRow:
    """`blocks` is the list that was read: a sequence that loses its blocks gets another, one that grows keeps it."""

    blocks: list[int]
    num_read: int
    values: np.ndarray


class BlockTables:
    """Holds the rows of sequences that were asked for lately."""

    def __init__(self) -> None:
        self._rows: dict[Sequence, _TableRow] = {}

    def of(self, sequence: Sequence) -> np.ndarray:
        """The sequence's blocks, int32; a view that holds until its next step."""
        blocks = sequence.blocks
        row = self._rows.get(sequence)
        if row is None or row.blocks is not blocks or row.num_read > len(blocks):
            row = self._rows[sequence] = _TableRow(blocks, 0, np.empty(_SMALLEST, dtype=np.int32))
        count = len(blocks)
        if row.num_read < count:
            if count > len(row.values):
                values = np.empty(max(2 * len(row.values), count), dtype=np.int32)
                values[: row.num_read] = row.values[: row.num_read]
                row.values = values
            row.values[row.num_read : count] = blocks[row.num_read :]
            row.num_read = count
        return row.values[:count]

    def keep_only(self, sequences: list[Sequence]) -> None:
        """Forget the others if there are many of them."""
        if len(self._rows) > max(_FEW, 2 * len(sequences)):
            self._rows = {s: self._rows[s] for s in sequences if s in self._rows}
