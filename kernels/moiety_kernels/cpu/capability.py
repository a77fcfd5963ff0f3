"""What the processor does in hardware, as far as the choice of an implementation depends on it."""

from __future__ import annotations

import functools

import torch

NATIVE_BFLOAT16_ROWS = 32  # from so many rows on torch's bfloat16 product wins where the hardware has one


@functools.cache
def native_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 matrices itself (AMX or AVX512-BF16).

    There torch's product is several times our float32 arithmetic once rows are many; where emulated it is slower.
    """
    return bool(torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())
