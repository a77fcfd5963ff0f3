"""The order in which requests are worked on by the event loop of a gateway: tenants take turns.

To decode a request's body and to count its tokens holds the event loop, for longer the more text there is. Requests
that come at the same time would otherwise be worked on in the order in which they came, so that a tenant which sends
hundreds at once would hold up everybody else's requests and every stream until the last of them is done. A few requests
are begun in each iteration of the event loop, one of each tenant in turn; between two iterations sockets are served.
"""

from __future__ import annotations

import asyncio
from collections import deque

MAX_BEGUN = 4  # in an iteration: each costs up to half a millisecond, and a gateway with fewer serves fewer a second


class Turns:
    """One event loop. A request that finds less than `MAX_BEGUN` before it in the same iteration goes on at once."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by tenant, in the order of their turns
        self._num_begun = 0  # in this iteration

    async def wait(self, tenant_id: str) -> None:
        """Return when the tenant has its turn, its requests in the order of their calls."""
        if self._num_begun < MAX_BEGUN and not self._waiting:
            self._begin()
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant_id, deque()).append(future)
        await future

    def _begin(self) -> None:
        if self._num_begun == 0:
            asyncio.get_running_loop().call_soon(self._next_iteration)
        self._num_begun += 1

    def _next_iteration(self) -> None:
        self._num_begun = 0
        while self._waiting and self._num_begun < MAX_BEGUN:
            tenant_id = next(iter(self._waiting))
            futures = self._waiting.pop(tenant_id)
            future = futures.popleft()
            if futures:
                self._waiting[tenant_id] = futures  # after all others
            if not future.done():  # else its client has left
                future.set_result(None)
                self._begin()
