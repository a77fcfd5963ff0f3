"""The definition of top-k routing. T tokens, E experts, K experts a token, R = T · K routed rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_kernels.route.groups import Groups, most_tiles

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


def group(expert_TK: Tensor, num_experts: int, tile_rows: int) -> Groups:
    """The pairs grouped by expert, and the tiles of `tile_rows` rows in which a grouped product takes them."""
    order_R, counts_E = group_by_expert(expert_TK, num_experts)
    ends_E = counts_E.cumsum(0)
    tiles_E = -(-counts_E // tile_rows)
    tile_ends_E = tiles_E.cumsum(0)
    tile_N = torch.arange(most_tiles(order_R.numel(), num_experts, tile_rows), device=expert_TK.device)
    expert_N = torch.searchsorted(tile_ends_E, tile_N, right=True)
    used_N, owner_N = expert_N < num_experts, expert_N.clamp(max=num_experts - 1)
    first_N = (ends_E - counts_E)[owner_N] + tile_rows * (tile_N - (tile_ends_E - tiles_E)[owner_N])
    tiles_N2 = torch.stack((owner_N, first_N), dim=1).where(used_N[:, None], -1)
    starts_E1 = torch.cat((ends_E.new_zeros(1), ends_E)).int()
    return Groups(order_R.int(), starts_E1, tiles_N2.int(), tile_ends_E[-1:].int(), tile_rows)
