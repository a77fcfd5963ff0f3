"""The definition of storing keys and values. T tokens, G key-value heads, P places a block, N blocks, d head width."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def kv_store(k_TGd: Tensor, v_TGd: Tensor, k_cache_NGPd: Tensor, v_cache_NGPd: Tensor, slots_T: Tensor) -> None:
    """Write token t's key and value to slot slots_T[t] = block · P + place; nowhere if that is negative."""
    places = k_cache_NGPd.shape[2]
    kept_T = slots_T >= 0
    block_t, place_t = slots_T[kept_T] // places, slots_T[kept_T] % places
    k_cache_NGPd[block_t, :, place_t] = k_TGd[kept_T].to(k_cache_NGPd.dtype)
    v_cache_NGPd[block_t, :, place_t] = v_TGd[kept_T].to(v_cache_NGPd.dtype)
