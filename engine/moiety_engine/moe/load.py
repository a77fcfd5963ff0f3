"""Counting how many tokens went to each expert of each layer. M layers with experts, E experts, T tokens, K a token."""

from __future__ import annotations

import torch
from torch import Tensor


class ExpertCounter:
    """Owns the counts since the last `take`. Off until `enabled` is set, and then costs one small operation a layer."""

    def __init__(self, moe_layers: tuple[int, ...], num_experts: int, device: torch.device) -> None:
        self.enabled = False
        self._row_of_layer = {layer: row for row, layer in enumerate(moe_layers)}
        self._counts_ME = torch.zeros(len(moe_layers), num_experts, dtype=torch.int64, device=device)

    def add(self, layer: int, expert_TK: Tensor) -> None:
        """Count one layer's choices; `layer` is the model's layer index."""
        if self.enabled:
            row_E = self._counts_ME[self._row_of_layer[layer]]
            chosen_R = expert_TK.flatten().long()
            row_E.index_add_(0, chosen_R, torch.ones_like(chosen_R))  # where a count by bins would wait for the device

    def take(self) -> Tensor:
        """The counts so far, int64 [moe layers, experts]; counting starts over."""
        counts_ME, self._counts_ME = self._counts_ME, torch.zeros_like(self._counts_ME)
        return counts_ME
