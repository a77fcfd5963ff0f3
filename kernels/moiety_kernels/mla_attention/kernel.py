"""Attention over latent rows in Triton: the kernels of paged attention with one key-value head.

Values are the first part of the keys and so are not read again. The README beside this file describes the design. T
tokens, S sequences, B blocks per row, H query heads, N blocks, P slots per block, L width of a cache row, V of a value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_kernels.gpu.targets import SM_80, SM_90, SM_100
from moiety_kernels.kv_store.caches import LayerCache
from moiety_kernels.paged_attention import kernel as paged
from moiety_kernels.paged_attention.cases import of_shard, variant
from moiety_kernels.paged_attention.inputs import AttentionParameters
from moiety_kernels.paged_attention.kernels.decode import decode, merge
from moiety_kernels.paged_attention.kernels.prefill import prefill
from moiety_kernels.paged_attention.tiles import Shape, parts

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.gpu.cases import CompileCase
    from moiety_kernels.kv_store.caches import LatentCache
    from moiety_kernels.paged_attention.inputs import AttentionMetadata

MAX_WIDTH = 576


def fits(q_THL: Tensor, cache: LatentCache) -> bool:
    """Return whether the kernels support these tensors."""
    rows_NPL = cache.rows_NPL
    return (
        q_THL.dtype in (torch.float16, torch.bfloat16)
        and (rows_NPL.dtype is q_THL.dtype or (rows_NPL.itemsize == 1 and paged.converts(rows_NPL)))
        and fits_widths(rows_NPL.shape[2], cache.latent_width)
        and q_THL.stride(2) == rows_NPL.stride(2) == 1
    )


def fits_widths(width: int, value_width: int) -> bool:
    """Return whether the kernels support rows of this width on the GPU here.

    The value must be all of the first of a row's two parts.
    """
    fits_memory = torch.version.hip is None  # on AMD, shared memory is too small for these rows
    return fits_memory and width <= MAX_WIDTH and parts(width)[0] == value_width < width


def mla_attention(
    q_THL: Tensor, cache: LatentCache, metadata: AttentionMetadata, scale: float, lse_TH: Tensor | None = None
) -> Tensor:
    """Return out_THV, contiguous. `lse_TH`: see `moiety_kernels.paged_attention.kernel`."""
    k_NGPL = cache.rows_NPL.unsqueeze(1)
    rows = LayerCache(
        k_NGPL,
        k_NGPL[..., : cache.latent_width],
        cache.rotated_scale_NP,  # for the rest of a key after its value
        cache.latent_scale_NP,
    )
    return paged.paged_attention(q_THL, rows, metadata, AttentionParameters(scale), shared=True, lse_TH=lse_TH)


def compile_cases() -> list[CompileCase]:
    """Return the cases of DeepSeek's rows of 512 + 64, with few heads and with many, in 16 and 8 bits."""
    few, many = (Shape(1, heads, 576, 512, 2, 2, False, True) for heads in (16, 128))
    narrow = Shape(1, 128, 576, 512, 2, 1, False, True)
    found = [variant(merge, "128 heads", many)]
    for target in (SM_80, SM_90, SM_100):
        found += [variant(decode, "16 heads", few, target), variant(decode, "128 heads", many, target)]
        found.append(variant(prefill, "128 heads", many, target))
    found += [variant(kernel, "16 heads, shards", of_shard(few), SM_90) for kernel in (decode, prefill, merge)]
    for target, kind in ((SM_80, "int8"), (SM_90, "int8"), (SM_90, "fp8"), (SM_100, "fp8")):
        found += [variant(kernel, f"128 heads, {kind}", narrow, target) for kernel in (decode, prefill)]
    return found
