"""RMS normalisation in Triton: one program per row, the whole row in registers; it also writes the residual sum.

T rows, D width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moiety_kernels.gpu.cases import CompileCase

MAX_WIDTH = 16384  # widest row that fits in the registers of 16 warps


def fits(x_TD: Tensor) -> bool:
    """Return whether the kernel supports these rows."""
    return x_TD.dim() == 2 and x_TD.shape[1] <= MAX_WIDTH and x_TD.stride(1) == 1


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x²) + eps) · weight, in x's dtype."""
    out_TD = torch.empty_like(x_TD)
    _launch(x_TD, None, weight_D, out_TD, None, eps)
    return out_TD


def add_rms_norm(x_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (x + delta, rms_norm(x + delta))."""
    out_TD, total_TD = torch.empty_like(x_TD), torch.empty_like(x_TD)
    _launch(x_TD, delta_TD, weight_D, out_TD, total_TD, eps)
    return total_TD, out_TD


def _launch(
    x_TD: Tensor, delta_TD: Tensor | None, weight_D: Tensor, out_TD: Tensor, total_TD: Tensor | None, eps: float
) -> None:
    rows, width = x_TD.shape
    if rows == 0:
        return
    block = triton.next_power_of_2(width)
    _rms_norm[(rows,)](
        x_TD,
        delta_TD,
        weight_D,
        out_TD,
        total_TD,
        width,
        x_TD.stride(0),
        0 if delta_TD is None else delta_TD.stride(0),
        out_TD.stride(0),
        eps,
        ADD=delta_TD is not None,
        BLOCK=block,
        num_warps=_num_warps(block),
    )


def _num_warps(block: int) -> int:
    return max(1, min(16, block // 512))


@triton.jit
def _rms_norm(
    p_x,
    p_delta,
    p_weight,
    p_out,
    p_total,
    width,
    x_stride,
    delta_stride,
    out_stride,
    eps,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    i_column = tl.arange(0, BLOCK)
    m_column = i_column < width
    x = tl.load(p_x + i_row * x_stride + i_column, mask=m_column, other=0.0)
    if ADD:
        x += tl.load(p_delta + i_row * delta_stride + i_column, mask=m_column, other=0.0)
        tl.store(p_total + i_row * out_stride + i_column, x, mask=m_column)
    x32 = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x32 * x32, axis=0) / width + eps)
    normed = (x32 * scale).to(x.dtype)
    weight = tl.load(p_weight + i_column, mask=m_column, other=0.0)
    tl.store(p_out + i_row * out_stride + i_column, (normed * weight).to(x.dtype), mask=m_column)


def compile_cases() -> list[CompileCase]:
    """Return the cases for the widths of small, usual and the largest models, with and without the sum."""
    signature = {"p_x": "*bf16", "p_delta": "*bf16", "p_weight": "*fp32", "p_out": "*bf16", "p_total": "*bf16"}
    sizes = dict.fromkeys(("width", "x_stride", "delta_stride", "out_stride"), "i32")
    return [
        CompileCase(
            f"{'add_' if add else ''}rms_norm {block}",
            _rms_norm,
            signature | sizes | {"eps": "fp32"},
            {"ADD": add, "BLOCK": block},
            num_warps=_num_warps(block),
        )
        for block in (1024, 4096, MAX_WIDTH)
        for add in (False, True)
    ]
