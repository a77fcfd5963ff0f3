"""Weights of recurrent layers; `weights` allocates them. Vectors and convolutions are float32.

C channels, D model width, M heads, W taps of a convolution with the oldest token's tap first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moiety_engine.model.compressed_specs import CompressedAttentionSpec
from moiety_engine.model.compressed_weights import CompressedAttentionWeights, allocate_compressed
from moiety_engine.model.conv_attention_spec import ConvAttentionSpec
from moiety_engine.model.conv_attention_weights import ConvAttentionWeights, allocate_conv_attention
from moiety_engine.model.recurrent_specs import (
    GatedDeltaSpec,
    KimiDeltaSpec,
    LightningSpec,
    Mamba2Spec,
    MambaSpec,
    ShortConvSpec,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from moiety_engine.model.recurrent_specs import RecurrentSpec
    from moiety_engine.model.tensor_allocator import TensorAllocator
    from moiety_kernels.quantization import Weight


@dataclass(frozen=True, slots=True)
class GatedDeltaWeights:
    input_CD: Weight  # rows: queries, keys, values of all heads, then the gates of the outputs
    strength_decay_GD: Tensor  # rows: the strength of each head's update, then its decay
    conv_WC: Tensor
    decay_M: Tensor  # logarithm of each head's rate
    decay_bias_M: Tensor
    norm_V: Tensor
    output_DC: Weight


@dataclass(frozen=True, slots=True)
class Mamba2Weights:
    input_CD: Weight  # rows: see Mamba2Spec.sections
    input_bias_C: Tensor | None
    conv_WC: Tensor
    conv_bias_C: Tensor | None
    decay_M: Tensor  # logarithm of each head's rate
    step_bias_M: Tensor
    skip_M: Tensor  # factor of a head's input in its output
    norm_C: Tensor | None
    output_DC: Weight
    output_bias_D: Tensor | None


@dataclass(frozen=True, slots=True)
class MambaWeights:
    input_CD: Weight  # rows: inputs of the convolution, then gates of the outputs
    input_bias_C: Tensor | None
    conv_WC: Tensor
    conv_bias_C: Tensor | None
    selection_EC: Tensor  # rows: the latent row of time steps, then what is written and what is read
    step_norm_R: Tensor
    write_norm_N: Tensor
    read_norm_N: Tensor
    step_CR: Tensor
    step_bias_C: Tensor
    decay_NC: Tensor  # logarithm of each rate
    skip_C: Tensor  # factor of a channel's input in its output
    output_DC: Weight
    output_bias_D: Tensor | None


@dataclass(frozen=True, slots=True)
class KimiDeltaWeights:
    input_CD: Weight  # rows: queries, keys and values of all heads
    low_rank_GD: Tensor  # rows: see KimiDeltaSpec.input_sections
    decay_up_CV: Tensor  # input: as many values as a head has, or the model's width
    gate_up_CV: Tensor
    conv_WC: Tensor
    decay_M: Tensor  # logarithm of each head's rate
    decay_bias_C: Tensor
    norm_V: Tensor
    output_DC: Weight


@dataclass(frozen=True, slots=True)
class LightningWeights:
    input_CD: Weight  # rows: queries, keys and values of all heads
    gate_CD: Weight  # of the outputs
    norm_C: Tensor
    output_DC: Weight


@dataclass(frozen=True, slots=True)
class ShortConvWeights:
    input_CD: Weight  # rows: gates of the convolution's input, gates of its output, and its input
    input_bias_C: Tensor | None
    conv_WC: Tensor
    conv_bias_C: Tensor | None
    output_DC: Weight
    output_bias_D: Tensor | None


RecurrentWeights = (
    GatedDeltaWeights
    | Mamba2Weights
    | MambaWeights
    | KimiDeltaWeights
    | LightningWeights
    | ShortConvWeights
    | CompressedAttentionWeights
    | ConvAttentionWeights
)
RECURRENT_PRODUCTS: dict[type, tuple[str, ...]] = {
    GatedDeltaWeights: ("input_CD", "output_DC"),
    Mamba2Weights: ("input_CD", "output_DC"),
    MambaWeights: ("input_CD", "output_DC"),
    KimiDeltaWeights: ("input_CD", "output_DC"),
    LightningWeights: ("input_CD", "gate_CD", "output_DC"),
    CompressedAttentionWeights: ("input_CD", "query_up_CR", "output_DC"),
    ConvAttentionWeights: ("input_CD", "output_DC"),
    ShortConvWeights: ("input_CD", "output_DC"),
}


def allocate_recurrent(spec: RecurrentSpec, size: int, new: TensorAllocator) -> RecurrentWeights:
    """Return the uninitialized weights of a recurrent layer in a model of width `size`."""
    return _ALLOCATORS[type(spec)](spec, size, new)


def _gated_delta(spec: RecurrentSpec, size: int, new: TensorAllocator) -> GatedDeltaWeights:
    assert isinstance(spec, GatedDeltaSpec)
    return GatedDeltaWeights(
        input_CD=new.product(spec.conv_channels + spec.output_width, size),
        strength_decay_GD=new.matrix(2 * spec.num_value_heads, size),
        conv_WC=new.vector(spec.conv_taps, spec.conv_channels),
        decay_M=new.vector(spec.num_value_heads),
        decay_bias_M=new.vector(spec.num_value_heads),
        norm_V=new.vector(spec.value_width),
        output_DC=new.product(size, spec.output_width),
    )


def _mamba2(spec: RecurrentSpec, size: int, new: TensorAllocator) -> Mamba2Weights:
    assert isinstance(spec, Mamba2Spec)
    inputs = sum(spec.sections)
    return Mamba2Weights(
        input_CD=new.product(inputs, size),
        input_bias_C=new.vector(inputs) if spec.bias else None,
        conv_WC=new.vector(spec.conv_taps, spec.conv_channels),
        conv_bias_C=new.vector(spec.conv_channels) if spec.conv_bias else None,
        decay_M=new.vector(spec.num_heads),
        step_bias_M=new.vector(spec.num_heads),
        skip_M=new.vector(spec.num_heads),
        norm_C=None if spec.norm == "none" else new.vector(spec.output_width),
        output_DC=new.product(size, spec.output_width),
        output_bias_D=new.vector(size) if spec.bias else None,
    )


def _mamba(spec: RecurrentSpec, size: int, new: TensorAllocator) -> MambaWeights:
    assert isinstance(spec, MambaSpec)
    channels, rows, rank = spec.num_channels, spec.state_width, spec.time_rank
    return MambaWeights(
        input_CD=new.product(2 * channels, size),
        input_bias_C=new.vector(2 * channels) if spec.bias else None,
        conv_WC=new.vector(spec.conv_taps, channels),
        conv_bias_C=new.vector(channels) if spec.conv_bias else None,
        selection_EC=new.matrix(rank + 2 * rows, channels),
        step_norm_R=new.vector(rank),
        write_norm_N=new.vector(rows),
        read_norm_N=new.vector(rows),
        step_CR=new.matrix(channels, rank),
        step_bias_C=new.vector(channels),
        decay_NC=new.vector(rows, channels),
        skip_C=new.vector(channels),
        output_DC=new.product(size, channels),
        output_bias_D=new.vector(size) if spec.bias else None,
    )


def _kimi_delta(spec: RecurrentSpec, size: int, new: TensorAllocator) -> KimiDeltaWeights:
    assert isinstance(spec, KimiDeltaSpec)
    return KimiDeltaWeights(
        input_CD=new.product(spec.conv_channels, size),
        low_rank_GD=new.matrix(sum(spec.input_sections), size),
        decay_up_CV=new.matrix(spec.output_width, spec.head_width if spec.low_rank else size),
        gate_up_CV=new.matrix(spec.output_width, spec.head_width if spec.low_rank else size),
        conv_WC=new.vector(spec.conv_taps, spec.conv_channels),
        decay_M=new.vector(spec.num_heads),
        decay_bias_C=new.vector(spec.output_width),
        norm_V=new.vector(spec.head_width),
        output_DC=new.product(size, spec.output_width),
    )


def _lightning(spec: RecurrentSpec, size: int, new: TensorAllocator) -> LightningWeights:
    assert isinstance(spec, LightningSpec)
    return LightningWeights(
        input_CD=new.product(3 * spec.output_width, size),
        gate_CD=new.product(spec.output_width, size),
        norm_C=new.vector(spec.output_width),
        output_DC=new.product(size, spec.output_width),
    )


def _short_conv(spec: RecurrentSpec, size: int, new: TensorAllocator) -> ShortConvWeights:
    assert isinstance(spec, ShortConvSpec)
    channels = spec.num_channels
    return ShortConvWeights(
        input_CD=new.product(3 * channels, size),
        input_bias_C=new.vector(3 * channels) if spec.bias else None,
        conv_WC=new.vector(spec.conv_taps, channels),
        conv_bias_C=new.vector(channels) if spec.bias else None,
        output_DC=new.product(size, channels),
        output_bias_D=new.vector(size) if spec.bias else None,
    )


_ALLOCATORS: dict[type, Callable[[RecurrentSpec, int, TensorAllocator], RecurrentWeights]] = {
    GatedDeltaSpec: _gated_delta,
    Mamba2Spec: _mamba2,
    MambaSpec: _mamba,
    KimiDeltaSpec: _kimi_delta,
    LightningSpec: _lightning,
    CompressedAttentionSpec: allocate_compressed,
    ConvAttentionSpec: allocate_conv_attention,
    ShortConvSpec: _short_conv,
}
