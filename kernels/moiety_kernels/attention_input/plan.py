"""Operations of a layer on its queries, keys and values before attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moiety_kernels.checks import require

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionInputPlan:
    """Normalisation and clipping of queries, keys and values.

    `q_norm` and `k_norm`, float32: RMS weights as wide as one head, or as all heads together, or None. `v_norm`: RMS
    weights as wide as one head's value, or None. Values beyond
    ±clip are clipped afterwards. `rotates_first`: the rotation comes before normalisation, which is then that of
    heads, without clipping.
    """

    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    norm_eps: float = 0.0
    clip: float | None = None
    rotates_first: bool = False
    v_norm: Tensor | None = None

    def __post_init__(self) -> None:
        require(not self.rotates_first or self.clip is None, "what is rotated first cannot be clipped")
