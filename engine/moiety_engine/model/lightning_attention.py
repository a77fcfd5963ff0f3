"""Lightning attention (2401.04658): the recurrent layers of MiniMax-01 and MiniMax-M1.

T tokens, D model width, M heads of width V, C width of all heads, R runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_engine.model.recurrent_mixer import RecurrentMixer
from moiety_engine.model.recurrent_specs import LightningSpec
from moiety_engine.model.recurrent_weights import LightningWeights
from moiety_kernels.gated_norm import gated_norm
from moiety_kernels.linear_attention import linear_attention
from moiety_kernels.output_gate import output_gate
from moiety_kernels.recurrent.inputs import RecurrentHeads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from moiety_engine.distribution.collectives import RankCollectives
    from moiety_engine.model.arithmetic import Arithmetic
    from moiety_engine.model.batch import RecurrentRows, RecurrentStateCache


class LightningAttention(RecurrentMixer[LightningSpec, LightningWeights]):
    """Linear attention with a constant decay per head."""

    def __init__(
        self, spec: LightningSpec, weights: LightningWeights, arithmetic: Arithmetic, *, group: RankCollectives
    ) -> None:
        """Create the layer. `group`: the ranks that share its heads."""
        super().__init__(spec, weights, arithmetic)
        self._group = group
        own = spec.decays[group.rank * spec.num_heads :][: spec.num_heads]
        self._log_decay_M = -torch.tensor(own, dtype=torch.float32, device=weights.norm_C.device)

    def _mix(self, x_TD: Tensor, rows: RecurrentRows, cache: RecurrentStateCache) -> Tensor:
        spec, weights = self._spec, self._weights
        qkv_TC = self._linear(x_TD, weights.input_CD)
        cache.record(rows, qkv_TC)
        out_TMV = self._advance(qkv_TC, rows, cache)
        gate_TC = self._linear(x_TD, weights.gate_CD)
        return self._linear(self._gated(out_TMV.view(-1, spec.output_width), gate_TC), weights.output_DC)

    def _gated(self, out_TC: Tensor, gate_TC: Tensor) -> Tensor:
        """Return the outputs, normalized with those of the heads of all ranks, times the sigmoid of their gates."""
        norm_C, eps = self._weights.norm_C, self._spec.norm_eps
        if self._group.size == 1:
            parts = out_TC.unsqueeze(1), gate_TC.unsqueeze(1), norm_C.unsqueeze(0)
            return gated_norm(*parts, eps, "sigmoid").squeeze(1)
        squares_T1 = self._group.sum(out_TC.double().square().sum(dim=1, keepdim=True))
        factor_T1 = torch.rsqrt(squares_T1 / (self._group.size * out_TC.shape[1]) + eps).float()
        normed_TC = (out_TC.float() * factor_T1 * norm_C).to(out_TC.dtype)
        return output_gate(normed_TC.unsqueeze(1), gate_TC, "sigmoid").squeeze(1)

    def replay(self, inputs_TC: Sequence[Tensor], rows: RecurrentRows, cache: RecurrentStateCache) -> None:
        """Advance states by tokens whose inputs were recorded."""
        self._advance(inputs_TC[0], rows, cache)

    def _advance(self, qkv_TC: Tensor, rows: RecurrentRows, cache: RecurrentStateCache) -> Tensor:
        """Return out_TMV, the heads' outputs, and advance the states."""
        (matrices,) = cache.parts
        heads_THV = qkv_TC.view(-1, 3 * self._spec.num_heads, self._spec.head_width)
        silu_THV = output_gate(heads_THV.clone(), qkv_TC, "sigmoid")  # x times its own sigmoid
        log_decay_TM = self._log_decay_M.expand(len(qkv_TC), -1).contiguous()
        return linear_attention(RecurrentHeads(*silu_THV.chunk(3, dim=1)), log_decay_TM, matrices, rows.runs)
