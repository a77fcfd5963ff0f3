"""Auxiliary losses of the routers: even use of experts over a batch, few experts per conversation.

Neither loss knows a domain. Together they raise the mutual information between a conversation and its experts. T
tokens, E experts, K top-k, N conversations.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from moiety_demo.network import Routing


def balance_loss(routings: Sequence[Routing], sequence_T: Tensor) -> Tensor:
    """Return E * sum(f_E * p_E) over the batch, averaged over layers; 1 when even (Switch Transformer, Fedus et al.

    2021).
    """
    keep = sequence_T >= 0
    losses = []
    for routing in routings:
        probability_TE = routing.probability_TE[keep]
        num_experts = probability_TE.shape[1]
        fraction_E = routing.expert_TK[keep].flatten().bincount(minlength=num_experts).float()
        fraction_E = fraction_E / fraction_E.sum()
        losses.append(num_experts * (fraction_E * probability_TE.mean(0)).sum())
    return torch.stack(losses).mean()


def focus_loss(routings: Sequence[Routing], sequence_T: Tensor, floor: float = 0.0) -> Tensor:
    """Return the entropy of a conversation's mean routing, from 0 (one expert) to 1 (uniform), above `floor`.

    Averaged over conversations and layers. The loss is zero below the floor.
    """
    keep = sequence_T >= 0
    sequence = sequence_T[keep]
    size_N = sequence.bincount().clamp(min=1)
    losses = []
    for routing in routings:
        probability_TE = routing.probability_TE[keep]
        total_NE = probability_TE.new_zeros(len(size_N), probability_TE.shape[1]).index_add(0, sequence, probability_TE)
        mean_NE = total_NE / size_N[:, None]
        entropy_N = -(mean_NE * (mean_NE + 1e-9).log()).sum(-1)
        share_N = entropy_N / math.log(probability_TE.shape[1])
        losses.append((share_N - floor).clamp(min=0).mean())
    return torch.stack(losses).mean()
