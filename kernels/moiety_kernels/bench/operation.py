"""An operation as a timed call: its sizes, and the type of its tensors on a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moiety_kernels.bench.clocks import Call
from moiety_kernels.bench.shapes import LayerShape
from moiety_kernels.bench.work import Work


@dataclass(frozen=True, slots=True)
class Point:
    """One timed size of an operation and the least work that it must do."""

    ours: Call
    rivals: dict[str, Call]
    work: Work
    dtype: str


@dataclass(frozen=True, slots=True)
class Operation:
    name: str
    tokens: Callable[[LayerShape, int], bool]  # whether it is measured with this many tokens
    bytes: Callable[[LayerShape, int], int]  # approximate memory in bytes
    make: Callable[[LayerShape, int, torch.device], Point]


def dtype_on(device: torch.device) -> torch.dtype:
    """Return float32 on a CPU, which has no fast 16-bit arithmetic beside its matrix tiles, else the GPU's type."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def dtype_name(tensor: Tensor) -> str:
    """Return the name of a tensor's type, as rows of a report have it."""
    return str(tensor.dtype).removeprefix("torch.")
