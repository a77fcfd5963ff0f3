"""Rehashing of keys with the current pepper as they are used: only their senders have their text.

Owned by the authenticator; for one event loop. It runs in the background, no request waits for it, and a key that
cannot be written while the database is down is noted again at its next use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog
from sqlalchemy import update

from moiety_platform.auth.keys import KeyText, hash_key, mark_of
from moiety_platform.db.session import Database
from moiety_platform.errors import Unavailable
from moiety_platform.tenants.models import ApiKey

MAX_AT_ONCE = 100  # keys per transaction
LAST_WRITES_S = 2.0  # time limit at shutdown

log = structlog.get_logger(__name__)


class Rehashing:
    """Background writer of new key hashes. `on_written` is called with the id of each changed key."""

    def __init__(self, database: Database, pepper: bytes, on_written: Callable[[str], None]) -> None:
        self._database = database
        self._pepper = pepper
        self._on_written = on_written
        self._due: dict[str, tuple[bytes, bytes]] = {}  # key id → its current hash, and its new one
        self._writing: asyncio.Task[None] | None = None

    def note(self, key: KeyText, found: bytes) -> None:
        """Note a verified key, whose stored hash is `found`, for rehashing."""
        self._due[key.key_id] = (found, hash_key(key, self._pepper))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_all(), name="key-rehashing")

    async def idle(self) -> None:
        """Wait until all noted keys are written or given up."""
        if self._writing is not None:
            await asyncio.shield(self._writing)

    async def close(self) -> None:
        """Wait until all noted keys are written; after `LAST_WRITES_S` the rest is left to a later use."""
        if self._writing is not None:
            await asyncio.wait([writing := self._writing], timeout=LAST_WRITES_S)
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    async def _write_all(self) -> None:
        try:
            while self._due:
                key_ids = list(self._due)[:MAX_AT_ONCE]
                await self._write({key_id: self._due.pop(key_id) for key_id in key_ids})
        except Unavailable as error:
            self._due.clear()
            log.warning(
                "keys_not_rehashed",
                reason=str(error),
                advice="restore the connection to the database; keys are hashed again after their next use",
            )
        finally:
            self._writing = None

    async def _write(self, hashes: dict[str, tuple[bytes, bytes]]) -> None:
        mark = mark_of(self._pepper)
        async with self._database.write() as session:
            for key_id, (found, wanted) in sorted(hashes.items()):  # in one order: gateways must not block each other
                row = ApiKey.id == key_id, ApiKey.secret_hash == found
                await session.execute(update(ApiKey).where(*row).values(secret_hash=wanted, pepper_mark=mark))
        for key_id in hashes:
            self._on_written(key_id)
        log.info("keys_rehashed", num_keys=len(hashes))
