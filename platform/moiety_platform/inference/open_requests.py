"""Counts of requests with a part that only a few requests of a tenant may have at once, such as documents or links."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from moiety_platform.errors import RateLimited


class OpenRequests:
    """Open requests by tenant. For one event loop."""

    def __init__(self) -> None:
        self._num_open: Counter[str] = Counter()

    def total(self) -> int:
        """Return the number of open requests of all tenants."""
        return self._num_open.total()

    @contextmanager
    def counted(self, tenant_id: str, limit: int, refusal: RateLimited) -> Iterator[None]:
        """Count a request of the tenant as open. Raises `refusal` where the tenant has `limit` of them."""
        if self._num_open[tenant_id] >= limit:
            raise refusal
        self._num_open[tenant_id] += 1
        try:
            yield
        finally:
            self._num_open[tenant_id] -= 1
            if not self._num_open[tenant_id]:
                del self._num_open[tenant_id]
