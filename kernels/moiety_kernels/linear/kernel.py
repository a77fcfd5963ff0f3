"""Batch-invariant linear maps in Triton: a row's result has the same bits alone and in any batch.

There is one weight, which may be quantized, or one per head. T rows, H heads, N outputs, K inputs, G groups of inputs
that share a scale.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moiety_kernels.gpu.cases import CompileCase
from moiety_kernels.gpu.devices import device_model
from moiety_kernels.grouped_gemm.kernels.four_bits import down_sums
from moiety_kernels.grouped_gemm.kernels.launching import GROUP, copied_by_engine, num_programs, rows_aligned
from moiety_kernels.grouped_gemm.kernels.shared import (
    SCALE_BLOCK,
    along_columns,
    empty_sums,
    load_weights,
    multiply,
    place,
)
from moiety_kernels.linear.tiles import FOUR, HOPPER, NARROW, PORTABLE, SINGLE, Tile, choose
from moiety_kernels.quantization import MXFP4, QuantizedWeight
from moiety_kernels.quantization.on_gpu import unreadable

if TYPE_CHECKING:
    from moiety_kernels.quantization import WeightFormat

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_WHOLE, _FLOATING = "int4", MXFP4.name  # the kernels' names of the 4-bit formats
_SWAP = tl.constexpr(True)  # weights are the rows of the tensor cores' products, which need at least 64


def unfit(x_THK: Tensor, weight_HNK: Tensor) -> str | None:
    """Return why the functions here do not support these tensors; None if they do."""
    if x_THK.dtype not in _DTYPES or weight_HNK.dtype not in _DTYPES:
        return f"inputs are {x_THK.dtype} and weights {weight_HNK.dtype}, not all of 16 or 32 bits"
    if x_THK.stride(-1) != 1 or weight_HNK.stride(-1) != 1:
        return "values of a row do not lie next to each other"
    return None


def unfit_narrow(x_TK: Tensor, weight_NK: QuantizedWeight) -> str | None:
    """Return why `linear` does not support a quantized weight; None if it does."""
    if x_TK.dtype not in _DTYPES or x_TK.stride(-1) != 1:
        return f"inputs are {x_TK.dtype}, not of 16 or 32 bits whose values lie next to each other"
    if weight_NK.format.bits == 4 and x_TK.element_size() != 2:
        return f"beside weights of 4 bits inputs are {x_TK.dtype}, not of 16 bits"
    if not weight_NK.is_contiguous():
        return "values of the weight do not lie next to each other"
    return unreadable(weight_NK.format, x_TK.device)


def linear(
    x_TK: Tensor, weight_NK: Tensor | QuantizedWeight, bias_N: Tensor | None = None, *, tile: Tile | None = None
) -> Tensor:
    """Return x · weightᵀ + bias in x's dtype. A weight of another dtype is widened or rounded to it first."""
    if isinstance(weight_NK, QuantizedWeight):
        form, values, scales = weight_NK.format, weight_NK.values_NK.unsqueeze(0), weight_NK.scales_NG
        return _multiply(x_TK.unsqueeze(1), values, bias_N, tile, scales, form).squeeze(1)
    return _multiply(x_TK.unsqueeze(1), weight_NK.unsqueeze(0), bias_N, tile).squeeze(1)


def head_linear(x_THK: Tensor, weight_HNK: Tensor, *, tile: Tile | None = None) -> Tensor:
    """Return out_THN = Σ_k x[t, h, k] · weight[h, n, k], contiguous, in x's dtype."""
    return _multiply(x_THK, weight_HNK, None, tile)


def _multiply(
    x_THK: Tensor,
    weight_HNK: Tensor,
    bias_N: Tensor | None,
    tile: Tile | None,
    scales_NG: Tensor | None = None,
    form: WeightFormat | None = None,
) -> Tensor:
    (rows, heads, inner), width = x_THK.shape, weight_HNK.shape[1]
    out_THN = torch.empty(rows, heads, width, dtype=x_THK.dtype, device=x_THK.device)
    if rows == 0 or width == 0:
        return out_THN
    if tile is None:
        device = device_model(x_THK.device)
        tile = choose(_tiles(x_THK, form), rows, heads * width, device.num_sms)
    four = "" if form is None or form.bits == 8 else _FLOATING if form.floating else _WHOLE
    a_step = tile.BK // (2 if four else 1)  # bytes of two numbers each, and the halves of rows that they multiply
    engine = copied_by_engine(weight_HNK)
    rows_engine = engine and heads == 1 and rows_aligned(x_THK)
    pieces = heads * triton.cdiv(rows, tile.BM) * triton.cdiv(width, tile.BN)
    _linear[(num_programs(x_THK.device, tile.per_sm, pieces),)](
        TensorDescriptor.from_tensor(x_THK.squeeze(1), [tile.BM, a_step]) if rows_engine else None,
        x_THK,
        _matrix(weight_HNK, tile.BN, a_step) if engine else weight_HNK,
        scales_NG,
        bias_N,
        out_THN,
        rows,
        heads,
        width,
        inner,
        x_THK.stride(0),
        x_THK.stride(1),
        weight_HNK.stride(0),
        weight_HNK.stride(1),
        BM=tile.BM,
        BN=tile.BN,
        BK=tile.BK,
        GROUP=GROUP,
        TMA=engine,
        ROWS_TMA=rows_engine,
        SCALES=_scales(form),
        FOUR=four,
        BIAS=bias_N is not None,
        FLAT=tile.flat,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out_THN


def _tiles(x_THK: Tensor, form: WeightFormat | None) -> tuple[Tile, ...]:
    if x_THK.dtype is torch.float32:
        return SINGLE
    target = device_model(x_THK.device).target
    if target.backend != "cuda" or int(target.arch) < 90:
        return PORTABLE
    if form is None:
        return HOPPER
    return NARROW if form.bits == 8 else FOUR


def _scales(form: WeightFormat | None) -> str:
    """Return which scales are applied to sums; those of 4-bit weights are applied to numbers instead."""
    if form is None or form.bits == 4:
        return "none"
    return "row" if form.group is None else "block"


def _matrix(weight_HNK: Tensor, columns: int, a_step: int) -> TensorDescriptor:
    """Return a descriptor of all heads' weights as one matrix."""
    heads, width, inner = weight_HNK.shape
    return TensorDescriptor(weight_HNK, [heads * width, inner], [weight_HNK.stride(1), 1], [columns, a_step])


@triton.jit(do_not_specialize=["num_rows"])
def _linear(
    x, p_x, w, p_scale, p_bias, p_out, num_rows, num_heads, width, inner, x_stride, x_head_stride, w_head_stride,
    w_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr,
    ROWS_TMA: tl.constexpr, SCALES: tl.constexpr, FOUR: tl.constexpr, BIAS: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    num_tiles = tl.cdiv(num_rows, BM)
    num_blocks = tl.cdiv(width, BN)
    of_head = num_tiles * num_blocks
    for index in tl.range(tl.program_id(0), num_heads * of_head, tl.num_programs(0), flatten=FLAT):
        head = index // of_head
        i_tile, i_block = place(index % of_head, num_tiles, num_blocks, GROUP)
        first = i_tile * BM
        column = i_block * BN
        i_row = first + tl.arange(0, BM)
        m_row = i_row < num_rows
        i_k = tl.arange(0, BK)
        p_row = p_x + i_row.to(tl.int64) * x_stride + head.to(tl.int64) * x_head_stride
        i_column = column + tl.arange(0, BN)
        m_column = i_column < width
        sums = empty_sums(BM, BN, _SWAP)
        if FOUR == "":
            for k in range(0, inner, BK):
                if ROWS_TMA:
                    rows = x.load([first, k])
                else:
                    m_rows = m_row[:, None] & (k + i_k < inner)[None, :]
                    rows = tl.load(p_row[:, None] + (k + i_k)[None, :], mask=m_rows, other=0.0)
                weights = load_weights(w, head, column, k, width, inner, w_head_stride, w_stride, BN, BK, TMA)
                if SCALES == "block":
                    p_group = p_scale + i_column.to(tl.int64) * tl.cdiv(inner, SCALE_BLOCK) + k // SCALE_BLOCK
                    scale = tl.load(p_group, mask=m_column, other=0.0)
                    step = multiply(rows, weights.to(rows.dtype), empty_sums(BM, BN, _SWAP), _SWAP)
                    sums += step * along_columns(scale, _SWAP)
                else:
                    sums = multiply(rows, weights.to(rows.dtype), sums, _SWAP)
        else:
            sums = down_sums(x, p_row, m_row, w, p_scale, sums, head, first, column, width, inner, w_head_stride,
                             w_stride, BN, BK, _SWAP, TMA, ROWS_TMA, FOUR)  # fmt: skip
        if SCALES == "row":
            sums *= along_columns(tl.load(p_scale + i_column, mask=m_column, other=0.0), _SWAP)
        if BIAS:
            bias = tl.load(p_bias + i_column, mask=m_column, other=0.0).to(tl.float32)
            sums += along_columns(bias, _SWAP)
        p_rows = p_out + (i_row.to(tl.int64) * num_heads + head)[:, None] * width + i_column[None, :]
        tl.store(p_rows, sums.to(p_out.dtype.element_ty).T, mask=m_row[:, None] & m_column[None, :])


def compile_cases() -> list[CompileCase]:
    """Return a case per tile; those without the copy engine for targets that lack it, and one of them for Hopper."""
    found = [_case(tile, "bf16", ("sm_90", "sm_100"), engine=True, bias=tile is HOPPER[0]) for tile in HOPPER]
    found += [_case(tile, "bf16", ("sm_80", "gfx942"), engine=False) for tile in PORTABLE]
    found.append(_case(HOPPER[0], "bf16", ("sm_90",), engine=False))
    for tile in NARROW:
        for weights, scales in (("i8", "row"), ("fp8e4nv", "row"), ("fp8e4nv", "block")):
            found.append(_case(tile, "bf16", ("sm_90",), engine=True, weights=weights, scales=scales))
    found += [_case(tile, "bf16", ("sm_90",), engine=True, four=four) for tile in FOUR for four in (_WHOLE, _FLOATING)]
    found.append(_case(PORTABLE[1], "bf16", ("sm_80", "gfx942"), engine=False, weights="i8", scales="row"))
    found.append(_case(PORTABLE[0], "bf16", ("sm_80", "gfx942"), engine=False, four=_FLOATING))
    return found + [_case(tile, "fp32", ("sm_90",), engine=True) for tile in SINGLE]


def _case(
    tile: Tile,
    dtype: str,
    only: tuple[str, ...],
    *,
    engine: bool,
    bias: bool = False,
    weights: str = "",
    scales: str = "none",
    four: str = "",
) -> CompileCase:
    kept = "u8" if four else weights or dtype
    a_step = tile.BK // (2 if four else 1)
    pointers = dict.fromkeys(("p_x", "p_out"), f"*{dtype}") | {"p_bias": "*fp32", "p_scale": "*fp32"}
    pointers["x"] = f"tensordesc<{dtype}[{tile.BM}, {a_step}]>" if engine else f"*{dtype}"
    pointers["w"] = f"tensordesc<{kept}[{tile.BN}, {a_step}]>" if engine else f"*{kept}"
    sizes = ("num_rows", "num_heads", "width", "inner", "x_stride", "x_head_stride", "w_head_stride", "w_stride")
    constants: dict[str, Any] = {
        "BM": tile.BM,
        "BN": tile.BN,
        "BK": tile.BK,
        "GROUP": GROUP,
        "TMA": engine,
        "ROWS_TMA": engine,
        "SCALES": scales,
        "FOUR": four,
        "BIAS": bias,
        "FLAT": tile.flat,
    }
    # One stage fewer where the compiler makes the copies from addresses, and where weights are widened in registers.
    ahead = tile.stages - (0 if engine and kept == dtype else 1)
    stage = tile.BM * tile.BK * 2 + tile.BN * a_step * (2 if kept == dtype else 1)
    least = 0 if dtype == "fp32" else ahead * stage
    kind = "" if kept == dtype else f" {four or kept}{'' if four else f' a scale a {scales}'}"
    name = f"linear {tile.name} {dtype}{kind}{'' if engine else ' by addresses'}{' bias' if bias else ''}"
    signature = pointers | dict.fromkeys(sizes, "i32")
    unaligned = frozenset({"num_rows"})
    return CompileCase(name, _linear, signature, constants, tile.warps, tile.stages, only, least, unaligned)
