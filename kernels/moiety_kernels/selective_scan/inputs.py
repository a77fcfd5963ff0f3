"""Inputs of the selective scan.

T tokens, C channels, N rows of the state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class ScanInputs(NamedTuple):
    """Tensors of the tokens, in one dtype, and the layer's weights, float32.

    Mamba has A as rate, B as write and C as read. `rate_NC` < 0. The time step is Δ = softplus(step + step_bias).
    """

    x_TC: Tensor
    step_TC: Tensor
    gate_TC: Tensor
    write_TN: Tensor
    read_TN: Tensor
    rate_NC: Tensor
    step_bias_C: Tensor
    skip_C: Tensor

    @property
    def of_tokens(self) -> tuple[Tensor, ...]:
        """The tensors with a row for each token."""
        return self[:5]

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """The tensors that are the same for all tokens."""
        return self[5:]
