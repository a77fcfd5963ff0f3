"""Names of the tensors of compressed attention and of hyper-connections (DeepSeek-V4).

They are those of the release; transformers saves the norm of a position's row under another name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_engine.model.names.tensor_mapping import TensorMapping, plain, whole

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from moiety_engine.model.compressed_specs import CompressedAttentionSpec
    from moiety_engine.model.compressed_weights import CompressedAttentionWeights, PoolWeights, StreamsWeights
    from moiety_engine.model.names.tensor_mapping import Named

_ROW_NORMS = ("attn.kv_norm.weight", "attn.norm.weight")


def compressed_places(
    spec: CompressedAttentionSpec, weights: CompressedAttentionWeights, present: set[str]
) -> Iterator[Named]:
    """Yield the names, relative to the layer's, and mappings of the layer's tensors.

    On disk the rotated entries are the last ones of a head, with those of a pair next to each other; in weights they
    are the first ones, all first entries of pairs before all second ones.
    """
    width, rotated = spec.head_dim, spec.rope.rotary_width
    latent_RD, row_dD = torch.split(plain(weights.input_CD), [spec.query_rank, width])
    yield "attn.wq_a.weight", whole(latent_RD)
    yield "attn.wkv.weight", _turned(row_dD, width, rotated)
    yield "attn.q_norm.weight", whole(weights.query_norm_R)
    yield "attn.wq_b.weight", _turned(plain(weights.query_up_CR), width, rotated)
    row_norm = next((name for name in _ROW_NORMS if name in present), _ROW_NORMS[0])
    yield row_norm, _turned(weights.row_norm_d, width, rotated)
    yield "attn.attn_sink", whole(weights.sinks_H)
    yield "attn.wo_a.weight", _by_group(weights.group_GRI, width, rotated)
    yield "attn.wo_b.weight", whole(plain(weights.output_DC))
    if weights.pool is not None:
        yield from _pool("attn.compressor.", weights.pool, width, rotated)
    if weights.indexer is not None and spec.pool is not None and spec.pool.indexer is not None:
        width = spec.pool.indexer.head_dim
        yield from _pool("attn.indexer.compressor.", weights.indexer.pool, width, rotated)
        yield "attn.indexer.wq_b.weight", _turned(weights.indexer.query_up_CR, width, rotated)
        yield "attn.indexer.weights_proj.weight", whole(weights.indexer.head_weight_HD)


def stream_places(prefix: str, weights: StreamsWeights) -> Iterator[Named]:
    """Yield the names and mappings of a mixture of residual streams."""
    yield f"{prefix}fn", whole(weights.projection_CJ)
    yield f"{prefix}base", whole(weights.base_C)
    yield f"{prefix}scale", whole(weights.scale)


def _pool(prefix: str, weights: PoolWeights, width: int, rotated: int) -> Iterator[Named]:
    values_CD, gates_CD = weights.rows_CD.chunk(2)
    yield f"{prefix}wkv.weight", _turned(values_CD, width, rotated)
    yield f"{prefix}wgate.weight", _turned(gates_CD, width, rotated)
    yield f"{prefix}ape", _turned(weights.bias_mC, width, rotated, dim=1)
    yield f"{prefix}norm.weight", _turned(weights.norm_C, width, rotated)


def _order(size: int, width: int, rotated: int) -> Tensor:
    """Return the place on disk of each of `size` entries, which are heads of this width."""
    still = width - rotated
    one = torch.cat((torch.arange(still, width, 2), torch.arange(still + 1, width, 2), torch.arange(still)))
    return (torch.arange(0, size, width)[:, None] + one).flatten()


def _turned(view: Tensor, width: int, rotated: int, dim: int = 0) -> TensorMapping:
    order = _order(view.shape[dim], width, rotated)
    return TensorMapping(view, tuple(view.shape), lambda source: source.index_select(dim, order))


def _by_group(view_GRI: Tensor, width: int, rotated: int) -> TensorMapping:
    groups, rank, inputs = view_GRI.shape
    order = _order(inputs, width, rotated)
    shape = groups * rank, inputs
    return TensorMapping(view_GRI, shape, lambda source: source[:, order].view(groups, rank, inputs))
