"""Detection of rows of a step's logits with a value that is not finite, from which no token can be drawn.

L rows, V vocabulary.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor


def finite_rows(logits_LV: np.ndarray) -> np.ndarray:
    """Return bool [L]: whether all values of the row are finite.

    The sum of a row with a value that is not finite is not finite either, so one pass suffices for most steps. A sum
    can overflow where all values are finite, so minimum and maximum, which propagate a NaN, decide on the others.
    """
    if not logits_LV.size:
        return np.ones(len(logits_LV), dtype=np.bool_)
    with np.errstate(invalid="ignore", over="ignore"):
        if all(map(math.isfinite, np.add.reduce(logits_LV, axis=1).tolist())):
            return np.ones(len(logits_LV), dtype=np.bool_)
        found: np.ndarray = np.isfinite(logits_LV.min(axis=1)) & np.isfinite(logits_LV.max(axis=1))
    return found


def finite_rows_on_device(logits_LV: Tensor) -> Tensor:
    """Return the same on the logits' device, without waiting for it."""
    if logits_LV.device.type == "cpu":
        return torch.from_numpy(finite_rows(logits_LV.numpy()))
    if not logits_LV.numel():
        return torch.ones(logits_LV.shape[0], dtype=torch.bool, device=logits_LV.device)
    lowest_L, highest_L = torch.aminmax(logits_LV, dim=-1)
    return lowest_L.isfinite() & highest_L.isfinite()
