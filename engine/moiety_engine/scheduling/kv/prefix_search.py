"""Cells of block tables, the keys of their contents, and the search for a cached prefix over all tables.

A cell is a place in one table of a sequence: (table, index of the block). The key of a full block's contents is the
hash of its tokens and of all before them; a table other than the first adds its number, since its layers store other
values for the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from moiety_engine.cache.table_layout import TableLayout
from moiety_engine.sequence import Sequence
from moiety_engine.sequence_records import KvState

Cell = tuple[int, int]

_SUFFIXES = [b"", *(bytes((table,)) for table in range(1, 256))]


class Hit(NamedTuple):
    """Cached block of a prefix. A block on the host needs a device block and a copy."""

    block: int
    on_host: bool


class PrefixHits:
    """Cached prefix of `num_blocks` blocks; its length is this number."""

    __slots__ = ("hits", "num_blocks", "num_kept")

    def __init__(self, num_blocks: int, hits: list[Hit], num_kept: int = 0) -> None:
        """Create the prefix.

        `hits` has the cells that the tokens after the prefix read, table by table: see `cells_of`. `num_kept` is the
        length of the prefix that the block tables alone have; it is longer where no snapshot of the recurrent states is
        there.
        """
        self.num_blocks, self.hits, self.num_kept = num_blocks, hits, num_kept

    def __len__(self) -> int:
        return self.num_blocks


NO_HITS = PrefixHits(0, [])


def key_of(block_hash: bytes, table: int) -> bytes:
    """Return the key of a block's contents in a table."""
    return block_hash + _SUFFIXES[table] if table else block_hash


def cells_of(firsts: tuple[int, ...], num_blocks: int) -> list[Cell]:
    """Return the cells of blocks `firsts` to `num_blocks` - 1, table by table."""
    return [(table, index) for table, first in enumerate(firsts) for index in range(first, num_blocks)]


def held_blocks(kv: KvState) -> list[int]:
    """Return the blocks that a sequence holds, the tail of a prefix before its head."""
    if not kv.blocks:
        return []
    if len(kv.firsts) == 1:
        return kv.blocks[kv.firsts[0] :][::-1]
    tables = list(zip(kv.tables, kv.firsts, strict=True))
    backwards = range(len(kv.blocks) - 1, -1, -1)
    return [table[index] for index in backwards for table, first in tables if index >= first]


def longest_prefix(
    sequence: Sequence,
    layout: TableLayout,
    most: int,
    find: Callable[[bytes], Hit | None],
    has_state: Callable[[bytes], bool] | None,
) -> PrefixHits:
    """Return the longest prefix of at most `most` blocks that every table still has.

    Tables without a window need all of its blocks, tables with one those that the next token sees. `has_state` returns
    whether the recurrent states after a block are known, which a prefix must end with; None: there are none.
    """
    hashes, size = sequence.block_hashes, layout.block_size
    found: list[dict[int, Hit]] = [{} for _ in layout.windows]
    whole = [table for table, window in enumerate(layout.windows) if window is None]

    def has(table: int, index: int) -> bool:
        if index in found[table]:
            return True
        hit = find(key_of(hashes.at(index, size), table))
        if hit is not None:
            found[table][index] = hit
        return hit is not None

    length = most
    if whole:
        length = next((i for i in range(most) if not all(has(table, i) for table in whole)), most)
    windowed = [table for table in range(layout.num_tables) if table not in whole]
    num_kept = 0
    while length:
        gap = max((_last_gap(layout, table, length, has) for table in windowed), default=-1)
        if gap >= 0:
            length = gap  # no prefix that needs the missing block
            continue
        num_kept = num_kept or length
        if has_state is None or has_state(hashes.at(length - 1, size)):
            break
        length -= 1
    firsts = tuple(layout.first_kept(table, length * size) for table in range(layout.num_tables))
    return PrefixHits(length, [found[table][index] for table, index in cells_of(firsts, length)], num_kept)


def _last_gap(layout: TableLayout, table: int, length: int, has: Callable[[int, int], bool]) -> int:
    """Return the last block that a prefix of `length` blocks needs and the table lacks, or -1."""
    first = layout.first_kept(table, length * layout.block_size)
    return next((index for index in range(length - 1, first - 1, -1) if not has(table, index)), -1)
