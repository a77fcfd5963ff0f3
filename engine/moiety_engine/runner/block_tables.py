"""Block tables of sequences as arrays, kept from step to step.

Converting long lists to arrays in each step would take more of a step's time than everything else.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moiety_engine.sequence import Sequence

_SMALLEST = 16  # blocks of a new row of a new row
_FEW = 512  # number of rows that are never worth dropping


@dataclass(slots=True)
class _TableRow:
    """Cached row of one sequence.

    `blocks` is the list that was read: a sequence that loses its blocks gets a new list, one that grows keeps its list.
    """

    blocks: list[int]
    num_read: int
    values: np.ndarray


class BlockTables:
    """Cache of the table rows of recently used sequences."""

    def __init__(self) -> None:
        self._rows: dict[Sequence, _TableRow] = {}

    def of(self, sequence: Sequence) -> np.ndarray:
        """Return the sequence's blocks as int32; a view that is valid until the sequence's next step."""
        blocks = sequence.kv.blocks
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
        """Drop the rows of all other sequences if there are many."""
        if len(self._rows) > max(_FEW, 2 * len(sequences)):
            self._rows = {s: self._rows[s] for s in sequences if s in self._rows}
