"""MoE layer whose router, routed experts and shared experts normalize the residual stream by weights of their own.

T tokens, D model width, E experts, K experts per token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_engine.model.layers import MixtureOfExperts, MoeContext
from moiety_kernels.rms_norm import rms_norm
from moiety_kernels.scaled_sum import scale_rows, scaled_sum

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_engine.distribution.collectives import RankCollectives
    from moiety_engine.model.adapter_stacks import AdaptedRows
    from moiety_engine.model.spec import MoeSpec
    from moiety_engine.model.weights import MoeWeights


class NormedMixture(MixtureOfExperts):
    """MoE layer of Gemma 4: experts beside a dense feed-forward, each with a norm of its input and of its output.

    Output norms need whole rows, so the layer itself sums over the ranks that share its columns.
    """

    def __init__(
        self,
        spec: MoeSpec,
        weights: MoeWeights,
        context: MoeContext,
        *,
        norm_eps: float,
        group: RankCollectives,
    ) -> None:
        """Create the layer. `group`: the ranks to sum over."""
        super().__init__(spec, weights, context)
        assert weights.norms is not None and self._shared is not None
        self._norms, self._eps, self._group = weights.norms, norm_eps, group

    _is_whole = True

    def __call__(self, x_TD: Tensor, rows: AdaptedRows | None, token_ids_T: Tensor | None = None) -> Tensor:
        norms = self._norms
        weight_TK, expert_TK = self._route(x_TD)
        self._chosen.append(expert_TK)
        input_TD = self._normed(x_TD, norms.routed_D)
        if self._dispatch is not None:
            routed_TD = self._dispatch(input_TD, weight_TK, expert_TK, self.routed, lambda: torch.zeros_like(x_TD))
        else:
            slot_TK = expert_TK if self._slots is None else self._slots.of(expert_TK)
            routed_TD = self.routed(input_TD, weight_TK, slot_TK, rows)
        assert self._shared is not None
        shared_TD = self._shared.alone(self._normed(x_TD, norms.shared_D))
        if self._group.size > 1:
            routed_TD, shared_TD = self._group.sum(torch.stack((routed_TD, shared_TD)))
        normed_TD = self._normed(shared_TD, norms.shared_output_D)
        return scaled_sum(normed_TD, y=self._normed(routed_TD, norms.routed_output_D))

    def _route(self, x_TD: Tensor, token_ids_T: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the weight and the index of each token's experts; experts have factors of their own."""
        weight_TK, expert_TK = super()._route(self._normed(x_TD, self._norms.router_D), token_ids_T)
        scaled_P1 = scale_rows(weight_TK.view(-1, 1), self._norms.expert_scale_E, expert_TK.view(-1))
        return scaled_P1.view(weight_TK.shape), expert_TK

    def _normed(self, x_TD: Tensor, weight_D: Tensor) -> Tensor:
        return rms_norm(x_TD, weight_D, self._eps) if len(x_TD) else x_TD
