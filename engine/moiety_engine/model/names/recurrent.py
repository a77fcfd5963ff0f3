"""Names of the tensors of recurrent layers, by kind of layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moiety_engine.model import recurrent_specs
from moiety_engine.model.compressed_specs import CompressedAttentionSpec
from moiety_engine.model.conv_attention_spec import ConvAttentionSpec
from moiety_engine.model.names.compressed import compressed_places
from moiety_engine.model.names.conv_attention import conv_attention_places
from moiety_engine.model.names.gated_delta import gated_delta_places
from moiety_engine.model.names.kimi_delta import kimi_delta_places
from moiety_engine.model.names.lightning import lightning_places
from moiety_engine.model.names.mamba import mamba_places
from moiety_engine.model.names.mamba2 import mamba2_places
from moiety_engine.model.names.short_conv import short_conv_places

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from moiety_engine.model.names.tensor_mapping import Named
    from moiety_engine.model.recurrent_specs import RecurrentSpec
    from moiety_engine.model.recurrent_weights import RecurrentWeights

_PLACES: dict[type, Callable[[Any, Any, set[str]], Iterator[Named]]] = {
    recurrent_specs.GatedDeltaSpec: gated_delta_places,
    recurrent_specs.Mamba2Spec: mamba2_places,
    recurrent_specs.MambaSpec: mamba_places,
    recurrent_specs.KimiDeltaSpec: kimi_delta_places,
    recurrent_specs.LightningSpec: lightning_places,
    CompressedAttentionSpec: compressed_places,
    ConvAttentionSpec: conv_attention_places,
    recurrent_specs.ShortConvSpec: short_conv_places,
}


def recurrent_places(spec: RecurrentSpec, weights: RecurrentWeights, present: set[str]) -> Iterator[Named]:
    """Return the names, relative to the layer's, and mappings of a recurrent layer's tensors."""
    return _PLACES[type(spec)](spec, weights, present)
