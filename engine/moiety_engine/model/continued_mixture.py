"""MoE layer whose router continues that of the layer before, and may choose no expert (ZAYA1).

T tokens, D model width, K experts per token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_engine.model.layers import MixtureOfExperts, MoeContext
from moiety_engine.model.router_mlp import RouterInputs, RouterMlp
from moiety_kernels.linear import linear
from moiety_kernels.route import route

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_engine.model.adapter_stacks import AdaptedRows
    from moiety_engine.model.spec import MoeSpec
    from moiety_engine.model.weights import MoeWeights


class ContinuedMixture(MixtureOfExperts):
    """Experts after a router with hidden layers. The router's last experts, which have no weights, add nothing."""

    def __init__(self, spec: MoeSpec, weights: MoeWeights, context: MoeContext, inputs: RouterInputs) -> None:
        """Create the layer. `inputs`: those of the model's routers."""
        super().__init__(spec, weights, context)
        assert spec.router_mlp is not None and weights.router_mlp is not None
        self._hidden = RouterMlp(spec.router_mlp, weights.router_mlp, context.arithmetic, inputs)

    _is_whole = True

    def __call__(self, x_TD: Tensor, rows: AdaptedRows | None, token_ids_T: Tensor | None = None) -> Tensor:
        weight_TK, expert_TK = self._route(x_TD, token_ids_T)
        self._chosen.append(expert_TK)
        held_TK = torch.where(expert_TK >= self._spec.num_experts, -1, expert_TK)
        if self._dispatch is not None:
            return self._dispatch(x_TD, weight_TK, held_TK, self.routed, lambda: torch.zeros_like(x_TD))
        slot_TK = held_TK if self._slots is None else self._slots.of(held_TK)
        return self.routed(x_TD, weight_TK, slot_TK, rows)

    def _route(self, x_TD: Tensor, token_ids_T: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the weight and the index of each token's experts, both [T, K]."""
        if not len(x_TD):
            return super()._route(x_TD)
        assert token_ids_T is not None, "the router's input is kept by the tokens of the batch"
        inner_TW = self._hidden(x_TD, token_ids_T)
        logits_TE = linear(inner_TW, self._weights.router_ED, invariant=self._arithmetic.invariant)
        return route(logits_TE, self._spec.routing, self._weights.selection_bias_E)
