"""Definition of rotary position embedding (Su et al. 2021) in the half-split layout of Hugging Face checkpoints.

T tokens, H heads, d head width, R rotated pairs (2R ≤ d; the rest of a head is unchanged), P positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def rope(x_THd: Tensor, cos_PR: Tensor, sin_PR: Tensor, positions_T: Tensor) -> Tensor:
    """Rotate the pairs (i, i + R) of each head by the angles of the token's position."""
    pairs = cos_PR.shape[1]
    cos, sin = cos_PR[positions_T][:, None], sin_PR[positions_T][:, None]
    first, second, rest = x_THd.tensor_split([pairs, 2 * pairs], dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
    return rotated.to(x_THd.dtype)
