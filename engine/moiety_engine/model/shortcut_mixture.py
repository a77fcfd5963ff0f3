"""MoE layer beside a dense feed-forward whose experts' output is added one layer later (shortcut, LongCat-Flash).

T tokens, D model width, K experts per token.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from moiety_engine.model.layers import MixtureOfExperts, MoeContext

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_engine.distribution.collectives import RankCollectives
    from moiety_engine.model.adapter_stacks import AdaptedRows
    from moiety_engine.model.spec import MoeSpec
    from moiety_engine.model.weights import MoeWeights


class ShortcutMixture(MixtureOfExperts):
    """Experts, some of which return their input, and a dense feed-forward, which has the place of shared experts.

    Only one rank may add the inputs that experts return, so the layer itself sums over the ranks.
    """

    def __init__(self, spec: MoeSpec, weights: MoeWeights, context: MoeContext, *, group: RankCollectives) -> None:
        """Create the layer. `group`: the ranks to sum over."""
        super().__init__(spec, weights, context)
        self._group = group

    _is_whole = True

    def __call__(self, x_TD: Tensor, rows: AdaptedRows | None, token_ids_T: Tensor | None = None) -> Tensor:
        """Return the dense feed-forward's output and the experts' output, [2, T, D]."""
        weight_TK, expert_TK = self._route(x_TD, token_ids_T)
        self._chosen.append(expert_TK)
        returns_TK = expert_TK >= self._spec.num_experts
        held_TK = torch.where(returns_TK, -1, expert_TK)  # experts that return their input are on no rank
        if self._dispatch is not None:
            routed_TD = self._dispatch(x_TD, weight_TK, held_TK, self.routed, partial(torch.zeros_like, x_TD), rows)
        else:
            slot_TK = held_TK if self._slots is None else self._slots.of(held_TK)
            routed_TD = self.routed(x_TD, weight_TK, slot_TK, rows)
        dense_TD = self._add_shared(torch.zeros_like(x_TD), x_TD, rows)
        dense_TD, routed_TD = self._group.sum(torch.stack((dense_TD, routed_TD)))
        kept_T1 = torch.where(returns_TK, weight_TK, 0.0).sum(dim=1, keepdim=True)
        return torch.stack((dense_TD, routed_TD + x_TD * kept_T1.to(x_TD.dtype)))
