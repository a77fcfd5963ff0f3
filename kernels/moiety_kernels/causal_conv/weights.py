"""Weights of a causal convolution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class CausalConvWeights:
    """Weights of W taps in C channels, the oldest tap first, and what follows their sum."""

    weight_WC: Tensor
    bias_C: Tensor | None = None
    silu: bool = False  # whether SiLU is applied after the bias
