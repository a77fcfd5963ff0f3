"""Preparation of queries, keys and values for attention on a CPU, in one pass over a token's row, in place.

T tokens, C fused width, G key-value heads, d head width, P slots per block, N blocks, R rotated pairs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from moiety_kernels.checks import has_contiguous_blocks
from moiety_kernels.cpu.compiling import jit
from moiety_kernels.cpu.memory import load_f32, load_i64, store_f32
from moiety_kernels.cpu.rotation import rotate_heads
from moiety_kernels.cpu.structs import Address, Float64, Int64, address_of
from moiety_kernels.cpu.team import team
from moiety_kernels.cpu.values import LANES
from moiety_kernels.cpu.vectors import copy_row, narrow_row, sum_squares, weigh_row

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.attention_input.plan import AttentionInputPlan
    from moiety_kernels.kv_store.caches import LayerCache
    from moiety_kernels.rope.inputs import RotaryInputs

_BLOCK = 16  # tokens per task


class AttentionInputArguments(NamedTuple):
    """Arguments of the preparation of T rows of queries, keys and values."""

    qkv_TC: Address  # float32, contiguous
    k_cache_NGPd: Address
    v_cache_NGPd: Address
    positions_T: Address  # int64
    slots_T: Address  # int64; negative: the token's key and value are not kept
    cos_PR: Address  # float32, a row for each position
    sin_PR: Address
    q_norm: Address  # float32 weight of the queries' normalisation, or 0
    k_norm: Address
    v_norm: Address  # of each head's value, as wide as it, or 0
    q_norm_width: Int64  # entries that are normalised together
    k_norm_width: Int64
    tokens: Int64  # T
    heads: Int64  # of queries
    kv_heads: Int64  # G
    width: Int64  # d
    value_width: Int64  # of a value
    k_block: Int64  # bytes from one block of the key cache to the next
    v_block: Int64
    places: Int64  # P, slots per block
    pairs: Int64  # R, rotated
    cache_itemsize: Int64  # 4 for float32, 2 for bfloat16
    eps: Float64
    clip: Float64  # or infinity
    rotates_first: Int64  # whether the rotation comes before the normalisation


def fits(qkv_TC: Tensor, rotary: RotaryInputs, cache: LayerCache, slots_T: Tensor) -> bool:
    """Return whether `attention_input` supports these tensors."""
    cos_PR, _, positions_T = rotary
    return (
        qkv_TC.dtype is torch.float32
        and cache.k_NGPd.dtype in (torch.float32, torch.bfloat16)
        and cos_PR.dtype is torch.float32
        and positions_T.dtype is torch.int64
        and slots_T.dtype is torch.int64
        and qkv_TC.shape[0] > 0
        and cache.k_NGPd.shape[3] % LANES == 0
        and cache.v_NGPd.shape[3] % LANES == 0
        and has_contiguous_blocks(cache.k_NGPd)
        and has_contiguous_blocks(cache.v_NGPd)
        and qkv_TC.is_contiguous()
        and cos_PR.is_contiguous()
        and positions_T.is_contiguous()
        and slots_T.is_contiguous()
    )


def attention_input(
    qkv_TC: Tensor, plan: AttentionInputPlan, rotary: RotaryInputs, cache: LayerCache, slots_T: Tensor
) -> Tensor:
    """Return the queries as a view of qkv."""
    (tokens, fused), (_, num_kv_heads, places, width) = qkv_TC.shape, cache.k_NGPd.shape
    value_width = cache.v_NGPd.shape[3]
    q_width = fused - num_kv_heads * (width + value_width)
    team().run(
        _task,
        -(-tokens // _BLOCK),
        AttentionInputArguments(
            qkv_TC=qkv_TC.data_ptr(),
            k_cache_NGPd=cache.k_NGPd.data_ptr(),
            v_cache_NGPd=cache.v_NGPd.data_ptr(),
            positions_T=rotary.positions_T.data_ptr(),
            slots_T=slots_T.data_ptr(),
            cos_PR=rotary.cos_PR.data_ptr(),
            sin_PR=rotary.sin_PR.data_ptr(),
            q_norm=address_of(plan.q_norm),
            k_norm=address_of(plan.k_norm),
            v_norm=address_of(plan.v_norm),
            q_norm_width=0 if plan.q_norm is None else plan.q_norm.shape[0],
            k_norm_width=0 if plan.k_norm is None else plan.k_norm.shape[0],
            tokens=tokens,
            heads=q_width // width,
            kv_heads=num_kv_heads,
            width=width,
            value_width=value_width,
            k_block=cache.k_NGPd.itemsize * cache.k_NGPd.stride(0),
            v_block=cache.v_NGPd.itemsize * cache.v_NGPd.stride(0),
            places=places,
            pairs=rotary.cos_PR.shape[1],
            cache_itemsize=cache.k_NGPd.itemsize,
            eps=plan.norm_eps,
            clip=math.inf if plan.clip is None else plan.clip,
            rotates_first=plan.rotates_first,
        ),
    )
    return qkv_TC.as_strided((tokens, q_width // width, width), (fused, width, 1))


@jit
def _normalize(row: int, count: int, weight: int, width: int, eps: float) -> None:
    for part in range(count // width):
        start = row + 4 * part * width
        factor = 1.0 / (sum_squares(start, width) / width + eps) ** 0.5
        weigh_row(start, width, factor, weight, start)


@jit
def _keep(row: int, width: int, size: int, target: int) -> None:
    """Write a row to the cache, whose elements have `size` bytes."""
    if size == 4:
        copy_row(row, width, target)
    else:
        narrow_row(row, width, target)


def _task(args: AttentionInputArguments, task: int, scratch: int) -> None:
    qkv_TC, k_cache, v_cache = args.qkv_TC, args.k_cache_NGPd, args.v_cache_NGPd
    positions_T, slots_T, cos_PR, sin_PR = args.positions_T, args.slots_T, args.cos_PR, args.sin_PR
    q_norm, k_norm = args.q_norm, args.k_norm
    tokens, heads, kv_heads = args.tokens, args.heads, args.kv_heads
    width, places, pairs = args.width, args.places, args.pairs
    size, eps, clip = args.cache_itemsize, args.eps, args.clip
    value_width, v_norm = args.value_width, args.v_norm
    fused = heads * width + kv_heads * (width + value_width)
    for t in range(task * _BLOCK, min(tokens, (task + 1) * _BLOCK)):
        q = qkv_TC + 4 * fused * t
        k = q + 4 * heads * width
        v = k + 4 * kv_heads * width
        at = 4 * pairs * load_i64(positions_T, t)
        if args.rotates_first:
            rotate_heads(q, heads + kv_heads, width, pairs, cos_PR + at, sin_PR + at)
        if q_norm:
            _normalize(q, heads * width, q_norm, args.q_norm_width, eps)
            _normalize(k, kv_heads * width, k_norm, args.k_norm_width, eps)
        if v_norm:
            _normalize(v, kv_heads * value_width, v_norm, value_width, eps)
        if clip < math.inf:
            for i in range(fused):
                store_f32(q, i, min(max(load_f32(q, i), -clip), clip))
        if not args.rotates_first:
            rotate_heads(q, heads + kv_heads, width, pairs, cos_PR + at, sin_PR + at)
        slot = load_i64(slots_T, t)
        if slot < 0:
            continue
        k_block, v_block = k_cache + slot // places * args.k_block, v_cache + slot // places * args.v_block
        for head in range(kv_heads):
            row = head * places + slot % places
            _keep(k + 4 * head * width, width, size, k_block + size * row * width)
            _keep(v + 4 * head * value_width, value_width, size, v_block + size * row * value_width)
