"""Names of the tensors of Mamba layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moiety_engine.model.names.tensor_mapping import TensorMapping, joined, plain, whole

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moiety_engine.model.names.tensor_mapping import Named
    from moiety_engine.model.recurrent_specs import MambaSpec
    from moiety_engine.model.recurrent_weights import MambaWeights


def mamba_places(spec: MambaSpec, weights: MambaWeights, _present: set[str]) -> Iterator[Named]:
    """Yield the names, relative to the layer's, and mappings of the layer's tensors."""
    channels = spec.num_channels
    halves = channels, channels
    yield "mamba.in_proj.weight", joined(plain(weights.input_CD), halves)
    if weights.input_bias_C is not None and weights.output_bias_D is not None:
        yield "mamba.in_proj.bias", joined(weights.input_bias_C, halves)
        yield "mamba.out_proj.bias", whole(weights.output_bias_D)
    taps = (channels, 1, spec.conv_taps)
    yield "mamba.conv1d.weight", TensorMapping(weights.conv_WC, taps, lambda source: source[:, 0].T)
    if weights.conv_bias_C is not None:
        yield "mamba.conv1d.bias", whole(weights.conv_bias_C)
    yield "mamba.x_proj.weight", whole(weights.selection_EC)
    yield "mamba.dt_proj.weight", whole(weights.step_CR)
    yield "mamba.dt_proj.bias", whole(weights.step_bias_C)
    yield "mamba.A_log", TensorMapping(weights.decay_NC, (channels, spec.state_width), lambda source: source.T)
    yield "mamba.D", whole(weights.skip_C)
    norms = {"dt": weights.step_norm_R, "b": weights.write_norm_N, "c": weights.read_norm_N}
    for name, norm in norms.items():
        yield f"mamba.{name}_layernorm.weight", whole(norm)
    yield "mamba.out_proj.weight", whole(plain(weights.output_DC))
