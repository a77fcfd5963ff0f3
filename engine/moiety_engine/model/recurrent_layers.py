"""Construction of recurrent layers from their specs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moiety_engine.model.gated_delta_net import GatedDeltaNet
from moiety_engine.model.mamba2 import Mamba2
from moiety_engine.model.recurrent_specs import Mamba2Spec
from moiety_engine.model.spec import GatedDeltaSpec

if TYPE_CHECKING:
    from moiety_engine.model.arithmetic import Arithmetic
    from moiety_engine.model.recurrent_weights import RecurrentWeights
    from moiety_engine.model.spec import RecurrentSpec

_LAYERS: dict[type, Any] = {GatedDeltaSpec: GatedDeltaNet, Mamba2Spec: Mamba2}


def recurrent_layer(spec: RecurrentSpec, weights: RecurrentWeights, arithmetic: Arithmetic) -> GatedDeltaNet | Mamba2:
    """Return the layer that a spec of a recurrent layer describes."""
    layer: GatedDeltaNet | Mamba2 = _LAYERS[type(spec)](spec, weights, arithmetic)
    return layer
