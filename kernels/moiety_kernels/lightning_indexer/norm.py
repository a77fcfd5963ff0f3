"""Layer norm of index keys. I width of an index key."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class IndexKeyNorm(NamedTuple):
    """Parameters of the layer norm that index keys get before they are rotated."""

    weight_I: Tensor
    bias_I: Tensor
    eps: float
