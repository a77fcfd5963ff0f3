"""Definition of top-k routing. T tokens, E experts in G groups, K experts per token, R = T · K routed rows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import softplus

from moiety_kernels.route.groups import Groups, most_tiles

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.route.spec import RoutingSpec


def route(logits_TE: Tensor, spec: RoutingSpec, bias_E: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return (weight_TK float32, expert_TK int32), the best expert first."""
    logits_TE = logits_TE.float()
    if spec.scoring == "softmax_chosen":
        chosen_TK, expert_TK = torch.topk(logits_TE, spec.top_k, dim=-1)
        weight_TK = torch.softmax(chosen_TK, dim=-1)
    elif spec.scoring == "sigmoid_chosen":
        ranks_TE = logits_TE if bias_E is None else logits_TE + bias_E
        expert_TK = torch.topk(ranks_TE, spec.top_k, dim=-1).indices
        weight_TK = torch.sigmoid(logits_TE.gather(1, expert_TK))
    elif spec.scoring == "sparse_mixer":
        weight_TK, expert_TK = _sparse_mixer(logits_TE, spec)
    else:
        scores_TE = _scores(logits_TE, spec)
        ranks_TE = scores_TE if bias_E is None else scores_TE + bias_E
        expert_TK = torch.topk(_of_best_groups(ranks_TE, spec), spec.top_k, dim=-1).indices
        weight_TK = scores_TE.gather(1, expert_TK)
    return _normalized(weight_TK, spec), expert_TK.to(torch.int32)


def weigh_experts(logits_TE: Tensor, expert_TK: Tensor, spec: RoutingSpec) -> Tensor:
    """Return weight_TK, float32, of experts that are chosen already."""
    return _normalized(_scores(logits_TE.float(), spec).gather(1, expert_TK.long()), spec)


def _scores(logits_TE: Tensor, spec: RoutingSpec) -> Tensor:
    """Return each expert's score, by one of the scorings that all experts have."""
    if spec.scoring == "softmax":
        return torch.softmax(logits_TE, dim=-1)
    return torch.sigmoid(logits_TE) if spec.scoring == "sigmoid" else softplus(logits_TE).sqrt()


def _normalized(weight_TK: Tensor, spec: RoutingSpec) -> Tensor:
    if spec.renormalize:
        sum_T1 = weight_TK.sum(dim=-1, keepdim=True) + spec.added_sum
        weight_TK = weight_TK / sum_T1.clamp(min=spec.least_sum)
    return weight_TK * spec.scale


def _of_best_groups(ranks_TE: Tensor, spec: RoutingSpec) -> Tensor:
    """Return the ranks, with -inf for all but the best groups: a bias may make the best ranks negative."""
    if spec.num_groups == 1:
        return ranks_TE
    ranks_TGe = ranks_TE.view(-1, spec.num_groups, spec.group_size)
    best_TGn = ranks_TGe.topk(1 if spec.group_score == "best" else 2, dim=-1).values
    group_TK = best_TGn.sum(dim=-1).topk(spec.top_groups, dim=-1).indices
    lost_TG = torch.ones_like(best_TGn[..., 0], dtype=torch.bool).scatter_(1, group_TK, False)
    return ranks_TGe.masked_fill(lost_TG.unsqueeze(-1), -math.inf).flatten(1)


def _sparse_mixer(logits_TE: Tensor, spec: RoutingSpec) -> tuple[Tensor, Tensor]:
    weights, experts, left_TE = [], [], logits_TE
    for _ in range(spec.top_k):
        best_T1, expert_T1 = left_TE.max(dim=-1, keepdim=True)
        size_TE = logits_TE.abs().clamp(min=best_T1)
        near_TE = left_TE.masked_fill((best_T1 - logits_TE) / size_TE > 2 * spec.jitter, -math.inf)
        weights.append(torch.softmax(near_TE, dim=-1).gather(1, expert_T1))
        experts.append(expert_T1)
        left_TE = left_TE.scatter(1, expert_T1, -math.inf)
    return torch.cat(weights, dim=1), torch.cat(experts, dim=1)


def group_by_expert(expert_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return (order_R, counts_E), both int64.

    order_R lists the token–expert pairs t · K + k sorted by expert, in token order within an expert, with those of a
    negative id last. counts_E holds each expert's number of pairs.
    """
    pairs_R = expert_TK.flatten().long()
    pairs_R = torch.where(pairs_R < 0, num_experts, pairs_R)
    return torch.argsort(pairs_R, stable=True), torch.bincount(pairs_R, minlength=num_experts + 1)[:num_experts]


def group(expert_TK: Tensor, num_experts: int, tile_rows: int) -> Groups:
    """Return the pairs grouped by expert, in tiles of `tile_rows` rows for a grouped product."""
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
