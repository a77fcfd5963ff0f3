"""Numbers of KV blocks that fit in the available memory."""

from __future__ import annotations

import torch

from moiety_engine.cache.table_layout import TableLayout
from moiety_engine.errors import OutOfMemory
from moiety_engine.memory import Memory

CPU_FRACTION = 0.4  # of the memory available after loading the weights; the rest is left to the machine
RESERVE_FRACTION = 0.02  # of a GPU's memory, for fragmentation and captured graphs
RESERVE_BYTES = 512 << 20  # for kernels that are loaded later
ADAPTER_FRACTION = 1 / 64  # of a GPU's memory, for adapters
ADAPTER_BYTES = 1 << 30  # on a CPU, where unused memory is not allocated
HOST_FRACTION = 0.25  # of the available host memory, for the host tier beside a GPU
HOST_STATE_FRACTION = 0.25  # of the host tier, at most, for recurrent states of swapped-out sequences
SNAPSHOT_FRACTION = 0.2  # of the KV cache's memory, for snapshots of recurrent states
HOST_PER_DEVICE = 2  # upper bound, in multiples of the device's KV cache


def kv_budget_bytes(free: Memory, activation_bytes: int, adapter_bytes: int = 0, image_bytes: int = 0) -> int:
    """Return the bytes for the KV cache, from a GPU's free memory.

    A step takes `activation_bytes` of the free memory at its peak; adapters may take `adapter_bytes`, and encoded
    images with the encoder `image_bytes`. Raises OutOfMemory where no memory is left.
    """
    reserve = RESERVE_BYTES + int(free.total_bytes * RESERVE_FRACTION)
    budget = free.free_bytes - activation_bytes - adapter_bytes - image_bytes - reserve
    if budget <= 0:
        raise OutOfMemory(
            f"no memory is left for the KV cache: of {gib(free.total_bytes)} the weights and other programs leave "
            f"{gib(free.free_bytes)}, a step takes up to {gib(activation_bytes)}, adapters "
            f"{gib(adapter_bytes)}, images {gib(image_bytes)}, and {gib(reserve)} stay in reserve; "
            "lower --max-batch-tokens or --max-running, choose a smaller model, or end what else uses the GPU"
        )
    return budget


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def num_kv_blocks(
    *, budget_bytes: int, block_bytes: int, layout: TableLayout, max_running: int, max_context: int
) -> int:
    """Return the number of blocks in the budget, at most what `max_running` sequences of the longest context fill.

    Raises OutOfMemory where not even a single short sequence fits.
    """
    useful = max_running * layout.held_for(max_context)
    count, least = min(budget_bytes // max(1, block_bytes), useful), 2 * layout.num_tables
    if count < least:
        raise OutOfMemory(
            f"the KV cache has {budget_bytes / 2**20:.1f} MiB, but {least} blocks of {layout.block_size} tokens need "
            f"{least * block_bytes / 2**20:.1f} MiB: raise --kv-memory-bytes, or lower --block-size"
        )
    return count


def num_states(budget_bytes: int, state_bytes: int, max_running: int) -> int:
    """Return the number of state slots of recurrent layers: one per running sequence, and the others for snapshots.

    Snapshots get a fixed part of what the slots of running sequences leave of the budget. Raises OutOfMemory where
    those take more than half of it.
    """
    running_bytes = max_running * state_bytes
    if running_bytes > budget_bytes // 2:
        raise OutOfMemory(
            f"the recurrent states of {max_running} running requests need {gib(running_bytes)}, more than half of the "
            f"{gib(budget_bytes)} for the KV cache: lower --max-running, or raise --kv-memory-bytes"
        )
    return max_running + max(1, int((budget_bytes - running_bytes) * SNAPSHOT_FRACTION) // state_bytes)


def num_host_slots(host_bytes: int, state_bytes: int, max_running: int) -> int:
    """Return the number of recurrent states for which the host tier keeps a part of its `host_bytes`."""
    return min(max_running, int(host_bytes * HOST_STATE_FRACTION) // state_bytes) if state_bytes else 0


def num_host_blocks(
    *, device: torch.device, wanted_bytes: int | None, kv_bytes: int, block_bytes: int, host_bytes: int
) -> int:
    """Return the number of blocks of the host-memory tier; 0 for no tier.

    The tier comes in addition to `kv_bytes` of KV cache; `host_bytes` of host memory are available. By default a GPU
    gets a tier and a CPU does not: on a CPU the tier would use the same memory as the cache. Raises OutOfMemory.
    """
    if wanted_bytes is None:
        given_bytes = min(int(host_bytes * HOST_FRACTION), HOST_PER_DEVICE * kv_bytes)
        return given_bytes // block_bytes if device.type == "cuda" else 0
    if wanted_bytes > host_bytes:
        raise OutOfMemory(
            f"the KV cache's host tier is set to {wanted_bytes / 2**20:.1f} MiB, but "
            f"{host_bytes / 2**20:.1f} MiB of memory are available: lower --host-kv-memory-bytes, or set "
            "it to 0 for no host tier"
        )
    if 0 < wanted_bytes < block_bytes:
        raise OutOfMemory(
            f"the KV cache's host tier is set to {wanted_bytes} bytes, but one block needs {block_bytes}: "
            "raise --host-kv-memory-bytes, or set it to 0 for no host tier"
        )
    return wanted_bytes // block_bytes
