"""Opens the encoding cache, and drops what tenants have not used for long."""

from __future__ import annotations

from contextlib import AsyncExitStack

from moiety_platform.inference.encoding_cache_metrics import encoding_cache_families
from moiety_platform.metrics import Metrics
from moiety_platform.periodic_task import PeriodicTask
from moiety_platform.settings import GatewaySettings
from moiety_text.segment_cache import SegmentCache

DROP_EVERY_S = 60.0


def open_encoding_cache(stack: AsyncExitStack, settings: GatewaySettings, metrics: Metrics) -> SegmentCache:
    """Return the cache of the process's encoders. The stack ends the task that drops idle entries."""
    cache = SegmentCache(settings.encoding_cache_bytes)
    metrics.watch(lambda: encoding_cache_families(cache))

    async def drop_idle() -> None:
        cache.drop_idle()

    task = PeriodicTask("encoding-cache", drop_idle, DROP_EVERY_S)
    task.start()
    stack.push_async_callback(task.stop)
    return cache
