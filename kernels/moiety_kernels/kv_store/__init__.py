"""Writing new keys and values into their slots of the paged cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moiety_kernels.asked_for import when_asked
from moiety_kernels.checks import require, require_shape
from moiety_kernels.kv_store import reference

if TYPE_CHECKING:
    from torch import Tensor


_kernel = when_asked("moiety_kernels.attention_input", "kernel")


def kv_store(k_TGd: Tensor, v_TGd: Tensor, k_cache_NGPd: Tensor, v_cache_NGPd: Tensor, slots_T: Tensor) -> None:
    """Write token t's key and value to slot slots_T[t] = block · P + place; slots of one call are distinct. A
    negative slot keeps nothing of its token."""
    require_shape("slots", slots_T, (k_TGd.shape[0],))
    require(k_cache_NGPd.shape == v_cache_NGPd.shape, "the key and the value cache must have one shape")
    if k_TGd.is_cuda and k_TGd.stride(-1) == v_TGd.stride(-1) == 1:
        _kernel().kv_store(k_TGd, v_TGd, k_cache_NGPd, v_cache_NGPd, slots_T)
        return
    reference.kv_store(k_TGd, v_TGd, k_cache_NGPd, v_cache_NGPd, slots_T)
