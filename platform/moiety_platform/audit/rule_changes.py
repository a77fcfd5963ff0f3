"""Changes of the rules that every request reads: prices, routes, guardrails and the logging of contents."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.audit.trail import AuditedStore
from moiety_platform.db.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class RuleChanges:
    """Access of one administrator to the rules, whose cached `snapshot` is discarded after each change."""

    store: AuditedStore
    snapshot: Snapshot[Any]

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncSession]:
        """Open a transaction whose changes are logged, and which requests of this process see once it is committed."""
        async with self.store.write() as session:
            yield session
        self.snapshot.forget()
