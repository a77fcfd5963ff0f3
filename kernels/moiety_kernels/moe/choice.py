"""Choice of the expert layer's implementation, and the devices that each supports. Handles no tensors."""

from __future__ import annotations

import functools
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from moiety_kernels.quantization.on_gpu import unreadable

if TYPE_CHECKING:
    from moiety_kernels.quantization import WeightFormat

MOE_KERNELS = ("auto", "triton", "grouped", "reference")

_MIN_CAPABILITY = (8, 0)  # NVIDIA's, with bfloat16 in the tensor cores


@functools.cache
def unavailable(kernel: str, device: torch.device, dtype: torch.dtype, form: WeightFormat | None = None) -> str | None:
    """Return why `kernel` cannot run on `device` with these types of activations and weights; None if it can."""
    if kernel == "triton":
        reason = None if form is None else unreadable(form, device)
        return reason or _triton_unavailable(device)
    if kernel == "grouped":
        if form is not None:
            return f"torch's grouped product does not read {form.name} weights"
        if not hasattr(functional, "grouped_mm"):
            return "this torch has no grouped_mm"
        if dtype is not torch.bfloat16:
            return f"torch's grouped product takes bfloat16, and activations are {str(dtype).removeprefix('torch.')}"
    return None


def _triton_unavailable(device: torch.device) -> str | None:
    if find_spec("triton") is None:
        return "Triton is not installed"
    if device.type == "cuda":
        if torch.version.hip is None and torch.cuda.get_device_capability(device) < _MIN_CAPABILITY:
            return f"{torch.cuda.get_device_name(device)} is older than what its kernels are written for"
        return None
    from triton import knobs  # noqa: PLC0415 - Triton, which a CPU has no use for

    return None if knobs.runtime.interpret else f"it needs a GPU, and the model is on {device.type!r}"
