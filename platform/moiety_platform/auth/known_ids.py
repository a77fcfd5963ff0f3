"""Ids of the existing API keys that this process has read.

They only decide in which queue a look-up waits, never on access: a missing id just waits in the queue of unknown ids.
Ids of deleted keys stay until the process ends.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from sqlalchemy import select, tuple_

from moiety_platform.db.session import Database
from moiety_platform.tenants.models import ApiKey

PAGE_ROWS = 5_000
MAX_IDS = 2_000_000  # about 70 bytes each
OVERLAP = timedelta(minutes=5)  # read again each time: the clocks of gateways differ, and transactions commit late


class KnownKeyIds:
    """Set of key ids, kept as hashes under a secret of the process."""

    def __init__(self, *, max_ids: int = MAX_IDS) -> None:
        self._hashes: set[int] = set()
        self._max_ids = max_ids
        self._read_until: datetime | None = None

    def __contains__(self, key_id: str) -> bool:
        return hash(key_id) in self._hashes

    def __len__(self) -> int:
        return len(self._hashes)

    def add(self, key_id: str) -> None:
        if len(self._hashes) < self._max_ids:
            self._hashes.add(hash(key_id))

    async def refresh(self, database: Database) -> None:
        """Read the ids of the keys created since the last call. Raises Unavailable."""
        after: tuple[datetime, str] | None = None if self._read_until is None else (self._read_until - OVERLAP, "")
        columns = ApiKey.created_at, ApiKey.id
        while True:
            page = select(*columns).order_by(*columns).limit(PAGE_ROWS)
            if after is not None:
                page = page.where(tuple_(*columns) > after)
            async with database.read_statements() as session:
                rows: list[tuple[datetime, str]] = [(row[0], row[1]) for row in await session.execute(page)]
            for created_at, key_id in rows:
                self.add(key_id)
                self._read_until = created_at
            if len(rows) < PAGE_ROWS:
                return
            after = rows[-1]
