"""Block tables of a sequence: one for each cache group, a group of layers that keep keys and values for the same range.

All tables of a sequence cover the same positions, and their blocks come from one pool of equal blocks. A table of
sliding-window layers holds only the blocks that its next query can see: earlier ones are freed. Pure arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

LEAST_CHUNK_TOKENS = 256  # prompt tokens at once for which a joining sequence must find blocks beside its windows


@dataclass(frozen=True, slots=True)
class TableLayout:
    """Tables of every sequence of a model.

    `windows`: for each table, the number of positions that a query of its layers sees, its own included; None: all.
    """

    block_size: int
    windows: tuple[int | None, ...] = (None,)

    @property
    def num_tables(self) -> int:
        return len(self.windows)

    @property
    def has_windows(self) -> bool:
        """True if some blocks of a sequence are freed while it runs."""
        return any(window is not None for window in self.windows)

    @property
    def slots_per_token(self) -> int:
        """Slots that one more token takes in a long context, at least one: windows do not grow."""
        return max(1, self.windows.count(None))

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks in each table that `num_tokens` tokens cover."""
        return -(-num_tokens // self.block_size)

    def first_kept(self, table: int, num_tokens: int) -> int:
        """Return the first block of a table that queries after `num_tokens` tokens read."""
        window = self.windows[table]
        return 0 if window is None else max(0, num_tokens - window + 1) // self.block_size

    def most_held(self, table: int) -> int | None:
        """Return the most blocks of a table that a sequence must hold, whatever its length; None: there is no bound.

        It is the window's range, a chunk beside it, and two partial blocks: one that the window begins in, and one that
        is freed only when the next block is full.
        """
        window = self.windows[table]
        return None if window is None else self.blocks_for(window - 1 + LEAST_CHUNK_TOKENS) + 2

    def held_for(self, num_tokens: int) -> int:
        """Return the blocks of all tables with which a sequence can reach `num_tokens` tokens."""
        return self.missing_for(num_tokens, 0, (0,) * self.num_tables)

    def missing_for(self, num_tokens: int, num_blocks: int, firsts: tuple[int, ...]) -> int:
        """Return `held_for`, for a sequence that must hold blocks `firsts` to `num_blocks` - 1 of its tables."""
        end, total = max(self.blocks_for(num_tokens), num_blocks), 0
        for table, first in enumerate(firsts):
            most = self.most_held(table)
            total += end - first if most is None else max(num_blocks - first, min(end - first, most))
        return total

    def slots_for(self, num_tokens: int) -> int:
        """Return the slots that a sequence of `num_tokens` tokens takes, partial blocks not counted."""
        total = 0
        for table in range(self.num_tables):
            most = self.most_held(table)
            total += num_tokens if most is None else min(num_tokens, most * self.block_size)
        return total

    def longest_context(self, num_blocks: int) -> int | None:
        """Return the most tokens that a sequence can reach in a pool of `num_blocks` blocks; None: there is no bound.

        The result is 0 where not even one block of each table fits.
        """
        bounds = [self.most_held(table) for table in range(self.num_tables)]
        growing, bounded = bounds.count(None), sorted(bound for bound in bounds if bound is not None)
        while bounded and (growing + len(bounded)) * bounded[0] <= num_blocks:
            num_blocks -= bounded.pop(0)
        tables = growing + len(bounded)
        return num_blocks // tables * self.block_size if tables else None
