"""The lightning indexer of sparse attention: index keys in the cache, and the selection of tokens by their scores."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_kernels.checks import require, require_shape
from moiety_kernels.lazy_imports import lazy_import
from moiety_kernels.lightning_indexer import reference

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.lightning_indexer.norm import IndexKeyNorm
    from moiety_kernels.paged_attention.inputs import AttentionMetadata
    from moiety_kernels.rope.inputs import RotaryInputs


_cpu = lazy_import(__name__, "cpu")
_kernel = lazy_import(__name__, "kernel")


def store_index_keys(
    key_TI: Tensor, norm: IndexKeyNorm, rotary: RotaryInputs, keys_NPI: Tensor, slots_T: Tensor
) -> None:
    """Apply layer norm to index keys, rotate their first 2R entries and store them in their slots.

    A slot is block · P + offset; a token with a negative slot is not stored. slots_T is int64. Raises KernelInputError
    for shapes that do not go together.
    """
    require_shape("slots", slots_T, (key_TI.shape[0],))
    require_shape("positions", rotary.positions_T, (key_TI.shape[0],))
    require_shape("keys", keys_NPI, (-1, -1, key_TI.shape[1]))
    require_shape("norm_weight", norm.weight_I, (key_TI.shape[1],))
    require_shape("norm_bias", norm.bias_I, (key_TI.shape[1],))
    require(2 * rotary.cos_PR.shape[1] <= key_TI.shape[1], "the rotated width is larger than an index key")
    reference.store_index_keys(key_TI, norm, rotary, keys_NPI, slots_T)


def select_tokens(
    q_THI: Tensor, weight_TH: Tensor, keys_NPI: Tensor, metadata: AttentionMetadata, top_k: int
) -> tuple[Tensor, Tensor]:
    """Return (slot_TK, count_T), both int32: the cache slots of the tokens that each query attends to, and how many.

    A query sees the tokens up to its own, and selects the `top_k` with the largest Σ_h weight[h] · max(q_h · key, 0),
    of equal scores the earlier one; if it sees no more than `top_k`, all of them. K is the smaller of `top_k` and
    `metadata.max_context`. Slots are in the order of positions; those after a row's count are void. weight_TH is
    float32. A row's selection is the same whatever other rows there are. Raises KernelInputError for other types, and
    for shapes that do not go together.
    """
    tokens, heads, width = q_THI.shape
    require_shape("weight", weight_TH, (tokens, heads))
    require_shape("keys", keys_NPI, (-1, -1, width))
    require(top_k > 0, "top_k must be positive")
    require(weight_TH.dtype is torch.float32, "weights of index queries must be float32")
    args = q_THI, weight_TH, keys_NPI, metadata, min(top_k, metadata.max_context)
    if q_THI.is_cpu and _cpu().fits(q_THI, weight_TH, keys_NPI, metadata):
        fast: tuple[Tensor, Tensor] = _cpu().select_tokens(*args)
        return fast
    if q_THI.is_cuda and _kernel().fits(q_THI, weight_TH, keys_NPI):
        on_gpu: tuple[Tensor, Tensor] = _kernel().select_tokens(*args)
        return on_gpu
    return reference.select_tokens(*args)
