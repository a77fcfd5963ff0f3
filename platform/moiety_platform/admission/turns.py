"""Fair order of request processing on a gateway's event loop: tenants take turns.

Decoding a request's body and counting its tokens block the event loop, for longer the more text there is. In order of
arrival, a tenant that sends hundreds of requests at once would delay the requests and streams of everybody else until
its last request is done. Instead each iteration of the event loop begins a few requests, one per tenant in turn;
sockets are served between two iterations.
"""

from __future__ import annotations

import asyncio
from collections import deque

MAX_BEGUN = 4  # per iteration: each takes up to 0.5 ms; a lower bound limits the requests per second


class Turns:
    """Round-robin over tenants, for one event loop.

    A request with fewer than `MAX_BEGUN` before it in the same iteration continues at once.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by tenant, in the order of their turns
        self._num_begun = 0  # in this iteration

    async def wait(self, tenant_id: str) -> None:
        """Wait for the tenant's turn. The requests of one tenant keep the order of their calls."""
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
                self._waiting[tenant_id] = futures  # behind all other tenants
            if not future.done():  # otherwise its client has disconnected
                future.set_result(None)
                self._begin()
