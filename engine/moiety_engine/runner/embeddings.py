"""From hidden states to embeddings.

E prompts that end in this step, D model width.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moiety_kernels.rms_norm import rms_norm

_LEAST = 1e-30  # under the root, so that a row of zeros stays one


def unit_vectors(hidden_ED: Tensor) -> Tensor:
    """The hidden states of the prompts' last tokens, after the final norm, as unit vectors, float32. A row is summed by
    itself: torch would sum it otherwise among others."""
    width = hidden_ED.shape[1]
    share_D = torch.full((width,), width**-0.5, device=hidden_ED.device)
    return rms_norm(hidden_ED.float(), share_D, _LEAST)


def as_bytes(unit_ED: Tensor) -> list[bytes]:
    """Return vectors in host memory as little-endian float32; one that is not finite as no bytes."""
    rows = unit_ED.numpy().astype("<f4", copy=False)
    return [row_D.tobytes() if np.isfinite(row_D).all() else b"" for row_D in rows]
