"""Attention over selected latent rows in Triton.

A program takes one query, a tile of its heads and a split of its slots. The loop over rows is that of
`paged_attention`, for blocks of one slot; decodes are cut into splits and merged. T tokens, K selected slots, H query
heads, L width of a cache row, V of a value.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from moiety_kernels.gpu.cases import CompileCase
from moiety_kernels.gpu.targets import SM_80, SM_90, SM_100
from moiety_kernels.mla_attention.kernel import fits
from moiety_kernels.paged_attention.kernels.decode import _visible, merge
from moiety_kernels.paged_attention.kernels.softmax import UNSEEN, attend, load_rows, start_sums, store_rows
from moiety_kernels.paged_attention.tiles import (
    MERGED_ROWS,
    Device,
    Shape,
    Tiles,
    constants,
    constants_of_merge,
    decode_tiles,
)

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.kv_store.caches import LatentCache

__all__ = ["fits", "sparse_mla_attention"]

_LEAST, _MOST = 512, 32  # slots of a split, splits of a query
_WHOLE = 1 << 30  # slots of a split where a query is not cut
_BLACKWELL = (10, 0)  # compute capability
_MAX_ROWS = 32  # of a tile with 32 keys on Blackwell


def sparse_mla_attention(
    q_THL: Tensor, cache: LatentCache, slot_TK: Tensor, count_T: Tensor, scale: float, *, num_decode: int
) -> Tensor:
    """Return out_THV, contiguous. Launches depend only on shapes and `num_decode`."""
    (tokens, heads, width), rows_NPL, value_width = q_THL.shape, cache.rows_NPL, cache.latent_width
    shape = Shape(1, heads, width, value_width, q_THL.itemsize, rows_NPL.itemsize, False, True)
    tiles = _tiles(shape, *_device(q_THL.device))
    out_THV = q_THL.new_empty(tokens, heads, value_width)
    factor, row = scale / math.log(2), rows_NPL.stride(1)
    flags = constants(shape, tiles) | {"SCALED": cache.latent_scale_NP is not None}
    num_splits = max(1, min(_MOST, triton.cdiv(slot_TK.shape[1], _LEAST)))
    part_SIHV, weight_SIH = (
        q_THL.new_empty(num_decode, num_splits, heads, *rest, dtype=torch.float32) for rest in ((value_width,), ())
    )
    for first, end, splits in ((0, num_decode, num_splits), (num_decode, tokens, 0)):
        if first == end:
            continue
        attend_to_slots[(end - first, triton.cdiv(heads, tiles.rows), max(1, splits))](
            q_THL[first:end],
            rows_NPL,
            out_THV[first:end],
            part_SIHV,
            weight_SIH,
            slot_TK[first:end],
            count_T[first:end],
            cache.rotated_scale_NP,  # for the rest of a key after its value
            cache.latent_scale_NP,
            heads,
            splits,
            factor,
            slot_TK.stride(0),
            q_THL.stride(0),
            q_THL.stride(1),
            row,
            **_known(flags, is_split=splits > 0),
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )
    if num_decode:
        token_T = torch.arange(num_decode, dtype=torch.int32, device=q_THL.device)
        merge[(num_decode, triton.cdiv(heads, MERGED_ROWS))](
            part_SIHV,
            weight_SIH,
            out_THV,
            token_T,
            count_T,
            heads,
            num_splits,
            0,
            **constants_of_merge(shape, tiles),
            LEAST=_LEAST,
            MOST=_MOST,
        )
    return out_THV


def _known(flags: dict[str, Any], *, is_split: bool) -> dict[str, Any]:
    """Return the constants of `attend_to_slots` among those of an attention layer."""
    known = flags | {"LEAST": _LEAST if is_split else _WHOLE, "MOST": _MOST if is_split else 1, "SPLIT": is_split}
    return {name: value for name, value in known.items() if name in attend_to_slots.arg_names}


def _tiles(shape: Shape, device: Device, on_blackwell: bool) -> Tiles:
    """Return the tiles of latent rows, with no more rows than one query has heads.

    On Blackwell, whose sums are not in registers while they are multiplied, 32 keys at once spill.
    """
    tiles = decode_tiles(shape, device)
    tiles = replace(tiles, rows=min(tiles.rows, max(16, triton.next_power_of_2(shape.group))))
    return replace(tiles, keys=16) if on_blackwell and tiles.rows > _MAX_ROWS else tiles


@functools.cache
def _device(device: torch.device) -> tuple[Device, bool]:
    """Return the GPU, and whether it is Blackwell or newer."""
    if device.type == "cpu":  # interpreted
        return Device(1, SM_90.max_shared_bytes), False
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    found = Device(properties["multiprocessor_count"], properties["max_shared_mem"])
    return found, torch.cuda.get_device_capability(device) >= _BLACKWELL


@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=["p_slot", "p_count"])
def attend_to_slots(
    p_q,
    p_cache,
    p_out,
    p_part,
    p_weight,
    p_slot,
    p_count,
    p_k_scale,
    p_v_scale,
    num_heads,
    num_splits,
    factor,
    slot_row,
    q_token,
    q_head,
    row,
    D: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    V: tl.constexpr,
    V0: tl.constexpr,
    V1: tl.constexpr,
    SCALED: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    SPLIT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Attend to one split of a query's slots; without SPLIT to all of them, which gives the output itself."""
    token = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2)
    count = tl.load(p_count + token)
    _, length, splits = _visible(count, 0, False, LEAST, MOST, BN)
    if split >= splits:
        return
    i_head = tl.program_id(1) * BM + tl.arange(0, BM)
    m_head = i_head < num_heads
    p_row = p_q + token * q_token + i_head * q_head
    b_q0 = load_rows(p_row, m_head, 0, D0, D)
    b_q1 = load_rows(p_row, m_head, D0, D1, D)
    b_max = tl.full([BM], UNSEEN, tl.float32)
    b_total = tl.zeros([BM], tl.float32)
    b_sum0, b_sum1 = start_sums(BM, V0, V1)
    begin = split * length
    b_sum0, b_sum1, b_max, b_total = attend(
        *(b_sum0, b_sum1, b_max, b_total, b_q0, b_q1, i_head, 0),
        *(begin, begin, tl.minimum(begin + length, count), factor),
        *(p_cache, p_cache, p_k_scale, p_v_scale, 1, p_slot + token * slot_row, row, row, row, row),
        *(1, D, D0, D1, V, V0, V1, True, BN, True, False, False, SCALED),
    )
    b_total = tl.where(b_total > 0, b_total, 1.0)  # a query without slots
    b_scale = 1.0 / b_total
    b_sum0 *= b_scale[:, None]
    if SPLIT:
        i_part = (token * num_splits + split) * num_heads + i_head
        store_rows(p_part + i_part * V, m_head, b_sum0, b_sum1, V, V0, V1)
        tl.store(p_weight + i_part, b_max + tl.log2(b_total), mask=m_head)
    else:
        store_rows(p_out + (token * num_heads + i_head) * V, m_head, b_sum0, b_sum1, V, V0, V1)


def compile_cases() -> list[CompileCase]:
    """Return the cases of DeepSeek's rows of 512 + 64, with few heads and with many, in 16 and 8 bits."""
    types = {"p_q": "*bf16", "p_out": "*bf16", "factor": "fp32", "p_slot": "*i32", "p_count": "*i32"}
    types |= dict.fromkeys(("p_part", "p_weight", "p_k_scale", "p_v_scale"), "*fp32")
    found = []
    wide, narrow = [(16, "*bf16", 2), (128, "*bf16", 2)], [(128, "*fp8e4nv", 1), (128, "*i8", 1)]
    for target, layers in ((SM_80, wide), (SM_90, wide + narrow), (SM_100, wide + narrow)):
        device = Device(1, target.max_shared_bytes)
        for heads, cache, itemsize in layers:
            shape = Shape(1, heads, 576, 512, 2, itemsize, False, True)
            tiles = _tiles(shape, device, target is SM_100)
            for is_split in (True, False):
                known = _known(constants(shape, tiles) | {"SCALED": cache == "*i8"}, is_split=is_split)
                given = [one for one in attend_to_slots.arg_names if one not in known]
                kind = "decode" if is_split else "prefill"
                found.append(
                    CompileCase(
                        f"{kind} {heads} heads, {cache[1:]} ({target.name})",
                        attend_to_slots,
                        {one: (types | {"p_cache": cache}).get(one, "i32") for one in given},
                        known,
                        num_warps=tiles.num_warps,
                        num_stages=tiles.num_stages,
                        only=(target.name,),
                        unaligned=frozenset(("p_slot", "p_count", "num_splits", "num_heads")),
                    )
                )
    return found
