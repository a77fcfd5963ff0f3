"""Names of the tensors of gated DeltaNet layers.

Qwen3-Next has one input projection, with the rows of each key head's query, key, values and gates next to each other;
Qwen 3.5 has the queries, keys and values of all heads in one and the gates in others. D model width, H key heads, M
value heads, W taps of the convolution.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_engine.model.names.tensor_mapping import TensorMapping, plain, whole

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from moiety_engine.model.names.tensor_mapping import Named
    from moiety_engine.model.recurrent_specs import GatedDeltaSpec
    from moiety_engine.model.recurrent_weights import GatedDeltaWeights

_FUSED = "linear_attn.in_proj_qkvz.weight"


def gated_delta_places(spec: GatedDeltaSpec, weights: GatedDeltaWeights, present: set[str]) -> Iterator[Named]:
    """Yield the names, relative to the layer's, and mappings of the layer's tensors."""
    heads, values = spec.num_key_heads, spec.num_value_heads
    keys, outputs = heads * spec.key_width, spec.output_width
    input_CD, gates_GD = plain(weights.input_CD), weights.strength_decay_GD
    if _FUSED in present:
        shared = outputs // heads  # values of one key head
        yield _FUSED, _by_head(input_CD, heads, [spec.key_width, spec.key_width, shared, shared])
        yield "linear_attn.in_proj_ba.weight", _by_head(gates_GD, heads, [values // heads] * 2)
    else:
        mixed, gate = torch.split(input_CD, [spec.conv_channels, outputs])
        yield "linear_attn.in_proj_qkv.weight", _in_sections(mixed, (keys, keys, outputs))
        yield "linear_attn.in_proj_z.weight", whole(gate)
        for name, view in zip("ba", gates_GD.chunk(2), strict=True):
            yield f"linear_attn.in_proj_{name}.weight", whole(view)
    channels = (spec.conv_channels, 1, spec.conv_taps)
    yield (
        "linear_attn.conv1d.weight",
        TensorMapping(weights.conv_WC, channels, lambda source: source[:, 0].T, sections=(keys, keys, outputs)),
    )
    yield "linear_attn.A_log", whole(weights.decay_M)
    yield "linear_attn.dt_bias", whole(weights.decay_bias_M)
    yield "linear_attn.norm.weight", whole(weights.norm_V)
    yield "linear_attn.out_proj.weight", whole(plain(weights.output_DC))


def _in_sections(view: Tensor, sections: tuple[int, ...]) -> TensorMapping:
    return TensorMapping(view, tuple(view.shape), sections=sections)


def _by_head(view: Tensor, heads: int, parts: list[int]) -> TensorMapping:
    """Return the mapping of rows that stand by key head on disk, and in the weight by part."""

    def by_part(source: Tensor) -> Tensor:
        of_heads = source.view(heads, -1, *source.shape[1:])
        return torch.cat([part.flatten(0, 1) for part in torch.split(of_heads, parts, dim=1)])

    return TensorMapping(view, tuple(view.shape), by_part)
