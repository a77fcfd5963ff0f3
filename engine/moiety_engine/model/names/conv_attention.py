"""Names of the tensors of compressed convolutional attention (ZAYA1). X heads, d head width, C channels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_engine.model.conv_attention_spec import CONV_TAPS, ConvAttentionSpec
from moiety_engine.model.names.tensor_mapping import TensorMapping, plain, whole

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moiety_engine.model.conv_attention_weights import ConvAttentionWeights
    from moiety_engine.model.names.tensor_mapping import Named
    from moiety_engine.model.recurrent_specs import RecurrentSpec

_INPUTS = ("q_proj", "k_proj", "v_proj_current", "v_proj_delayed")


def conv_attention_places(spec: RecurrentSpec, weights: ConvAttentionWeights, _present: set[str]) -> Iterator[Named]:
    """Yield the names, relative to the layer's, and mappings of the tensors."""
    assert isinstance(spec, ConvAttentionSpec)
    block, channels, width = "self_attn.qkv_proj.", spec.conv_channels, spec.head_dim
    keys = spec.num_kv_heads * width
    widths = [spec.query_width, keys, spec.delayed_width, spec.delayed_width]
    for name, view in zip(_INPUTS, torch.split(plain(weights.input_CD), widths), strict=True):
        yield f"{block}{name}.weight", whole(view)
    taps_2C, heads_Xdd = weights.channel_taps_2C, weights.head_taps_Xdd
    yield (
        f"{block}conv_qk_depthwise.weight",
        TensorMapping(taps_2C, (channels, 1, CONV_TAPS), lambda source: source.squeeze(1).T),
    )
    yield f"{block}conv_qk_depthwise.bias", whole(weights.channel_bias_C)
    yield (
        f"{block}conv_qk_grouped.weight",
        TensorMapping(
            heads_Xdd,
            (channels, width, CONV_TAPS),
            lambda source: source.view(-1, width, width, CONV_TAPS).transpose(2, 3).flatten(2),
        ),
    )
    yield f"{block}conv_qk_grouped.bias", whole(weights.head_bias_C)
    yield "self_attn.qk_norm.temp", whole(weights.key_scale_G)
    yield "self_attn.o_proj.weight", whole(plain(weights.output_DC))
