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

    from moiety_kernels.kv_store.caches import LayerCache
    from moiety_kernels.rope.inputs import RotaryInputs

__all__ = ["AttentionInputPlan", "attention_input"]


_cpu = lazy_import(__name__, "cpu")
_kernel = lazy_import(__name__, "kernel")


def attention_input(
    qkv_TC: Tensor, plan: AttentionInputPlan, rotary: RotaryInputs, cache: LayerCache, slots_T: Tensor
) -> Tensor:
    """Normalise, clip and rotate queries and keys, store keys and values in their slots, return the queries q_THd.

    A row holds all query heads, then all key heads, then all value heads. A slot is block · P + offset; a token with a
    negative slot is not stored. qkv may be overwritten. slots_T is int64. Raises KernelInputError for other shapes, and
    for caches as `kv_store` does.
    """
    require_shape("slots", slots_T, (qkv_TC.shape[0],))
    require_shape("positions", rotary.positions_T, (qkv_TC.shape[0],))
    require_slots(cache.k_NGPd, cache.v_NGPd)
    require(2 * rotary.cos_PR.shape[1] <= cache.k_NGPd.shape[3], "the rotated width is larger than the head width")
    require_scales(cache.k_NGPd, cache.k_scale_NGP, cache.v_scale_NGP)
    if qkv_TC.is_cpu and _cpu().fits(qkv_TC, rotary, cache, slots_T):
        fast: Tensor = _cpu().attention_input(qkv_TC, plan, rotary, cache, slots_T)
        return fast
    if qkv_TC.is_cuda and _kernel().fits(qkv_TC, rotary.cos_PR) and _kernel().fits_plan(plan):
        on_gpu: Tensor = _kernel().attention_input(qkv_TC, plan, rotary, cache, slots_T)
        return on_gpu
    return reference.attention_input(qkv_TC, plan, rotary, cache, slots_T)
