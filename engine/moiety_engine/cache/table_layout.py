"""Block tables of a sequence: one for each cache group, a group of layers that keep keys and values for the same range.

All tables of a sequence cover the same positions, and their blocks come from one pool of equal blocks. A table of
sliding-window layers holds only the blocks that its next query can see: earlier ones are freed. Pure arithmetic.
"""

from __future__ import annotations

CHUNK_TOKENS = 256  # prompt tokens at once for which a joining sequence must find blocks beside its windows


class TableLayout:
    """Tables of every sequence of a model; immutable."""

    __slots__ = (
        "_chunked",
        "block_size",
        "has_windows",
        "is_plain",
        "most_held",
        "num_tables",
        "slots_per_token",
        "windows",
    )

    def __init__(
        self,
        block_size: int,
        windows: tuple[int | None, ...] = (None,),
        chunked: frozenset[int] = frozenset(),
        *,
        max_chunk_tokens: int = CHUNK_TOKENS,
    ) -> None:
        """Create the layout.

        `windows`: for each table, the number of positions that a query of its layers sees, its own included; None: all.
        `chunked`: tables whose queries see the positions of their own chunk of `window` positions (Llama 4).
        `max_chunk_tokens`: the most tokens of a sequence that a step computes.
        """
        chunk_tokens = min(CHUNK_TOKENS, max_chunk_tokens)
        self.block_size, self.windows, self._chunked = block_size, windows, chunked
        self.num_tables = len(windows)
        self.has_windows = any(window is not None for window in windows)  # some blocks are freed while a sequence runs
        self.is_plain = windows == (None,)
        self.slots_per_token = max(1, windows.count(None))  # slots of one more token in a long context
        # For each table, the most blocks that a sequence must hold, whatever its length; None: there is no bound. It is
        # the window's range, a chunk beside it, and two partial blocks: one that the window begins in, and one that is
        # freed only when the next block is full.
        self.most_held = tuple(
            None if window is None else self.blocks_for(window - 1 + chunk_tokens) + 2 for window in windows
        )

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks in each table that `num_tokens` tokens cover."""
        return -(-num_tokens // self.block_size)

    def first_kept(self, table: int, num_tokens: int) -> int:
        """Return the first block of a table that queries after `num_tokens` tokens read."""
        window = self.windows[table]
        if window is None:
            return 0
        first = num_tokens // window * window if table in self._chunked else max(0, num_tokens - window + 1)
        return first // self.block_size

    def held_for(self, num_tokens: int) -> int:
        """Return the blocks of all tables with which a sequence can reach `num_tokens` tokens."""
        if self.is_plain:
            return -(-num_tokens // self.block_size)
        return self.missing_for(num_tokens, 0, (0,) * self.num_tables)

    def missing_for(self, num_tokens: int, num_blocks: int, firsts: tuple[int, ...]) -> int:
        """Return `held_for`, for a sequence that must hold blocks `firsts` to `num_blocks` - 1 of its tables."""
        end = -(-num_tokens // self.block_size)
        end = max(end, num_blocks)
        if self.is_plain:
            return end
        total = 0
        for most, first in zip(self.most_held, firsts, strict=True):
            total += end - first if most is None else max(num_blocks - first, min(end - first, most))
        return total

    def slots_for(self, num_tokens: int) -> int:
        """Return the slots that a sequence of `num_tokens` tokens takes, partial blocks not counted."""
        if self.is_plain:
            return num_tokens
        size = self.block_size
        return sum(num_tokens if most is None else min(num_tokens, most * size) for most in self.most_held)

    def longest_context(self, num_blocks: int) -> int | None:
        """Return the most tokens that a sequence can reach in a pool of `num_blocks` blocks; None: there is no bound.

        The result is 0 where not even one block of each table fits.
        """
        growing = self.windows.count(None)
        bounded = sorted(bound for bound in self.most_held if bound is not None)
        while bounded and (growing + len(bounded)) * bounded[0] <= num_blocks:
            num_blocks -= bounded.pop(0)
        tables = growing + len(bounded)
        return num_blocks // tables * self.block_size if tables else None
