"""Names of the tensors of Mamba-2 layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moiety_engine.model.names.tensor_mapping import TensorMapping, joined, plain, whole

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moiety_engine.model.names.tensor_mapping import Named
    from moiety_engine.model.recurrent_specs import Mamba2Spec
    from moiety_engine.model.recurrent_weights import Mamba2Weights


def mamba2_places(spec: Mamba2Spec, weights: Mamba2Weights, _present: set[str]) -> Iterator[Named]:
    """Yield the names, relative to the layer's, and mappings of the layer's tensors."""
    sections, convolved = spec.sections, spec.sections[1:4]
    yield "mamba.in_proj.weight", joined(plain(weights.input_CD), sections)
    if weights.input_bias_C is not None:
        yield "mamba.in_proj.bias", joined(weights.input_bias_C, sections)
    channels = (spec.conv_channels, 1, spec.conv_taps)
    yield (
        "mamba.conv1d.weight",
        TensorMapping(weights.conv_WC, channels, lambda source: source[:, 0].T, sections=convolved),
    )
    if weights.conv_bias_C is not None:
        yield "mamba.conv1d.bias", joined(weights.conv_bias_C, convolved)
    yield "mamba.A_log", whole(weights.decay_M)
    yield "mamba.dt_bias", whole(weights.step_bias_M)
    yield "mamba.D", whole(weights.skip_M)
    if weights.norm_C is not None:
        yield "mamba.norm.weight", whole(weights.norm_C)
    yield "mamba.out_proj.weight", whole(plain(weights.output_DC))
    if weights.output_bias_D is not None:
        yield "mamba.out_proj.bias", whole(weights.output_bias_D)
