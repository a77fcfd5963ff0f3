"""GPUs and their links by data sheet, with the share of it that is reached; or this processor, measured.

Memory and arithmetic of an H200 are measured (`moiety_kernels.gpu.targets`); the other GPUs are assumed to reach the
same share of their data sheets.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from moiety_engine.errors import InvalidConfig
from moiety_engine.memory import available_bytes
from moiety_engine.simulator.devices import H200_QWEN3_30B_A3B
from moiety_kernels.bench.clocks import clock_of
from moiety_kernels.bench.speeds import measure_speeds
from moiety_kernels.environment import cpu_name
from moiety_kernels.gpu.targets import GFX942, H200, SM_80, SM_90, SM_100, DeviceModel, Target

_MEMORY_REACHED = H200.memory_bytes_per_s / 4.8e12  # 0.90: copies measured against the data sheet's bandwidth
_FLOPS_REACHED = H200.flops_bf16 / 989e12  # 0.80
LINK_REACHED = 0.8  # DeepEP's kernels: 39 to 48 of 50 GB/s, docs/legacy.md of deepseek-ai/DeepEP


@dataclass(frozen=True, slots=True)
class Link:
    """Bandwidth of one GPU in one direction, and the latency before an exchange's first byte."""

    name: str
    peak_bytes_per_s: float
    latency_s: float

    @property
    def bytes_per_s(self) -> float:
        return LINK_REACHED * self.peak_bytes_per_s


@dataclass(frozen=True, slots=True)
class Machine:
    """One GPU or processor: its speeds, its memory, and the link to the others of its host.

    `tiled`: experts are timed by the grouped GEMM's cost model instead of the floor of their bytes and operations.
    """

    speeds: DeviceModel
    memory_bytes: float
    link: str
    overhead_s: float = H200_QWEN3_30B_A3B.overhead_s  # constant part of a step
    tiled: bool = True
    reached: float = 0.85  # share of `speeds` that products and reads of real sizes reach; as in the simulator's H200


def _gpu(name: str, target: Target, num_sms: int, memory: float, bf16: float, fp8: float, l2_mib: int) -> DeviceModel:
    """Return the device model from data-sheet bytes/s and dense FLOP/s."""
    reached = _FLOPS_REACHED
    return DeviceModel(name, target, num_sms, memory * _MEMORY_REACHED, bf16 * reached, fp8 * reached, l2_mib << 20)


# Data sheets of the SXM and OAM modules: memory, dense bf16 and fp8, NVLink or Infinity Fabric in one direction (half
# of the advertised figure). An A100 has no fp8: its fp8 weights are widened.
GPUS = {
    "a100": Machine(_gpu("NVIDIA A100 80GB", SM_80, 108, 2.039e12, 312e12, 312e12, 40), 80e9, "nvlink3"),
    "h100": Machine(_gpu("NVIDIA H100 SXM", SM_90, 132, 3.35e12, 989e12, 1979e12, 50), 80e9, "nvlink4"),
    "h200": Machine(H200, 141e9, "nvlink4"),
    "b200": Machine(_gpu("NVIDIA B200", SM_100, 148, 8.0e12, 2250e12, 4500e12, 126), 180e9, "nvlink5"),
    "mi300x": Machine(_gpu("AMD MI300X", GFX942, 304, 5.3e12, 1307e12, 2615e12, 256), 192e9, "xgmi"),
}
LINKS = {
    link.name: link
    for link in (
        Link("nvlink3", 300e9, 4e-6),
        Link("nvlink4", 450e9, 4e-6),
        Link("nvlink5", 900e9, 4e-6),
        Link("xgmi", 448e9, 4e-6),  # seven links of 64 GB/s
        Link("pcie4", 32e9, 10e-6),
        Link("pcie5", 64e9, 10e-6),
        Link("ib200", 25e9, 10e-6),
        Link("ib400", 50e9, 10e-6),
        Link("ib800", 100e9, 10e-6),
        Link("eth100", 12.5e9, 30e-6),
    )
}


@dataclass(frozen=True, slots=True)
class GpuNetwork:
    """Links of a cluster: `inside` joins a host's `node_gpus` GPUs; `across` joins hosts, with one port per GPU."""

    inside: Link
    across: Link
    node_gpus: int


def find_gpu(name: str) -> Machine:
    """Return the machine of this name; "cpu" is this machine's processor, measured. Raises InvalidConfig."""
    if name == "cpu":
        return measure_processor()
    if name not in GPUS:
        raise InvalidConfig(f"{name!r} is not a known GPU; known are {', '.join(GPUS)}, and cpu, which is measured")
    return GPUS[name]


def find_network(names: str, machine: Machine, node_gpus: int) -> GpuNetwork:
    """Parse "INSIDE,ACROSS", where "nvlink" is the GPU's own link. Raises InvalidConfig."""
    parts = [machine.link if name == "nvlink" else name for name in names.split(",")]
    if len(parts) != 2 or any(name not in LINKS for name in parts):
        known = ", ".join(("nvlink", *LINKS))
        raise InvalidConfig(f"--link {names!r} must be two of {known}: inside a host, and across, as in nvlink,ib400")
    return GpuNetwork(LINKS[parts[0]], LINKS[parts[1]], node_gpus)


def measure_processor() -> Machine:
    """Measure this machine's processor for some seconds.

    Measures reads, and products in bfloat16 or float32, whichever is faster. Its memory is the available memory.
    """
    device = torch.device("cpu")
    measured = measure_speeds(device, clock_of(device)).best
    speeds = replace(  # its tiles and fp8 are never used
        H200,
        name=cpu_name(),
        memory_bytes_per_s=measured.memory_bytes_per_s,
        flops_bf16=measured.flops_per_s,
        flops_fp8=measured.flops_per_s,
    )
    return Machine(speeds, float(available_bytes()), "pcie5", overhead_s=0.0, tiled=False, reached=1.0)
