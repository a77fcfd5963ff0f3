"""Normalization of the residual stream before each half of a layer. T tokens, D model width."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from moiety_kernels.layer_norm import add_layer_norm, layer_norm
from moiety_kernels.linear import linear
from moiety_kernels.output_gate import output_gate
from moiety_kernels.rms_norm import add_rms_norm, rms_norm
from moiety_kernels.scaled_sum import scaled_sum

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_engine.model.arithmetic import Arithmetic
    from moiety_engine.model.norm_weights import NormGateWeights, NormWeights
    from moiety_engine.model.spec import NormSpec


class Norm(Protocol):
    """Normalization of rows, alone or fused with a preceding addition."""

    def __call__(self, x_TD: Tensor) -> Tensor:
        """Return the normalized rows."""
        ...

    def after_adding(self, x_TD: Tensor, delta_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return (x + delta, its normalized rows). Both inputs may be overwritten."""
        ...


class RmsNorm:
    """Normalization by the root mean square."""

    def __init__(self, weight_D: Tensor, eps: float) -> None:
        self._weight_D, self._eps = weight_D, eps

    def __call__(self, x_TD: Tensor) -> Tensor:
        return rms_norm(x_TD, self._weight_D, self._eps)

    def after_adding(self, x_TD: Tensor, delta_TD: Tensor) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x_TD, delta_TD, self._weight_D, self._eps)


class LayerNorm:
    """Normalization by mean and variance, with a bias."""

    def __init__(self, weight_D: Tensor, bias_D: Tensor, eps: float) -> None:
        self._weight_D, self._bias_D, self._eps = weight_D, bias_D, eps

    def __call__(self, x_TD: Tensor) -> Tensor:
        return layer_norm(x_TD, self._weight_D, self._bias_D, self._eps)

    def after_adding(self, x_TD: Tensor, delta_TD: Tensor) -> tuple[Tensor, Tensor]:
        return add_layer_norm(x_TD, delta_TD, self._weight_D, self._bias_D, self._eps)


class GatedNorm:
    """Normalization whose output y is multiplied by sigmoid(up · silu(down · y)), as in A.X-K2."""

    def __init__(self, norm: Norm, weights: NormGateWeights, arithmetic: Arithmetic) -> None:
        self._norm, self._weights, self._invariant = norm, weights, arithmetic.invariant

    def __call__(self, x_TD: Tensor) -> Tensor:
        return self._gated(self._norm(x_TD))

    def after_adding(self, x_TD: Tensor, delta_TD: Tensor) -> tuple[Tensor, Tensor]:
        sum_TD, normed_TD = self._norm.after_adding(x_TD, delta_TD)
        return sum_TD, self._gated(normed_TD)

    def _gated(self, y_TD: Tensor) -> Tensor:
        inner_TR = linear(y_TD, self._weights.down_RD, invariant=self._invariant)
        silu_TR = output_gate(inner_TR.clone().unsqueeze(1), inner_TR, "sigmoid").squeeze(1)  # torch's depends on T
        gate_TD = linear(silu_TR, self._weights.up_DR, invariant=self._invariant)
        return output_gate(y_TD.unsqueeze(1), gate_TD, "sigmoid").squeeze(1)


class Unnormalized:
    """Residual stream as it is, in layers that normalize only the outputs of their halves."""

    def __call__(self, x_TD: Tensor) -> Tensor:
        return x_TD

    def after_adding(self, x_TD: Tensor, delta_TD: Tensor) -> tuple[Tensor, Tensor]:
        sum_TD = scaled_sum(x_TD, y=delta_TD)
        return sum_TD, sum_TD


def make_norm(spec: NormSpec, weights: NormWeights | None, arithmetic: Arithmetic | None = None) -> Norm:
    """Return the normalization that the spec describes; `weights`: None if there is no normalization.

    `arithmetic` is needed for gates.
    """
    if weights is None:
        return Unnormalized()
    if weights.gate is not None:
        assert arithmetic is not None, "a gate is computed by products"
        return GatedNorm(make_norm(spec, replace(weights, gate=None)), weights.gate, arithmetic)
    if weights.bias_D is None:
        return RmsNorm(weights.weight_D, spec.eps)
    return LayerNorm(weights.weight_D, weights.bias_D, spec.eps)
