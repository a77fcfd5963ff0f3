"""Attention over a paged cache in Triton, in the manner of FlashAttention. The README beside this has the design.

T tokens, S sequences, B blocks a row, H query heads, G key-value heads, d width of a key, v of a value, N blocks, P places
a block.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import triton
from torch import Tensor

from moiety_kernels.gpu.cases import CompileCase
from moiety_kernels.gpu.targets import SM_90
from moiety_kernels.paged_attention.decode import decode, merge
from moiety_kernels.paged_attention.prefill import prefill
from moiety_kernels.paged_attention.tiles import (
    MAX_WIDTH,
    Device,
    Shape,
    Tiles,
    decode_programs,
    decode_tiles,
    parts,
    prefill_tiles,
    splits,
)

_SPAN = 256  # decoding sequences that no new compilation is needed for
_MERGED_ROWS = 8
QUANTISED = (torch.float8_e4m3fn, torch.int8)


def fits(q_THd: Tensor, k_cache_NGPd: Tensor, v_cache_NGPv: Tensor) -> bool:
    """Whether the kernels take these."""
    key_width, value_width = k_cache_NGPd.shape[3], v_cache_NGPv.shape[3]
    return (
        q_THd.dtype in (torch.float16, torch.bfloat16)
        and (k_cache_NGPd.dtype is q_THd.dtype or (k_cache_NGPd.dtype in QUANTISED and _converts(k_cache_NGPd)))
        and max(key_width, value_width) <= MAX_WIDTH
        and q_THd.stride(2) == k_cache_NGPd.stride(3) == v_cache_NGPv.stride(3) == 1
    )


def paged_attention(
    q_THd: Tensor,
    k_cache_NGPd: Tensor,
    v_cache_NGPv: Tensor,
    query_start_S1: Tensor,
    context_len_S: Tensor,
    block_table_SB: Tensor,
    scale: float,
    window: int | None,
    sinks_H: Tensor | None,
    k_scale_G: Tensor | None,
    v_scale_G: Tensor | None,
    *,
    num_decode: int,
    max_context: int,
    shared: bool = False,
) -> Tensor:
    """out_THv, contiguous. `shared`: a value is the first of its key's `parts`. Launches depend on nothing but shapes,
    `num_decode` and `max_context`."""
    _, num_kv_heads, places, key_width = k_cache_NGPd.shape
    num_tokens, num_heads = q_THd.shape[:2]
    shape = Shape(
        num_kv_heads,
        num_heads // num_kv_heads,
        key_width,
        v_cache_NGPv.shape[3],
        q_THd.itemsize,
        k_cache_NGPd.itemsize,
        window is not None,
        shared,
    )
    device = _device(q_THd.device)
    out_THv = q_THd.new_empty(num_tokens, num_heads, shape.value_width)
    tensors = q_THd, k_cache_NGPd, v_cache_NGPv, out_THv
    extras = sinks_H, k_scale_G, v_scale_G
    strides = *q_THd.stride()[:2], *k_cache_NGPd.stride()[:3], *v_cache_NGPv.stride()[:3]
    common = window or 0, scale / math.log(2), block_table_SB.stride(0), *strides
    flags = {"PLACES": places, "SINKS": sinks_H is not None, "SCALED": k_scale_G is not None}
    if num_decode:
        sequences = query_start_S1, context_len_S, block_table_SB
        _decode(tensors, sequences, extras, common, flags, shape, device, num_decode, max_context)
    num_chunks = context_len_S.shape[0] - num_decode
    if num_chunks and num_tokens > num_decode:
        tiles = prefill_tiles(shape, device)
        num_tiles = (num_tokens - num_decode) * shape.group // tiles.rows + num_chunks
        prefill[(num_kv_heads, num_tiles)](
            *tensors,
            query_start_S1[num_decode:],
            context_len_S[num_decode:],
            block_table_SB[num_decode:],
            *extras,
            num_chunks,
            *common,
            **flags,
            **_constants(shape, tiles),
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )
    return out_THv


def _decode(
    tensors: tuple[Tensor, ...],
    sequences: tuple[Tensor, ...],
    extras: tuple[Tensor | None, ...],
    common: tuple[Any, ...],
    flags: dict[str, Any],
    shape: Shape,
    device: Device,
    num_decode: int,
    max_context: int,
) -> None:
    tiles, rule = decode_tiles(shape, device), splits(shape)
    num_heads, num_splits = shape.num_kv_heads * shape.group, rule.bound(max_context)
    items = num_decode * num_splits * shape.num_kv_heads * -(-shape.group // tiles.rows)
    q_THd, out_THv = tensors[0], tensors[3]
    alone = num_splits == 1
    part_SIHv, weight_SIH = (
        q_THd.new_empty(0 if alone else num_decode, num_splits, num_heads, *rest, dtype=torch.float32)
        for rest in ((shape.value_width,), ())
    )
    split = {"LEAST": rule.least, "MOST": rule.most}
    decode[(decode_programs(items, tiles, shape, device),)](
        *tensors,
        part_SIHv,
        weight_SIH,
        *sequences,
        *extras,
        num_decode,
        num_heads,
        num_splits,
        *common,
        **flags,
        **_constants(shape, tiles),
        **split,
        SPAN=max(_SPAN, triton.next_power_of_2(num_decode)),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    if alone:
        return
    first, second = parts(shape.value_width)
    merge[(num_decode, triton.cdiv(num_heads, _MERGED_ROWS))](
        part_SIHv,
        weight_SIH,
        out_THv,
        *sequences[:2],
        num_heads,
        num_splits,
        common[0],
        V=shape.value_width,
        V0=first,
        V1=second,
        WINDOWED=shape.windowed,
        BN=tiles.keys,
        ROWS=_MERGED_ROWS,
        **split,
    )


def _constants(shape: Shape, tiles: Tiles) -> dict[str, Any]:
    return {
        "GROUP": shape.group,
        "D": shape.key_width,
        "D0": tiles.key_parts[0],
        "D1": tiles.key_parts[1],
        "V": shape.value_width,
        "V0": tiles.value_parts[0],
        "V1": tiles.value_parts[1],
        "SHARED": shape.shared,
        "WINDOWED": shape.windowed,
        "BM": tiles.rows,
        "BN": tiles.keys,
    }


def _converts(cache: Tensor) -> bool:
    """Whether the GPU knows the type."""
    return (
        cache.dtype is torch.int8 or torch.version.hip is not None or torch.cuda.get_device_capability(cache.device) >= (8, 9)
    )


@functools.cache
def _device(device: torch.device) -> Device:
    if device.type == "cpu":  # interpreted: few programs, so that each of them takes several items
        return Device(1, SM_90.max_shared_bytes)
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", 64 * 1024)
    return Device(properties.multi_processor_count, shared)
