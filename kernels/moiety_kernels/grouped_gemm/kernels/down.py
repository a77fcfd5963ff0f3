"""Product → bias → routing weight → rows in pair order, and their sum over a token's experts in that order.

Adding each expert's part to the token directly would need atomic additions, whose order, and therefore result, changes
from run to run. So each weighted row is written once, to position t · K + k of its pair, and read back consecutively.

T tokens, K experts per token, R = T · K routed rows, D model width, F expert width, E experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from moiety_kernels.grouped_gemm.kernels.four_bits import down_sums
from moiety_kernels.grouped_gemm.kernels.launching import (
    GROUP,
    copied_by_engine,
    kind_of_scales,
    num_programs,
    weight_argument,
)
from moiety_kernels.grouped_gemm.kernels.shared import (
    SCALE_BLOCK,
    along_columns,
    empty_sums,
    load_weights,
    multiply_scaled,
    place,
)

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.grouped_gemm.tile_cost_model import TileConfig
    from moiety_kernels.route import Groups

_COMBINE_BLOCK = 1024  # columns that a program sums


def down(
    inner_RF: Tensor,
    groups: Groups,
    weight_TK: Tensor,
    w_down_EDF: Tensor,
    scale: Tensor | None,
    bias_ED: Tensor | None,
    config: TileConfig,
    inner_scale_RG: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return [R, D], in the order of the pairs: each row's product times its routing weight.

    Rows may be rounded to 8 bits, with scales; then `dtype` is the result's type.
    """
    (rows, hidden), width, block = inner_RF.shape, w_down_EDF.shape[1], config.down
    weighted_RD = torch.empty(rows, width, dtype=dtype or inner_RF.dtype, device=inner_RF.device)
    engine = copied_by_engine(w_down_EDF)
    most_pieces = groups.tiles_N2.shape[0] * triton.cdiv(width, block.BN)
    _down[(num_programs(inner_RF.device, block.per_sm, most_pieces),)](
        TensorDescriptor.from_tensor(inner_RF, [config.BM, block.BK // (2 if config.four else 1)]) if engine else None,
        inner_RF,
        inner_scale_RG,
        weight_argument(w_down_EDF, block, engine),
        scale,
        bias_ED,
        weight_TK,
        weighted_RD,
        groups.order_R,
        groups.starts_E1,
        groups.tiles_N2,
        groups.num_tiles_1,
        width,
        hidden,
        w_down_EDF.stride(0),
        w_down_EDF.stride(1),
        BM=config.BM,
        BN=block.BN,
        BK=block.BK,
        TAIL=config.tail if not block.flat else 0,
        GROUP=GROUP,
        SWAP=config.swap_ab,
        TMA=engine,
        SCALES=kind_of_scales(scale),
        EIGHT=inner_scale_RG is not None,
        FOUR=config.four,
        BIAS=bias_ED is not None,
        FLAT=block.flat,
        num_warps=block.warps,
        num_stages=block.stages,
    )
    return weighted_RD


def combine(weighted_RD: Tensor, expert_TK: Tensor) -> Tensor:
    """Return [T, D]: the sum of each token's rows, in the order of its choices, without rows of a negative expert."""
    (tokens, top_k), width = expert_TK.shape, weighted_RD.shape[1]
    out_TD = torch.empty(tokens, width, dtype=weighted_RD.dtype, device=weighted_RD.device)
    block = min(_COMBINE_BLOCK, triton.next_power_of_2(width))
    _combine[(tokens, triton.cdiv(width, block))](
        weighted_RD, expert_TK, out_TD, width, TOP_K=top_k, BLOCK=block, num_warps=4
    )
    return out_TD


@triton.jit
def _down_tile(
    inner, p_inner, p_inner_scale, w, p_scale, p_bias, p_weight, p_out, p_order, expert, first, end, column, width,
    hidden, expert_stride, row_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr, ROWS_TMA: tl.constexpr,
    SCALES: tl.constexpr, EIGHT: tl.constexpr, FOUR: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    i_row = first + tl.arange(0, BM)
    m_row = i_row < end
    i_k = tl.arange(0, BK)
    p_row = p_inner + i_row.to(tl.int64) * hidden
    if SCALES == "block":
        p_block_scale = p_scale + (expert.to(tl.int64) * width + column) * tl.cdiv(hidden, SCALE_BLOCK)
    else:
        p_block_scale = p_row
    p_row_scale = p_inner_scale + i_row.to(tl.int64) * tl.cdiv(hidden, BK) if EIGHT else p_row
    sums = empty_sums(BM, BN, SWAP)
    if FOUR == "":
        for k in range(0, hidden, BK):
            if ROWS_TMA:
                rows = inner.load([first, k])  # rows from `end` on are another expert's and are not stored
            else:
                m_rows = m_row[:, None] & (k + i_k < hidden)[None, :]
                rows = tl.load(p_row[:, None] + (k + i_k)[None, :], mask=m_rows, other=0.0)
            weights = load_weights(w, expert, column, k, width, hidden, expert_stride, row_stride, BN, BK, TMA)
            row_scale = tl.load(p_row_scale + k // BK, mask=m_row, other=0.0) if EIGHT else 1.0
            block_scale = tl.load(p_block_scale + k // SCALE_BLOCK) if SCALES == "block" else 1.0
            sums = multiply_scaled(rows, weights, sums, row_scale, block_scale, SWAP, SCALES, EIGHT)
    else:
        sums = down_sums(inner, p_row, m_row, w, p_scale, sums, expert, first, column, width, hidden, expert_stride,
                         row_stride, BN, BK, SWAP, TMA, ROWS_TMA, FOUR)  # fmt: skip
    i_column = column + tl.arange(0, BN)
    m_column = i_column < width
    if SCALES == "row":
        scale = tl.load(p_scale + expert.to(tl.int64) * width + i_column, mask=m_column, other=0.0)
        sums *= along_columns(scale, SWAP)
    if BIAS:
        bias = tl.load(p_bias + expert.to(tl.int64) * width + i_column, mask=m_column, other=0.0)
        sums += along_columns(bias, SWAP)
    pair = tl.load(p_order + i_row, mask=m_row, other=0)
    share = tl.load(p_weight + pair, mask=m_row, other=0.0)
    if SWAP:
        weighted = (sums * share[None, :]).to(p_out.dtype.element_ty).T
    else:
        weighted = (sums * share[:, None]).to(p_out.dtype.element_ty)
    p_rows = p_out + pair.to(tl.int64)[:, None] * width + i_column[None, :]
    tl.store(p_rows, weighted, mask=m_row[:, None] & m_column[None, :])


@triton.jit
def _down(
    inner, p_inner, p_inner_scale, w, p_scale, p_bias, p_weight, p_out, p_order, p_starts, p_tiles, p_num_tiles, width,
    hidden, expert_stride, row_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TAIL: tl.constexpr, GROUP: tl.constexpr, SWAP: tl.constexpr,
    TMA: tl.constexpr, SCALES: tl.constexpr, EIGHT: tl.constexpr, FOUR: tl.constexpr,
    BIAS: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    num_blocks = tl.cdiv(width, BN)
    num_tiles = tl.load(p_num_tiles)
    for index in tl.range(tl.program_id(0), num_tiles * num_blocks, tl.num_programs(0), flatten=FLAT):
        i_tile, i_block = place(index, num_tiles, num_blocks, GROUP)
        expert = tl.load(p_tiles + 2 * i_tile)
        first = tl.load(p_tiles + 2 * i_tile + 1)
        end = tl.load(p_starts + expert + 1)
        if TAIL > 0:
            if end - first <= TAIL:
                _down_tile(inner, p_inner, p_inner_scale, w, p_scale, p_bias, p_weight, p_out, p_order, expert, first,
                           end, i_block * BN, width, hidden, expert_stride, row_stride,
                           TAIL, BN, BK, SWAP, TMA, False, SCALES, EIGHT, FOUR, BIAS)  # fmt: skip
            else:
                _down_tile(inner, p_inner, p_inner_scale, w, p_scale, p_bias, p_weight, p_out, p_order, expert, first,
                           end, i_block * BN, width, hidden, expert_stride, row_stride,
                           BM, BN, BK, SWAP, TMA, TMA, SCALES, EIGHT, FOUR, BIAS)  # fmt: skip
        else:
            _down_tile(inner, p_inner, p_inner_scale, w, p_scale, p_bias, p_weight, p_out, p_order, expert, first,
                       end, i_block * BN, width, hidden, expert_stride, row_stride,
                       BM, BN, BK, SWAP, TMA, TMA, SCALES, EIGHT, FOUR, BIAS)  # fmt: skip


@triton.jit
def _combine(p_rows, p_expert, p_out, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    i_column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_column = i_column < width
    p_row = p_rows + token * TOP_K * width + i_column
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in tl.static_range(TOP_K):
        m_here = m_column & (tl.load(p_expert + token * TOP_K + k) >= 0)
        total += tl.load(p_row + k * width, mask=m_here, other=0.0).to(tl.float32)
    tl.store(p_out + token * width + i_column, total.to(p_out.dtype.element_ty), mask=m_column)
