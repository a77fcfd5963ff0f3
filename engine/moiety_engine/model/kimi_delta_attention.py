"""Kimi Delta Attention (2510.26692): the recurrent layers of Kimi Linear and Ling 3.

T tokens, D model width, M heads of width V for keys and values, C width of all heads, R runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from moiety_engine.model.recurrent_mixer import RecurrentMixer
from moiety_engine.model.recurrent_specs import KimiDeltaSpec
from moiety_engine.model.recurrent_weights import KimiDeltaWeights
from moiety_kernels.causal_conv import CausalConvWeights, causal_conv
from moiety_kernels.gated_delta import delta_gates, gated_delta_rule
from moiety_kernels.gated_norm import gated_norm
from moiety_kernels.recurrent.inputs import RecurrentHeads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from moiety_engine.model.arithmetic import Arithmetic
    from moiety_engine.model.batch import RecurrentRows, RecurrentStateCache


class KimiDeltaAttention(RecurrentMixer[KimiDeltaSpec, KimiDeltaWeights]):
    """Linear attention by the gated delta rule with a decay per key channel."""

    def __init__(self, spec: KimiDeltaSpec, weights: KimiDeltaWeights, arithmetic: Arithmetic) -> None:
        super().__init__(spec, weights, arithmetic)
        self._conv = CausalConvWeights(weights.conv_WC, silu=True)
        self._decay_C = weights.decay_M.repeat_interleave(spec.head_width)
        self._rate_C = self._decay_C.exp()

    def _mix(self, x_TD: Tensor, rows: RecurrentRows, cache: RecurrentStateCache) -> Tensor:
        spec, weights = self._spec, self._weights
        input_TC = self._linear(x_TD, weights.input_CD)
        low_TG = self._linear(x_TD, weights.low_rank_GD)
        decay_TV, gate_TV, strength_TM = torch.split(low_TG, list(spec.input_sections), dim=1)
        if not spec.low_rank:
            decay_TV = gate_TV = x_TD
        decay_TC = self._linear(decay_TV.contiguous(), weights.decay_up_CV)
        cache.record(rows, input_TC, decay_TC, strength_TM)
        out_TMV = self._advance(input_TC, decay_TC, strength_TM, rows, cache)
        gate_TMV = self._linear(gate_TV.contiguous(), weights.gate_up_CV).view(out_TMV.shape)
        normed_TMV = gated_norm(out_TMV, gate_TMV, weights.norm_V.unsqueeze(0), spec.norm_eps, "sigmoid")
        return self._linear(normed_TMV.flatten(1), weights.output_DC)

    def replay(self, inputs_TC: Sequence[Tensor], rows: RecurrentRows, cache: RecurrentStateCache) -> None:
        """Advance states by tokens whose inputs were recorded."""
        input_TC, decay_TC, strength_TM = inputs_TC
        self._advance(input_TC, decay_TC, strength_TM, rows, cache)

    def _advance(
        self, input_TC: Tensor, decay_TC: Tensor, strength_TM: Tensor, rows: RecurrentRows, cache: RecurrentStateCache
    ) -> Tensor:
        """Return out_TMV, the heads' outputs, and advance the states."""
        spec = self._spec
        (matrices, tails), runs = cache.parts, rows.runs
        mixed_TC = causal_conv(input_TC, self._conv, tails, runs)
        heads = RecurrentHeads(
            *(part_TC.view(-1, spec.num_heads, spec.head_width) for part_TC in mixed_TC.chunk(3, dim=1))
        )
        log_decay_TMV, strength_TM = self._gates(decay_TC, strength_TM)
        return gated_delta_rule(heads, log_decay_TMV, strength_TM, matrices, runs)

    def _gates(self, decay_TC: Tensor, strength_TM: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logarithm of each channel's decay and the strength of each head's update, float32.

        `delta_gates` takes as many strengths as decays, so the strengths are padded to the channels of all heads;
        of bounded decays and of strengths only its sigmoids are used.
        """
        spec, weights = self._spec, self._weights
        shape = -1, spec.num_heads, spec.head_width
        if spec.lowest_decay is not None:
            bounded_TC = (decay_TC + weights.decay_bias_C) * self._rate_C
            _, share_TC = delta_gates(torch.cat((bounded_TC, bounded_TC), dim=1), self._decay_C, weights.decay_bias_C)
            _, strength_TM = delta_gates(torch.cat((strength_TM, strength_TM), dim=1), weights.decay_M, weights.decay_M)
            return (spec.lowest_decay * share_TC).view(shape), strength_TM
        padded_TC = pad(strength_TM, (0, spec.output_width - spec.num_heads))
        gates_TG = torch.cat((padded_TC, decay_TC), dim=1)
        log_decay_TC, strength_TC = delta_gates(gates_TG, self._decay_C, weights.decay_bias_C)
        return log_decay_TC.view(shape), strength_TC[:, : spec.num_heads].contiguous()
