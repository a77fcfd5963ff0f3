"""LoRA products on a CPU: each token is a task, and each of its rows is read once and written once per rank.

T tokens, K pairs per token, S slots, E experts, P parts, r rank, D input and N output width. A pair is a token and one
of its experts; without experts each token is one pair. Products outside the experts are one job per layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from moiety_kernels.cpu.compiling import jit
from moiety_kernels.cpu.memory import load_f32, load_i32, load_i64, store_f32, store_i64
from moiety_kernels.cpu.structs import Address, Int64, Int64x3, address_of
from moiety_kernels.cpu.team import MAX_TASKS, team
from moiety_kernels.cpu.values import LANES
from moiety_kernels.cpu.vectors import add_scaled_row, dot_tile

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.low_rank.factors import Factors

_COLUMNS = 4  # inner values computed at once
MAX_PARTS, MAX_INNER = 3, 4096


class LowRankArguments(NamedTuple):
    """Arguments of the products of one layer's factors."""

    out_TN: Address  # float32; a row for each pair if `per_pair`
    x_TD: Address  # float32; rows of pairs if there is a `place_P`
    down_SRD: Address  # float32, R = E · P · r
    up_SrN: Address  # float32
    slot_T: Address  # int64; negative: the token has no adapter
    expert_TK: Address  # int32, or 0
    place_P: Address  # int64 row of x for each pair, or 0
    weight_TK: Address  # float32, or 0
    out_stride: Int64  # bytes from one row of the output to the next
    x_stride: Int64
    top_k: Int64  # K
    experts: Int64  # E
    rank: Int64  # r
    width: Int64  # D
    per_pair: Int64
    parts: Int64  # P
    widths: Int64x3  # of the parts of N


_dots = dot_tile(1, _COLUMNS, widen=False)


def takes(factors: Factors) -> bool:
    """Return whether the code here supports factors of this shape."""
    down_SRD, up_SrN = factors.down_SRD, factors.up_SrN
    return (
        down_SRD.dtype is torch.float32
        and down_SRD.is_contiguous()
        and up_SrN.is_contiguous()
        and down_SRD.shape[2] % LANES == 0
        and all(width % LANES == 0 for width in factors.widths)
        and factors.rank % _COLUMNS == 0
        and down_SRD.shape[1] <= MAX_INNER
        and len(factors.widths) <= MAX_PARTS
    )


def fits(x_TD: Tensor, out_TN: Tensor, factors: Factors, slot_T: Tensor) -> bool:
    """Return whether `add` supports these tensors."""
    return (
        x_TD.dtype is torch.float32
        and takes(factors)
        and slot_T.dtype is torch.int64
        and slot_T.is_contiguous()
        and 0 < x_TD.shape[0] < MAX_TASKS
        and x_TD.stride(1) == 1
        and out_TN.stride(1) == 1
    )


def add(out_TN: Tensor, x_TD: Tensor, factors: Factors, slot_T: Tensor) -> None:
    """Add out[t] += up[slot[t]] · down[slot[t]] · x[t] for the tokens with a slot."""
    _run(out_TN, out_TN.stride(0), x_TD.data_ptr(), x_TD.stride(0), factors, slot_T)


def spread(out_PN: Tensor, x_TD: Tensor, factors: Factors, slot_T: Tensor, expert_TK: Tensor | None) -> None:
    """Write out[t · K + k], the k-th expert's factors applied to x[t], for tokens with a slot; skip the others."""
    _run(out_PN, out_PN.stride(0), x_TD.data_ptr(), x_TD.stride(0), factors, slot_T, expert_TK, per_pair=True)


def gather(
    out_TN: Tensor,
    inner_RF: tuple[int, int],
    place_P: int,
    factors: Factors,
    slot_T: Tensor,
    expert_TK: Tensor | None,
    weight_TK: Tensor | None,
) -> None:
    """Add out[t] += Σ_k weight · the k-th expert's factors applied to the pair's row, for tokens with a slot.

    `inner_RF`: address and width of rows; `place_P`: the address of each pair's row index.
    """
    address, width = inner_RF
    _run(
        out_TN, out_TN.stride(0), address, width, factors, slot_T, expert_TK, place=place_P,
        weight=address_of(weight_TK),
    )  # fmt: skip


def _run(
    out: Tensor,
    out_stride: int,
    x: int,
    x_stride: int,
    factors: Factors,
    slot_T: Tensor,
    expert_TK: Tensor | None = None,
    *,
    per_pair: bool = False,
    place: int = 0,
    weight: int = 0,
) -> None:
    top_k = 1 if expert_TK is None else expert_TK.shape[1]
    first, second, third, *_ = *factors.widths, *[0] * MAX_PARTS
    team().run(
        _task,
        slot_T.shape[0],
        LowRankArguments(
            out_TN=out.data_ptr(),
            x_TD=x,
            down_SRD=factors.down_SRD.data_ptr(),
            up_SrN=factors.up_SrN.data_ptr(),
            slot_T=slot_T.data_ptr(),
            expert_TK=address_of(expert_TK),
            place_P=place,
            weight_TK=weight,
            out_stride=4 * out_stride,
            x_stride=4 * x_stride,
            top_k=top_k,
            experts=factors.num_experts,
            rank=factors.rank,
            width=factors.down_SRD.shape[2],
            per_pair=per_pair,
            parts=len(factors.widths),
            widths=(first, second, third),
        ),
    )


def _task(args: LowRankArguments, task: int, scratch: int) -> None:
    slot, top_k = load_i64(args.slot_T, task), args.top_k
    if slot < 0:
        return
    expert_TK, place_P, weight_TK = args.expert_TK, args.place_P, args.weight_TK
    for pair in range(task * top_k, (task + 1) * top_k):
        expert = load_i32(expert_TK, pair) if expert_TK else 0
        if expert < 0:
            continue
        source = load_i64(place_P, pair) if place_P else task
        per_pair = args.per_pair
        out = args.out_TN + args.out_stride * (pair if per_pair else task)
        if per_pair:
            _clear(args, out)
        x_D = args.x_TD + args.x_stride * source
        factor = load_f32(weight_TK, pair) if weight_TK else 1.0
        _add_one(args, slot * args.experts + expert, x_D, factor, out, scratch)


@jit
def _clear(args: LowRankArguments, out: int) -> None:
    total = 0
    for part in range(args.parts):
        total += load_i64(args.widths, part)
    for i in range(total):
        store_f32(out, i, 0.0)


@jit
def _add_one(args: LowRankArguments, index: int, x_D: int, factor: float, out: int, scratch: int) -> None:
    """Add out += factor · up · down · x. Scratch: the address of x, then the inner values."""
    rank, width, parts = args.rank, args.width, args.parts
    total = 0
    for part in range(parts):
        total += load_i64(args.widths, part)
    down = args.down_SRD + 4 * index * parts * rank * width
    up = args.up_SrN + 4 * index * rank * total
    inner = scratch + 64
    store_i64(scratch, 0, x_D)
    for j in range(0, parts * rank, _COLUMNS):
        _dots(scratch, down + 4 * j * width, 4 * width, width, inner + 4 * j, 4 * _COLUMNS)
    start = 0
    for part in range(parts):
        columns = load_i64(args.widths, part)
        for j in range(rank):
            value = load_f32(inner, part * rank + j) * factor
            row = up + 4 * (j * total + start)
            add_scaled_row(out + 4 * start, row, columns, value, out + 4 * start)
        start += columns
