"""Weights of compressed attention and of hyper-connections. Vectors and biases are float32.

C channels, D model width, R rank of the queries' latent row, H index queries, G groups of heads, I inputs of a group,
N streams, J all streams' width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moiety_engine.model.compressed_specs import CompressedAttentionSpec

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_engine.model.compressed_specs import PoolSpec, StreamsSpec
    from moiety_engine.model.recurrent_specs import RecurrentSpec
    from moiety_engine.model.tensor_allocator import TensorAllocator
    from moiety_kernels.quantization import Weight


@dataclass(frozen=True, slots=True)
class PoolWeights:
    rows_CD: Tensor  # rows: values of each series, then gates of each series
    bias_mC: Tensor  # of the gates, by place in a window
    norm_C: Tensor


@dataclass(frozen=True, slots=True)
class EntryIndexerWeights:
    pool: PoolWeights  # of index keys
    query_up_CR: Tensor  # from the queries' latent row to all index queries
    head_weight_HD: Tensor  # float32, to the weight of each index query


@dataclass(frozen=True, slots=True)
class CompressedAttentionWeights:
    input_CD: Weight  # rows: the queries' latent row, then the row of the position
    query_norm_R: Tensor
    query_up_CR: Weight
    row_norm_d: Tensor
    sinks_H: Tensor
    group_GRI: Tensor  # from the heads of a group to its part of the output's inputs
    output_DC: Weight
    pool: PoolWeights | None
    indexer: EntryIndexerWeights | None


@dataclass(frozen=True, slots=True)
class StreamsWeights:
    """Weights of one mixture of residual streams, all float32: of half a layer, or of the head."""

    projection_CJ: Tensor
    base_C: Tensor
    scale: Tensor  # a factor for each of the projection's parts


def allocate_compressed(spec: RecurrentSpec, size: int, new: TensorAllocator) -> CompressedAttentionWeights:
    """Return the uninitialized weights of a layer in a model of width `size`."""
    assert isinstance(spec, CompressedAttentionSpec)
    pool, group = spec.pool, spec.num_heads * spec.head_dim // spec.output_groups
    indexer: EntryIndexerWeights | None = None
    if pool is not None and pool.indexer is not None:
        indexer = EntryIndexerWeights(
            pool=_pool(pool, pool.indexer.head_dim, size, new),
            query_up_CR=new.matrix(pool.indexer.num_heads * pool.indexer.head_dim, spec.query_rank),
            head_weight_HD=new.vector(pool.indexer.num_heads, size),
        )
    return CompressedAttentionWeights(
        input_CD=new.product(spec.query_rank + spec.head_dim, size),
        query_norm_R=new.vector(spec.query_rank),
        query_up_CR=new.product(spec.num_heads * spec.head_dim, spec.query_rank),
        row_norm_d=new.vector(spec.head_dim),
        sinks_H=new.vector(spec.num_heads),
        group_GRI=new.matrix(spec.output_groups, spec.output_rank, group),
        output_DC=new.product(size, spec.output_width),
        pool=None if pool is None else _pool(pool, spec.head_dim, size, new),
        indexer=indexer,
    )


def allocate_streams(spec: StreamsSpec, size: int, new: TensorAllocator, *, head: bool = False) -> StreamsWeights:
    """Return the uninitialized weights of a mixture of streams of width `size`; that of the `head` is only read."""
    columns = spec.num_streams if head else spec.mixture_width
    projection = new.vector(columns, spec.num_streams * size)
    return StreamsWeights(projection, new.vector(columns), new.vector(1 if head else 3))


def _pool(pool: PoolSpec, width: int, size: int, new: TensorAllocator) -> PoolWeights:
    columns = pool.num_series * width
    return PoolWeights(new.matrix(2 * columns, size), new.vector(pool.rate, columns), new.vector(width))
