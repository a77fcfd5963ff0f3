"""Operations of a latent attention layer on its projections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class LatentInputPlan:
    """RMS weights, float32, of the latent row, and of the queries' latent row if there is one."""

    latent_norm: Tensor
    query_norm: Tensor | None
    norm_eps: float
