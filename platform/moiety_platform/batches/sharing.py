"""Distribution of a worker's free places over batches. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moiety_platform.batches.claims import OpenBatch


def next_batch(candidates: Sequence[OpenBatch], num_running: Mapping[str, int]) -> OpenBatch | None:
    """Return the oldest batch of the tenant with the fewest running lines.

    So a long batch delays no other tenant's. `candidates` are ordered oldest first; `num_running` counts lines by
    tenant.
    """
    return min(candidates, key=lambda batch: num_running.get(batch.tenant_id, 0), default=None)


def share(free: int, candidates: Sequence[OpenBatch], num_running: Mapping[str, int], tenant_id: str) -> int:
    """Return how many free places a tenant's batch may take at once; at least one.

    A tenant's batches may run up to its even part of all places.
    """
    tenants = {batch.tenant_id for batch in candidates}
    places = free + sum(num_running.get(tenant, 0) for tenant in tenants)
    even = places // len(tenants) - num_running.get(tenant_id, 0)
    return max(1, min(free, even))
