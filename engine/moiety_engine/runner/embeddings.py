"""From hidden states to embeddings.

E prompts that end in this step, D model width.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def embeddings(hidden_ED: Tensor) -> list[bytes]:
    """The hidden states of the prompts' last tokens, after the final norm, as unit vectors of little-endian float32."""
    unit_ED = functional.normalize(hidden_ED.float(), dim=-1).cpu().numpy().astype("<f4", copy=False)
    return [row_D.tobytes() for row_D in unit_ED]
