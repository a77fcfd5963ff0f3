"""Fused query-key-value projection to rotated queries and a written KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moiety_kernels.attention_input import reference
from moiety_kernels.attention_input.plan import AttentionInputPlan
from moiety_kernels.checks import require, require_shape
from moiety_kernels.kv_store import require_scales, require_slots
from moiety_kernels.lazy_imports import lazy_import

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AttentionInputPlan", "attention_input"]


_cpu = lazy_import(__name__, "cpu")
_kernel = lazy_import(__name__, "kernel")


def attention_input(
    qkv_TC: Tensor,
    plan: AttentionInputPlan,
    cos_PR: Tensor,
    sin_PR: Tensor,
    positions_T: Tensor,
    k_cache_NGPd: Tensor,
    v_cache_NGPd: Tensor,
    slots_T: Tensor,
    k_scale_NGP: Tensor | None = None,
    v_scale_NGP: Tensor | None = None,
) -> Tensor:
    """Normalise, clip and rotate queries and keys, store keys and values in their slots, return the queries q_THd.

    A row holds all query heads, then all key heads, then all value heads. A slot is block · P + offset; a token with a
    negative slot is not stored. qkv may be overwritten. positions_T and slots_T are int64, cos and sin float32. An int8
    cache has scales beside it, as in `kv_store`.
    """
    require_shape("slots", slots_T, (qkv_TC.shape[0],))
    require_shape("positions", positions_T, (qkv_TC.shape[0],))
    require_slots(k_cache_NGPd, v_cache_NGPd)
    require(2 * cos_PR.shape[1] <= k_cache_NGPd.shape[3], "the rotated width is larger than the head width")
    require_scales(k_cache_NGPd, k_scale_NGP, v_scale_NGP)
    scales = k_scale_NGP, v_scale_NGP
    if qkv_TC.is_cpu and _cpu().fits(qkv_TC, cos_PR, positions_T, k_cache_NGPd, v_cache_NGPd, slots_T):
        fast: Tensor = _cpu().attention_input(
            qkv_TC, plan, cos_PR, sin_PR, positions_T, k_cache_NGPd, v_cache_NGPd, slots_T
        )
        return fast
    if qkv_TC.is_cuda and _kernel().fits(qkv_TC, cos_PR) and _kernel().fits_plan(plan):
        on_gpu: Tensor = _kernel().attention_input(
            qkv_TC, plan, cos_PR, sin_PR, positions_T, k_cache_NGPd, v_cache_NGPd, slots_T, *scales
        )
        return on_gpu
    return reference.attention_input(
        qkv_TC, plan, cos_PR, sin_PR, positions_T, k_cache_NGPd, v_cache_NGPd, slots_T, *scales
    )
