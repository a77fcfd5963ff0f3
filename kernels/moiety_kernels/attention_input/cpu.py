"""Preparation of queries, keys and values for attention on a CPU, in one pass over a token's row, in place.

T tokens, C fused width, G key-value heads, d head width, P slots per block, N blocks, R rotated pairs.
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING

import torch

from moiety_kernels.cpu.compiling import jit, task_address
from moiety_kernels.cpu.emitter import LANES
from moiety_kernels.cpu.memory import load_f32, load_f64, load_i64, store_f32
from moiety_kernels.cpu.rotation import rotate_heads
from moiety_kernels.cpu.team import team
from moiety_kernels.cpu.vectors import copy_row, narrow_row, sum_squares, weigh_row

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.attention_input.plan import AttentionInputPlan

_LAYOUT = struct.Struct("18q2d")
_BLOCK = 16  # tokens per task


def fits(qkv_TC: Tensor, cos_PR: Tensor, positions_T: Tensor, k_cache_NGPd: Tensor, slots_T: Tensor) -> bool:
    """Return whether `attention_input` supports these tensors."""
    return (
        qkv_TC.dtype is torch.float32
        and k_cache_NGPd.dtype in (torch.float32, torch.bfloat16)
        and cos_PR.dtype is torch.float32
        and positions_T.dtype is torch.int64
        and slots_T.dtype is torch.int64
        and qkv_TC.shape[0] > 0
        and k_cache_NGPd.shape[3] % LANES == 0
        and all(t.is_contiguous() for t in (qkv_TC, cos_PR, positions_T, k_cache_NGPd, slots_T))
    )


def attention_input(
    qkv_TC: Tensor,
    plan: AttentionInputPlan,
    cos_PR: Tensor,
    sin_PR: Tensor,
    positions_T: Tensor,
    k_cache_NGPd: Tensor,
    v_cache_NGPd: Tensor,
    slots_T: Tensor,
) -> Tensor:
    """Return the queries as a view of qkv."""
    tokens, fused = qkv_TC.shape
    _, num_kv_heads, places, width = k_cache_NGPd.shape
    q_width = fused - 2 * num_kv_heads * width
    team().run(
        task_address(_task),
        -(-tokens // _BLOCK),
        _LAYOUT,
        qkv_TC.data_ptr(),
        k_cache_NGPd.data_ptr(),
        v_cache_NGPd.data_ptr(),
        positions_T.data_ptr(),
        slots_T.data_ptr(),
        cos_PR.data_ptr(),
        sin_PR.data_ptr(),
        0 if plan.q_norm is None else plan.q_norm.data_ptr(),
        0 if plan.k_norm is None else plan.k_norm.data_ptr(),
        0 if plan.q_norm is None else plan.q_norm.shape[0],
        0 if plan.k_norm is None else plan.k_norm.shape[0],
        tokens,
        q_width // width,
        num_kv_heads,
        width,
        places,
        cos_PR.shape[1],
        k_cache_NGPd.itemsize,
        plan.norm_eps,
        math.inf if plan.clip is None else plan.clip,
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


def _task(args: int, task: int, scratch: int) -> None:
    qkv, k_cache, v_cache = load_i64(args, 0), load_i64(args, 1), load_i64(args, 2)
    positions, slots, cos, sin = load_i64(args, 3), load_i64(args, 4), load_i64(args, 5), load_i64(args, 6)
    q_norm, k_norm = load_i64(args, 7), load_i64(args, 8)
    tokens, heads, kv_heads = load_i64(args, 11), load_i64(args, 12), load_i64(args, 13)
    width, places, pairs = load_i64(args, 14), load_i64(args, 15), load_i64(args, 16)
    size, eps, clip = load_i64(args, 17), load_f64(args, 18), load_f64(args, 19)
    fused = (heads + 2 * kv_heads) * width
    for t in range(task * _BLOCK, min(tokens, (task + 1) * _BLOCK)):
        q = qkv + 4 * fused * t
        k = q + 4 * heads * width
        if q_norm:
            _normalize(q, heads * width, q_norm, load_i64(args, 9), eps)
            _normalize(k, kv_heads * width, k_norm, load_i64(args, 10), eps)
        if clip < math.inf:
            for i in range(fused):
                store_f32(q, i, min(max(load_f32(q, i), -clip), clip))
        at = 4 * pairs * load_i64(positions, t)
        rotate_heads(q, heads + kv_heads, width, pairs, cos + at, sin + at)
        slot = load_i64(slots, t)
        if slot < 0:
            continue
        place = (slot // places * kv_heads * places + slot % places) * width
        for head in range(kv_heads):
            source, target = k + 4 * head * width, size * (place + head * places * width)
            _keep(source, width, size, k_cache + target)
            _keep(source + 4 * kv_heads * width, width, size, v_cache + target)
