"""Products for few tokens: each program computes some columns of one pair, or of one token's sum over its experts.

One row is too little for tensor cores, and memory is the bound. So weights are read in wide loads, several steps ahead,
and no program waits for another: nothing is sorted, and a sum over experts is computed in one program. The inner
dimension is split over a program's lanes and reduced in one fixed order.

T tokens, K experts per token, R = T · K pairs, D model width, F expert width, E experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from moiety_kernels.grouped_gemm.kernels.four_rows import down_row_sums, up_row_sums
from moiety_kernels.grouped_gemm.kernels.launching import in_words, kind_of_scales
from moiety_kernels.grouped_gemm.kernels.shared import SCALE_BLOCK, activate

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.grouped_gemm.tile_cost_model import Block, Four
    from moiety_kernels.moe.activation import Activation


def up_rows(
    x_TD: Tensor,
    expert_TK: Tensor,
    w_gate_up_E2FD: Tensor,
    scale: Tensor | None,
    bias_E2F: Tensor | None,
    activation: Activation,
    block: Block,
    four: Four = "",
) -> Tensor:
    """Return [R, F], in the order of the pairs: the activation of each pair's gate and up products."""
    hidden, width = w_gate_up_E2FD.shape[1] // activation.num_inputs, x_TD.shape[1]
    weights = in_words(w_gate_up_E2FD) if four else w_gate_up_E2FD
    inner_RF = torch.empty(expert_TK.numel(), hidden, dtype=x_TD.dtype, device=x_TD.device)
    _up_rows[(expert_TK.numel() * triton.cdiv(hidden, block.BN),)](
        x_TD,
        weights,
        scale,
        bias_E2F,
        inner_RF,
        expert_TK,
        expert_TK.shape[1],
        width,
        hidden,
        x_TD.stride(0),
        weights.stride(0),
        weights.stride(1),
        activation.limit,
        activation.alpha,
        BN=block.BN,
        BK=block.BK,
        STAGES=block.stages,
        SCALES=kind_of_scales(scale),
        FOUR=four,
        BIAS=bias_E2F is not None,
        ACTIVATION=activation.kind,
        num_warps=block.warps,
    )
    return inner_RF


def down_rows(
    inner_RF: Tensor,
    expert_TK: Tensor,
    weight_TK: Tensor,
    w_down_EDF: Tensor,
    scale: Tensor | None,
    bias_ED: Tensor | None,
    block: Block,
    four: Four = "",
) -> Tensor:
    """Return [T, D]: the weighted sum of the products of each token's pairs."""
    (tokens, top_k), width = expert_TK.shape, w_down_EDF.shape[1]
    out_TD = torch.empty(tokens, width, dtype=inner_RF.dtype, device=inner_RF.device)
    weights = in_words(w_down_EDF) if four else w_down_EDF
    _down_rows[(tokens * triton.cdiv(width, block.BN),)](
        inner_RF,
        weights,
        scale,
        bias_ED,
        weight_TK,
        out_TD,
        expert_TK,
        top_k,
        width,
        inner_RF.shape[1],
        weights.stride(0),
        weights.stride(1),
        BN=block.BN,
        BK=block.BK,
        STAGES=block.stages,
        SCALES=kind_of_scales(scale),
        FOUR=four,
        BIAS=bias_ED is not None,
        num_warps=block.warps,
    )
    return out_TD


@triton.jit
def _up_rows(
    p_x, p_w, p_scale, p_bias, p_inner, p_expert, top_k, width, hidden, x_stride, expert_stride,
    row_stride, limit, alpha,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, SCALES: tl.constexpr, FOUR: tl.constexpr,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    GATED: tl.constexpr = ACTIVATION != "relu2"  # without a gate, ups are the only product, in the gates' place
    num_rows = 2 * hidden if GATED else hidden  # of an expert
    num_blocks = tl.cdiv(hidden, BN)
    pair = tl.program_id(0) // num_blocks
    i_column = tl.program_id(0) % num_blocks * BN + tl.arange(0, BN)
    m_column = i_column < hidden
    expert = tl.load(p_expert + pair)
    if expert < 0:  # on another rank
        return
    p_x += (pair // top_k).to(tl.int64) * x_stride
    if FOUR == "":
        p_w += expert.to(tl.int64) * expert_stride
        i_k = tl.arange(0, BK)
        p_gate = p_w + i_column.to(tl.int64)[:, None] * row_stride + i_k[None, :]
        p_up = p_w + (hidden + i_column).to(tl.int64)[:, None] * row_stride + i_k[None, :]
        gates = tl.zeros((BN, BK), dtype=tl.float32)
        ups = tl.zeros((BN, BK), dtype=tl.float32)
        if SCALES == "block":  # a block's rows are a multiple of BN, so all columns here have the scales of the first
            across = tl.cdiv(width, SCALE_BLOCK)
            column = tl.program_id(0) % num_blocks * BN
            p_gate_scale = p_scale + (expert.to(tl.int64) * num_rows + column) * across
            p_up_scale = p_gate_scale + hidden * across
        for k in tl.range(0, width, BK, num_stages=STAGES):
            m_k = k + i_k < width
            m_w = m_column[:, None] & m_k[None, :]
            x = tl.load(p_x + k + i_k, mask=m_k, other=0.0).to(tl.float32)
            x_gate, x_up = x, x
            if SCALES == "block":
                x_gate = x * tl.load(p_gate_scale + (k + i_k) // SCALE_BLOCK, mask=m_k, other=0.0)
            gates += tl.load(p_gate + k, mask=m_w, other=0.0).to(tl.float32) * x_gate[None, :]
            if GATED:
                if SCALES == "block":
                    x_up = x * tl.load(p_up_scale + (k + i_k) // SCALE_BLOCK, mask=m_k, other=0.0)
                ups += tl.load(p_up + k, mask=m_w, other=0.0).to(tl.float32) * x_up[None, :]
        gate = tl.sum(gates, axis=1)
        up = tl.sum(ups, axis=1)
    else:
        gate, up = up_row_sums(p_x, p_w, p_scale, expert, i_column, m_column, width, hidden, expert_stride, row_stride,
                               BN, BK, STAGES, FOUR, GATED)  # fmt: skip
    if SCALES == "row":
        p_scale += expert.to(tl.int64) * num_rows
        gate *= tl.load(p_scale + i_column, mask=m_column, other=0.0)
        if GATED:
            up *= tl.load(p_scale + hidden + i_column, mask=m_column, other=0.0)
    if BIAS:
        p_bias += expert.to(tl.int64) * num_rows
        gate += tl.load(p_bias + i_column, mask=m_column, other=0.0)
        if GATED:
            up += tl.load(p_bias + hidden + i_column, mask=m_column, other=0.0)
    inner = activate(gate, up, limit, alpha, ACTIVATION).to(p_inner.dtype.element_ty)
    tl.store(p_inner + pair.to(tl.int64) * hidden + i_column, inner, mask=m_column)


@triton.jit
def _down_rows(
    p_inner, p_w, p_scale, p_bias, p_weight, p_out, p_expert, top_k, width, hidden, expert_stride, row_stride,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, SCALES: tl.constexpr, FOUR: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    num_blocks = tl.cdiv(width, BN)
    token = tl.program_id(0) // num_blocks
    i_column = tl.program_id(0) % num_blocks * BN + tl.arange(0, BN)
    m_column = i_column < width
    if FOUR == "":
        i_k = tl.arange(0, BK)
        p_column = p_w + i_column.to(tl.int64)[:, None] * row_stride + i_k[None, :]
        sums = tl.zeros((BN, BK), dtype=tl.float32)
        steps = tl.cdiv(hidden, BK)
        across = tl.cdiv(hidden, SCALE_BLOCK)
        column = tl.program_id(0) % num_blocks * BN
        for step in tl.range(0, top_k * steps, num_stages=STAGES):
            pair = token * top_k + step // steps
            k = step % steps * BK
            expert = tl.load(p_expert + pair).to(tl.int64)
            m_k = (k + i_k < hidden) & (expert >= 0)  # experts on other ranks
            share = tl.load(p_weight + pair)
            inner = tl.load(p_inner + pair.to(tl.int64) * hidden + k + i_k, mask=m_k, other=0.0).to(tl.float32)
            if SCALES == "block":
                p_across = p_scale + (expert * width + column) * across
                inner *= tl.load(p_across + (k + i_k) // SCALE_BLOCK, mask=m_k, other=0.0)
            m_w = m_column[:, None] & m_k[None, :]
            weights = tl.load(p_column + expert * expert_stride + k, mask=m_w, other=0.0)
            parts = weights.to(tl.float32) * (inner * share)[None, :]
            if SCALES == "row":
                parts *= tl.load(p_scale + expert * width + i_column, mask=m_column & (expert >= 0), other=0.0)[:, None]
            sums += parts
        total = tl.sum(sums, axis=1)
    else:
        total = down_row_sums(p_inner, p_w, p_scale, p_weight, p_expert, token, i_column, m_column, top_k, width,
                              hidden, expert_stride, row_stride, BN, BK, STAGES, FOUR)  # fmt: skip
    if BIAS:
        for k in range(top_k):
            pair = token * top_k + k
            expert = tl.load(p_expert + pair).to(tl.int64)
            bias = tl.load(p_bias + expert * width + i_column, mask=m_column & (expert >= 0), other=0.0)
            total += tl.load(p_weight + pair) * bias
    tl.store(p_out + token.to(tl.int64) * width + i_column, total.to(p_out.dtype.element_ty), mask=m_column)
