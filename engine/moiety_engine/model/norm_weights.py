"""Weights of norms. D model width, R inner width of a gate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class NormGateWeights:
    down_RD: Tensor
    up_DR: Tensor


@dataclass(frozen=True, slots=True)
class NormWeights:
    weight_D: Tensor  # float32, as is the bias
    bias_D: Tensor | None
    gate: NormGateWeights | None = None
