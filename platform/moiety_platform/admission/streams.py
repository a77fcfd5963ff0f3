"""Count of each key's open streams at this gateway, and the bound on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from moiety_platform.errors import RateLimited

RETRY_AFTER_S = 1.0


class StreamGate:
    """Counter of streamed responses, from the body of their request to their end. For one event loop."""

    def __init__(self, max_per_key: int) -> None:
        self.limit = max_per_key  # can be changed, for streams that begin from then on
        self._num_open: Counter[str] = Counter()

    @contextmanager
    def hold(self, key_id: str) -> Iterator[None]:
        """Count a stream as open. Raises RateLimited where the key is at its limit."""
        if self._num_open[key_id] >= self.limit:
            raise RateLimited(
                f"This key has {self.limit} streams open at this gateway, and no more are allowed; read some to their "
                "end or close them, then try again",
                code="too_many_streams",
                retry_after_s=RETRY_AFTER_S,
            )
        self._num_open[key_id] += 1
        try:
            yield
        finally:
            self._num_open[key_id] -= 1
            if not self._num_open[key_id]:
                del self._num_open[key_id]
