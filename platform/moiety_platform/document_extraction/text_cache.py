"""Cache of the texts of PDF files, so that a conversation's files are read once and not for each request.

A file's text is found by its tenant only. Texts of the tenant that has the most are evicted first, the least recently
used before the others, so no tenant can evict another one's by sending many files.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

from moiety_platform.document_extraction.extractor import DocumentLimits, DocumentRefused, ExtractedText

ENTRY_BYTES = 512  # of an entry, beside its text


@dataclass(frozen=True, slots=True)
class _CachedText:
    """A text, or why a file was refused within some limits."""

    found: ExtractedText | DocumentRefused
    limits: DocumentLimits

    def applies(self, limits: DocumentLimits) -> bool:
        """Return whether reading the file within these limits has the same result."""
        if isinstance(self.found, DocumentRefused):
            return self.limits == limits
        return self.found.num_pages <= limits.max_pages and len(self.found.text) <= limits.max_characters

    @property
    def num_bytes(self) -> int:
        text = self.found.text if isinstance(self.found, ExtractedText) else str(self.found)
        return ENTRY_BYTES + sys.getsizeof(text)


class DocumentTextCache:
    """Cache of one gateway process. `max_bytes` can be changed; 0: nothing is cached. For one event loop."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: dict[str, OrderedDict[bytes, _CachedText]] = {}  # by tenant, the least recently used first
        self._num_bytes_by_tenant: dict[str, int] = {}
        self.num_bytes = 0
        self.num_hits = self.num_misses = 0

    @property
    def max_bytes(self) -> int:
        """Largest size of the texts together, in bytes."""
        return self._max_bytes

    @max_bytes.setter
    def max_bytes(self, value: int) -> None:
        self._max_bytes = value
        self._evict()

    def find(self, tenant_id: str, key: bytes, limits: DocumentLimits) -> ExtractedText | None:
        """Return the text of a tenant's file, or None if it has to be read.

        Raises DocumentRefused if the same limits have refused the file before.
        """
        entries = self._entries.get(tenant_id)
        entry = None if entries is None else entries.get(key)
        if entries is None or entry is None or not entry.applies(limits):
            self.num_misses += 1
            return None
        entries.move_to_end(key)
        self.num_hits += 1
        if isinstance(entry.found, DocumentRefused):
            raise DocumentRefused(str(entry.found), entry.found.reason)
        return entry.found

    def put(self, tenant_id: str, key: bytes, found: ExtractedText | DocumentRefused, limits: DocumentLimits) -> None:
        """Store what reading a tenant's file within the limits resulted in."""
        entry = _CachedText(found, limits)
        if entry.num_bytes > self._max_bytes:
            return
        self._remove(tenant_id, key)
        self._entries.setdefault(tenant_id, OrderedDict())[key] = entry
        self._count(tenant_id, entry.num_bytes)
        self._evict()

    def forget_tenants(self, tenant_ids: Collection[str]) -> None:
        """Remove the texts of deleted tenants."""
        for tenant_id in self._entries.keys() & set(tenant_ids):
            for key in list(self._entries[tenant_id]):
                self._remove(tenant_id, key)

    def _evict(self) -> None:
        while self.num_bytes > self._max_bytes:
            tenant_id = max(self._num_bytes_by_tenant, key=self._num_bytes_by_tenant.__getitem__)
            self._remove(tenant_id, next(iter(self._entries[tenant_id])))

    def _remove(self, tenant_id: str, key: bytes) -> None:
        entries = self._entries.get(tenant_id)
        if entries is None or key not in entries:
            return
        self._count(tenant_id, -entries.pop(key).num_bytes)
        if not entries:
            del self._entries[tenant_id], self._num_bytes_by_tenant[tenant_id]

    def _count(self, tenant_id: str, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._num_bytes_by_tenant[tenant_id] = self._num_bytes_by_tenant.get(tenant_id, 0) + num_bytes
