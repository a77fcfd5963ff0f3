"""Weights of compressed convolutional attention, and their names in ZAYA1's checkpoints.

D model width, C all queries and keys, X query and key heads, d head width, G key-value heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moiety_engine.model.conv_attention_spec import CONV_TAPS, ConvAttentionSpec

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_engine.model.recurrent_specs import RecurrentSpec
    from moiety_engine.model.tensor_allocator import TensorAllocator
    from moiety_kernels.quantization import Weight


@dataclass(frozen=True, slots=True)
class ConvAttentionWeights:
    input_CD: Weight  # rows: queries, keys, values of the token, values that the next token gets
    channel_taps_2C: Tensor  # float32, as all vectors and biases
    channel_bias_C: Tensor
    head_taps_Xdd: Tensor  # inputs: the head of the token before, then that of the token
    head_bias_C: Tensor
    key_scale_G: Tensor
    output_DC: Weight


def allocate_conv_attention(spec: RecurrentSpec, size: int, new: TensorAllocator) -> ConvAttentionWeights:
    """Return the uninitialized weights of a layer in a model of width `size`."""
    assert isinstance(spec, ConvAttentionSpec)
    channels, width = spec.conv_channels, spec.head_dim
    return ConvAttentionWeights(
        input_CD=new.product(channels + 2 * spec.delayed_width, size),
        channel_taps_2C=new.vector(CONV_TAPS, channels),
        channel_bias_C=new.vector(channels),
        head_taps_Xdd=new.matrix(channels // width, width, CONV_TAPS * width),
        head_bias_C=new.vector(channels),
        key_scale_G=new.vector(spec.num_kv_heads),
        output_DC=new.product(size, spec.output_width),
    )
