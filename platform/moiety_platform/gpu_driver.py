"""Device files of GPU drivers, which tell that there is a GPU without the seconds that an import of torch takes."""

from __future__ import annotations

from pathlib import Path

NVIDIA_DRIVER = Path("/dev/nvidiactl")
AMD_DRIVER = Path("/dev/kfd")


def has_gpu_driver() -> bool:
    return NVIDIA_DRIVER.exists() or AMD_DRIVER.exists()
