"""Activation between the two products of a feed-forward, as data without an implementation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Activation:
    """Function of a gate and an up value.

    "silu": silu(gate) · up. "limited_silu" (DeepSeek-V4): the same with gate at most `limit` and up within ±`limit`.
    "gelu_tanh": gelu(gate) · up, with the tanh approximation. "clipped" (gpt-oss): (up + 1) · gate ·
    sigmoid(alpha · gate), with the same limits.
    """

    kind: Literal["silu", "gelu_tanh", "clipped", "limited_silu"]
    limit: float = 0.0
    alpha: float = 0.0


SILU = Activation("silu")
GELU_TANH = Activation("gelu_tanh")
