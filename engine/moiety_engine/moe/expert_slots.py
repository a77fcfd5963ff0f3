"""Slots of a layer's experts in each part, and the choice of a slot for each token where an expert has replicas.

All ranks of a pipeline stage hold the same table of a layer and switch it between the same two steps. On CPUs every
rank makes the same choice from the number of tokens that each expert got over all ranks. On a GPU this would make every
layer wait for the host, so there the choice depends on the number of tokens only and is balanced over many steps. This
module handles no weights.

T tokens, K experts a token, E experts, R ranks that have tokens of their own, C the most replicas of an expert.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from moiety_placement.placement_table import Placement
from moiety_placement.replicas import concentrate, distribute, spread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from moiety_placement.transition import Write

# Approximate rows per expert at which its matrix products take longer than reading its weights. From there on, tokens
# are balanced over ranks; below it, active experts are. 184 is that of an H200 in 16 bits; a CPU core has about
# 100 Gflop/s for 10 GB/s.
_RIDGE_ROWS = {"cuda": 184, "cpu": 16}


class OtherRanks(Protocol):
    """Ranks that process other tokens (data-parallel attention)."""

    rank: int
    size: int

    def all_gather(self, x_E: Tensor) -> Tensor:
        """Gather `x_E` of every rank, including this one, as [R, E]."""
        ...


class ExpertSlots:
    """Expert slots of one layer, on a rank that holds one of its parts."""

    def __init__(
        self,
        slots: Sequence[int],
        num_experts: int,
        *,
        num_parts: int,
        own_part: int,
        device: torch.device,
        counts: bool | None = None,
    ) -> None:
        """Build the slot table of the layer.

        `slots`: the expert in each slot, part by part. `counts`: whether the choice counts tokens, which waits for the
        device; None means yes on a CPU and no on a GPU.
        """
        self._device = device
        self._ridge_rows = _RIDGE_ROWS[device.type]
        self._counts = device.type == "cpu" if counts is None else counts
        self.replace_parts(slots, num_experts, num_parts=num_parts, own_part=own_part)

    def replace_parts(self, slots: Sequence[int], num_experts: int, *, num_parts: int, own_part: int) -> None:
        """Switch to another number of parts. All ranks call it between the same two steps."""
        self.num_held = len(slots) // num_parts  # slots of a part
        self._first = own_part * self.num_held
        self._switch(Placement.of([slots], num_experts=num_experts, num_ranks=num_parts))

    @property
    def held(self) -> tuple[int, ...]:
        """Experts in this rank's slots, in order."""
        slots_R = self.placement.physical_to_logical_LR[0]
        return tuple(slots_R[self._first : self._first + self.num_held].tolist())

    def write(self, writes: Sequence[Write]) -> None:
        """Update the table for slots that now hold other experts."""
        slots_R = self.placement.physical_to_logical_LR[0].copy()
        slots_R[[one.slot for one in writes]] = [one.expert for one in writes]
        old = self.placement
        self._switch(Placement.of([slots_R], num_experts=old.num_experts, num_ranks=old.num_ranks))

    def _switch(self, placement: Placement) -> None:
        self.placement = placement
        self._has_choice = bool((placement.counts_LE > 1).any())
        even_R = concentrate(placement, np.ones_like(placement.counts_LE))[0]  # one slot of each expert
        home_E = np.empty(placement.num_experts, dtype=np.int32)
        home_E[placement.physical_to_logical_LR[0, even_R > 0]] = np.flatnonzero(even_R)
        # The last row of each table is that of -1, no expert.
        slots_EC = np.pad(placement.logical_to_physical_LEC[0].astype(np.int32), ((0, 1), (0, 0)), constant_values=-1)
        self._home_E = torch.from_numpy(np.append(home_E, np.int32(-1))).to(self._device)
        self._slots_EC = torch.from_numpy(slots_EC).to(self._device)
        self._copies_E = torch.from_numpy(np.append(placement.counts_LE[0], 1)).to(self._device)

    def of(self, expert_TK: Tensor, others: OtherRanks | None = None, num_ranks: int = 1) -> Tensor:
        """Return the slot of each chosen expert, [T, K], int32; -1 for -1, which stands for no expert.

        `others`: None where all ranks have the same tokens, or where `num_ranks` ranks have their own tokens and do not
        exchange counts.
        """
        if self._has_choice and self._counts:
            return self._distribute(expert_TK, others)
        rows = expert_TK.numel() * (num_ranks if others is None else others.size) / self.placement.num_experts
        if self._has_choice and rows >= self._ridge_rows:
            return self._by_turns(expert_TK)
        return self._home_E[expert_TK]

    def here(self, slot_TK: Tensor) -> Tensor:
        """Return the slots as indices into this rank's own part; -1 for slots of other parts."""
        is_here_TK = (slot_TK >= self._first) & (slot_TK < self._first + self.num_held)
        return torch.where(is_here_TK, slot_TK - self._first, -1)

    def _distribute(self, expert_TK: Tensor, others: OtherRanks | None) -> Tensor:
        is_any_TK = expert_TK >= 0
        counts_E = torch.bincount(expert_TK[is_any_TK], minlength=self.placement.num_experts)
        if others is None:
            all_RE, rank = counts_E.cpu().numpy()[None], 0
        else:
            all_RE, rank = others.all_gather(counts_E).cpu().numpy(), others.rank
        total_E = all_RE.sum(axis=0)
        is_active_E = total_E > 0
        rows = total_E.sum() / max(1, is_active_E.sum())
        choose = spread if rows >= self._ridge_rows else concentrate
        quota_R = choose(self.placement, total_E[None])[0]
        experts_TK = expert_TK.cpu().numpy().astype(np.int64)
        slot_TK = np.full(experts_TK.shape, -1, dtype=np.int32)
        is_any = experts_TK >= 0
        slot_TK[is_any] = distribute(self.placement, 0, experts_TK[is_any], quota_R, all_RE[:rank].sum(axis=0))
        return torch.from_numpy(slot_TK).to(self._device)

    def _by_turns(self, expert_TK: Tensor) -> Tensor:
        """Assign the tokens to the replicas of their experts round-robin."""
        expert_TK = expert_TK.long()
        turn_T1 = torch.arange(len(expert_TK), device=self._device).unsqueeze(1)
        return self._slots_EC[expert_TK, turn_T1 % self._copies_E[expert_TK]]
