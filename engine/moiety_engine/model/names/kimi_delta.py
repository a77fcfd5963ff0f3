"""Names of the tensors of Kimi Delta Attention layers; queries, keys and values have a convolution each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_engine.model.names.tensor_mapping import TensorMapping, plain, reshaped, whole

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moiety_engine.model.names.tensor_mapping import Named
    from moiety_engine.model.recurrent_specs import KimiDeltaSpec
    from moiety_engine.model.recurrent_weights import KimiDeltaWeights


def kimi_delta_places(spec: KimiDeltaSpec, weights: KimiDeltaWeights, present: set[str]) -> Iterator[Named]:
    """Yield the names, relative to the layer's, and mappings of the layer's tensors."""
    of_ling = "attention.dense.weight" in present
    block, output, width = (
        "attention." if of_ling else "self_attn.",
        "dense" if of_ling else "o_proj",
        spec.output_width,
    )
    inputs, taps = plain(weights.input_CD).chunk(3), weights.conv_WC.chunk(3, dim=1)
    for name, rows_CD, taps_WC in zip("qkv", inputs, taps, strict=True):
        yield f"{block}{name}_proj.weight", whole(rows_CD)
        yield (
            f"{block}{name}_conv1d.weight",
            TensorMapping(taps_WC, (width, 1, spec.conv_taps), lambda source: source[:, 0].T),
        )
    low_ranks = torch.split(weights.low_rank_GD, list(spec.input_sections))
    for name, rows_GD in zip(("f_a", "g_a", "b"), low_ranks, strict=True):
        if len(rows_GD):
            yield f"{block}{name}_proj.weight", whole(rows_GD)
    decay, gate = ("f_b_proj", "g_b_proj") if spec.low_rank else ("f_proj", "g_proj")
    yield f"{block}{decay}.weight", whole(weights.decay_up_CV)
    yield f"{block}{gate}.weight", whole(weights.gate_up_CV)
    rates = whole(weights.decay_M) if of_ling else reshaped(weights.decay_M, (1, 1, spec.num_heads, 1))
    yield f"{block}A_log", rates
    yield f"{block}dt_bias", whole(weights.decay_bias_C)
    yield f"{block}o_norm.weight", whole(weights.norm_V)
    yield f"{block}{output}.weight", whole(plain(weights.output_DC))
