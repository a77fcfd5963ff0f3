"""LoRA products on a CPU: each token is a task, and each of its rows is read once and written once per rank.

T tokens, K pairs per token, S slots, E experts, P parts, r rank, D input and N output width. A pair is a token and one
of its experts; without experts each token is one pair. Products outside the experts are one job per layer.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import torch

from moiety_kernels.cpu.compiling import jit, task_address
from moiety_kernels.cpu.emitter import LANES
from moiety_kernels.cpu.memory import load_f32, load_i32, load_i64, store_f32, store_i64
from moiety_kernels.cpu.team import MAX_TASKS, team
from moiety_kernels.cpu.vectors import add_scaled_row, dot_tile

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.low_rank.factors import Factors

_LAYOUT = struct.Struct("19q")  # the last three are widths
_COLUMNS = 4  # inner values computed at once
MAX_PARTS, MAX_INNER = 3, 4096

# arguments
OUT, X, DOWN, UP, SLOT, CHOSEN, PLACE, WEIGHT = 0, 1, 2, 3, 4, 5, 6, 7
OUT_STRIDE, X_STRIDE, TOP_K, EXPERTS, RANK, WIDTH, PER_PAIR = 8, 9, 10, 11, 12, 13, 14
PARTS, WIDTHS = 15, 16  # followed by MAX_PARTS widths

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
        weight=0 if weight_TK is None else weight_TK.data_ptr(),
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
    widths = factors.widths + (0,) * (MAX_PARTS - len(factors.widths))
    team().run(
        task_address(_task),
        slot_T.shape[0],
        _LAYOUT,
        *(out.data_ptr(), x, factors.down_SRD.data_ptr(), factors.up_SrN.data_ptr(), slot_T.data_ptr()),
        *(0 if expert_TK is None else expert_TK.data_ptr(), place, weight),
        *(4 * out_stride, 4 * x_stride, top_k, factors.num_experts, factors.rank, factors.down_SRD.shape[2]),
        *(per_pair, len(factors.widths), *widths),
    )


def _task(args: int, task: int, scratch: int) -> None:
    slot, top_k = load_i64(load_i64(args, SLOT), task), load_i64(args, TOP_K)
    if slot < 0:
        return
    chosen, place, weights = load_i64(args, CHOSEN), load_i64(args, PLACE), load_i64(args, WEIGHT)
    for pair in range(task * top_k, (task + 1) * top_k):
        expert = load_i32(chosen, pair) if chosen else 0
        if expert < 0:
            continue
        source = load_i64(place, pair) if place else task
        per_pair = load_i64(args, PER_PAIR)
        out = load_i64(args, OUT) + load_i64(args, OUT_STRIDE) * (pair if per_pair else task)
        if per_pair:
            _clear(args, out)
        x = load_i64(args, X) + load_i64(args, X_STRIDE) * source
        factor = load_f32(weights, pair) if weights else 1.0
        _add_one(args, slot * load_i64(args, EXPERTS) + expert, x, factor, out, scratch)


@jit
def _clear(args: int, out: int) -> None:
    total = 0
    for part in range(load_i64(args, PARTS)):
        total += load_i64(args, WIDTHS + part)
    for i in range(total):
        store_f32(out, i, 0.0)


@jit
def _add_one(args: int, index: int, x: int, factor: float, out: int, scratch: int) -> None:
    """Add out += factor · up · down · x. Scratch: the address of x, then the inner values."""
    rank, width, parts = load_i64(args, RANK), load_i64(args, WIDTH), load_i64(args, PARTS)
    total = 0
    for part in range(parts):
        total += load_i64(args, WIDTHS + part)
    down = load_i64(args, DOWN) + 4 * index * parts * rank * width
    up = load_i64(args, UP) + 4 * index * rank * total
    inner = scratch + 64
    store_i64(scratch, 0, x)
    for j in range(0, parts * rank, _COLUMNS):
        _dots(scratch, down + 4 * j * width, 4 * width, width, inner + 4 * j, 4 * _COLUMNS)
    start = 0
    for part in range(parts):
        columns = load_i64(args, WIDTHS + part)
        for j in range(rank):
            value = load_f32(inner, part * rank + j) * factor
            row = up + 4 * (j * total + start)
            add_scaled_row(out + 4 * start, row, columns, value, out + 4 * start)
        start += columns
