"""Embeddings from hidden states.

E prompts that end in this step, D model width.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moiety_kernels.rms_norm import rms_norm

_NORM_EPSILON = 1e-30  # epsilon under the square root, so that a row of zeros stays zero


def unit_vectors(hidden_ED: Tensor) -> Tensor:
    """Return the hidden states of the prompts' last tokens, after the final norm, as float32 unit vectors.

    Each row is summed by itself: torch's summation of a row depends on the other rows of the batch.
    """
    width = hidden_ED.shape[1]
    share_D = torch.full((width,), width**-0.5, device=hidden_ED.device)
    return rms_norm(hidden_ED.float(), share_D, _NORM_EPSILON)


def as_bytes(unit_ED: Tensor) -> list[bytes]:
    """Return vectors in host memory as little-endian float32. A vector that is not finite becomes empty bytes."""
    rows = unit_ED.numpy().astype("<f4", copy=False)
    return [row_D.tobytes() if np.isfinite(row_D).all() else b"" for row_D in rows]
