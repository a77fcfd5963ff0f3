"""Slots of one process for work that tenants cause and that cannot be interrupted, shared fairly between them."""

from __future__ import annotations

import asyncio
from collections import Counter, deque


class TenantSlots:
    """A number of slots, with a queue for each tenant. For one event loop.

    A tenant without a slot gets any that is free. A further one it gets only while more than half of all are free, so
    a few tenants whose work never ends cannot take the slots from the others. A slot that becomes free goes to the
    waiting tenant with the fewest, and among equals to the one whose last turn is longest ago.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._held: Counter[str] = Counter()
        self._num_held = 0
        self._queues: dict[str, deque[tuple[asyncio.Future[None], int]]] = {}  # in the order of their turns

    async def acquire(self, tenant_id: str, max_per_tenant: int) -> None:
        """Wait for a slot of the tenant, which has at most so many. `release` frees it."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = turn, max_per_tenant
        self._queues.setdefault(tenant_id, deque()).append(entry)
        self._grant()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(tenant_id)
            else:
                self._leave_queue(tenant_id, entry)
            raise

    def release(self, tenant_id: str) -> None:
        """Free a slot of the tenant."""
        self._num_held -= 1
        self._held[tenant_id] -= 1
        if not self._held[tenant_id]:
            del self._held[tenant_id]
        self._grant()

    def _grant(self) -> None:
        """Give free slots to those that wait, as long as one may have one."""
        while self._num_held < self._num_slots:
            able = [tenant_id for tenant_id in self._queues if self._may_take(tenant_id)]
            if not able:
                return
            tenant_id = min(able, key=lambda one: self._held[one])
            queue = self._queues.pop(tenant_id)
            turn, _ = queue.popleft()
            if queue:
                self._queues[tenant_id] = queue  # behind the others
            if turn.cancelled():
                continue
            self._held[tenant_id] += 1
            self._num_held += 1
            turn.set_result(None)

    def _may_take(self, tenant_id: str) -> bool:
        held, (_, max_per_tenant) = self._held[tenant_id], self._queues[tenant_id][0]
        return held < max_per_tenant and (not held or 2 * (self._num_slots - self._num_held) > self._num_slots)

    def _leave_queue(self, tenant_id: str, entry: tuple[asyncio.Future[None], int]) -> None:
        queue = self._queues.get(tenant_id)
        if queue is not None and entry in queue:
            queue.remove(entry)
            if not queue:
                del self._queues[tenant_id]
            self._grant()  # what is now first in the queue may have a higher limit
