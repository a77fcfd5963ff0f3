"""Definition of the KV store. T tokens, G key-value heads, P slots per block, N blocks, d head width."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.kv_store.caches import LayerCache

FLOAT8_MAX = torch.finfo(torch.float8_e4m3fn).max


LARGEST = 127  # largest int8


def kv_store(k_TGd: Tensor, v_TGd: Tensor, cache: LayerCache, slots_T: Tensor) -> None:
    """Write token t's key and value to slot slots_T[t] = block · P + offset; a negative slot writes nothing.

    Values beyond float8's range become its largest. In int8, each key and each value has the scale that maps its
    largest entry to 127.
    """
    places = cache.k_NGPd.shape[2]
    kept_T = slots_T >= 0
    block_t, place_t = slots_T[kept_T] // places, slots_T[kept_T] % places
    for rows_TGd, cache_NGPd, scale_NGP in (
        (k_TGd[kept_T], cache.k_NGPd, cache.k_scale_NGP),
        (v_TGd[kept_T], cache.v_NGPd, cache.v_scale_NGP),
    ):
        if cache_NGPd.dtype is torch.float8_e4m3fn:
            rows_TGd = rows_TGd.clamp(-FLOAT8_MAX, FLOAT8_MAX)  # noqa: PLW2901 - narrowed, not another
        elif scale_NGP is not None:
            largest_TG = rows_TGd.float().abs().amax(-1)
            scale_TG = torch.where(largest_TG > 0, largest_TG, 1.0) / LARGEST
            scale_NGP[block_t, :, place_t] = scale_TG
            rows_TGd = torch.floor(rows_TGd.float() / scale_TG.unsqueeze(-1) + 0.5)  # noqa: PLW2901 - likewise
        cache_NGPd[block_t, :, place_t] = rows_TGd.to(cache_NGPd.dtype)
