"""Quantized weight formats that the GPU kernels support. Handles no tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_kernels.quantization.weight import GPU_PACK, SCALE_BLOCK

if TYPE_CHECKING:
    from moiety_kernels.quantization.weight import WeightFormat

FLOAT8_CAPABILITY = (8, 9)  # NVIDIA's, the first with float8_e4m3fn


def unreadable(form: WeightFormat, device: torch.device) -> str | None:
    """Return why the kernels do not support weights in `form`; None if they do."""
    if form.is_float8:
        if (form.group, form.rows % SCALE_BLOCK) not in ((None, 1), (SCALE_BLOCK, 0)):
            block = f"{form.rows} by {form.group}"
            return f"its kernels read float8 with scales of rows or of blocks of {SCALE_BLOCK}, not of {block}"
        if device.type == "cuda" and not _has_float8(device):
            return "this GPU has no fp8, which came with compute capability 8.9"
        return None
    four_bits = (form.bits, form.group, form.pack, form.offsets) == (4, 32, GPU_PACK, False)
    return None if four_bits or (form.bits, form.group) == (8, None) else f"its kernels do not read {form.name} weights"


def _has_float8(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= FLOAT8_CAPABILITY
