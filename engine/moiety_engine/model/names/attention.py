"""The names of an attention's tensors. C the widths of all heads' queries, keys and values, d head width."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_engine.model.names.place import Place, reshaped, whole

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from moiety_engine.model.names.place import Named
    from moiety_engine.model.spec import AttentionSpec
    from moiety_engine.model.weights import AttentionWeights


def attention_places(spec: AttentionSpec, weights: AttentionWeights) -> Iterator[Named]:
    """Names relative to the layer's, and where the tensors go."""
    widths = [spec.q_width, spec.kv_width, spec.kv_width]
    for fused_C, kind in ((weights.qkv_CD, "weight"), (weights.qkv_bias_C, "bias")):
        if fused_C is not None:
            for name, view in zip("qkv", torch.split(fused_C, widths), strict=True):
                turned = spec.rope.interleaved and name != "v"
                yield f"self_attn.{name}_proj.{kind}", _from_neighbours(view, spec) if turned else whole(view)
    yield "self_attn.o_proj.weight", whole(weights.output_DC)
    if weights.output_bias_D is not None:
        yield "self_attn.o_proj.bias", whole(weights.output_bias_D)
    if weights.q_norm is not None and weights.k_norm is not None:
        yield "self_attn.q_norm.weight", whole(weights.q_norm)
        yield "self_attn.k_norm.weight", whole(weights.k_norm)


def _from_neighbours(rows_C: Tensor, spec: AttentionSpec) -> Place:
    """On disk the two rows of a rotated pair are neighbours; here each head has all first ones, then all second."""
    split = rows_C.view(-1, 2, spec.head_dim // 2, *rows_C.shape[1:])
    return reshaped(split.transpose(1, 2), tuple(rows_C.shape))
