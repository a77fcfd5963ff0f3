"""Turns of tenants: one task of each tenant at a time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class TenantLocks:
    """Locks per tenant for work that takes much memory or time: a tenant's further requests wait for its first one."""

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}
        self._users = Counter[str]()

    @asynccontextmanager
    async def of(self, tenant_id: str) -> AsyncIterator[None]:
        """Wait for the tenant's turn, and hold it while the context is open."""
        lock = self._locks.setdefault(tenant_id, asyncio.Lock())
        self._users[tenant_id] += 1
        try:
            async with lock:
                yield
        finally:
            self._users[tenant_id] -= 1
            if not self._users[tenant_id]:
                del self._users[tenant_id], self._locks[tenant_id]
