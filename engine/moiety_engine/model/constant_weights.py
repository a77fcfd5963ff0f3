"""Weights of experts that are the same for each token. T tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

_MAX_KEPT_ROWS = 64  # tokens of a step whose constant weights are kept: those of the largest recorded step


class ConstantWeights:
    """The same weight for each token, [T, 1], float32. Nothing may write to the tensors, which are kept."""

    def __init__(self, weight: float) -> None:
        self._weight = weight
        self._known: dict[int, Tensor] = {}  # recorded programs read these by address

    def of_tokens(self, tokens: int, device: torch.device) -> Tensor:
        """Return the weights of this number of tokens."""
        if tokens not in self._known:
            weights_T1 = torch.full((tokens, 1), self._weight, device=device)
            if tokens > _MAX_KEPT_ROWS:
                return weights_T1
            self._known[tokens] = weights_T1
        return self._known[tokens]
