"""The definition of top-k routing. T tokens, E experts, K experts a token, R = T · K routed rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.route.spec import RoutingSpec


def route(logits_TE: Tensor, spec: RoutingSpec) -> tuple[Tensor, Tensor]:
    """(weight_TK float32, expert_TK int32), the best expert first."""
    scores_TE = torch.softmax(logits_TE, dim=-1, dtype=torch.float32)
    weight_TK, expert_TK = torch.topk(scores_TE, spec.top_k, dim=-1)
    if spec.renormalize:
        weight_TK = weight_TK / weight_TK.sum(dim=-1, keepdim=True)
    return weight_TK, expert_TK.to(torch.int32)


def group_by_expert(expert_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """(order_R, counts_E), both int64: order_R lists the token–expert pairs t · K + k expert by expert, in token order
    within an expert; counts_E says how many pairs each expert has."""
    pairs_R = expert_TK.flatten().long()
    return torch.argsort(pairs_R, stable=True), torch.bincount(pairs_R, minlength=num_experts)
