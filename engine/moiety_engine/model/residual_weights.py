"""Learned factors and biases of the terms of residual connections (ZAYA1). D model width."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_engine.model.tensor_allocator import TensorAllocator


@dataclass(frozen=True, slots=True)
class TermScale:
    """Factor and bias of one term, float32: it becomes (term + bias) · factor."""

    factor_D: Tensor
    bias_D: Tensor


@dataclass(frozen=True, slots=True)
class ResidualScales:
    """Factors and biases of a half's input and of its output."""

    input: TermScale
    output: TermScale

    def of(self, x_TD: Tensor, delta_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return both terms, scaled."""
        return scale_term(x_TD, self.input), scale_term(delta_TD, self.output)


def allocate_term(size: int, new: TensorAllocator) -> TermScale:
    """Return uninitialized weights of a term of width `size`."""
    return TermScale(new.vector(size), new.vector(size))


def allocate_scales(size: int, new: TensorAllocator) -> ResidualScales:
    """Return uninitialized weights of both terms of half a layer."""
    return ResidualScales(allocate_term(size, new), allocate_term(size, new))


def scale_term(x_TD: Tensor, scale: TermScale) -> Tensor:
    """Return (x + bias) · factor, in x's dtype."""
    return (x_TD + scale.bias_D.to(x_TD.dtype)) * scale.factor_D.to(x_TD.dtype)
