"""Writes of new keys and values into their slots of the paged KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_kernels.checks import require, require_shape
from moiety_kernels.kv_store import reference
from moiety_kernels.lazy_imports import lazy_import

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.kv_store.caches import LayerCache


_kernel = lazy_import("moiety_kernels.attention_input", "kernel")


def kv_store(k_TGd: Tensor, v_TGd: Tensor, cache: LayerCache, slots_T: Tensor) -> None:
    """Write token t's key and value to slot slots_T[t] = block · P + offset.

    The slots of one call are distinct. A token with a negative slot is not stored. Raises KernelInputError for caches
    or scales of other shapes or types.
    """
    require_shape("slots", slots_T, (k_TGd.shape[0],))
    require_slots(cache.k_NGPd, cache.v_NGPd)
    require_scales(cache.k_NGPd, cache.k_scale_NGP, cache.v_scale_NGP)
    if k_TGd.is_cuda and k_TGd.stride(-1) == v_TGd.stride(-1) == 1:
        _kernel().kv_store(k_TGd, v_TGd, cache, slots_T)
        return
    reference.kv_store(k_TGd, v_TGd, cache, slots_T)


def require_slots(k_cache_NGPd: Tensor, v_cache_NGPv: Tensor) -> None:
    """Raise KernelInputError unless both caches have the same blocks, heads and places; widths may differ."""
    require(
        k_cache_NGPd.shape[:3] == v_cache_NGPv.shape[:3],
        "the key and the value cache must have the same blocks, heads and places",
    )


def require_scales(cache_NGPd: Tensor, k_scale_NGP: Tensor | None, v_scale_NGP: Tensor | None) -> None:
    """Raise KernelInputError unless scales that fit come with an int8 cache, and none with another."""
    if k_scale_NGP is v_scale_NGP is None and cache_NGPd.dtype is not torch.int8:
        return
    for scale_NGP in (k_scale_NGP, v_scale_NGP):
        require((scale_NGP is not None) == (cache_NGPd.dtype is torch.int8), "an int8 cache, and no other, has scales")
        if scale_NGP is not None:
            require_shape("scale", scale_NGP, tuple(cache_NGPd.shape[:3]))
            require(
                scale_NGP.dtype is torch.float32 and scale_NGP.is_contiguous(), "scales must be float32, contiguous"
            )
