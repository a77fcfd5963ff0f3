"""Definition of the steps between the first projections of latent attention and attention.

T tokens, C width of the fused projections, H heads, d width of a query head, k of its part that is not rotated, L width
of a cache row (for `key_up`: of its latent part), R rotated pairs, N blocks, P slots per block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_kernels.head_linear.reference import head_linear
from moiety_kernels.kv_store.reference import FLOAT8_MAX, LARGEST
from moiety_kernels.rms_norm.reference import rms_norm
from moiety_kernels.rope.reference import rope

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from moiety_kernels.kv_store.caches import LatentCache
    from moiety_kernels.latent_input.plan import LatentInputPlan
    from moiety_kernels.rope.inputs import RotaryInputs


def latent_input(
    input_TC: Tensor,
    plan: LatentInputPlan,
    rotary: RotaryInputs,
    cache: LatentCache,
    slots_T: Tensor,
    normalize: Callable[[Tensor, Tensor, float], Tensor] = rms_norm,
) -> Tensor:
    """Normalise, rotate and store the cache's part of the input; return the rest, the queries' part.

    Values beyond float8's range become its largest. In int8, each of a row's two parts has the scale that maps its
    largest entry to 127.
    """
    latent_width, rotated_width = plan.latent_norm.shape[0], 2 * rotary.cos_PR.shape[1]
    query, latent, rotated = input_TC.tensor_split([-latent_width - rotated_width, -rotated_width], dim=1)
    rotated = rope(rotated.unsqueeze(1), *rotary).squeeze(1)
    latent = normalize(latent, plan.latent_norm, plan.norm_eps)
    if cache.latent_scale_NP is not None and cache.rotated_scale_NP is not None:
        of_latent_T1, of_rotated_T1 = scale_of(latent), scale_of(rotated)
        latent, rotated = to_whole(latent, of_latent_T1), to_whole(rotated, of_rotated_T1)
        store_rows(of_latent_T1, cache.latent_scale_NP.view(-1, 1), slots_T)
        store_rows(of_rotated_T1, cache.rotated_scale_NP.view(-1, 1), slots_T)
    row_TL = torch.cat((latent, rotated), dim=1)
    if cache.rows_NPL.dtype is torch.float8_e4m3fn:
        row_TL = row_TL.clamp(-FLOAT8_MAX, FLOAT8_MAX)
    store_rows(row_TL.to(cache.rows_NPL.dtype), cache.rows_NPL.flatten(0, 1), slots_T)
    return query if plan.query_norm is None else normalize(query, plan.query_norm, plan.norm_eps)


def scale_of(part_TL: Tensor) -> Tensor:
    """Return scale_T1, which maps the largest number of a row to the largest int8."""
    largest_T1 = part_TL.float().abs().amax(1, keepdim=True)
    return torch.where(largest_T1 > 0, largest_T1, 1.0) / LARGEST


def to_whole(part_TL: Tensor, scale_T1: Tensor) -> Tensor:
    """Return the nearest integer multiples of the rows' scales, as float32."""
    return torch.floor(part_TL.float() / scale_T1 + 0.5)


def store_rows(row_TL: Tensor, rows: Tensor, slots_T: Tensor) -> None:
    """Write each row to its slot, if the slot is not negative.

    On a GPU the host must not wait to learn which slots are negative. So a row without a slot rewrites the row of the
    first token with a slot, and if there is none, the current contents of the first slot.
    """
    if rows.itemsize == 1:  # as bytes, since torch cannot index-copy float8
        row_TL, rows = row_TL.view(torch.uint8), rows.view(torch.uint8)
    nowhere_T = slots_T < 0
    kept_1 = (~nowhere_T).int().argmax(0, keepdim=True)  # 0 if there is none
    slot_1 = slots_T.index_select(0, kept_1)
    row_1L = torch.where(slot_1 < 0, rows[:1], row_TL.index_select(0, kept_1))
    rows.index_copy_(
        0,
        torch.where(nowhere_T, slot_1.clamp(min=0), slots_T),
        torch.where(nowhere_T[:, None], row_1L, row_TL),
    )


def latent_queries(
    q_THd: Tensor,
    key_up_HLk: Tensor,
    rotary: RotaryInputs,
    multiply: Callable[[Tensor, Tensor], Tensor] = head_linear,
) -> Tensor:
    """Return each head's query: its first part projected into the latent space, then its rotated part."""
    plain, rotated = q_THd.tensor_split([key_up_HLk.shape[2]], dim=2)
    return torch.cat((multiply(plain, key_up_HLk), rope(rotated, *rotary)), dim=2)
