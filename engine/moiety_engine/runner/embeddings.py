"""From hidden states to embeddings.

E prompts that end in this step, D model width.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def unit_vectors(hidden_ED: Tensor) -> Tensor:
    """The hidden states of the prompts' last tokens, after the final norm, as unit vectors, float32."""
    return functional.normalize(hidden_ED.float(), dim=-1)


def as_bytes(unit_ED: Tensor) -> list[bytes]:
    """Vectors in host memory as little-endian float32."""
    return [row_D.tobytes() for row_D in unit_ED.numpy().astype("<f4", copy=False)]
