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

EIGHT_BITS = (torch.float8_e4m3fn, torch.int8)  # types that a cache may have whatever the queries' type


_cpu = lazy_import(__name__, "cpu")
_kernel = lazy_import(__name__, "kernel")


def paged_attention(
    q_THd: Tensor,
    k_cache_NGPd: Tensor,
    v_cache_NGPd: Tensor,
    query_start_S1: Tensor,
    context_len_S: Tensor,
    block_table_SB: Tensor,
    scale: float,
    window: int | None = None,
    sinks_H: Tensor | None = None,
    k_scale_NGP: Tensor | None = None,
    v_scale_NGP: Tensor | None = None,
    *,
    num_decode: int = 0,
    max_query: int,
    max_context: int,
    chunked: bool = False,
    rounds: bool = False,
) -> Tensor:
    """Return attention of each sequence's queries, its last tokens in the cache, to positions up to their own.

    query_start_S1, context_len_S and block_table_SB are int32. The first `num_decode` sequences have one query each;
    `max_query` and `max_context` bound the queries and the context of any sequence, so the host does not read device
    memory. `window`: number of positions that a query sees, its own included; with `chunked`, a query sees those of its
    own chunk of `window` positions (Llama 4). `sinks_H`, float32: a score per query
    head that takes its share of the softmax and adds nothing. Slots beyond a sequence's context, and blocks behind the
    window of its first query, may have any content. An 8-bit cache (float8_e4m3fn, int8) is multiplied by `k_scale` and
    `v_scale`, float32, both or none; a bfloat16 cache goes with float32 queries on a CPU. `rounds`: on a CPU, queries,
    keys, values and weights may be rounded to bfloat16, as on a GPU.
    """
    require_shape("query_start", query_start_S1, (context_len_S.shape[0] + 1,))
    require(scale > 0, "scale must be positive")
    _require_agreement(q_THd, k_cache_NGPd, v_cache_NGPd, sinks_H, k_scale_NGP, v_scale_NGP)
    tensors = q_THd, k_cache_NGPd, v_cache_NGPd, query_start_S1, context_len_S, block_table_SB
    scales = k_scale_NGP, v_scale_NGP
    if q_THd.is_cpu and k_scale_NGP is None and _cpu().fits(q_THd, k_cache_NGPd, v_cache_NGPd, block_table_SB):
        fast: Tensor = _cpu().paged_attention(*tensors, scale, window, sinks_H, chunked=chunked, rounds=rounds)
        return fast
    if q_THd.is_cuda and _kernel().fits(q_THd, k_cache_NGPd, v_cache_NGPd):
        on_gpu: Tensor = _kernel().paged_attention(
            *tensors, scale, window, sinks_H, *scales, num_decode=num_decode, max_context=max_context, chunked=chunked
        )
        return on_gpu
    if q_THd.is_cuda:
        return batched.paged_attention(
            *tensors,
            scale,
            window,
            sinks_H,
            *scales,
            num_decode=num_decode,
            max_query=max_query,
            max_context=max_context,
            chunked=chunked,
        )
    return reference.paged_attention(*tensors, scale, window, sinks_H, *scales, chunked=chunked)


def _require_agreement(
    q_THd: Tensor,
    k_cache_NGPd: Tensor,
    v_cache_NGPd: Tensor,
    sinks_H: Tensor | None,
    k_scale_NGP: Tensor | None,
    v_scale_NGP: Tensor | None,
) -> None:
    dtype, num_heads, num_kv_heads = k_cache_NGPd.dtype, q_THd.shape[1], k_cache_NGPd.shape[1]
    require(num_heads % num_kv_heads == 0, "query heads must be a multiple of key-value heads")
    require_slots(k_cache_NGPd, v_cache_NGPd)
    require(v_cache_NGPd.dtype is dtype, "the key and the value cache must have one dtype")
    require(
        dtype is q_THd.dtype or dtype in EIGHT_BITS or (q_THd.is_cpu and dtype is torch.bfloat16),
        "the cache must have the queries' dtype, float8_e4m3fn or int8, or bfloat16 on a CPU",
    )
    require((k_scale_NGP is None) == (v_scale_NGP is None), "give scales of keys and of values, or neither")
    require(dtype is not torch.int8 or k_scale_NGP is not None, "an int8 cache needs the scales of keys and values")
    for name, given, shape in (
        ("sinks", sinks_H, (num_heads,)),
        ("k_scale", k_scale_NGP, k_cache_NGPd.shape[:3]),
        ("v_scale", v_scale_NGP, k_cache_NGPd.shape[:3]),
    ):
        if given is not None:
            require_shape(name, given, tuple(shape))
            require(
                given.dtype is torch.float32 and given.is_contiguous(), "sinks and scales must be float32, contiguous"
            )
