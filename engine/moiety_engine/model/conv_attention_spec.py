"""Specification of compressed convolutional attention (ZAYA1), independent of tensors."""

from __future__ import annotations

from dataclasses import dataclass

from moiety_engine.model.paged_state_spec import PagedStateSpec
from moiety_engine.model.recurrent_specs import StatePart

CONV_TAPS = 2  # tokens that each of the two convolutions sees


@dataclass(frozen=True, slots=True)
class ConvAttentionSpec(PagedStateSpec):
    """Compressed convolutional attention (Figliolia et al. 2025, arXiv 2510.04476).

    Queries and keys pass through a convolution of each channel and one of each head, both over two tokens, and half of
    all values are those of the token before. Keys and values are in blocks; the last rows before the convolutions, and
    the last token's half of values, are a state. `num_attending_heads`: query heads that a rank attends with.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_attending_heads: int
    window: int | None = None

    @property
    def query_width(self) -> int:
        """Width of all queries."""
        return self.num_heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """Width of all queries and keys."""
        return (self.num_heads + self.num_kv_heads) * self.head_dim

    @property
    def delayed_width(self) -> int:
        """Width of the values of the token before."""
        return self.num_kv_heads * self.head_dim // 2

    @property
    def output_width(self) -> int:
        """Width of the output of the heads that a rank attends with."""
        return self.num_attending_heads * self.head_dim

    @property
    def row_widths(self) -> tuple[int, ...]:
        """Widths of the rows that the layer computes with."""
        return self.head_dim, self.delayed_width

    @property
    def divided_heads(self) -> tuple[tuple[str, str], ...]:
        """Field that tensor parallelism divides.

        All ranks have all queries, keys and values, and the whole cache: some key-value heads have the values of the
        token, the others those of the token before, so their ranks would otherwise have layers of different kinds.
        """
        return (("num_attending_heads", "query heads"),)

    @property
    def state_parts(self) -> tuple[StatePart, ...]:
        """The last rows of queries and keys, and the last token's half of values."""
        rows = 2 * (CONV_TAPS - 1), self.conv_channels
        return StatePart(rows, exact=False), StatePart((1, self.delayed_width), exact=False)

    @property
    def input_widths(self) -> tuple[int, ...]:
        """The rows of queries and keys, and the half of values that the next token gets."""
        return self.conv_channels, self.delayed_width

    @property
    def entry_widths(self) -> tuple[int, ...]:
        """Width of a key or a value of one head."""
        return (self.head_dim,)

    @property
    def heads_in_entries(self) -> int:
        """All key-value heads."""
        return self.num_kv_heads

    def entries_of(self, block_size: int) -> int:
        """Return the number of keys and values of a block: the keys of each head, then the values of each."""
        return 2 * self.num_kv_heads * block_size
