"""Attention over latent rows in Triton: the kernels of paged attention with one key-value head, whose values are the
first part of its keys and so are not read again. The README beside this has the design.

T tokens, S sequences, B blocks a row, H query heads, N blocks, P places a block, L width of a cache row, V of a value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_kernels.gpu.targets import SM_80, SM_90, SM_100
from moiety_kernels.paged_attention import kernel as paged
from moiety_kernels.paged_attention.cases import variant
from moiety_kernels.paged_attention.kernels.decode import decode, merge
from moiety_kernels.paged_attention.kernels.prefill import prefill
from moiety_kernels.paged_attention.tiles import Shape, parts

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.gpu.cases import CompileCase

MAX_WIDTH = 576


def fits(q_THL: Tensor, cache_NPL: Tensor, value_width: int) -> bool:
    """Whether the kernels take these: the value must be all of the first of a row's two parts."""
    return (
        torch.version.hip is None  # whose shared memory is too small for such rows
        and q_THL.dtype in (torch.float16, torch.bfloat16)
        and cache_NPL.dtype is q_THL.dtype
        and cache_NPL.shape[2] <= MAX_WIDTH
        and parts(cache_NPL.shape[2])[0] == value_width
        and q_THL.stride(2) == cache_NPL.stride(2) == 1
    )


def mla_attention(
    q_THL: Tensor,
    cache_NPL: Tensor,
    value_width: int,
    query_start_S1: Tensor,
    context_len_S: Tensor,
    block_table_SB: Tensor,
    scale: float,
    *,
    num_decode: int,
    max_context: int,
) -> Tensor:
    """out_THV, contiguous."""
    k_NGPL = cache_NPL.unsqueeze(1)
    return paged.paged_attention(
        q_THL,
        k_NGPL,
        k_NGPL[..., :value_width],
        query_start_S1,
        context_len_S,
        block_table_SB,
        scale,
        None,
        None,
        None,
        None,
        num_decode=num_decode,
        max_context=max_context,
        shared=True,
    )


def compile_cases() -> list[CompileCase]:
    """DeepSeek's rows of 512 + 64, with as many heads as a small model has and as a large one has."""
    few, many = (Shape(1, heads, 576, 512, 2, 2, False, True) for heads in (16, 128))
    found = [variant(merge, "128 heads", many)]
    for target in (SM_80, SM_90, SM_100):
        found += [variant(decode, "16 heads", few, target), variant(decode, "128 heads", many, target)]
        found.append(variant(prefill, "128 heads", many, target))
    return found
