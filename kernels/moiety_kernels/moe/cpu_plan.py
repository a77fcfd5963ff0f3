"""Division of the experts' products into tasks on a CPU. E experts, D width of the model, F of an expert."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from moiety_kernels.cpu.gemm import ROW_BLOCK, TEMP_AT, UNPACKED_AT, chunk_of
from moiety_kernels.cpu.products import Product, product_of

if TYPE_CHECKING:
    import torch

    from moiety_kernels.quantization.weight import WeightFormat

_MAX_CHUNK = (UNPACKED_AT - TEMP_AT) // (2 * 4 * ROW_BLOCK) // 16 * 16


@functools.lru_cache(maxsize=4096)
def experts_plan(
    up: tuple[int, torch.dtype | WeightFormat],
    down: tuple[int, torch.dtype | WeightFormat],
    shape_EDF: tuple[int, int, int],
    rows: int,
    num_inputs: int,
    threads: int,
) -> tuple[Product, Product, int, int]:
    """Return the products with both weights, and how many weight rows a task of each takes.

    `up`, `down`: the product kind of each weight, and how it is stored. `num_inputs`: of the activation.
    """
    num_experts, width, hidden = shape_EDF
    items = min(num_experts, rows)
    up_chunk = chunk_of(*up, width, hidden, rows // num_experts, items, num_inputs, threads)
    down_chunk = chunk_of(*down, hidden, width, rows // num_experts, items, 1, threads)
    return product_of(*up), product_of(*down), min(up_chunk, _MAX_CHUNK), down_chunk
