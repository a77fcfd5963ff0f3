"""Names of the tensors of gated short convolutions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moiety_engine.model.names.tensor_mapping import TensorMapping, joined, plain, whole

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moiety_engine.model.names.tensor_mapping import Named
    from moiety_engine.model.recurrent_specs import ShortConvSpec
    from moiety_engine.model.recurrent_weights import ShortConvWeights


def short_conv_places(spec: ShortConvSpec, weights: ShortConvWeights, _present: set[str]) -> Iterator[Named]:
    """Yield the names, relative to the layer's, and mappings of the layer's tensors."""
    sections = (spec.num_channels,) * 3
    yield "conv.in_proj.weight", joined(plain(weights.input_CD), sections)
    shape = (spec.num_channels, 1, spec.conv_taps)
    yield "conv.conv.weight", TensorMapping(weights.conv_WC, shape, lambda source: source[:, 0].T)
    yield "conv.out_proj.weight", whole(plain(weights.output_DC))
    if weights.input_bias_C is not None and weights.conv_bias_C is not None and weights.output_bias_D is not None:
        yield "conv.in_proj.bias", joined(weights.input_bias_C, sections)
        yield "conv.conv.bias", whole(weights.conv_bias_C)
        yield "conv.out_proj.bias", whole(weights.output_bias_D)
