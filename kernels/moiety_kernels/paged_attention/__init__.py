"""Causal attention over a paged key-value cache: prefill chunks and single decode tokens in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_kernels.checks import require, require_shape
from moiety_kernels.kv_store import require_slots
from moiety_kernels.lazy_imports import lazy_import
from moiety_kernels.paged_attention import batched, reference

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.kv_store.caches import LayerCache
    from moiety_kernels.paged_attention.inputs import AttentionMetadata, AttentionParameters

EIGHT_BITS = (torch.float8_e4m3fn, torch.int8)  # types that a cache may have whatever the queries' type


_cpu = lazy_import(__name__, "cpu")
_kernel = lazy_import(__name__, "kernel")


def paged_attention(
    q_THd: Tensor, cache: LayerCache, metadata: AttentionMetadata, parameters: AttentionParameters
) -> Tensor:
    """Return attention of each sequence's queries, its last tokens in the cache, to positions up to their own.

    Slots beyond a sequence's context, and blocks behind the window of its first query, may have any content. An 8-bit
    cache (float8_e4m3fn, int8) is multiplied by its scales, float32, both or none; a bfloat16 cache goes with float32
    queries on a CPU. Raises KernelInputError for other types, and for shapes that do not go together.
    """
    require_agreement(q_THd, cache, parameters.sinks_H)
    require(metadata.num_shards == 1, "a cache in several shards needs shard_attention")
    args = q_THd, cache, metadata, parameters
    if q_THd.is_cpu and cache.k_scale_NGP is None and _cpu().fits(q_THd, cache, metadata.block_table_SB):
        fast: Tensor = _cpu().paged_attention(*args)
        return fast
    if q_THd.is_cuda and _kernel().fits(q_THd, cache):
        on_gpu: Tensor = _kernel().paged_attention(*args)
        return on_gpu
    if q_THd.is_cuda:
        return batched.paged_attention(*args)
    return reference.paged_attention(*args)


def require_agreement(q_THd: Tensor, cache: LayerCache, sinks_H: Tensor | None) -> None:
    """Raise KernelInputError for queries, caches and sinks of types or shapes that do not go together."""
    k_NGPd, k_scale_NGP, v_scale_NGP = cache.k_NGPd, cache.k_scale_NGP, cache.v_scale_NGP
    dtype, num_heads, num_kv_heads = k_NGPd.dtype, q_THd.shape[1], k_NGPd.shape[1]
    require(num_heads % num_kv_heads == 0, "query heads must be a multiple of key-value heads")
    require_slots(k_NGPd, cache.v_NGPd)
    require(cache.v_NGPd.dtype is dtype, "the key and the value cache must have one dtype")
    require(
        dtype is q_THd.dtype or dtype in EIGHT_BITS or (q_THd.is_cpu and dtype is torch.bfloat16),
        "the cache must have the queries' dtype, float8_e4m3fn or int8, or bfloat16 on a CPU",
    )
    require((k_scale_NGP is None) == (v_scale_NGP is None), "give scales of keys and of values, or neither")
    require(dtype is not torch.int8 or k_scale_NGP is not None, "an int8 cache needs the scales of keys and values")
    if sinks_H is None and k_scale_NGP is None:
        return
    for name, given, shape in (
        ("sinks", sinks_H, (num_heads,)),
        ("k_scale", k_scale_NGP, k_NGPd.shape[:3]),
        ("v_scale", v_scale_NGP, k_NGPd.shape[:3]),
    ):
        if given is not None:
            require_shape(name, given, tuple(shape))
            require(
                given.dtype is torch.float32 and given.is_contiguous(), "sinks and scales must be float32, contiguous"
            )
