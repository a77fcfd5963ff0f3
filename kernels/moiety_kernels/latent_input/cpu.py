"""Operations before latent attention on a CPU: one pass over a token's row, and one over its queries.

T tokens, C fused width, H heads, d width of a query head, L width of a cache row, P slots per block, R rotated pairs.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import torch

from moiety_kernels.cpu.compiling import jit, task_address
from moiety_kernels.cpu.emitter import LANES
from moiety_kernels.cpu.memory import load_f64, load_i64
from moiety_kernels.cpu.rotation import rotate_heads
from moiety_kernels.cpu.team import team
from moiety_kernels.cpu.vectors import copy_row, narrow_row, sum_squares, weigh_row
from moiety_kernels.head_linear import cpu as head_linear

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.latent_input.plan import LatentInputPlan

_INPUT = struct.Struct("14qd")
_QUERIES = struct.Struct("11q")
_BLOCK = 16  # tokens per task


def fits(
    input_TC: Tensor,
    plan: LatentInputPlan,
    cos_PR: Tensor,
    positions_T: Tensor,
    cache_NPL: Tensor,
    slots_T: Tensor,
) -> bool:
    """Return whether `latent_input` supports these tensors."""
    widths = plan.latent_norm.shape[0], 2 * cos_PR.shape[1], input_TC.shape[1] - cache_NPL.shape[2]
    return (
        all(t.dtype is torch.float32 for t in (input_TC, cos_PR))
        and cache_NPL.dtype in (torch.float32, torch.bfloat16)
        and all(t.dtype is torch.int64 for t in (positions_T, slots_T))
        and all(width % LANES == 0 for width in widths)
        and input_TC.shape[0] > 0
        and all(t.is_contiguous() for t in (input_TC, cos_PR, positions_T, cache_NPL, slots_T))
    )


def latent_input(
    input_TC: Tensor,
    plan: LatentInputPlan,
    cos_PR: Tensor,
    sin_PR: Tensor,
    positions_T: Tensor,
    cache_NPL: Tensor,
    slots_T: Tensor,
) -> Tensor:
    """Return the queries' part as a view of the input."""
    tokens, fused = input_TC.shape
    query_width = fused - cache_NPL.shape[2]
    team().run(
        task_address(_input_task),
        -(-tokens // _BLOCK),
        _INPUT,
        input_TC.data_ptr(),
        cache_NPL.data_ptr(),
        positions_T.data_ptr(),
        slots_T.data_ptr(),
        cos_PR.data_ptr(),
        sin_PR.data_ptr(),
        plan.latent_norm.data_ptr(),
        0 if plan.query_norm is None else plan.query_norm.data_ptr(),
        tokens,
        fused,
        query_width,
        plan.latent_norm.shape[0],
        cos_PR.shape[1],
        cache_NPL.itemsize,
        plan.norm_eps,
    )
    return input_TC.as_strided((tokens, query_width), (fused, 1))


def fits_queries(q_THd: Tensor, key_up_HLk: Tensor, cos_PR: Tensor, positions_T: Tensor) -> bool:
    """Return whether `latent_queries` supports these tensors."""
    return (
        cos_PR.dtype is torch.float32
        and positions_T.dtype is torch.int64
        and 2 * cos_PR.shape[1] % LANES == 0
        and cos_PR.is_contiguous()
        and positions_T.is_contiguous()
        and head_linear.fits(q_THd, key_up_HLk, key_up_HLk.shape[2])
    )


def latent_queries(q_THd: Tensor, key_up_HLk: Tensor, cos_PR: Tensor, sin_PR: Tensor, positions_T: Tensor) -> Tensor:
    """Return the queries, contiguous."""
    tokens, heads, _ = q_THd.shape
    latent_width, plain_width = key_up_HLk.shape[1:]
    out_THL = torch.empty(tokens, heads, latent_width + 2 * cos_PR.shape[1])
    head_linear.multiply_heads(q_THd, key_up_HLk, out_THL)
    team().run(
        task_address(_queries_task),
        -(-tokens // _BLOCK),
        _QUERIES,
        q_THd.data_ptr() + 4 * plain_width,
        out_THL.data_ptr() + 4 * latent_width,
        positions_T.data_ptr(),
        cos_PR.data_ptr(),
        sin_PR.data_ptr(),
        tokens,
        heads,
        4 * q_THd.stride(0),
        4 * q_THd.stride(1),
        4 * out_THL.shape[2],
        cos_PR.shape[1],
    )
    return out_THL


@jit
def _normalize(row: int, width: int, weight: int, eps: float) -> None:
    factor = 1.0 / (sum_squares(row, width) / width + eps) ** 0.5
    weigh_row(row, width, factor, weight, row)


def _input_task(args: int, task: int, scratch: int) -> None:
    rows, cache, positions, slots = load_i64(args, 0), load_i64(args, 1), load_i64(args, 2), load_i64(args, 3)
    cos, sin, latent_norm, query_norm = load_i64(args, 4), load_i64(args, 5), load_i64(args, 6), load_i64(args, 7)
    tokens, fused, query_width = load_i64(args, 8), load_i64(args, 9), load_i64(args, 10)
    latent_width, pairs, size, eps = load_i64(args, 11), load_i64(args, 12), load_i64(args, 13), load_f64(args, 14)
    width = latent_width + 2 * pairs
    for t in range(task * _BLOCK, min(tokens, (task + 1) * _BLOCK)):
        query = rows + 4 * fused * t
        latent = query + 4 * query_width
        if query_norm:
            _normalize(query, query_width, query_norm, eps)
        _normalize(latent, latent_width, latent_norm, eps)
        at = 4 * pairs * load_i64(positions, t)
        rotate_heads(latent + 4 * latent_width, 1, 2 * pairs, pairs, cos + at, sin + at)
        slot = load_i64(slots, t)
        if slot >= 0 and size == 4:
            copy_row(latent, width, cache + 4 * width * slot)
        elif slot >= 0:
            narrow_row(latent, width, cache + size * width * slot)


def _queries_task(args: int, task: int, scratch: int) -> None:
    q, out, positions, cos, sin = (
        load_i64(args, 0),
        load_i64(args, 1),
        load_i64(args, 2),
        load_i64(args, 3),
        load_i64(args, 4),
    )
    tokens, heads, token_bytes, head_bytes = load_i64(args, 5), load_i64(args, 6), load_i64(args, 7), load_i64(args, 8)
    out_bytes, pairs = load_i64(args, 9), load_i64(args, 10)
    for t in range(task * _BLOCK, min(tokens, (task + 1) * _BLOCK)):
        at = 4 * pairs * load_i64(positions, t)
        for head in range(heads):
            target = out + (t * heads + head) * out_bytes
            copy_row(q + t * token_bytes + head * head_bytes, 2 * pairs, target)
            rotate_heads(target, 1, 2 * pairs, pairs, cos + at, sin + at)
