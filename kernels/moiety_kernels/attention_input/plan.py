"""Operations of a layer on its queries, keys and values before attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionInputPlan:
    """Normalisation and clipping of queries, keys and values.

    `q_norm` and `k_norm`, float32: RMS weights as wide as one head, or as all heads together, or None. Values beyond
    ±clip are clipped afterwards.
    """

    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    norm_eps: float = 0.0
    clip: float | None = None
