"""Rows rounded to float8_e4m3fn for the tensor cores, with one scale per 128 columns of a row.

T rows, D columns, G groups of 128 columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from moiety_kernels.grouped_gemm.kernels.shared import SCALE_BLOCK, to_eight_bits

if TYPE_CHECKING:
    from torch import Tensor

GROUPS: int = 8  # groups that a program rounds


def round_rows(x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Return ([T, D] float8_e4m3fn, [T, G] float32), whose products equal x up to rounding."""
    (rows, width), block = x_TD.shape, SCALE_BLOCK.value
    groups = triton.cdiv(width, block)
    rounded_TD = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x_TD.device)
    scale_TG = torch.empty(rows, groups, dtype=torch.float32, device=x_TD.device)
    grid = rows, triton.cdiv(groups, GROUPS)
    _round_rows[grid](x_TD, rounded_TD, scale_TG, width, x_TD.stride(0), GROUPS=GROUPS, num_warps=4)
    return rounded_TD, scale_TG


@triton.jit
def _round_rows(p_x, p_rounded, p_scale, width, x_stride, GROUPS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i_group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    i_column = i_group[:, None] * SCALE_BLOCK + tl.arange(0, SCALE_BLOCK)[None, :]
    m_column = i_column < width
    x = tl.load(p_x + row * x_stride + i_column, mask=m_column, other=0.0).to(tl.float32)
    rounded, scale = to_eight_bits(x)
    tl.store(p_rounded + row * width + i_column, rounded, mask=m_column)
    num_groups = tl.cdiv(width, SCALE_BLOCK)
    tl.store(p_scale + row * num_groups + i_group, scale, mask=i_group < num_groups)
