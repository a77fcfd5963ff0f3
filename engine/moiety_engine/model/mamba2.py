"""Mamba-2 (2405.21060): the recurrent layers of Granite 4.0 and of other hybrid families.

T tokens, D model width, C channels of the convolution, M heads of width V, G groups of heads, R runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_engine.model.recurrent_mixer import RecurrentMixer
from moiety_engine.model.recurrent_specs import Mamba2Spec
from moiety_engine.model.recurrent_weights import Mamba2Weights
from moiety_engine.model.residuals import times
from moiety_kernels.causal_conv import CausalConvWeights, causal_conv
from moiety_kernels.gated_delta import delta_gates
from moiety_kernels.gated_norm import Gate, gated_norm
from moiety_kernels.linear_attention import linear_attention
from moiety_kernels.output_gate import output_gate
from moiety_kernels.recurrent.inputs import RecurrentHeads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from moiety_engine.distribution.collectives import RankCollectives
    from moiety_engine.model.arithmetic import Arithmetic
    from moiety_engine.model.batch import RecurrentRows, RecurrentStateCache


class Mamba2(RecurrentMixer[Mamba2Spec, Mamba2Weights]):
    """State space model with one decay per head and a state of fixed size for each sequence."""

    def __init__(
        self, spec: Mamba2Spec, weights: Mamba2Weights, arithmetic: Arithmetic, *, group: RankCollectives
    ) -> None:
        """Create the layer. `group`: the ranks that share its heads."""
        super().__init__(spec, weights, arithmetic)
        self._group = group
        self._conv = CausalConvWeights(weights.conv_WC, weights.conv_bias_C, silu=True)
        self._rate_M, self._unit_rate_M = weights.decay_M.exp(), torch.zeros_like(weights.decay_M)
        self._factor_C: Tensor | None = None
        if any(factor != 1.0 for factor in spec.section_factors):
            factors, widths = torch.tensor(spec.section_factors), torch.tensor(spec.sections)
            self._factor_C = torch.repeat_interleave(factors, widths).to(weights.conv_WC.device)

    def _mix(self, x_TD: Tensor, rows: RecurrentRows, cache: RecurrentStateCache) -> Tensor:
        spec, weights = self._spec, self._weights
        input_TC = self._linear(x_TD, weights.input_CD, weights.input_bias_C)
        if self._factor_C is not None:
            input_TC = (input_TC * self._factor_C).to(input_TC.dtype)
        gate_TC, conv_TC, step_TM = torch.split(
            input_TC, [spec.output_width, spec.conv_channels, spec.num_heads], dim=1
        )
        cache.record(rows, conv_TC, step_TM)
        out_TMV = self._advance(conv_TC, step_TM, rows, cache)
        out_TC = self._gated(out_TMV.flatten(1), gate_TC)
        return times(spec.output_factor, self._linear(out_TC, weights.output_DC, weights.output_bias_D))

    def _gated(self, out_TC: Tensor, gate_TC: Tensor) -> Tensor:
        """Return the output of all heads times the SiLU of its gate, with each group normalized before or after."""
        spec, weight_C = self._spec, self._weights.norm_C
        if weight_C is None:
            return out_TC * _silu(gate_TC)
        if spec.is_one_group and self._group.size > 1:
            return self._normed_over_ranks(out_TC, _silu(gate_TC), weight_C)
        by_group = -1, spec.num_groups, spec.output_width // spec.num_groups
        kind: Gate = "silu_first" if spec.norm == "gate_first" else "silu"
        return gated_norm(
            out_TC.view(by_group), gate_TC.view(by_group), weight_C.view(by_group[1:]), spec.norm_eps, kind
        ).flatten(1)

    def _normed_over_ranks(self, out_TC: Tensor, silu_TC: Tensor, weight_C: Tensor) -> Tensor:
        """Return the gated output, normalized by the squares of all ranks' heads; all ranks call it together.

        Sums are float64, so that their order, which may depend on the number of rows, does not show in float32.
        """
        gates_first = self._spec.norm == "gate_first"
        x_TC = out_TC.float() * silu_TC if gates_first else out_TC.float()
        squares_T1 = self._group.sum(x_TC.double().square().sum(dim=1, keepdim=True))
        mean_T1 = squares_T1 / (self._spec.output_width * self._group.size)
        normed_TC = x_TC * torch.rsqrt(mean_T1 + self._spec.norm_eps).float() * weight_C.float()
        return (normed_TC if gates_first else normed_TC * silu_TC).to(out_TC.dtype)

    def replay(self, inputs_TC: Sequence[Tensor], rows: RecurrentRows, cache: RecurrentStateCache) -> None:
        """Advance states by tokens whose inputs were recorded."""
        conv_TC, step_TM = inputs_TC
        self._advance(conv_TC, step_TM, rows, cache)

    def _advance(self, conv_TC: Tensor, step_TM: Tensor, rows: RecurrentRows, cache: RecurrentStateCache) -> Tensor:
        """Return out_TMV, the heads' outputs before the gate, and advance the states."""
        spec = self._spec
        (matrices, tails), runs = cache.parts, rows.runs
        mixed_TC = causal_conv(conv_TC, self._conv, tails, runs)
        inputs_TC, write_TC, read_TC = torch.split(mixed_TC, list(spec.sections[1:4]), dim=1)
        inputs_TMV = inputs_TC.view(-1, spec.num_heads, spec.head_width)
        step_TM, log_decay_TM = self._time_steps(step_TM)
        heads = RecurrentHeads(
            read_TC.view(-1, spec.num_groups, spec.state_width),
            write_TC.view(-1, spec.num_groups, spec.state_width),
            (inputs_TMV * step_TM.unsqueeze(2)).to(inputs_TMV.dtype),
        )
        out_TMV = linear_attention(heads, log_decay_TM, matrices, runs)
        return (out_TMV + inputs_TMV * self._weights.skip_M.unsqueeze(1)).to(inputs_TMV.dtype)

    def _time_steps(self, step_TM: Tensor) -> tuple[Tensor, Tensor]:
        """Return the time steps Δ = softplus(step + bias) and the logarithms of the decays, -Δ · e^decay, float32.

        With a rate of e^0 the gates of the delta rule are -Δ; they are computed number by number, so that their bits
        do not depend on the batch.
        """
        steps_TG = torch.cat((step_TM, step_TM), dim=1)
        negative_TM, _ = delta_gates(steps_TG, self._unit_rate_M, self._weights.step_bias_M)
        return -negative_TM, negative_TM * self._rate_M


def _silu(gate_TC: Tensor) -> Tensor:
    """Return the SiLU of the gate; torch's depends on the number of rows."""
    gate_TC = gate_TC.contiguous()
    return output_gate(gate_TC.clone().unsqueeze(1), gate_TC, "sigmoid").squeeze(1)
