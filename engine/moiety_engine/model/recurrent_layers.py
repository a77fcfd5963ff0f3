"""Construction of recurrent layers from their specs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moiety_engine.model import recurrent_specs
from moiety_engine.model.compressed_attention import CompressedAttention
from moiety_engine.model.compressed_specs import CompressedAttentionSpec
from moiety_engine.model.compressed_weights import CompressedAttentionWeights
from moiety_engine.model.conv_attention import ConvAttention
from moiety_engine.model.conv_attention_spec import ConvAttentionSpec
from moiety_engine.model.conv_attention_weights import ConvAttentionWeights
from moiety_engine.model.gated_delta_net import GatedDeltaNet
from moiety_engine.model.kimi_delta_attention import KimiDeltaAttention
from moiety_engine.model.lightning_attention import LightningAttention
from moiety_engine.model.mamba import Mamba
from moiety_engine.model.mamba2 import Mamba2
from moiety_engine.model.recurrent_mixer import RecurrentMixer
from moiety_engine.model.recurrent_weights import LightningWeights, Mamba2Weights, MambaWeights
from moiety_engine.model.short_convolution import ShortConvolution

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moiety_engine.distribution.collectives import RankCollectives
    from moiety_engine.model.arithmetic import Arithmetic
    from moiety_engine.model.recurrent_specs import RecurrentSpec
    from moiety_engine.model.recurrent_weights import RecurrentWeights
    from moiety_engine.model.rope_spec import RopeSpec
    from moiety_engine.model.rotary import RotaryTable

RecurrentLayer = RecurrentMixer[Any, Any] | CompressedAttention | ConvAttention
_LAYERS: dict[type, Any] = {
    recurrent_specs.GatedDeltaSpec: GatedDeltaNet,
    recurrent_specs.KimiDeltaSpec: KimiDeltaAttention,
    recurrent_specs.ShortConvSpec: ShortConvolution,
}


def recurrent_layer(
    spec: RecurrentSpec,
    weights: RecurrentWeights,
    arithmetic: Arithmetic,
    rotaries: Mapping[RopeSpec, RotaryTable],
    *,
    group: RankCollectives,
) -> RecurrentLayer:
    """Return the layer that a spec of a recurrent layer describes. `group`: the ranks that share its heads."""
    if isinstance(spec, CompressedAttentionSpec):
        assert isinstance(weights, CompressedAttentionWeights)
        return CompressedAttention(spec, weights, rotaries[spec.rope], arithmetic)
    if isinstance(spec, ConvAttentionSpec):
        assert isinstance(weights, ConvAttentionWeights)
        return ConvAttention(spec, weights, rotaries[spec.rope], arithmetic, group=group)
    if isinstance(spec, recurrent_specs.LightningSpec):
        assert isinstance(weights, LightningWeights)
        return LightningAttention(spec, weights, arithmetic, group=group)
    if isinstance(spec, recurrent_specs.MambaSpec):
        assert isinstance(weights, MambaWeights)
        return Mamba(spec, weights, arithmetic, group=group)
    if isinstance(spec, recurrent_specs.Mamba2Spec):
        assert isinstance(weights, Mamba2Weights)
        return Mamba2(spec, weights, arithmetic, group=group)
    layer: RecurrentLayer = _LAYERS[type(spec)](spec, weights, arithmetic)
    return layer
