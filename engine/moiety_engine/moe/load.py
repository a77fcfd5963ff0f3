"""Counters of the experts that the tokens of a step were routed to, by tenant.

T tokens of a step, K experts a token, L layers with experts, E experts, S slots of tenants (`moe.tenants`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moiety_engine.moe.shape import ExpertShape
from moiety_kernels.expert_count import count_picks


@dataclass(frozen=True, slots=True)
class Counts:
    """Counted picks, and the number of experts of a layer that a step picked at all, summed over the steps."""

    picks_SLE: Tensor  # int64; the counts of slot NO_TENANT have no meaning
    active_L: Tensor  # int64


class ExpertCounter:
    """Owner of the counts since the last `take`.

    The addresses of its tensors never change, so that replayed CUDA graphs add to them too.
    """

    def __init__(self, shape: ExpertShape, num_slots: int, device: torch.device) -> None:
        num_layers = len(shape.layers)
        self._picks_SLE = torch.zeros(num_slots, num_layers, shape.num_experts, dtype=torch.int64, device=device)
        self._active_L = torch.zeros(num_layers, dtype=torch.int64, device=device)

    def count(self, chosen: Sequence[Tensor], owner_T: Tensor) -> None:
        """Count one forward pass: expert_TK of each layer, int32, and the tenant slot of each token, int64."""
        count_picks(chosen, owner_T, self._picks_SLE, self._active_L)

    def take(self, download: Callable[[Tensor], Tensor]) -> Counts:
        """Return the counts so far, copied from the device by `download`, and reset them to zero."""
        taken = (self._picks_SLE, self._active_L)
        counts = Counts(*(one.clone() if one.is_cpu else download(one) for one in taken))
        for one in taken:
            one.zero_()
        return counts
