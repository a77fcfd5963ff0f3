"""Block tables of sequences as arrays, kept from step to step.

Converting long lists to arrays in each step would take more of a step's time than everything else.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import NamedTuple

import numpy as np
from torch import Tensor

from moiety_engine.model.batch import GroupTable
from moiety_engine.sequence import Sequence

_first_blocks = attrgetter("kv.blocks")
_SMALLEST = 16  # blocks of a new row of a new row
_MIN_KEPT_ROWS = 512  # number of rows that are never worth dropping


@dataclass(slots=True)
class _TableRow:
    """Cached row of one sequence.

    `blocks` is the list that was read: a sequence that loses its blocks gets a new list, one that grows keeps its list.
    """

    blocks: list[int]
    num_read: int
    values: np.ndarray


@dataclass(slots=True)
class _DecodeTables:
    """Stacked tables of the newest step of decodes: the lists that were read, their lengths, and the values."""

    lists: list[list[int]]
    lengths: list[int]
    values_SB: np.ndarray  # wider than the longest list


class HostTable(NamedTuple):
    """Slots and block tables of a step in one cache group, in host memory; see GroupTable."""

    slots_T: np.ndarray
    block_table_SB: np.ndarray

    @staticmethod
    def empty() -> HostTable:
        """Return the table of a step without rows."""
        return HostTable(np.zeros(0, dtype=np.int64), np.zeros((0, 1), dtype=np.int32))


class BlockTables:
    """Cache of the table rows of recently used sequences, in one cache group.

    The entries of blocks that were freed behind a window are void: they may name any block.
    """

    def __init__(self, table: int = 0) -> None:
        self._table = table
        self._rows: dict[Sequence, _TableRow] = {}
        self._decodes: _DecodeTables | None = None

    def blocks(self, sequence: Sequence) -> list[int]:
        """Return the sequence's block table in this group."""
        return sequence.kv.further_blocks[self._table - 1] if self._table else sequence.kv.blocks

    def of(self, sequence: Sequence) -> np.ndarray:
        """Return the sequence's blocks as int32; a view that is valid until the sequence's next step."""
        blocks = self.blocks(sequence) if self._table else sequence.kv.blocks
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

    def stacked(self, sequences: list[Sequence]) -> np.ndarray:
        """Return the block tables of these sequences: [S, B], int32, padded with 0."""
        if len(sequences) == 1:
            return self.of(sequences[0])[None, :]
        width = max([len(sequence.kv.blocks) for sequence in sequences])
        tables_SB = np.zeros((len(sequences), width), dtype=np.int32)
        for s, sequence in enumerate(sequences):
            tables_SB[s, : len(sequence.kv.blocks)] = self.of(sequence)
        return tables_SB

    def of_decodes(self, sequences: list[Sequence], positions: list[int], block_size: int) -> HostTable:
        """Return the table of a step that decodes one token of each sequence, at these positions."""
        if len(sequences) == 1:
            self._decodes, values, position = None, self.of(sequences[0]), positions[0]
            slots_T = values[position // block_size : position // block_size + 1].astype(np.int64)
            slots_T *= block_size
            slots_T += position % block_size
            return HostTable(slots_T, values[None, :])
        tables = list(map(self.blocks, sequences) if self._table else map(_first_blocks, sequences))
        slots = [
            table[position // block_size] * block_size + position % block_size
            for table, position in zip(tables, positions, strict=True)
        ]
        return HostTable(np.array(slots, dtype=np.int64), self._stacked_again(sequences, tables))

    def _stacked_again(self, sequences: list[Sequence], lists: list[list[int]]) -> np.ndarray:
        """Return the same as `stacked`, from the tables of the step before if it had the same sequences.

        Only the rows that grew or shrank are read again, which are few. `lists` are the sequences' tables.
        """
        lengths, before = list(map(len, lists)), self._decodes
        width = max(lengths)
        if (
            before is None
            or len(before.lists) != len(lists)
            or not all(map(is_, before.lists, lists))
            or width > before.values_SB.shape[1]
        ):
            values_SB = np.zeros((len(lists), width + _SMALLEST), dtype=np.int32)
            values_SB[:, :width] = self.stacked(sequences)
        else:
            values_SB = before.values_SB
            for s, (length, was) in enumerate(zip(lengths, before.lengths, strict=True)):
                if length != was:
                    values_SB[s, length:was] = 0
                    values_SB[s, :length] = self.of(sequences[s])
        self._decodes = _DecodeTables(lists, lengths, values_SB)
        return values_SB[:, :width].copy()  # a device may still read it when the next step is built

    def of_rows(
        self, sequences: list[Sequence], sequence_T: np.ndarray, positions_T: np.ndarray, block_size: int
    ) -> HostTable:
        """Return the table of a step whose rows are tokens of `sequences[sequence_T]` at these positions."""
        tables_SB, (in_block_T, offset_T) = self.stacked(sequences), np.divmod(positions_T, block_size)
        return HostTable(tables_SB[sequence_T, in_block_T].astype(np.int64) * block_size + offset_T, tables_SB)

    def keep_only(self, sequences: list[Sequence]) -> None:
        """Drop the rows of all other sequences if there are many."""
        if len(self._rows) > max(_MIN_KEPT_ROWS, 2 * len(sequences)):
            self._rows = {s: self._rows[s] for s in sequences if s in self._rows}


def upload_tables(
    upload: Callable[[np.ndarray], Tensor],
    further_tables: tuple[HostTable, ...],
    rank_slots: SequenceOf[SequenceOf[np.ndarray]],
) -> tuple[tuple[Tensor, ...], tuple[GroupTable, ...]]:
    """Return the slots of all ranks in the first cache group, and the tables of the further groups, on the device."""
    slots_of_groups = [tuple(map(upload, slots)) for slots in rank_slots]
    tables = further_tables or (HostTable.empty(),) * (len(slots_of_groups) - 1)
    first, *others = slots_of_groups or [()] * (1 + len(tables))
    further = (
        GroupTable(upload(table.slots_T), upload(table.block_table_SB), slots)
        for table, slots in zip(tables, others, strict=True)
    )
    return first, tuple(further)
