"""Specifications of compressed attention and of hyper-connections (DeepSeek-V4), independent of tensors."""

from __future__ import annotations

from dataclasses import dataclass

from moiety_engine.model.paged_state_spec import PagedStateSpec
from moiety_engine.model.recurrent_specs import StatePart


@dataclass(frozen=True, slots=True)
class EntryIndexerSpec:
    """Lightning indexer over compressed entries: selects the `top_k` entries that a query attends to.

    A query has `num_heads` index queries, an entry one index key of width `head_dim`, pooled as the entry is.
    """

    num_heads: int
    head_dim: int
    top_k: int


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """Compressed entries of a layer: one for `rate` tokens.

    `overlaps`: an entry is pooled over its own tokens and those of the entry before, from two series of each token.
    `indexer`: selects a query's entries; None: a query attends to all of them.
    """

    rate: int
    overlaps: bool
    indexer: EntryIndexerSpec | None

    @property
    def num_series(self) -> int:
        """Series of values and of gates that a token has for each channel of an entry."""
        return 2 if self.overlaps else 1

    @property
    def span(self) -> int:
        """Number of tokens that an entry is pooled over."""
        return self.rate * self.num_series

    def entries_of(self, block_size: int) -> int:
        """Return the places for entries in a block: an entry is in the block that has its last token."""
        return max(1, block_size // self.rate)

    def fits(self, block_size: int) -> bool:
        """Return whether entries end at the borders of blocks of `block_size` tokens, or blocks at those of entries."""
        return block_size % self.rate == 0 or self.rate % block_size == 0


@dataclass(frozen=True, slots=True)
class CompressedAttentionSpec(PagedStateSpec):
    """Attention to a sliding window of uncompressed rows and to compressed entries (DeepSeek-V4).

    A row or an entry of width `head_dim` is key and value of all heads, and its last entries are rotated; the output is
    rotated back. The rows of the window, and what the next entries are pooled from, are a state of fixed size, so the
    layer is recurrent; the entries are in the sequence's blocks. `query_rank`: width of the queries' latent row.
    `output_groups`: groups of heads whose output is projected to `output_rank` values before the output projection.
    `pool`: None if the layer has no entries. `rows_in_blocks`: the rows of the window are in blocks, and the layer has
    no state: an MTP layer, which has no entries, keeps them like that, since rejected drafts then need no undo.
    """

    num_heads: int
    head_dim: int
    query_rank: int
    scale: float
    window: int
    output_groups: int
    output_rank: int
    norm_eps: float
    pool: PoolSpec | None
    rows_in_blocks: bool = False

    @property
    def output_width(self) -> int:
        """Width of the groups' projected output."""
        return self.output_groups * self.output_rank

    @property
    def row_widths(self) -> tuple[int, ...]:
        """Widths of the rows that the layer computes with."""
        of_indexer = () if self.pool is None or self.pool.indexer is None else (self.pool.indexer.head_dim,)
        group = self.num_heads * self.head_dim // self.output_groups
        return self.head_dim, self.query_rank, group, self.output_width, *of_indexer

    @property
    def divided_heads(self) -> tuple[tuple[str, str], ...]:
        """Fields that tensor parallelism divides. All ranks have all rows and entries, which all heads share."""
        return ("num_heads", "query heads"), ("output_groups", "groups of heads that are projected together")

    @property
    def state_parts(self) -> tuple[StatePart, ...]:
        """Rows of the window, and values and gates of the last tokens for entries, and for their index keys."""
        if self.rows_in_blocks:
            return ()
        parts = [StatePart((self.window, self.head_dim), exact=False)]
        if self.pool is not None:
            columns = 2 * self.pool.num_series
            parts.append(StatePart((self.pool.span, columns * self.head_dim), exact=False))
            if self.pool.indexer is not None:
                parts.append(StatePart((self.pool.span, columns * self.pool.indexer.head_dim), exact=False))
        return tuple(parts)

    @property
    def input_widths(self) -> tuple[int, ...]:
        """The position, and the rows that are kept of it: of the window, for entries, and for their index keys.

        Positions are exact, since the layer runs on a CPU only, where activations are float32.
        """
        parts = self.state_parts
        return (1, *(part.shape[1] for part in parts)) if parts else ()

    @property
    def entry_widths(self) -> tuple[int, ...]:
        """Widths of an entry and of its index key, or of a row in blocks; () without entries."""
        if self.pool is None:
            return (self.head_dim,) if self.rows_in_blocks else ()
        return (self.head_dim,) if self.pool.indexer is None else (self.head_dim, self.pool.indexer.head_dim)

    @property
    def tokens_per_entry(self) -> int:
        """Tokens of an entry, or of a row."""
        return 1 if self.pool is None else self.pool.rate

    def entries_of(self, block_size: int) -> int:
        """Return the places for entries, or for rows, in a block of `block_size` tokens."""
        return block_size if self.pool is None else self.pool.entries_of(block_size)


@dataclass(frozen=True, slots=True)
class StreamsSpec:
    """Manifold-constrained hyper-connections (Xie et al. 2026): a residual stream of `num_streams` rows for each token.

    `iterations` of Sinkhorn and Knopp's algorithm make the matrices that mix the streams nearly doubly stochastic;
    `eps` is added to what they divide by.
    """

    num_streams: int
    iterations: int
    eps: float

    @property
    def mixture_width(self) -> int:
        """Number of projections of half a layer: of its input's and output's weights, and of the mixing matrix."""
        return self.num_streams * (2 + self.num_streams)


def has_entries(spec: object) -> bool:
    """Return whether a layer with a state, given by its attention's spec, keeps entries or rows in blocks, too."""
    return isinstance(spec, PagedStateSpec) and bool(spec.entry_widths)
