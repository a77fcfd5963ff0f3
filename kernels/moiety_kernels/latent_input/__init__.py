"""Operations before multi-head latent attention: write of the cache, and queries in the form of the cache rows."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from moiety_kernels.checks import require, require_shape
from moiety_kernels.head_linear import head_linear
from moiety_kernels.latent_input import reference
from moiety_kernels.latent_input.plan import LatentInputPlan
from moiety_kernels.lazy_imports import lazy_import
from moiety_kernels.rms_norm import rms_norm

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.kv_store.caches import LatentCache
    from moiety_kernels.rope.inputs import RotaryInputs

__all__ = ["LatentInputPlan", "latent_input", "latent_queries"]


_cpu = lazy_import(__name__, "cpu")
_kernel = lazy_import(__name__, "kernel")


def latent_input(
    input_TC: Tensor, plan: LatentInputPlan, rotary: RotaryInputs, cache: LatentCache, slots_T: Tensor
) -> Tensor:
    """Normalise the latent row, rotate the part after it and store both in their slots; return the queries' part.

    The queries' part is the columns before: the queries, or their latent row, normalised if the plan says so.

    The last L columns of a row are for the cache, 2R of them rotated. A slot is block · P + offset; a token with a
    negative slot is not stored. The input may be overwritten. slots_T is int64. Raises
    KernelInputError for other shapes, and unless the cache has scales as `require_latent_scales` says.
    """
    rows_NPL = cache.rows_NPL
    require_shape("slots", slots_T, (input_TC.shape[0],))
    require_shape("positions", rotary.positions_T, (input_TC.shape[0],))
    require_shape("latent_norm", plan.latent_norm, (rows_NPL.shape[2] - 2 * rotary.cos_PR.shape[1],))
    require(input_TC.shape[1] > rows_NPL.shape[2], "the input is no wider than a row of the cache")
    require_latent_scales(cache)
    if input_TC.is_cpu and _cpu().fits(input_TC, plan, rotary, rows_NPL, slots_T):
        fast: Tensor = _cpu().latent_input(input_TC, plan, rotary, cache, slots_T)
        return fast
    if input_TC.is_cuda and _kernel().fits(input_TC, plan, rotary.cos_PR, rows_NPL):
        on_gpu: Tensor = _kernel().latent_input(input_TC, plan, rotary, cache, slots_T)
        return on_gpu
    return reference.latent_input(input_TC, plan, rotary, cache, slots_T, rms_norm)


def require_latent_scales(cache: LatentCache) -> None:
    """Raise KernelInputError unless scales that fit come with an int8 cache, and none with another.

    There is a scale for each of a row's two parts, float32 and contiguous.
    """
    rows_NPL = cache.rows_NPL
    for scale_NP in (cache.latent_scale_NP, cache.rotated_scale_NP):
        require((scale_NP is not None) == (rows_NPL.dtype is torch.int8), "an int8 cache, and no other, has scales")
        if scale_NP is not None:
            require_shape("scale", scale_NP, tuple(rows_NPL.shape[:2]))
            require(scale_NP.dtype is torch.float32 and scale_NP.is_contiguous(), "scales must be float32, contiguous")


def latent_queries(q_THd: Tensor, key_up_HLk: Tensor, rotary: RotaryInputs, *, invariant: bool = False) -> Tensor:
    """Return queries as wide as a cache row: the latent part, then the rotated part, for each token and head.

    They are (Σ_k q[t, h, k] · key_up[h, l, k], then the last 2R entries of q, rotated). Shapes and types are otherwise
    as in `latent_input`, `invariant` as in `head_linear`.
    """
    require_shape("positions", rotary.positions_T, (q_THd.shape[0],))
    require_shape("key_up", key_up_HLk, (q_THd.shape[1], -1, q_THd.shape[2] - 2 * rotary.cos_PR.shape[1]))
    if q_THd.is_cpu and _cpu().fits_queries(q_THd, key_up_HLk, rotary):
        fast: Tensor = _cpu().latent_queries(q_THd, key_up_HLk, rotary)
        return fast
    multiply = functools.partial(head_linear, invariant=invariant)
    return reference.latent_queries(q_THd, key_up_HLk, rotary, multiply)
