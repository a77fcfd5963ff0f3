"""Total and available memory of a device."""

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
    """Return the device's memory that this process may still use, and its total."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # memory that torch keeps for later allocations counts as free
        return Memory(*torch.cuda.mem_get_info(device))
    return Memory(available_bytes(), psutil.virtual_memory().total)


def available_bytes(cgroups: Path = CGROUPS) -> int:
    """Return the memory that this process may still use: the machine's, or less under a container's limit.

    Page-cache pages, for instance of a checkpoint's files, are released under memory pressure: they count as free.
    """
    left = [psutil.virtual_memory().available]
    for folder, limit_name, used_name, of_all in (
        (cgroups, "memory.max", "memory.current", ""),  # cgroup version 2
        (cgroups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),  # cgroup version 1
    ):
        limit_file, used_file = folder / limit_name, folder / used_name
        if limit_file.exists() and used_file.exists() and (limit := limit_file.read_text().strip()) != "max":
            in_use = int(used_file.read_text()) - _pages_of_files(folder / "memory.stat", of_all)
            left.append(max(0, int(limit) - max(0, in_use)))
    return min(left)


def _pages_of_files(stat: Path, of_all: str) -> int:
    if not stat.exists():
        return 0
    counts = dict(line.split() for line in stat.read_text().splitlines())
    return sum(int(counts.get(f"{of_all}{kind}_file", 0)) for kind in ("active", "inactive"))
