"""The product with the vocabulary in eight bits, beside products of layers in 8 or 4: each token reads all of it, and
as wide as it was it would be a good part of what is read. Embeddings stay wide: of those a token reads one row.

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

_ROWS_AT_ONCE = 256  # that are rounded, which takes several times their memory


def narrow_head_bytes(spec: ModelSpec) -> int:
    """Memory that it takes."""
    rows, width = allocate(spec, device=torch.device("meta"), dtype=torch.bfloat16).head_VD.shape
    return rows * (width * INT8.bits // 8 + 4)


def with_narrow_head(weights: ModelWeights) -> ModelWeights:
    """The same with the head in eight bits, if this machine's processor multiplies those as they lie. Where they are
    widened for each product that would take longer, not shorter, and the head stays as it is."""
    from moiety_kernels.cpu.gemm import is_unpacked  # noqa: PLC0415 - numba, which the start loads beside the weights

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
