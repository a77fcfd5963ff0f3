"""The GPUs that kernels are compiled for and tiles are chosen for. Imports neither torch nor Triton."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """An instruction set, by Triton's name."""

    name: str
    backend: str  # "cuda" or "hip"
    arch: int | str
    warp_size: int
    max_shared_bytes: int  # limit of one program


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """Properties of one GPU for a cost model. Speeds are those that simple code reaches, not a data sheet's."""

    name: str
    target: Target
    num_sms: int
    memory_bytes_per_s: float
    flops_bf16: float
    flops_fp8: float
    l2_bytes: int


SM_80 = Target("sm_80", "cuda", 80, 32, 163 * 1024)
SM_90 = Target("sm_90", "cuda", 90, 32, 227 * 1024)
SM_100 = Target("sm_100", "cuda", 100, 32, 227 * 1024)
GFX942 = Target("gfx942", "hip", "gfx942", 64, 64 * 1024)
TARGETS = {target.name: target for target in (SM_80, SM_90, SM_100, GFX942)}

# Measured copies and bf16 products of an H200; fp8 at twice the bf16 rate, as in its data sheet.
H200 = DeviceModel("NVIDIA H200", SM_90, 132, 4.3e12, 790e12, 1580e12, 50 * 1024**2)
