"""Operations before latent attention on a CPU: one pass over a token's row, and one over its queries.

T tokens, C fused width, H heads, d width of a query head, L width of a cache row, P slots per block, R rotated pairs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from moiety_kernels.cpu.compiling import jit
from moiety_kernels.cpu.memory import load_i64
from moiety_kernels.cpu.rotation import rotate_heads
from moiety_kernels.cpu.structs import Address, Float64, Int64, address_of
from moiety_kernels.cpu.team import team
from moiety_kernels.cpu.values import LANES
from moiety_kernels.cpu.vectors import copy_row, narrow_row, sum_squares, weigh_row
from moiety_kernels.head_linear import cpu as head_linear

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.kv_store.caches import LatentCache
    from moiety_kernels.latent_input.plan import LatentInputPlan
    from moiety_kernels.rope.inputs import RotaryInputs

_BLOCK = 16  # tokens per task


class LatentInputArguments(NamedTuple):
    """Arguments of the pass over T rows of the input."""

    input_TC: Address  # float32, contiguous
    cache_NPL: Address
    positions_T: Address  # int64
    slots_T: Address  # int64; negative: the token's row is not kept
    cos_PR: Address  # float32, a row for each position
    sin_PR: Address
    latent_norm: Address  # float32 weight of the normalisation of the latent part
    query_norm: Address  # float32 weight of that of the queries' part, or 0
    tokens: Int64  # T
    fused: Int64  # C
    query_width: Int64
    latent_width: Int64
    pairs: Int64  # R
    cache_itemsize: Int64  # 4 for float32, 2 for bfloat16
    eps: Float64


class LatentQueriesArguments(NamedTuple):
    """Arguments of the rotation of T tokens' queries."""

    q_THd: Address  # float32; the rotated part of the first head
    out_THL: Address  # float32; likewise
    positions_T: Address  # int64
    cos_PR: Address  # float32, a row for each position
    sin_PR: Address
    tokens: Int64  # T
    heads: Int64  # H
    token_bytes: Int64  # from one token of q to the next
    head_bytes: Int64  # from one head of q to the next
    out_bytes: Int64  # from one head of the output to the next
    pairs: Int64  # R


def fits(input_TC: Tensor, plan: LatentInputPlan, rotary: RotaryInputs, rows_NPL: Tensor, slots_T: Tensor) -> bool:
    """Return whether `latent_input` supports these tensors."""
    cos_PR, _, positions_T = rotary
    widths = plan.latent_norm.shape[0], 2 * cos_PR.shape[1], input_TC.shape[1] - rows_NPL.shape[2]
    return (
        all(t.dtype is torch.float32 for t in (input_TC, cos_PR))
        and rows_NPL.dtype in (torch.float32, torch.bfloat16)
        and all(t.dtype is torch.int64 for t in (positions_T, slots_T))
        and all(width % LANES == 0 for width in widths)
        and input_TC.shape[0] > 0
        and all(t.is_contiguous() for t in (input_TC, cos_PR, positions_T, rows_NPL, slots_T))
    )


def latent_input(
    input_TC: Tensor, plan: LatentInputPlan, rotary: RotaryInputs, cache: LatentCache, slots_T: Tensor
) -> Tensor:
    """Return the queries' part as a view of the input."""
    tokens, fused = input_TC.shape
    query_width = fused - cache.rows_NPL.shape[2]
    team().run(
        _input_task,
        -(-tokens // _BLOCK),
        LatentInputArguments(
            input_TC=input_TC.data_ptr(),
            cache_NPL=cache.rows_NPL.data_ptr(),
            positions_T=rotary.positions_T.data_ptr(),
            slots_T=slots_T.data_ptr(),
            cos_PR=rotary.cos_PR.data_ptr(),
            sin_PR=rotary.sin_PR.data_ptr(),
            latent_norm=plan.latent_norm.data_ptr(),
            query_norm=address_of(plan.query_norm),
            tokens=tokens,
            fused=fused,
            query_width=query_width,
            latent_width=plan.latent_norm.shape[0],
            pairs=rotary.cos_PR.shape[1],
            cache_itemsize=cache.rows_NPL.itemsize,
            eps=plan.norm_eps,
        ),
    )
    return input_TC.as_strided((tokens, query_width), (fused, 1))


def fits_queries(q_THd: Tensor, key_up_HLk: Tensor, rotary: RotaryInputs) -> bool:
    """Return whether `latent_queries` supports these tensors."""
    cos_PR, _, positions_T = rotary
    return (
        cos_PR.dtype is torch.float32
        and positions_T.dtype is torch.int64
        and 2 * cos_PR.shape[1] % LANES == 0
        and cos_PR.is_contiguous()
        and positions_T.is_contiguous()
        and head_linear.fits(q_THd, key_up_HLk, key_up_HLk.shape[2])
    )


def latent_queries(q_THd: Tensor, key_up_HLk: Tensor, rotary: RotaryInputs) -> Tensor:
    """Return the queries, contiguous."""
    tokens, heads, _ = q_THd.shape
    latent_width, plain_width = key_up_HLk.shape[1:]
    out_THL = torch.empty(tokens, heads, latent_width + 2 * rotary.cos_PR.shape[1])
    head_linear.multiply_heads(q_THd, key_up_HLk, out_THL)
    team().run(
        _queries_task,
        -(-tokens // _BLOCK),
        LatentQueriesArguments(
            q_THd=q_THd.data_ptr() + 4 * plain_width,
            out_THL=out_THL.data_ptr() + 4 * latent_width,
            positions_T=rotary.positions_T.data_ptr(),
            cos_PR=rotary.cos_PR.data_ptr(),
            sin_PR=rotary.sin_PR.data_ptr(),
            tokens=tokens,
            heads=heads,
            token_bytes=4 * q_THd.stride(0),
            head_bytes=4 * q_THd.stride(1),
            out_bytes=4 * out_THL.shape[2],
            pairs=rotary.cos_PR.shape[1],
        ),
    )
    return out_THL


@jit
def _normalize(row: int, width: int, weight: int, eps: float) -> None:
    factor = 1.0 / (sum_squares(row, width) / width + eps) ** 0.5
    weigh_row(row, width, factor, weight, row)


def _input_task(args: LatentInputArguments, task: int, scratch: int) -> None:
    input_TC, cache_NPL, positions_T, slots_T = args.input_TC, args.cache_NPL, args.positions_T, args.slots_T
    cos_PR, sin_PR, latent_norm, query_norm = args.cos_PR, args.sin_PR, args.latent_norm, args.query_norm
    tokens, fused, query_width = args.tokens, args.fused, args.query_width
    latent_width, pairs, size, eps = args.latent_width, args.pairs, args.cache_itemsize, args.eps
    width = latent_width + 2 * pairs
    for t in range(task * _BLOCK, min(tokens, (task + 1) * _BLOCK)):
        query = input_TC + 4 * fused * t
        latent = query + 4 * query_width
        if query_norm:
            _normalize(query, query_width, query_norm, eps)
        _normalize(latent, latent_width, latent_norm, eps)
        at = 4 * pairs * load_i64(positions_T, t)
        rotate_heads(latent + 4 * latent_width, 1, 2 * pairs, pairs, cos_PR + at, sin_PR + at)
        slot = load_i64(slots_T, t)
        if slot >= 0 and size == 4:
            copy_row(latent, width, cache_NPL + 4 * width * slot)
        elif slot >= 0:
            narrow_row(latent, width, cache_NPL + size * width * slot)


def _queries_task(args: LatentQueriesArguments, task: int, scratch: int) -> None:
    q_THd, out_THL, positions_T, cos_PR, sin_PR = args.q_THd, args.out_THL, args.positions_T, args.cos_PR, args.sin_PR
    tokens, heads, token_bytes, head_bytes = args.tokens, args.heads, args.token_bytes, args.head_bytes
    out_bytes, pairs = args.out_bytes, args.pairs
    for t in range(task * _BLOCK, min(tokens, (task + 1) * _BLOCK)):
        at = 4 * pairs * load_i64(positions_T, t)
        for head in range(heads):
            target = out_THL + (t * heads + head) * out_bytes
            copy_row(q_THd + t * token_bytes + head * head_bytes, 2 * pairs, target)
            rotate_heads(target, 1, 2 * pairs, pairs, cos_PR + at, sin_PR + at)
