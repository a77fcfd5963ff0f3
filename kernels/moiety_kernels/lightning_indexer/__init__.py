"""The lightning indexer of sparse attention: index keys in the cache, and the selection of tokens by their scores."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_kernels.checks import require, require_shape
from moiety_kernels.lazy_imports import lazy_import
from moiety_kernels.lightning_indexer import reference

if TYPE_CHECKING:
    from torch import Tensor


_cpu = lazy_import(__name__, "cpu")
_kernel = lazy_import(__name__, "kernel")


def store_index_keys(
    key_TI: Tensor,
    norm_weight_I: Tensor,
    norm_bias_I: Tensor,
    eps: float,
    cos_PR: Tensor,
    sin_PR: Tensor,
    positions_T: Tensor,
    keys_NPI: Tensor,
    slots_T: Tensor,
) -> None:
    """Apply layer norm to index keys, rotate their first 2R entries and store them in their slots.

    A slot is block · P + offset; a token with a negative slot is not stored. positions_T and slots_T are int64, cosines
    and sines float32.
    """
    require_shape("slots", slots_T, (key_TI.shape[0],))
    require_shape("positions", positions_T, (key_TI.shape[0],))
    require_shape("keys", keys_NPI, (-1, -1, key_TI.shape[1]))
    require_shape("norm_weight", norm_weight_I, (key_TI.shape[1],))
    require_shape("norm_bias", norm_bias_I, (key_TI.shape[1],))
    require(2 * cos_PR.shape[1] <= key_TI.shape[1], "the rotated width is larger than an index key")
    reference.store_index_keys(key_TI, norm_weight_I, norm_bias_I, eps, cos_PR, sin_PR, positions_T, keys_NPI, slots_T)


def select_tokens(
    q_THI: Tensor,
    weight_TH: Tensor,
    keys_NPI: Tensor,
    query_start_S1: Tensor,
    context_len_S: Tensor,
    block_table_SB: Tensor,
    top_k: int,
    *,
    max_context: int,
) -> tuple[Tensor, Tensor]:
    """Return (slot_TK, count_T), both int32: the cache slots of the tokens that each query attends to, and how many.

    A query sees the tokens up to its own, and selects the `top_k` with the largest Σ_h weight[h] · max(q_h · key, 0),
    of equal scores the earlier one; if it sees no more than `top_k`, all of them. K is the smaller of `top_k` and
    `max_context`. Slots are in the order of positions; those after a row's count are void. query_start_S1,
    context_len_S and block_table_SB are int32, as in `paged_attention`; weight_TH is float32. A row's selection is the
    same whatever other rows there are.
    """
    tokens, heads, width = q_THI.shape
    require_shape("weight", weight_TH, (tokens, heads))
    require_shape("keys", keys_NPI, (-1, -1, width))
    require_shape("query_start", query_start_S1, (context_len_S.shape[0] + 1,))
    require(top_k > 0, "top_k must be positive")
    require(weight_TH.dtype is torch.float32, "weights of index queries must be float32")
    sequences, most = (query_start_S1, context_len_S, block_table_SB), min(top_k, max_context)
    if q_THI.is_cpu and _cpu().fits(q_THI, weight_TH, keys_NPI, block_table_SB, max_context):
        fast: tuple[Tensor, Tensor] = _cpu().select_tokens(q_THI, weight_TH, keys_NPI, *sequences, most)
        return fast
    if q_THI.is_cuda and _kernel().fits(q_THI, weight_TH, keys_NPI):
        on_gpu: tuple[Tensor, Tensor] = _kernel().select_tokens(
            q_THI, weight_TH, keys_NPI, *sequences, most, max_context
        )
        return on_gpu
    return reference.select_tokens(q_THI, weight_TH, keys_NPI, *sequences, most)
