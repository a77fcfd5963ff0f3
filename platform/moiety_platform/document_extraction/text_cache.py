"""Cache of the texts of PDF files, so that a conversation's files are read once and not for each request.

A file's text is found by its tenant only. When the cache is full, texts that have not been used for some minutes are
evicted first, in the order of their last use, of all tenants. Then the tenant that has the most loses its least
recently used ones, so no tenant can evict another one's texts in use by sending many files. Each eviction takes a time
logarithmic in the number of tenants.
"""

from __future__ import annotations

import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from moiety_platform.document_extraction.extractor import DocumentLimits, DocumentRefused, ExtractedText

ENTRY_BYTES = 512  # of an entry, beside its text
IDLE_S = 300.0  # after its last use, a text is evicted before those of any tenant that uses its own


@dataclass(slots=True)
class _CachedText:
    """A text, or why a file was refused within some limits."""

    found: ExtractedText | DocumentRefused
    limits: DocumentLimits
    num_bytes: int
    used_s: float  # monotonic

    def applies(self, limits: DocumentLimits) -> bool:
        """Return whether reading the file within these limits has the same result."""
        if isinstance(self.found, DocumentRefused):
            return self.limits == limits
        return self.found.num_pages <= limits.max_pages and len(self.found.text) <= limits.max_characters


def _size_of(found: ExtractedText | DocumentRefused) -> int:
    return ENTRY_BYTES + sys.getsizeof(found.text if isinstance(found, ExtractedText) else str(found))


class DocumentTextCache:
    """Cache of one gateway process. `max_bytes` can be changed; 0: nothing is cached. For one event loop."""

    def __init__(self, max_bytes: int, monotonic: Callable[[], float] = time.monotonic) -> None:
        """Create it, empty. `monotonic` returns the time in seconds."""
        self._max_bytes = max_bytes
        self._monotonic = monotonic
        self._entries: OrderedDict[tuple[str, bytes], _CachedText] = OrderedDict()  # the least recently used first
        self._keys: dict[str, OrderedDict[bytes, None]] = {}  # by tenant, in the same order
        self._num_bytes_by_tenant: dict[str, int] = {}
        self._largest: list[tuple[int, str]] = []  # a heap of (-bytes, tenant), with outdated pairs in between
        self.num_bytes = 0
        self.num_hits = self.num_misses = 0

    @property
    def max_bytes(self) -> int:
        """Largest size of the texts together, in bytes."""
        return self._max_bytes

    @max_bytes.setter
    def max_bytes(self, value: int) -> None:
        self._max_bytes = value
        if value > 0:
            self._evict()
            return
        for held in (self._entries, self._keys, self._num_bytes_by_tenant, self._largest):
            held.clear()
        self.num_bytes = 0

    def find(self, tenant_id: str, key: bytes, limits: DocumentLimits) -> ExtractedText | None:
        """Return the text of a tenant's file, or None if it has to be read.

        Raises DocumentRefused if the same limits have refused the file before.
        """
        entry = self._entries.get((tenant_id, key))
        if entry is None or not entry.applies(limits):
            self.num_misses += 1
            return None
        entry.used_s = self._monotonic()
        self._entries.move_to_end((tenant_id, key))
        self._keys[tenant_id].move_to_end(key)
        self.num_hits += 1
        if isinstance(entry.found, DocumentRefused):
            raise DocumentRefused(str(entry.found), entry.found.reason)
        return entry.found

    def put(self, tenant_id: str, key: bytes, found: ExtractedText | DocumentRefused, limits: DocumentLimits) -> None:
        """Store what reading a tenant's file within the limits resulted in."""
        entry = _CachedText(found, limits, _size_of(found), self._monotonic())
        if entry.num_bytes > self._max_bytes:
            return
        if (tenant_id, key) in self._entries:
            self._remove(tenant_id, key)
        self._entries[tenant_id, key] = entry
        self._keys.setdefault(tenant_id, OrderedDict())[key] = None
        self._count(tenant_id, entry.num_bytes)
        self._evict()

    def forget_tenants(self, tenant_ids: Collection[str]) -> None:
        """Remove the texts of deleted tenants."""
        for tenant_id in self._keys.keys() & set(tenant_ids):
            for key in list(self._keys[tenant_id]):
                self._remove(tenant_id, key)

    def _evict(self) -> None:
        """Remove texts until the others fit: idle ones in the order of their use, then those of the largest tenants."""
        idle_since_s = self._monotonic() - IDLE_S
        while self.num_bytes > self._max_bytes:
            (tenant_id, key), oldest = next(iter(self._entries.items()))
            if oldest.used_s > idle_since_s:
                tenant_id = self._largest_tenant()
                key = next(iter(self._keys[tenant_id]))
            self._remove(tenant_id, key)

    def _largest_tenant(self) -> str:
        """Return the tenant whose texts are the largest together. The cache is not empty."""
        while True:
            negative_bytes, tenant_id = self._largest[0]
            if self._num_bytes_by_tenant.get(tenant_id) == -negative_bytes:
                return tenant_id
            heappop(self._largest)

    def _remove(self, tenant_id: str, key: bytes) -> None:
        entry, keys = self._entries.pop((tenant_id, key)), self._keys[tenant_id]
        del keys[key]
        if not keys:
            del self._keys[tenant_id]
        self._count(tenant_id, -entry.num_bytes)

    def _count(self, tenant_id: str, num_bytes: int) -> None:
        """Add to the size of a tenant's texts, and remove those pairs of the heap that would outnumber the tenants."""
        self.num_bytes += num_bytes
        total = self._num_bytes_by_tenant.get(tenant_id, 0) + num_bytes
        if not total:
            del self._num_bytes_by_tenant[tenant_id]
            return
        self._num_bytes_by_tenant[tenant_id] = total
        heappush(self._largest, (-total, tenant_id))
        if len(self._largest) > 2 * len(self._num_bytes_by_tenant) + 64:
            self._largest = [(-held, one) for one, held in self._num_bytes_by_tenant.items()]
            heapify(self._largest)
