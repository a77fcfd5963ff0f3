"""Measured peak speeds of this device (copies, reads, dense products), and the known speeds of named devices."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moiety_kernels.bench.clocks import Call, Clock, measure
from moiety_kernels.bench.work import Speeds
from moiety_kernels.gpu.targets import H200

_BUDGET_S = 1.0
_PRODUCTS = {"bf16": torch.bfloat16, "float32": torch.float32}
_KNOWN = {model.name: Speeds(model.memory_bytes_per_s, model.flops_bf16) for model in (H200,)}


@dataclass(frozen=True, slots=True)
class Measured:
    """Speeds measured in this run. A copy counts the bytes read and the bytes written."""

    copy_bytes_per_s: float
    read_bytes_per_s: float
    flops_bf16: float
    flops_float32: float

    @property
    def best(self) -> Speeds:
        return Speeds(max(self.copy_bytes_per_s, self.read_bytes_per_s), max(self.flops_bf16, self.flops_float32))


def measure_speeds(device: torch.device, clock: Clock) -> Measured:
    """Measure the device's speeds. Takes a few seconds, and 4 GB of a GPU's memory or 256 MB of the host's."""
    size, side = (1 << 31, 8192) if device.type == "cuda" else (1 << 27, 1024)
    moved, _ = measure(_moves(size, device), clock, budget_s=_BUDGET_S)
    calls = {name: _product(side, dtype, device) for name, dtype in _PRODUCTS.items()}
    products, _ = measure(calls, clock, budget_s=_BUDGET_S)
    return Measured(
        copy_bytes_per_s=2 * size / moved["copy"].seconds,
        read_bytes_per_s=size / moved["read"].seconds,
        flops_bf16=2 * side**3 / products["bf16"].seconds,
        flops_float32=2 * side**3 / products["float32"].seconds,
    )


def roofline_speeds(device_name: str, measured: Measured) -> tuple[Speeds, str]:
    """Return the roofline's speeds and their source.

    A known device's speeds are used, so that runs can be compared; otherwise this run's.
    """
    known = _KNOWN.get(device_name)
    return (measured.best, "measured in this run") if known is None else (known, f"known of {device_name}")


def _product(side: int, dtype: torch.dtype, device: torch.device) -> Call:
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return lambda: left @ right


def _moves(size: int, device: torch.device) -> dict[str, Call]:
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return {"copy": lambda: target.copy_(source), "read": source.sum}
