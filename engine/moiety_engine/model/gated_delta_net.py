"""Gated DeltaNet (2412.06464): the recurrent layers of Qwen3-Next and Qwen 3.5.

T tokens, D model width, C channels of the convolution, H key heads of width K, M value heads of width V, R runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_engine.model.recurrent_mixer import RecurrentMixer
from moiety_engine.model.recurrent_specs import GatedDeltaSpec
from moiety_engine.model.recurrent_weights import GatedDeltaWeights
from moiety_kernels.causal_conv import CausalConvWeights, causal_conv
from moiety_kernels.gated_delta import delta_gates, gated_delta_rule
from moiety_kernels.gated_norm import gated_norm
from moiety_kernels.recurrent.inputs import RecurrentHeads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from moiety_engine.model.arithmetic import Arithmetic
    from moiety_engine.model.batch import RecurrentRows, RecurrentStateCache


class GatedDeltaNet(RecurrentMixer[GatedDeltaSpec, GatedDeltaWeights]):
    """Linear attention by the gated delta rule, with a state of fixed size for each sequence."""

    def __init__(self, spec: GatedDeltaSpec, weights: GatedDeltaWeights, arithmetic: Arithmetic) -> None:
        super().__init__(spec, weights, arithmetic)
        self._conv = CausalConvWeights(weights.conv_WC, silu=True)

    def _mix(self, x_TD: Tensor, rows: RecurrentRows, cache: RecurrentStateCache) -> Tensor:
        spec, weights = self._spec, self._weights
        input_TC = self._linear(x_TD, weights.input_CD)
        conv_TC = input_TC[:, : spec.conv_channels]
        gates_TG = self._linear(x_TD, weights.strength_decay_GD)
        cache.record(rows, conv_TC, gates_TG)
        out_TMV = self._advance(conv_TC, gates_TG, rows, cache)
        gate_TMV = input_TC[:, spec.conv_channels :].view(out_TMV.shape)
        normed_TMV = gated_norm(out_TMV, gate_TMV, weights.norm_V.unsqueeze(0), spec.norm_eps)
        return self._linear(normed_TMV.flatten(1), weights.output_DC)

    def replay(self, inputs_TC: Sequence[Tensor], rows: RecurrentRows, cache: RecurrentStateCache) -> None:
        """Advance states by tokens whose inputs were recorded."""
        conv_TC, gates_TG = inputs_TC
        self._advance(conv_TC, gates_TG, rows, cache)

    def _advance(self, conv_TC: Tensor, gates_TG: Tensor, rows: RecurrentRows, cache: RecurrentStateCache) -> Tensor:
        """Return out_TMV, the heads' outputs, and advance the states."""
        spec, weights = self._spec, self._weights
        (matrices, tails), runs = cache.parts, rows.runs
        mixed_TC = causal_conv(conv_TC, self._conv, tails, runs)
        log_decay_TM, strength_TM = delta_gates(gates_TG, weights.decay_M, weights.decay_bias_M)
        keys = spec.num_key_heads * spec.key_width
        q_TC, k_TC, v_TC = torch.split(mixed_TC, [keys, keys, spec.output_width], dim=1)
        heads = RecurrentHeads(
            q_TC.view(-1, spec.num_key_heads, spec.key_width),
            k_TC.view(-1, spec.num_key_heads, spec.key_width),
            v_TC.view(-1, spec.num_value_heads, spec.value_width),
        )
        return gated_delta_rule(heads, log_decay_TM.unsqueeze(2), strength_TM, matrices, runs)
