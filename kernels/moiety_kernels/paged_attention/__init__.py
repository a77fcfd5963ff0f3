"""Causal attention over a paged key-value cache: chunks of prompts and single decode tokens in one call."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from moiety_kernels.checks import require, require_shape
from moiety_kernels.paged_attention import batched, reference

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor


@functools.cache
def _cpu() -> ModuleType:
    from moiety_kernels.paged_attention import cpu  # noqa: PLC0415 - numba, which a GPU has no use for

    return cpu


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
    *,
    num_decode: int = 0,
    max_query: int,
    max_context: int,
) -> Tensor:
    """Attention of each sequence's queries, its last tokens in the cache, to what is at or before them.

    query_start_S1, context_len_S and block_table_SB are int32. Of the sequences the first `num_decode` have one query
    each; `max_query` and `max_context` bound the queries and the context of any sequence, so nothing has to ask the
    device. `window`: a query sees so many positions, itself included. `sinks_H`, float32: a score for each query head
    that takes its share of the softmax and adds nothing. Slots beyond a sequence's context are never read.
    """
    require(q_THd.shape[1] % k_cache_NGPd.shape[1] == 0, "query heads must be a multiple of key-value heads")
    require(k_cache_NGPd.shape == v_cache_NGPd.shape, "the key and the value cache must have one shape")
    require_shape("query_start", query_start_S1, (context_len_S.shape[0] + 1,))
    if sinks_H is not None:
        require_shape("sinks", sinks_H, (q_THd.shape[1],))
        require(sinks_H.dtype is torch.float32, "sinks must be float32")
    if q_THd.is_cpu and _cpu().fits(q_THd, k_cache_NGPd, v_cache_NGPd, block_table_SB):
        fast: Tensor = _cpu().paged_attention(
            q_THd, k_cache_NGPd, v_cache_NGPd, query_start_S1, context_len_S, block_table_SB, scale, window, sinks_H
        )
        return fast
    if q_THd.is_cuda:
        return batched.paged_attention(
            q_THd,
            k_cache_NGPd,
            v_cache_NGPd,
            query_start_S1,
            context_len_S,
            block_table_SB,
            scale,
            window,
            sinks_H,
            num_decode=num_decode,
            max_query=max_query,
            max_context=max_context,
        )
    return reference.paged_attention(
        q_THd, k_cache_NGPd, v_cache_NGPd, query_start_S1, context_len_S, block_table_SB, scale, window, sinks_H
    )
