"""Gather → gate and up products → activation: rows of x, found through the sorted order, times their expert's weights.

T tokens, D model width, F expert width, E experts, R routed rows in the order of their experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from moiety_kernels.grouped_gemm.kernels.four_bits import up_sums
from moiety_kernels.grouped_gemm.kernels.launching import (
    GROUP,
    copied_by_engine,
    kind_of_scales,
    num_programs,
    rows_aligned,
    weight_argument,
)
from moiety_kernels.grouped_gemm.kernels.shared import (
    SCALE_BLOCK,
    activate,
    along_columns,
    empty_sums,
    load_weights,
    multiply_scaled,
    place,
    to_eight_bits,
)

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.grouped_gemm.tile_cost_model import TileConfig
    from moiety_kernels.moe.activation import Activation
    from moiety_kernels.route import Groups


def up(
    x_TD: Tensor,
    groups: Groups,
    top_k: int,
    w_gate_up_E2FD: Tensor,
    scale: Tensor | None,
    bias_E2F: Tensor | None,
    activation: Activation,
    config: TileConfig,
) -> Tensor:
    """Return [R, F], in the order of the groups: the activation of each row's gate and up products."""
    hidden = w_gate_up_E2FD.shape[1] // activation.num_inputs
    inner_RF = torch.empty(groups.order_R.numel(), hidden, dtype=x_TD.dtype, device=x_TD.device)
    _launch(x_TD, None, groups, top_k, w_gate_up_E2FD, scale, bias_E2F, activation, config, inner_RF, None)
    return inner_RF


def up_rounded(
    x_TD: Tensor,
    x_scale_TG: Tensor,
    groups: Groups,
    top_k: int,
    w_gate_up_E2FD: Tensor,
    scale: Tensor | None,
    bias_E2F: Tensor | None,
    activation: Activation,
    config: TileConfig,
) -> tuple[Tensor, Tensor]:
    """Return the result of `up` for rows rounded to float8 with one scale per step's columns.

    The result is also float8, with one scale per tile's columns, [R, F ÷ BN] float32.
    """
    rows, hidden = groups.order_R.numel(), w_gate_up_E2FD.shape[1] // activation.num_inputs
    inner_RF = torch.empty(rows, hidden, dtype=x_TD.dtype, device=x_TD.device)
    inner_scale = torch.empty(rows, triton.cdiv(hidden, config.up.BN), dtype=torch.float32, device=x_TD.device)
    outputs = inner_RF, inner_scale
    _launch(x_TD, x_scale_TG, groups, top_k, w_gate_up_E2FD, scale, bias_E2F, activation, config, *outputs)
    return outputs


def _launch(
    x_TD: Tensor,
    x_scale_TG: Tensor | None,
    groups: Groups,
    top_k: int,
    w_gate_up_E2FD: Tensor,
    scale: Tensor | None,
    bias_E2F: Tensor | None,
    activation: Activation,
    config: TileConfig,
    inner_RF: Tensor,
    inner_scale_RG: Tensor | None,
) -> None:
    hidden, width, block = inner_RF.shape[1], x_TD.shape[1], config.up
    engine = copied_by_engine(w_gate_up_E2FD)
    most_pieces = groups.tiles_N2.shape[0] * triton.cdiv(hidden, block.BN)
    _up[(num_programs(x_TD.device, block.per_sm, most_pieces),)](
        x_TD,
        x_scale_TG,
        weight_argument(w_gate_up_E2FD, block, engine),
        scale,
        bias_E2F,
        inner_RF,
        inner_scale_RG,
        groups.order_R,
        groups.starts_E1,
        groups.tiles_N2,
        groups.num_tiles_1,
        top_k,
        width,
        hidden,
        x_TD.stride(0),
        w_gate_up_E2FD.stride(0),
        w_gate_up_E2FD.stride(1),
        activation.limit,
        activation.alpha,
        BM=config.BM,
        BN=block.BN,
        BK=block.BK,
        TAIL=config.tail if not block.flat else 0,
        GROUP=GROUP,
        SWAP=config.swap_ab,
        TMA=engine,
        EVEN=width % block.BK == 0,
        ALIGNED=rows_aligned(x_TD),
        SCALES=kind_of_scales(scale),
        EIGHT=x_scale_TG is not None,
        FOUR=config.four,
        BIAS=bias_E2F is not None,
        ACTIVATION=activation.kind,
        FLAT=block.flat,
        num_warps=block.warps,
        num_stages=block.stages,
    )


@triton.jit
def _scaled_sums(
    p_row, m_row, p_row_scale, w, p_scale, gate, up, expert, column, width, hidden, rows, expert_stride, row_stride,
    BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr,
    ALIGNED: tl.constexpr, SCALES: tl.constexpr, EIGHT: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Return gate and up, each plus the products of rows and an expert's weights, of which it has `rows`."""
    i_k = tl.arange(0, BK)
    if SCALES == "block":
        across = tl.cdiv(width, SCALE_BLOCK)  # the scales of the first row's block apply to the whole tile
        p_gate_scale = p_scale + (expert.to(tl.int64) * rows + column) * across
        p_up_scale = p_gate_scale + hidden * across
    else:
        p_gate_scale = p_row
        p_up_scale = p_row
    for k in range(0, width, BK):
        m_x = m_row[:, None] if EVEN else m_row[:, None] & (k + i_k < width)[None, :]
        p_tile = p_row[:, None] + (k + i_k)[None, :]
        if ALIGNED:  # in flat loops the compiler loses this fact and then prefetches nothing
            p_tile = tl.max_contiguous(tl.multiple_of(p_tile, (1, 16)), (1, BK))
        x = tl.load(p_tile, mask=m_x, other=0.0)
        w_gate = load_weights(w, expert, column, k, rows, width, expert_stride, row_stride, BN, BK, TMA)
        row_scale = tl.load(p_row_scale + k // BK) if EIGHT else 1.0
        gate_scale = tl.load(p_gate_scale + k // SCALE_BLOCK) if SCALES == "block" else 1.0
        if GATED:
            w_up = load_weights(w, expert, hidden + column, k, rows, width, expert_stride, row_stride, BN, BK, TMA)
            up_scale = tl.load(p_up_scale + k // SCALE_BLOCK) if SCALES == "block" else 1.0
        gate = multiply_scaled(x, w_gate, gate, row_scale, gate_scale, SWAP, SCALES, EIGHT)
        if GATED:
            up = multiply_scaled(x, w_up, up, row_scale, up_scale, SWAP, SCALES, EIGHT)
    return gate, up


@triton.jit
def _up_tile(
    p_x, p_x_scale, w, p_scale, p_bias, p_inner, p_inner_scale, p_order, expert, first, end, column, top_k, width,
    hidden, x_stride, expert_stride, row_stride, limit, alpha,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr,
    EVEN: tl.constexpr, ALIGNED: tl.constexpr, SCALES: tl.constexpr, EIGHT: tl.constexpr,
    FOUR: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    GATED: tl.constexpr = ACTIVATION != "relu2"  # without a gate, ups are the only product, in the gates' place
    rows = 2 * hidden if GATED else hidden  # of an expert
    i_row = first + tl.arange(0, BM)
    m_row = i_row < end
    token = tl.load(p_order + i_row, mask=m_row, other=0) // top_k
    p_row = p_x + token.to(tl.int64) * x_stride
    p_row_scale = p_x_scale + token.to(tl.int64) * tl.cdiv(width, BK) if EIGHT else p_row
    gate = empty_sums(BM, BN, SWAP)
    up = empty_sums(BM, BN, SWAP)
    if FOUR == "":
        gate, up = _scaled_sums(p_row, m_row, p_row_scale, w, p_scale, gate, up, expert, column, width, hidden, rows,
                                expert_stride, row_stride, BN, BK, SWAP, TMA, EVEN, ALIGNED, SCALES, EIGHT,
                                GATED)  # fmt: skip
    else:
        gate, up = up_sums(p_row, m_row, w, p_scale, gate, up, expert, column, width, hidden, expert_stride, row_stride,
                           BN, BK, SWAP, TMA, ALIGNED, FOUR, GATED)  # fmt: skip
    i_column = column + tl.arange(0, BN)
    m_column = i_column < hidden
    if SCALES == "row":
        p_column_scale = p_scale + expert.to(tl.int64) * rows + i_column
        gate *= along_columns(tl.load(p_column_scale, mask=m_column, other=0.0), SWAP)
        if GATED:
            up *= along_columns(tl.load(p_column_scale + hidden, mask=m_column, other=0.0), SWAP)
    if BIAS:
        p_gate = p_bias + expert.to(tl.int64) * rows + i_column
        gate += along_columns(tl.load(p_gate, mask=m_column, other=0.0), SWAP)
        if GATED:
            up += along_columns(tl.load(p_gate + hidden, mask=m_column, other=0.0), SWAP)
    inner = activate(gate, up, limit, alpha, ACTIVATION)
    if EIGHT:  # the tile's columns share a scale
        inner, inner_scale = to_eight_bits(tl.where(m_column[None, :], inner, 0.0))
        p_scale_out = p_inner_scale + i_row.to(tl.int64) * tl.cdiv(hidden, BN) + column // BN
        tl.store(p_scale_out, inner_scale, mask=m_row)
    inner = inner.to(p_inner.dtype.element_ty)
    if SWAP:
        inner = inner.T
    p_out = p_inner + i_row.to(tl.int64)[:, None] * hidden + i_column[None, :]
    tl.store(p_out, inner, mask=m_row[:, None] & m_column[None, :])


@triton.jit
def _up(
    p_x, p_x_scale, w, p_scale, p_bias, p_inner, p_inner_scale, p_order, p_starts, p_tiles, p_num_tiles, top_k,
    width, hidden, x_stride, expert_stride, row_stride, limit, alpha,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TAIL: tl.constexpr, GROUP: tl.constexpr, SWAP: tl.constexpr,
    TMA: tl.constexpr, EVEN: tl.constexpr, ALIGNED: tl.constexpr, SCALES: tl.constexpr, EIGHT: tl.constexpr,
    FOUR: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    num_blocks = tl.cdiv(hidden, BN)
    num_tiles = tl.load(p_num_tiles)
    for index in tl.range(tl.program_id(0), num_tiles * num_blocks, tl.num_programs(0), flatten=FLAT):
        i_tile, i_block = place(index, num_tiles, num_blocks, GROUP)
        expert = tl.load(p_tiles + 2 * i_tile)
        first = tl.load(p_tiles + 2 * i_tile + 1)
        end = tl.load(p_starts + expert + 1)
        if TAIL > 0:
            if end - first <= TAIL:
                _up_tile(p_x, p_x_scale, w, p_scale, p_bias, p_inner, p_inner_scale, p_order, expert, first, end,
                         i_block * BN, top_k, width, hidden, x_stride, expert_stride, row_stride, limit, alpha,
                         TAIL, BN, BK, SWAP, TMA, EVEN, ALIGNED, SCALES, EIGHT, FOUR, BIAS, ACTIVATION)  # fmt: skip
            else:
                _up_tile(p_x, p_x_scale, w, p_scale, p_bias, p_inner, p_inner_scale, p_order, expert, first, end,
                         i_block * BN, top_k, width, hidden, x_stride, expert_stride, row_stride, limit, alpha,
                         BM, BN, BK, SWAP, TMA, EVEN, ALIGNED, SCALES, EIGHT, FOUR, BIAS, ACTIVATION)  # fmt: skip
        else:
            _up_tile(p_x, p_x_scale, w, p_scale, p_bias, p_inner, p_inner_scale, p_order, expert, first, end,
                     i_block * BN, top_k, width, hidden, x_stride, expert_stride, row_stride, limit, alpha,
                     BM, BN, BK, SWAP, TMA, EVEN, ALIGNED, SCALES, EIGHT, FOUR, BIAS, ACTIVATION)  # fmt: skip
