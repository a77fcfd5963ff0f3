"""Reader of float8 matrices (float8_e4m3fn) with scales.

A scale belongs to a block of rows and columns (`…weight_scale_inv` in DeepSeek-V3, `….scale` in V4), to a row, to a
group of a row's inputs (MXFP8, whose scales are powers of two) or to the matrix.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from moiety_engine.model.checkpoint_formats.tensor_source import TensorSource
from moiety_kernels.quantization import FP8, QuantizedWeight, WeightFormat, dequantize

if TYPE_CHECKING:
    from torch import Tensor

INVERSE, SCALES = "_scale_inv", "_scale"  # suffixes to the weight's name
_WEIGHT, _SCALE = ".weight", ".scale"  # of a module
EXPONENT_BIAS = 127


def float8_format(block: Any = None, group: int | None = None) -> WeightFormat:
    """Return the format with a scale per `block` (rows, columns), per `group` of a row's inputs, or per row."""
    if block:
        return WeightFormat(FP8.name, 8, int(block[1]), floating=True, rows=int(block[0]))
    return FP8 if group is None else WeightFormat(FP8.name, 8, group, floating=True)


def float8_sources(present: set[str], form: WeightFormat) -> dict[str, TensorSource]:
    """Return the sources of all matrices that have a scale."""
    return {plain: float8_source(plain, scale, form) for plain, scale in scaled_matrices(present).items()}


def scaled_matrices(present: set[str]) -> dict[str, str]:
    """Return the name of the scales of each matrix that has some."""
    found = {}
    for end, of_matrix in ((SCALES, ""), (INVERSE, ""), (_SCALE, _WEIGHT)):
        for name in present:
            plain = name.removesuffix(end) + of_matrix
            if name.endswith(end) and plain in present:
                found[plain] = name
    return found


def float8_source(name: str, scale: str, form: WeightFormat) -> TensorSource:
    """Return the source of one matrix that is kept."""
    make, keep = partial(from_float8, form=form), partial(kept_float8, form=form)
    return TensorSource((name, scale), make, keep, is_narrow=True)


def kept_float8(matrix: Tensor, scale: Tensor, form: WeightFormat) -> tuple[Tensor, Tensor]:
    """Return (bytes [..., N, K], scales float32 [..., N, G]) of a float8_e4m3fn matrix.

    `scale` is that of the matrix, or those of its rows, groups or blocks; the last blocks may be smaller. Scales in
    uint8 are exponents of two. Raises ValueError.
    """
    if matrix.dtype is not torch.float8_e4m3fn:
        raise ValueError(f"the values are {matrix.dtype}, not float8_e4m3fn")
    *stacked, rows, width = matrix.shape
    if scale.dim() == matrix.dim() + 2 and scale.shape[-1] == scale.shape[-3] == 1:  # as ModelOpt writes blocks
        scale = scale.squeeze(-1).squeeze(-2)
    wide = powers_of_two(scale) if scale.dtype is torch.uint8 else scale.float()
    if wide.numel() == 1:
        wide = wide.reshape(1, 1)
    elif form.group is None:
        wide = wide.reshape(*stacked, rows, 1)
    elif tuple(scale.shape) == (*stacked, -(-rows // form.rows), -(-width // form.group)):
        wide = wide.repeat_interleave(form.rows, -2)[..., :rows, :]
    else:
        raise ValueError(f"scales of shape {tuple(scale.shape)} do not match blocks of {form.rows} by {form.group}")
    return matrix.view(torch.uint8), wide.expand(*matrix.shape[:-1], form.num_groups(width))


def from_float8(matrix: Tensor, scale: Tensor, form: WeightFormat) -> Tensor:
    """Return each value times its scale, float32."""
    values, scales = kept_float8(matrix, scale, form)
    return dequantize(QuantizedWeight(values.view(torch.float8_e4m3fn), scales, form))


def powers_of_two(exponents: Tensor) -> Tensor:
    """Return the float32 powers of two with the exponents [uint8] plus a bias of 127 (E8M0 of the OCP MX formats)."""
    return torch.ldexp(torch.ones(exponents.shape), exponents.int() - EXPONENT_BIAS)
