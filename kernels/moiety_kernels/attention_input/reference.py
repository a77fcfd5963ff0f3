"""Definition of the steps between the fused projection and attention.

T tokens, C fused width of queries, keys and values, H query heads, G key-value heads, d head width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moiety_kernels.kv_store.reference import kv_store
from moiety_kernels.rms_norm.reference import rms_norm
from moiety_kernels.rope.reference import rope

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.attention_input.plan import AttentionInputPlan
    from moiety_kernels.kv_store.caches import LayerCache
    from moiety_kernels.rope.inputs import RotaryInputs


def attention_input(
    qkv_TC: Tensor, plan: AttentionInputPlan, rotary: RotaryInputs, cache: LayerCache, slots_T: Tensor
) -> Tensor:
    """Normalise, clip and rotate queries and keys, store keys and values, return q_THd."""
    (num_kv_heads, width), value_width = cache.k_NGPd.shape[1::2], cache.v_NGPd.shape[3]
    k_at, v_at = (qkv_TC.shape[1] - num_kv_heads * further for further in (width + value_width, value_width))
    q, k, v = qkv_TC.tensor_split([k_at, v_at], dim=1)
    tokens = qkv_TC.shape[0]
    if plan.rotates_first:
        q = rope(q.reshape(tokens, -1, width), *rotary)
        k = rope(k.reshape(tokens, -1, width), *rotary)
    if plan.q_norm is not None and plan.k_norm is not None:
        q = rms_norm(q.reshape(tokens, -1, plan.q_norm.shape[0]), plan.q_norm, plan.norm_eps)
        k = rms_norm(k.reshape(tokens, -1, plan.k_norm.shape[0]), plan.k_norm, plan.norm_eps)
    if plan.v_norm is not None:
        v = rms_norm(v.reshape(tokens, -1, value_width), plan.v_norm, plan.norm_eps)
    if plan.clip is not None:
        q, k, v = (part.clamp(-plan.clip, plan.clip) for part in (q, k, v))
    q_THd, k_TGd = q.reshape(tokens, -1, width), k.reshape(tokens, -1, width)
    if not plan.rotates_first:
        q_THd, k_TGd = (rope(part, *rotary) for part in (q_THd, k_TGd))
    kv_store(k_TGd, v.reshape(tokens, -1, value_width), cache, slots_T)
    return q_THd
