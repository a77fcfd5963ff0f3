"""Residual connections of a layer: how the outputs of attention and of the feed-forward are added to the input."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moiety_engine.model.residual_specs import NormedResidual
from moiety_kernels.scaled_sum import scaled_sum

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_engine.model.norms import Norm
    from moiety_engine.model.spec import LayerSpec
    from moiety_engine.model.weights import LayerWeights


class ResidualConnections:
    """Residual connections of one layer.

    `multiplier`: factor of both outputs. `weights`: those of the layer, which can have factors of its terms or output.
    `input_is_shared`: the next layer reads the input of this one.
    """

    def __init__(
        self, spec: LayerSpec, multiplier: float, weights: LayerWeights, *, input_is_shared: bool = False
    ) -> None:
        self._other = spec.residual if isinstance(spec.residual, NormedResidual) else None
        self._attention_scales, self._ffn_scales = weights.attention_scales, weights.ffn_scales
        self._parallel, self._defers = spec.parallel, spec.defers_experts
        self._multiplier, self._input_is_shared = multiplier, input_is_shared
        # a layer with an embedding is scaled after that is added
        self._scale = 1.0 if weights.scale_1 is None or spec.embedded else float(weights.scale_1)
        other_terms = self._other, self._attention_scales, self._ffn_scales
        self._only_adds = (  # to the input, first attention and then the feed-forward, as in most models
            all(one is None for one in other_terms)
            and self._scale == multiplier == 1.0
            and not (self._parallel or self._defers)
        )

    def add_attention(
        self, x_TD: Tensor, normed_TD: Tensor, attended_TD: Tensor, ffn_norm: Norm
    ) -> tuple[Tensor, Tensor]:
        """Return the layer's input with the output of attention added, and the input of the feed-forward.

        `normed_TD`: the input of attention.
        """
        if self._only_adds:
            return ffn_norm.after_adding(x_TD, attended_TD)
        x_TD, attended_TD = self.scale_attention(x_TD, normed_TD, attended_TD)
        return (
            (scaled_sum(x_TD, y=attended_TD), normed_TD) if self._parallel else ffn_norm.after_adding(x_TD, attended_TD)
        )

    def scale_attention(self, x_TD: Tensor, normed_TD: Tensor, attended_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two terms of the layer's output after attention. `normed_TD`: the input of attention."""
        if self._other is not None:
            x_TD = times(self._other.attention_alpha, normed_TD)
            attended_TD = times(self._other.attention_beta, attended_TD)
        if self._attention_scales is not None:
            return self._attention_scales.of(x_TD, attended_TD)
        return x_TD, times(self._multiplier, attended_TD)

    def scale_ffn(
        self, x_TD: Tensor, normed_TD: Tensor, fed_TD: Tensor, deferred_TD: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the two terms of the layer's output, and the output of experts to add in the next layer.

        `normed_TD`: the input of the feed-forward. `deferred_TD`: the output of experts of the layer before.
        """
        if self._only_adds and deferred_TD is None:
            return x_TD, fed_TD, None
        later_TD = None
        if self._defers:
            fed_TD, later_TD = fed_TD.unbind()
        if deferred_TD is not None:
            fed_TD = fed_TD + deferred_TD
        if self._other is not None:
            x_TD, fed_TD = times(self._other.ffn_alpha, normed_TD), times(self._other.ffn_beta, fed_TD)
        if self._ffn_scales is not None:
            x_TD, fed_TD = self._ffn_scales.of(x_TD, fed_TD)
        return times(self._scale, x_TD), times(self._scale, times(self._multiplier, fed_TD)), later_TD

    def end(self, x_TD: Tensor, normed_TD: Tensor, fed_TD: Tensor, next_norm: Norm) -> tuple[Tensor, Tensor]:
        """Return the layer's output, which is the sum of its two terms, and the input of the next layer.

        `normed_TD`: the input of the layer's last half.
        """
        return (
            (scaled_sum(x_TD, y=fed_TD), normed_TD) if self._input_is_shared else next_norm.after_adding(x_TD, fed_TD)
        )


def times(factor: float, values: Tensor) -> Tensor:
    """Return the product, without a copy where the factor is 1."""
    return values if factor == 1.0 else scaled_sum(values, factor)
