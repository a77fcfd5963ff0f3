"""Gated short convolution: the recurrent layers of LFM2. T tokens, D model width, C channels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moiety_engine.model.recurrent_mixer import RecurrentMixer
from moiety_engine.model.recurrent_specs import ShortConvSpec
from moiety_engine.model.recurrent_weights import ShortConvWeights
from moiety_kernels.causal_conv import CausalConvWeights, causal_conv

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from moiety_engine.model.arithmetic import Arithmetic
    from moiety_engine.model.batch import RecurrentRows, RecurrentStateCache


class ShortConvolution(RecurrentMixer[ShortConvSpec, ShortConvWeights]):
    """Convolution over the last tokens, whose input and output are multiplied by gates of the same token."""

    def __init__(self, spec: ShortConvSpec, weights: ShortConvWeights, arithmetic: Arithmetic) -> None:
        super().__init__(spec, weights, arithmetic)
        self._conv = CausalConvWeights(weights.conv_WC, weights.conv_bias_C, silu=False)

    def _mix(self, x_TD: Tensor, rows: RecurrentRows, cache: RecurrentStateCache) -> Tensor:
        weights = self._weights
        input_gate_TC, output_gate_TC, value_TC = self._linear(x_TD, weights.input_CD, weights.input_bias_C).chunk(3, 1)
        gated_TC = input_gate_TC * value_TC
        cache.record(rows, gated_TC)
        mixed_TC = output_gate_TC * self._advance(gated_TC, rows, cache)
        return self._linear(mixed_TC, weights.output_DC, weights.output_bias_D)

    def replay(self, inputs_TC: Sequence[Tensor], rows: RecurrentRows, cache: RecurrentStateCache) -> None:
        """Advance states by tokens whose inputs were recorded."""
        self._advance(inputs_TC[0], rows, cache)

    def _advance(self, gated_TC: Tensor, rows: RecurrentRows, cache: RecurrentStateCache) -> Tensor:
        """Return the convolution's output, and advance the states, which are its last inputs."""
        (tails,) = cache.parts
        return causal_conv(gated_TC, self._conv, tails, rows.runs)
