"""Definition of expert counts, and their GPU implementation.

It runs a few operations for all layers together, without a host synchronisation. T tokens, K experts per token, L
layers, E experts, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def count_picks(chosen: Sequence[Tensor], owner_T: Tensor, picks_SLE: Tensor, active_L: Tensor) -> None:
    """Add 1 to picks[owner[t], l, e] for each expert e chosen by token t in layer l.

    Also add to active[l] the number of experts that any token of a slot other than 0 chose.
    """
    num_layers, num_experts = picks_SLE.shape[1:]
    first_L = torch.arange(num_layers, device=picks_SLE.device) * num_experts
    at_LTK = torch.stack(tuple(chosen)) + first_L[:, None, None]
    index_R = (at_LTK + (owner_T * (num_layers * num_experts))[:, None]).flatten()
    picks_SLE.view(-1).scatter_add_(0, index_R, torch.ones_like(index_R))
    hit_2LE = torch.zeros(2, num_layers, num_experts, dtype=torch.int64, device=picks_SLE.device)
    nobodys_T = (owner_T == 0) * (num_layers * num_experts)  # their experts are counted apart
    hit_2LE.view(-1).scatter_(0, (at_LTK + nobodys_T[:, None]).flatten(), 1)
    active_L += hit_2LE[0].sum(dim=1)
