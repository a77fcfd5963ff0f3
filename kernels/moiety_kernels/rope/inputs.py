"""Inputs of the rotary position embedding. T tokens, P positions, R rotated pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class RotaryInputs(NamedTuple):
    """Tables of cosines and sines, and the row of both for each token."""

    cos_PR: Tensor  # float32, as the next
    sin_PR: Tensor
    positions_T: Tensor  # int64
