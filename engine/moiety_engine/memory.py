"""How much memory a device has and has left."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import psutil
import torch

CGROUPS = Path("/sys/fs/cgroup")


class Memory(NamedTuple):
    free_bytes: int
    total_bytes: int


def device_memory(device: torch.device) -> Memory:
    """What this process may still take of the device's memory, and what it has in all."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what torch keeps for later allocations is free to us
        return Memory(*torch.cuda.mem_get_info(device))
    return Memory(available_bytes(), psutil.virtual_memory().total)


def available_bytes(cgroups: Path = CGROUPS) -> int:
    """Memory that this process may still take: the machine's, or what is left of its container's limit if less."""
    left = [psutil.virtual_memory().available]
    for limit_name, used_name in (
        ("memory.max", "memory.current"),  # version 2
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),  # version 1
    ):
        limit_file, used_file = cgroups / limit_name, cgroups / used_name
        if limit_file.exists() and used_file.exists() and (limit := limit_file.read_text().strip()) != "max":
            left.append(max(0, int(limit) - int(used_file.read_text())))
    return min(left)
