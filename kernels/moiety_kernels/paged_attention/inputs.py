"""Inputs of attention over the paged KV cache. T tokens, S sequences, B blocks per row, H query heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moiety_kernels.checks import require, require_shape

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Sequences of a step. The queries of a sequence are its last tokens in the cache.

    With several shards the cache has a part of the positions only: those with position % num_shards == shard, in order,
    so that slot j of a sequence has position j · num_shards + shard. Contexts count all positions. Only
    `paged_attention.sharded` takes such sequences.

    `max_query` and `max_context` bound the queries and the context of each sequence, so the host does not read device
    memory. Creating the record checks it, once for all layers of a step: it raises KernelInputError unless there is one
    query start more than sequences.
    """

    query_start_S1: Tensor  # int32; sequence s has the queries query_start[s] … query_start[s + 1] - 1
    context_len_S: Tensor  # int32, tokens of each sequence in the cache, the queries' included
    block_table_SB: Tensor  # int32; entries after the context are void
    max_query: int
    max_context: int
    num_decode: int = 0  # sequences 0 … num_decode - 1 have exactly one query
    num_shards: int = 1  # caches among which the positions are divided
    shard: int = 0  # index of this one

    def __post_init__(self) -> None:
        require(0 <= self.shard < self.num_shards, "the shard must be one of the shards")
        require_shape("query_start", self.query_start_S1, (self.context_len_S.shape[0] + 1,))


@dataclass(frozen=True, slots=True)
class AttentionParameters:
    """Parameters of one layer's attention. Creating the record raises KernelInputError unless the scale is positive."""

    scale: float
    window: int | None = None  # positions that a query sees, its own included; None: all
    sinks_H: Tensor | None = (
        None  # float32, a score per query head that takes its share of the softmax and adds nothing
    )
    chunked: bool = False  # a query sees the positions of its own chunk of `window` positions (Llama 4)
    rounds: bool = False  # on a CPU, queries, keys, values and weights may be rounded to bfloat16, as on a GPU

    def __post_init__(self) -> None:
        require(self.scale > 0, "scale must be positive")
