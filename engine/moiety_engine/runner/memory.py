"""How many KV blocks fit in the memory that is there."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from moiety_engine.errors import OutOfMemory

CGROUPS = Path("/sys/fs/cgroup")
CPU_FRACTION = 0.4  # of the memory that is available once the weights are loaded; the rest is the machine's
CUDA_FRACTION = 0.85  # of the free device memory, less the workspace; the rest is for activations
HOST_FRACTION = 0.25  # of the available memory beside a GPU, for the host tier
HOST_PER_DEVICE = 2  # but no more than so many times the device's KV cache
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


def num_host_blocks(
    *, device: torch.device, wanted_bytes: int | None, kv_bytes: int, block_bytes: int, host_bytes: int
) -> int:
    """Blocks of the host-memory tier, beside `kv_bytes` of KV cache and with `host_bytes` of memory available; 0 for no
    tier. Where nothing is said, a GPU gets one and a CPU does not: there it would be the same memory once more.
    Raises OutOfMemory."""
    if wanted_bytes is None:
        given_bytes = min(int(host_bytes * HOST_FRACTION), HOST_PER_DEVICE * kv_bytes)
        return given_bytes // block_bytes if device.type == "cuda" else 0
    if wanted_bytes > host_bytes:
        raise OutOfMemory(
            f"the KV cache's host tier was given {wanted_bytes / 2**20:.1f} MiB, and {host_bytes / 2**20:.1f} MiB of "
            "memory are available: lower --host-kv-memory-bytes, or set it to 0 to go without"
        )
    if 0 < wanted_bytes < block_bytes:
        raise OutOfMemory(
            f"the KV cache's host tier was given {wanted_bytes} bytes, and one block takes {block_bytes}: raise "
            "--host-kv-memory-bytes, or set it to 0 to go without"
        )
    return wanted_bytes // block_bytes
