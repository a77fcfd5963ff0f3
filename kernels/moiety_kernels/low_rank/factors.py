"""What the product of a low rank is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Factors:
    """Of all slots, one shape: an adapter of a smaller rank ends with zeros. The output has parts of these `widths`,
    such as queries, keys and values, and each has a `down` of its own. Of experts, slot s's expert e has the place
    s · E + e, so that there S is the number of slots times that of experts."""

    down_SRD: Tensor  # R = P · r: the parts' one after the other
    up_SrN: Tensor  # transposed, and already multiplied by the adapter's scale
    widths: tuple[int, ...]
    num_experts: int = 1

    @property
    def rank(self) -> int:
        return int(self.up_SrN.shape[1])


@dataclass(frozen=True, slots=True)
class FeedForwardFactors:
    """Those of a feed-forward, with experts or without, and whose each token is; None where no adapter has any."""

    slot_T: Tensor  # int64, negative for none
    gate_up: Factors | None
    down: Factors | None
