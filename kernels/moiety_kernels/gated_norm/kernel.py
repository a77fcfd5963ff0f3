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

MAX_WIDTH = 1024
_ENTRIES = 4096  # per program


def fits(x_TMV: Tensor, gate_TMV: Tensor) -> bool:
    """Return whether the kernel supports these tensors."""
    return x_TMV.shape[2] <= MAX_WIDTH and x_TMV.is_contiguous() and gate_TMV.stride()[1:] == (gate_TMV.shape[2], 1)


def gated_norm(x_TMV: Tensor, gate_TMV: Tensor, weight_V: Tensor, eps: float, gate: str) -> Tensor:
    """Return rms_norm(x) · weight · gate, contiguous, in x's dtype."""
    out_TMV = torch.empty_like(x_TMV)
    tokens, heads, width = x_TMV.shape
    if out_TMV.numel() == 0:
        return out_TMV
    block = triton.next_power_of_2(width)
    some = min(triton.next_power_of_2(heads), max(1, _ENTRIES // block))
    _gated_norm[(tokens, triton.cdiv(heads, some))](
        x_TMV, gate_TMV, weight_V, out_TMV, heads, width, gate_TMV.stride(0), eps, SIGMOID=gate == "sigmoid",
        HEADS=some, BLOCK=block,
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
    eps,
    SIGMOID: tl.constexpr,
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
    weight = tl.load(p_weight + i_column, mask=i_column < width, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, axis=1) / width + eps)[:, None] * weight[None, :]
    opened = tl.sigmoid(gate) if SIGMOID else gate * tl.sigmoid(gate)
    tl.store(p_out + i_token * heads * width + at, (normed * opened).to(p_out.dtype.element_ty), mask=mask)


def compile_cases() -> list[CompileCase]:
    """Return the cases of heads of 128 and of 64, with both gates."""
    signature = {"p_x": "*bf16", "p_gate": "*bf16", "p_weight": "*fp32", "p_out": "*bf16", "eps": "fp32"}
    signature |= dict.fromkeys(("heads", "width", "gate_stride"), "i32")
    return [
        CompileCase(
            f"gated_norm {block}{' sigmoid' if sigmoid else ''}",
            _gated_norm,
            signature,
            {"SIGMOID": sigmoid, "HEADS": _ENTRIES // block, "BLOCK": block},
        )
        for block in (64, 128)
        for sigmoid in (False, True)
    ]
