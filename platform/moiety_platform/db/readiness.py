"""Readiness of the store: checked until it succeeds once, then never again, because caches outlive a short outage."""

from __future__ import annotations

import asyncio
import functools
from abc import ABC, abstractmethod
from typing import ClassVar

import structlog
from sqlalchemy import Select, exists, or_, select

from moiety_platform.db.base import Base
from moiety_platform.db.connection_errors import NoConnection
from moiety_platform.db.session import Database
from moiety_platform.errors import Unavailable

CHECK_TIMEOUT_S = 3.0
CHECK_TIMEOUT_S = 0.5

_log = structlog.get_logger(__name__)


class ReadinessCheck(ABC):
    """Readiness check that concurrent callers share. `event` is logged with each new reason against readiness."""

    event: ClassVar[str]
    silence: ClassVar[str]  # reason while nothing has answered

    def __init__(self) -> None:
        self._ready = False
        self._check: asyncio.Task[str] | None = None
        self._asking: asyncio.Task[str] | None = None  # for callers that do not wait
        self._said = ""

    async def why_not_ready(self) -> str:
        """Return the reason why the store cannot serve; empty if it can, or once could.

        Returns soon, even if the store does not answer.
        """
        if self._ready:
            return ""
        if self._check is None:
            self._check = asyncio.create_task(self._look(), name="store-check")
        done, _ = await asyncio.wait([self._check], timeout=CHECK_TIMEOUT_S)
        if not done:
            return self._said or self.silence
        self._check = None  # before the result, which may be an exception: the next call checks again
        reason = next(iter(done)).result()
        self._ready = not reason
        if reason and reason != self._said:
            _log.warning(self.event, reason=reason)
        self._said = reason
        return reason

    def poll(self) -> bool:
        """Return whether the store was ready at the last check; until it was, start another check without waiting.

        Call it in the event loop.
        """
        if not self._ready and (self._asking is None or self._asking.done()):
            self._asking = asyncio.create_task(self.why_not_ready(), name="store-check")
        return self._ready

    async def close(self) -> None:
        """Cancel a check that is still running."""
        for task in (self._asking, self._check):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])

    @abstractmethod
    async def _look(self) -> str:
        """Return the reason why the store cannot serve; empty if it can."""


class StoreReadiness(ReadinessCheck):
    """Readiness of the database: it has every table and column that the program knows."""

    event = "store_not_ready"
    silence = "the database does not answer yet"

    def __init__(self, database: Database) -> None:
        super().__init__()
        self._database = database

    async def _look(self) -> str:
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S), self._database.read() as session:
                await session.execute(_names_all_columns())
        except (Unavailable, TimeoutError) as error:
            told = str(error) or "the database does not answer in time"
            return f"{told} ({error.__cause__})" if isinstance(error.__cause__, NoConnection) else told
        return ""


@functools.cache
def _names_all_columns() -> Select[tuple[bool]]:
    """Return a statement that fails where a table or a column is missing, and reads no row."""
    return select(or_(*(exists(select(table).limit(0)) for table in Base.metadata.sorted_tables)))
