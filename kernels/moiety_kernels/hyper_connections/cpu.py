"""Hyper-connections on a CPU: a task is a few tokens, whose bits do not depend on other tokens.

T tokens, N streams, D model width, C projections.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from moiety_kernels.causal_conv.cpu import clear_row
from moiety_kernels.cpu.compiling import jit
from moiety_kernels.cpu.memory import load_f32, store_f32
from moiety_kernels.cpu.structs import Address, Float64, Int64
from moiety_kernels.cpu.team import team
from moiety_kernels.cpu.values import LANES
from moiety_kernels.cpu.vectors import add_scaled_row

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 4  # tokens per task


class MixtureArguments(NamedTuple):
    """Arguments of the weights of T tokens' mixtures; all tensors are float32 and contiguous."""

    logits_TC: Address
    scale: Address
    base_C: Address
    pre_TN: Address
    post_TN: Address
    comb_TNN: Address
    tokens: Int64  # T
    streams: Int64  # N
    columns: Int64  # C
    iterations: Int64
    eps: Float64


class StreamArguments(NamedTuple):
    """Arguments of the mixtures of T tokens' streams; all tensors are float32 and contiguous."""

    streams_TND: Address
    output_TD: Address
    weight_TN: Address  # of the streams' mixture, or of the output
    comb_TNN: Address
    out: Address
    tokens: Int64  # T
    streams: Int64  # N
    width: Int64  # D


def fits(*tensors: Tensor) -> bool:
    """Return whether the kernels support these tensors, the first of which has a row for each token."""
    return len(tensors[0]) > 0 and all(one.dtype is torch.float32 and one.is_contiguous() for one in tensors)


def fits_width(streams_TND: Tensor) -> bool:
    """Return whether the kernels support rows of this width."""
    return streams_TND.shape[2] % LANES == 0


def mixture_weights(
    logits_TC: Tensor, scale: Tensor, base_C: Tensor, num_streams: int, iterations: int, eps: float
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return (pre_TN, post_TN, comb_TNN), or pre_TN alone if the logits have its columns only."""
    tokens, columns = logits_TC.shape
    pre_TN, post_TN = torch.empty(2, tokens, num_streams)
    comb_TNN = torch.empty(tokens, num_streams, num_streams)
    args = MixtureArguments(
        logits_TC=logits_TC.data_ptr(),
        scale=scale.data_ptr(),
        base_C=base_C.data_ptr(),
        pre_TN=pre_TN.data_ptr(),
        post_TN=post_TN.data_ptr(),
        comb_TNN=comb_TNN.data_ptr(),
        tokens=tokens,
        streams=num_streams,
        columns=columns,
        iterations=iterations,
        eps=eps,
    )
    team().run(_weights_task, -(-tokens // _BLOCK), args)
    return (pre_TN, None, None) if columns == num_streams else (pre_TN, post_TN, comb_TNN)


def collapse_streams(streams_TND: Tensor, pre_TN: Tensor) -> Tensor:
    """Return x_TD, contiguous."""
    out_TD = torch.empty(streams_TND.shape[0], streams_TND.shape[2])
    team().run(_collapse_task, -(-len(out_TD) // _BLOCK), _arguments(streams_TND, out_TD, pre_TN, streams_TND, out_TD))
    return out_TD


def expand_streams(streams_TND: Tensor, output_TD: Tensor, post_TN: Tensor, comb_TNN: Tensor) -> Tensor:
    """Return the streams with the output of half a layer, contiguous."""
    out_TND = torch.empty_like(streams_TND)
    team().run(_expand_task, -(-len(out_TND) // _BLOCK), _arguments(streams_TND, output_TD, post_TN, comb_TNN, out_TND))
    return out_TND


def _arguments(
    streams_TND: Tensor, output_TD: Tensor, weight_TN: Tensor, comb_TNN: Tensor, out: Tensor
) -> StreamArguments:
    tokens, streams, width = streams_TND.shape
    return StreamArguments(
        streams_TND=streams_TND.data_ptr(),
        output_TD=output_TD.data_ptr(),
        weight_TN=weight_TN.data_ptr(),
        comb_TNN=comb_TNN.data_ptr(),
        out=out.data_ptr(),
        tokens=tokens,
        streams=streams,
        width=width,
    )


@jit
def _scaled(args: MixtureArguments, row: int, part: int, column: int) -> float:
    """Return a projection with its part's factor and its bias."""
    value: float = load_f32(row, column) * load_f32(args.scale, part) + load_f32(args.base_C, column)
    return value


@jit
def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


@jit
def _divide_by_sum(matrix: int, first: int, step: int, count: int, eps: float) -> None:
    """Divide `count` values, `step` apart from the `first` on, by their sum."""
    total = eps
    for i in range(count):
        total += load_f32(matrix, first + i * step)
    for i in range(count):
        store_f32(matrix, first + i * step, load_f32(matrix, first + i * step) / total)


@jit
def _combine(args: MixtureArguments, row: int, comb: int) -> None:
    """Write a token's comb: the softmax of its rows, then Sinkhorn and Knopp's iterations."""
    n, eps = args.streams, args.eps
    for i in range(n):
        largest = -math.inf
        for j in range(n):
            largest = max(largest, _scaled(args, row, 2, (2 + i) * n + j))
        total = 0.0
        for j in range(n):
            power = math.exp(_scaled(args, row, 2, (2 + i) * n + j) - largest)
            total += power
            store_f32(comb, i * n + j, power)
        for j in range(n):
            store_f32(comb, i * n + j, load_f32(comb, i * n + j) / total + eps)
    for j in range(n):
        _divide_by_sum(comb, j, n, n, eps)
    for _ in range(args.iterations - 1):
        for i in range(n):
            _divide_by_sum(comb, i * n, 1, n, eps)
        for j in range(n):
            _divide_by_sum(comb, j, n, n, eps)


def _weights_task(args: MixtureArguments, task: int, scratch: int) -> None:
    n, columns = args.streams, args.columns
    for t in range(task * _BLOCK, min(args.tokens, (task + 1) * _BLOCK)):
        row = args.logits_TC + 4 * columns * t
        for i in range(n):
            store_f32(args.pre_TN, t * n + i, _sigmoid(_scaled(args, row, 0, i)) + args.eps)
        if columns > n:
            for i in range(n):
                store_f32(args.post_TN, t * n + i, 2.0 * _sigmoid(_scaled(args, row, 1, n + i)))
            _combine(args, row, args.comb_TNN + 4 * n * n * t)


def _collapse_task(args: StreamArguments, task: int, scratch: int) -> None:
    n, width = args.streams, args.width
    for t in range(task * _BLOCK, min(args.tokens, (task + 1) * _BLOCK)):
        out = args.out + 4 * width * t
        clear_row(width, out)
        for i in range(n):
            add_scaled_row(
                out, args.streams_TND + 4 * width * (t * n + i), width, load_f32(args.weight_TN, t * n + i), out
            )


def _expand_task(args: StreamArguments, task: int, scratch: int) -> None:
    n, width = args.streams, args.width
    for t in range(task * _BLOCK, min(args.tokens, (task + 1) * _BLOCK)):
        for i in range(n):
            out = args.out + 4 * width * (t * n + i)
            clear_row(width, out)
            for j in range(n):
                weight = load_f32(args.comb_TNN, (t * n + j) * n + i)
                add_scaled_row(out, args.streams_TND + 4 * width * (t * n + j), width, weight, out)
            add_scaled_row(out, args.output_TD + 4 * width * t, width, load_f32(args.weight_TN, t * n + i), out)
