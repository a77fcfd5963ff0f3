"""Which batches get the free places of a worker. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moiety_platform.batches.claims import OpenBatch


def next_batch(candidates: Sequence[OpenBatch], num_running: Mapping[str, int]) -> OpenBatch | None:
    """The oldest batch of the tenant that has the fewest lines running here, so that a long batch of one tenant holds
    no other's up. `candidates` are the oldest first; `num_running` counts lines by tenant."""
    return min(candidates, key=lambda batch: num_running.get(batch.tenant_id, 0), default=None)


def share(free: int, candidates: Sequence[OpenBatch], num_running: Mapping[str, int], tenant_id: str) -> int:
    """How many of the free places a tenant's batch may ask for at once: to its even part of all places; at least
    one."""
    tenants = {batch.tenant_id for batch in candidates}
    places = free + sum(num_running.get(tenant, 0) for tenant in tenants)
    even = places // len(tenants) - num_running.get(tenant_id, 0)
    return max(1, min(free, even))
