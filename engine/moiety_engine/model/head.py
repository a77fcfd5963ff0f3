"""Output head quantized to 8 bits, for models whose layers' products are in 8 or 4 bits.

Each token reads the whole head, which unquantized would be a large part of the memory traffic. Embeddings stay
unquantized, since a token reads one row only.

V vocabulary, D model width.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from moiety_engine.model.weights import allocate
from moiety_kernels.quantization import INT8, QuantizedWeight, quantize

if TYPE_CHECKING:
    from moiety_engine.model.spec import ModelSpec
    from moiety_engine.model.weights import ModelWeights

_ROWS_AT_ONCE = 256  # rows quantized per call, which needs several times their memory


def narrow_head_bytes(spec: ModelSpec) -> int:
    """Return the memory of the quantized head, in bytes."""
    rows, width = allocate(spec, device=torch.device("meta"), dtype=torch.bfloat16).head_VD.shape
    return rows * (width * INT8.bits // 8 + 4)


def with_narrow_head(weights: ModelWeights) -> ModelWeights:
    """Return the weights with the head in 8 bits, if this machine's CPU multiplies 8-bit weights directly.

    Otherwise they would be widened for each product, which takes longer, and the weights are returned unchanged.
    """
    from moiety_kernels.cpu.gemm import is_unpacked  # noqa: PLC0415 - numba, imported while weights load

    wide_VD = weights.head_VD
    assert isinstance(wide_VD, torch.Tensor)
    rows = wide_VD.shape[0]
    narrow = QuantizedWeight(torch.empty_like(wide_VD, dtype=torch.int8), torch.empty(rows, 1), INT8)
    if not rows or not INT8.takes(wide_VD.shape[1]) or is_unpacked(narrow):
        return weights
    for first in range(0, rows, _ROWS_AT_ONCE):
        some = slice(first, first + _ROWS_AT_ONCE)
        part = quantize(wide_VD[some], INT8)
        narrow.values_NK[some], narrow.scales_NG[some] = part.values_NK, part.scales_NG
    return replace(weights, head_VD=narrow)
