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

__all__ = ["LatentInputPlan", "latent_input", "latent_queries"]


_cpu = lazy_import(__name__, "cpu")
_kernel = lazy_import(__name__, "kernel")


def latent_input(
    input_TC: Tensor,
    plan: LatentInputPlan,
    cos_PR: Tensor,
    sin_PR: Tensor,
    positions_T: Tensor,
    cache_NPL: Tensor,
    slots_T: Tensor,
    latent_scale_NP: Tensor | None = None,
    rotated_scale_NP: Tensor | None = None,
) -> Tensor:
    """Normalise the latent row, rotate the part after it and store both in their slots; return the queries' part.

    The queries' part is the columns before: the queries, or their latent row, normalised if the plan says so.

    The last L columns of a row are for the cache, 2R of them rotated. A slot is block · P + offset; a token with a
    negative slot is not stored; tokens with slots come first. The input may be overwritten. positions_T and slots_T are
    int64, cos and sin float32. An int8 cache has a scale for each of a row's two parts beside it, float32 and
    contiguous.
    """
    require_shape("slots", slots_T, (input_TC.shape[0],))
    require_shape("positions", positions_T, (input_TC.shape[0],))
    require_shape("latent_norm", plan.latent_norm, (cache_NPL.shape[2] - 2 * cos_PR.shape[1],))
    require(input_TC.shape[1] > cache_NPL.shape[2], "the input is no wider than a row of the cache")
    scales = latent_scale_NP, rotated_scale_NP
    require_latent_scales(cache_NPL, *scales)
    if input_TC.is_cpu and _cpu().fits(input_TC, plan, cos_PR, positions_T, cache_NPL, slots_T):
        fast: Tensor = _cpu().latent_input(input_TC, plan, cos_PR, sin_PR, positions_T, cache_NPL, slots_T)
        return fast
    if input_TC.is_cuda and _kernel().fits(input_TC, plan, cos_PR, cache_NPL):
        on_gpu: Tensor = _kernel().latent_input(
            input_TC, plan, cos_PR, sin_PR, positions_T, cache_NPL, slots_T, *scales
        )
        return on_gpu
    return reference.latent_input(input_TC, plan, cos_PR, sin_PR, positions_T, cache_NPL, slots_T, *scales, rms_norm)


def require_latent_scales(cache_NPL: Tensor, *scales: Tensor | None) -> None:
    """Raise KernelInputError unless scales that fit come with an int8 cache, and none with another."""
    for scale_NP in scales:
        require((scale_NP is not None) == (cache_NPL.dtype is torch.int8), "an int8 cache, and no other, has scales")
        if scale_NP is not None:
            require_shape("scale", scale_NP, tuple(cache_NPL.shape[:2]))
            require(scale_NP.dtype is torch.float32 and scale_NP.is_contiguous(), "scales must be float32, contiguous")


def latent_queries(
    q_THd: Tensor,
    key_up_HLk: Tensor,
    cos_PR: Tensor,
    sin_PR: Tensor,
    positions_T: Tensor,
    *,
    invariant: bool = False,
) -> Tensor:
    """Return queries as wide as a cache row: the latent part, then the rotated part, for each token and head.

    They are (Σ_k q[t, h, k] · key_up[h, l, k], then the last 2R entries of q, rotated). Shapes and types are otherwise
    as in `latent_input`, `invariant` as in `head_linear`.
    """
    require_shape("positions", positions_T, (q_THd.shape[0],))
    require_shape("key_up", key_up_HLk, (q_THd.shape[1], -1, q_THd.shape[2] - 2 * cos_PR.shape[1]))
    if q_THd.is_cpu and _cpu().fits_queries(q_THd, key_up_HLk, cos_PR, positions_T):
        fast: Tensor = _cpu().latent_queries(q_THd, key_up_HLk, cos_PR, sin_PR, positions_T)
        return fast
    multiply = functools.partial(head_linear, invariant=invariant)
    return reference.latent_queries(q_THd, key_up_HLk, cos_PR, sin_PR, positions_T, multiply)
