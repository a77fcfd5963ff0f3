"""The definition of what happens between the first projections of latent attention and attention.

T tokens, C width of the fused projections, H heads, d width of a query head, k of its part that is not rotated, L width
of a cache row (for `key_up`: of its latent part), R rotated pairs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_kernels.head_linear.reference import head_linear
from moiety_kernels.rms_norm.reference import rms_norm
from moiety_kernels.rope.reference import rope

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from moiety_kernels.latent_input.plan import LatentInputPlan


def latent_input(
    input_TC: Tensor,
    plan: LatentInputPlan,
    cos_PR: Tensor,
    sin_PR: Tensor,
    positions_T: Tensor,
    cache_NPL: Tensor,
    slots_T: Tensor,
    normalize: Callable[[Tensor, Tensor, float], Tensor] = rms_norm,
) -> Tensor:
    """Normalise, rotate and store what goes into the cache; return what is left of the input, the queries' part."""
    latent_width, rotated_width = plan.latent_norm.shape[0], 2 * cos_PR.shape[1]
    query, latent, rotated = input_TC.tensor_split([-latent_width - rotated_width, -rotated_width], dim=1)
    rotated = rope(rotated.unsqueeze(1), cos_PR, sin_PR, positions_T).squeeze(1)
    row_TL = torch.cat((normalize(latent, plan.latent_norm, plan.norm_eps), rotated), dim=1)
    _store(row_TL.to(cache_NPL.dtype), cache_NPL.flatten(0, 1), slots_T)
    return query if plan.query_norm is None else normalize(query, plan.query_norm, plan.norm_eps)


def _store(row_TL: Tensor, rows: Tensor, slots_T: Tensor) -> None:
    """Write each row to its slot, if that is not negative. On a GPU nothing may wait to learn which those are: a row
    that goes nowhere is the first token's once more, and if that goes nowhere, what the first slot holds already."""
    first_L = torch.where(slots_T[0] < 0, rows[0], row_TL[0])
    nowhere_T = slots_T < 0
    rows.index_copy_(
        0,
        torch.where(nowhere_T, slots_T[0].clamp(min=0), slots_T),
        torch.where(nowhere_T[:, None], first_L, row_TL),
    )


def latent_queries(
    q_THd: Tensor,
    key_up_HLk: Tensor,
    cos_PR: Tensor,
    sin_PR: Tensor,
    positions_T: Tensor,
    multiply: Callable[[Tensor, Tensor], Tensor] = head_linear,
) -> Tensor:
    """Each head's query: its first part taken into the latent space, then its rotated part."""
    plain, rotated = q_THd.tensor_split([key_up_HLk.shape[2]], dim=2)
    return torch.cat((multiply(plain, key_up_HLk), rope(rotated, cos_PR, sin_PR, positions_T)), dim=2)
