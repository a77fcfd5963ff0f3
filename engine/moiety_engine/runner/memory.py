"""How many KV blocks fit in the memory that is there."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from moiety_engine.errors import OutOfMemory

CGROUPS = Path("/sys/fs/cgroup")
CPU_FRACTION = 0.4  # of the memory that is available once the weights are loaded; the rest is the machine's
CUDA_FRACTION = 0.85  # of the free device memory, less the workspace; the rest is for activations
CUDA_WORKSPACE_BYTES = 2 << 30  # what gathered attention may take, with some room


def kv_budget_bytes(device: torch.device, wanted_bytes: int | None) -> int:
    """Bytes for the KV cache: what the configuration says, else a share of what is free now."""
    if wanted_bytes is not None:
        return wanted_bytes
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return max(free // 2, int(free * CUDA_FRACTION) - CUDA_WORKSPACE_BYTES)
    return int(available_bytes() * CPU_FRACTION)


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


def num_kv_blocks(*, budget_bytes: int, block_bytes: int, block_size: int, max_running: int, max_context: int) -> int:
    """Blocks for the budget, but no more than `max_running` sequences of the longest context could fill.
    Raises OutOfMemory where not even a single short sequence fits."""
    useful = max_running * -(-max_context // block_size)
    count = min(budget_bytes // block_bytes, useful)
    if count < 2:
        raise OutOfMemory(
            f"the KV cache has {budget_bytes / 2**20:.1f} MiB, and two blocks of {block_size} tokens take "
            f"{2 * block_bytes / 2**20:.1f} MiB: raise --kv-memory-bytes, or lower --block-size"
        )
    return count
