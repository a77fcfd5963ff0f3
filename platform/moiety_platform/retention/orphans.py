"""Deletion of objects that no row refers to: of an upload whose row was erased before it ended, or of a killed process.

An object is written before the row that refers to it changes, so only old objects are looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import structlog
from sqlalchemy import select

from moiety_platform.adapters.models import Adapter
from moiety_platform.db.now import now_ms
from moiety_platform.db.session import Database
from moiety_platform.files.models import StoredFile
from moiety_platform.files.store import read_clock
from moiety_platform.object_storage.keys import KINDS
from moiety_platform.object_storage.store import ObjectStore
from moiety_platform.retention.leases import Now

GRACE = timedelta(hours=24)  # longer than any upload takes, and than clocks differ

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class OrphanedObjects:
    """Job that compares the object store with the database."""

    database: Database
    objects: ObjectStore
    now: Now = now_ms

    async def delete(self) -> int:
        """Look at all objects once and delete the orphaned ones; return 0, since nothing is left."""
        async with self.database.read() as session:
            before = datetime.fromtimestamp(await read_clock(session, self.now) / 1000, UTC) - GRACE
        num_deleted = await self.objects.remove_unfinished(before=before)
        for kind in KINDS:
            async for page in self.objects.list_pages(kind):
                keys = [one.key for one in page if one.modified_at < before]
                for key in await self._without_row(keys):
                    num_deleted += await self.objects.delete(key)
        if num_deleted:
            log.info("orphaned_objects_deleted", objects=num_deleted)
        return 0

    async def _without_row(self, keys: Sequence[str]) -> list[str]:
        async with self.database.read() as session:
            known: set[str | None] = set()
            for column in (StoredFile.object_key, Adapter.object_key):
                known.update(await session.scalars(select(column).where(column.in_(keys))))
        return [key for key in keys if key not in known]
