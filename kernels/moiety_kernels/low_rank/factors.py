"""The factors of LoRA products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Factors:
    """Factors of all slots in one shape: an adapter of a smaller rank is padded with zeros.

    The output has parts of these `widths`, such as queries, keys and values, and each has its own `down`. With experts,
    slot s's expert e has index s · E + e, so S is then the number of slots times that of experts.
    """

    down_SRD: Tensor  # R = P · r: the parts in sequence
    up_SrN: Tensor  # transposed, and already multiplied by the adapter's scale
    widths: tuple[int, ...]
    num_experts: int = 1

    @property
    def rank(self) -> int:
        return int(self.up_SrN.shape[1])


@dataclass(frozen=True, slots=True)
class FeedForwardFactors:
    """Factors of a feed-forward, with or without experts, and the slot of each token; None where no adapter has any."""

    slot_T: Tensor  # int64, negative for none
    gate_up: Factors | None
    down: Factors | None
