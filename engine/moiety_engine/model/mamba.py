"""Mamba (2312.00752) with norms of its inputs: the recurrent layers of Jamba.

T tokens, D model width, C channels, N rows of a channel's state, R width of the time steps' latent row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_engine.model.recurrent_mixer import RecurrentMixer
from moiety_engine.model.recurrent_specs import MambaSpec
from moiety_engine.model.recurrent_weights import MambaWeights
from moiety_kernels.causal_conv import CausalConvWeights, causal_conv
from moiety_kernels.rms_norm import rms_norm
from moiety_kernels.selective_scan import selective_scan
from moiety_kernels.selective_scan.inputs import ScanInputs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from moiety_engine.distribution.collectives import RankCollectives
    from moiety_engine.model.arithmetic import Arithmetic
    from moiety_engine.model.batch import RecurrentRows, RecurrentStateCache


class Mamba(RecurrentMixer[MambaSpec, MambaWeights]):
    """State space model with a state of fixed size for each channel, whose numbers have decays of their own."""

    def __init__(
        self, spec: MambaSpec, weights: MambaWeights, arithmetic: Arithmetic, *, group: RankCollectives
    ) -> None:
        """Create the layer. `group`: the ranks that share its channels."""
        super().__init__(spec, weights, arithmetic)
        self._group = group
        self._conv = CausalConvWeights(weights.conv_WC, weights.conv_bias_C, silu=True)
        self._rate_NC = -weights.decay_NC.exp()

    def _mix(self, x_TD: Tensor, rows: RecurrentRows, cache: RecurrentStateCache) -> Tensor:
        spec, weights = self._spec, self._weights
        conv_TC, gate_TC = self._linear(x_TD, weights.input_CD, weights.input_bias_C).chunk(2, dim=1)
        mixed_TC = self._convolved(conv_TC, rows, cache)
        selection_TE = self._group.sum(self._linear(mixed_TC, weights.selection_EC))
        step_TR, write_TN, read_TN = torch.split(
            selection_TE, [spec.time_rank, spec.state_width, spec.state_width], dim=1
        )
        step_TC = self._linear(self._normed(step_TR, weights.step_norm_R), weights.step_CR)
        write_TN, read_TN = self._normed(write_TN, weights.write_norm_N), self._normed(read_TN, weights.read_norm_N)
        cache.record(rows, conv_TC, step_TC, write_TN, read_TN)
        out_TC = self._scan(mixed_TC, step_TC, gate_TC, write_TN, read_TN, rows, cache)
        return self._linear(out_TC, weights.output_DC, weights.output_bias_D)

    def replay(self, inputs_TC: Sequence[Tensor], rows: RecurrentRows, cache: RecurrentStateCache) -> None:
        """Advance states by tokens whose inputs were recorded."""
        conv_TC, step_TC, write_TN, read_TN = inputs_TC
        mixed_TC = self._convolved(conv_TC, rows, cache)
        self._scan(mixed_TC, step_TC, mixed_TC, write_TN, read_TN, rows, cache)  # any gate: the output is not used

    def _convolved(self, conv_TC: Tensor, rows: RecurrentRows, cache: RecurrentStateCache) -> Tensor:
        """Return the convolution's output, and keep its last inputs."""
        return causal_conv(conv_TC, self._conv, cache.parts[1], rows.runs)

    def _scan(
        self,
        mixed_TC: Tensor,
        step_TC: Tensor,
        gate_TC: Tensor,
        write_TN: Tensor,
        read_TN: Tensor,
        rows: RecurrentRows,
        cache: RecurrentStateCache,
    ) -> Tensor:
        """Return out_TC, the channels' outputs, and advance their states."""
        weights = self._weights
        inputs = ScanInputs(
            mixed_TC,
            step_TC,
            gate_TC,
            write_TN,
            read_TN,
            self._rate_NC,
            weights.step_bias_C,
            weights.skip_C,
        )
        return selective_scan(inputs, cache.parts[0], rows.runs)

    def _normed(self, rows: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(rows.contiguous(), weight, self._spec.norm_eps)
