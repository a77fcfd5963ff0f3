"""Reader of float8 checkpoints whose experts have another type, as DeepSeek-V4 is published.

Experts are e2m1 numbers in bytes, two in each, with an exponent for every 32 inputs: mxfp4, matrix by matrix. All other
matrices that have scales are float8 in blocks.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from moiety_engine.model.checkpoint_formats.float8 import float8_source, powers_of_two, scaled_matrices
from moiety_engine.model.checkpoint_formats.four_bit_floats import from_codes
from moiety_engine.model.checkpoint_formats.tensor_source import StoredQuantization, TensorSource
from moiety_engine.model.quantization_formats import refused
from moiety_kernels.quantization import MXFP4

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.quantization import WeightFormat

_EXPERT = re.compile(r"\bexperts\.\d+\.")
_FLOAT4 = "fp4"
_GROUP = 32


def float8_with_experts(settings: dict[str, Any], form: WeightFormat) -> StoredQuantization:
    """Return the quantization of a checkpoint in float8, `form`, whose experts are mxfp4.

    The experts are kept as they are, and the other matrices are widened. Raises UnsupportedModelError.
    """
    if settings["expert_dtype"] != _FLOAT4:
        raise refused(f"'fp8' with expert_dtype {settings['expert_dtype']!r}")
    return StoredQuantization("fp8 with mxfp4 experts", MXFP4, partial(_sources, form=form))


def _sources(present: set[str], form: WeightFormat) -> dict[str, TensorSource]:
    found = {}
    for name, scale in scaled_matrices(present).items():
        if _EXPERT.search(name):
            found[name] = TensorSource((name, scale), from_float4, is_narrow=True)
        else:
            found[name] = TensorSource((name, scale), float8_source(name, scale, form).make, widened="float8")
    return found


def from_float4(packed: Tensor, exponents: Tensor) -> Tensor:
    """Return the values of a matrix, float32 [N, K], from bytes [N, K / 2] and scales or exponents [N, K / 32].

    The lower half of a byte comes first. Scales are float8_e8m0fnu, or their bytes. Raises ValueError.
    """
    if packed.itemsize != 1 or packed.dtype is torch.float8_e4m3fn:
        raise ValueError(f"the values are {packed.dtype}, not pairs of four bits")
    scales = powers_of_two(exponents) if exponents.dtype is torch.uint8 else exponents.float()
    return from_codes(packed.view(torch.uint8), scales, _GROUP)
