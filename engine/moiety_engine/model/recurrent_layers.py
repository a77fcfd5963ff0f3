"""Construction of recurrent layers from their specs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moiety_engine.model.gated_delta_net import GatedDeltaNet
from moiety_engine.model.kimi_delta_attention import KimiDeltaAttention
from moiety_engine.model.lightning_attention import LightningAttention
from moiety_engine.model.mamba2 import Mamba2
from moiety_engine.model.recurrent_mixer import RecurrentMixer
from moiety_engine.model.recurrent_specs import GatedDeltaSpec, KimiDeltaSpec, LightningSpec, Mamba2Spec

if TYPE_CHECKING:
    from moiety_engine.model.arithmetic import Arithmetic
    from moiety_engine.model.recurrent_specs import RecurrentSpec
    from moiety_engine.model.recurrent_weights import RecurrentWeights

_LAYERS: dict[type, Any] = {
    GatedDeltaSpec: GatedDeltaNet,
    Mamba2Spec: Mamba2,
    KimiDeltaSpec: KimiDeltaAttention,
    LightningSpec: LightningAttention,
}


def recurrent_layer(spec: RecurrentSpec, weights: RecurrentWeights, arithmetic: Arithmetic) -> RecurrentMixer[Any, Any]:
    """Return the layer that a spec of a recurrent layer describes."""
    layer: RecurrentMixer[Any, Any] = _LAYERS[type(spec)](spec, weights, arithmetic)
    return layer
