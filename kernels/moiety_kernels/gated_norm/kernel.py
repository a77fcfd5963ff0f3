"""Gated RMS normalisation in Triton: a program normalises some heads of one token.

T tokens, M heads of width V.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from moiety_kernels.gpu.cases import CompileCase

if TYPE_CHECKING:
    from torch import Tensor

MAX_WIDTH = 4096
_ENTRIES = 4096  # per program


def fits(x_TMV: Tensor, gate_TMV: Tensor) -> bool:
    """Return whether the kernel supports these tensors."""
    return x_TMV.shape[2] <= MAX_WIDTH and x_TMV.is_contiguous() and gate_TMV.stride()[1:] == (gate_TMV.shape[2], 1)


def gated_norm(x_TMV: Tensor, gate_TMV: Tensor, weight_MV: Tensor, eps: float, gate: str) -> Tensor:
    """Return the gated normalisation, contiguous, in x's dtype."""
    out_TMV = torch.empty_like(x_TMV)
    tokens, heads, width = x_TMV.shape
    if out_TMV.numel() == 0:
        return out_TMV
    block = triton.next_power_of_2(width)
    some = min(triton.next_power_of_2(heads), max(1, _ENTRIES // block))
    _gated_norm[(tokens, triton.cdiv(heads, some))](
        x_TMV, gate_TMV, weight_MV, out_TMV, heads, width, gate_TMV.stride(0), 0 if weight_MV.shape[0] == 1 else width,
        eps, SIGMOID=gate == "sigmoid", GATES_FIRST=gate == "silu_first", HEADS=some, BLOCK=block,
    )  # fmt: skip
    return out_TMV


@triton.jit
def _gated_norm(
    p_x,
    p_gate,
    p_weight,
    p_out,
    heads,
    width,
    gate_stride,
    weight_stride,
    eps,
    SIGMOID: tl.constexpr,
    GATES_FIRST: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    i_head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    i_column = tl.arange(0, BLOCK)
    mask = (i_head < heads)[:, None] & (i_column < width)[None, :]
    at = i_head[:, None] * width + i_column[None, :]
    x = tl.load(p_x + i_token * heads * width + at, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(p_gate + i_token * gate_stride + at, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(p_weight + i_head[:, None] * weight_stride + i_column[None, :], mask=mask, other=0.0).to(
        tl.float32
    )
    opened = tl.sigmoid(gate) if SIGMOID else gate * tl.sigmoid(gate)
    if GATES_FIRST:
        x *= opened
    normed = x * tl.rsqrt(tl.sum(x * x, axis=1) / width + eps)[:, None] * weight
    if not GATES_FIRST:
        normed *= opened
    tl.store(p_out + i_token * heads * width + at, normed.to(p_out.dtype.element_ty), mask=mask)


def compile_cases() -> list[CompileCase]:
    """Return the cases of heads of 64 and 128 with both gates, and of Mamba-2's groups of 1,024."""
    signature = {"p_x": "*bf16", "p_gate": "*bf16", "p_weight": "*fp32", "p_out": "*bf16", "eps": "fp32"}
    signature |= dict.fromkeys(("heads", "width", "gate_stride", "weight_stride"), "i32")
    return [
        CompileCase(
            f"gated_norm {block} {gate}",
            _gated_norm,
            signature,
            {
                "SIGMOID": gate == "sigmoid",
                "GATES_FIRST": gate == "silu_first",
                "HEADS": max(1, _ENTRIES // block),
                "BLOCK": block,
            },
        )
        for block, gate in ((64, "silu"), (128, "silu"), (128, "sigmoid"), (1024, "silu_first"))
    ]
