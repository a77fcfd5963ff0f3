"""Activation between the two products of a feed-forward, as data without an implementation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Activation:
    """Function of a gate and an up value, or of an up value alone.

    "silu": silu(gate) · up. "limited_silu" (DeepSeek-V4): the same with gate at most `limit` and up within ±`limit`.
    "gelu_tanh": gelu(gate) · up, with the tanh approximation. "clipped" (gpt-oss): (up + 1) · gate ·
    sigmoid(alpha · gate), with the same limits. "scaled_silu" (Falcon-H1): silu(alpha · gate) · up. "relu2" (Nemotron):
    max(up, 0)², without a gate.
    """

    kind: Literal["silu", "gelu_tanh", "clipped", "limited_silu", "scaled_silu", "relu2"]
    limit: float = 0.0
    alpha: float = 0.0

    @property
    def gated(self) -> bool:
        """Return whether the function has a gate."""
        return self.kind != "relu2"

    @property
    def num_inputs(self) -> int:
        """Number of values of the first product that give one value of the second product's input."""
        return 2 if self.gated else 1


SILU = Activation("silu")
GELU_TANH = Activation("gelu_tanh")
RELU2 = Activation("relu2")
