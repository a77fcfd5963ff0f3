"""Background writer of contents: redacts, encrypts and stores them after the end of their requests.

It fails open: requests never wait for it, and contents are lost if the process is killed, if they cannot be redacted,
or if the database is away for so long that the queue is full.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import structlog
from sqlalchemy import ColumnElement, select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.db.dialect import insert_into
from moiety_platform.db.now import now_ms
from moiety_platform.db.session import Database
from moiety_platform.errors import Unavailable
from moiety_platform.periodic_task import PeriodicTask
from moiety_platform.request_contents.cipher import ContentCipher
from moiety_platform.request_contents.models import ContentLogging, RequestContent
from moiety_platform.request_contents.redaction import ContentRedactor, RedactionFailed
from moiety_platform.request_contents.terms import CapturedContent, ContentTerms

EVERY_S = 1.0
BATCH_ROWS = 50
STOP_S = 10.0
MAX_QUEUED_CHARS = 32 * 1024 * 1024
DAY_MS = 24 * 3600 * 1000

log = structlog.get_logger(__name__)

Now = Callable[[], ColumnElement[int]]
Queued = tuple[str, CapturedContent]
"""Request id and content."""


@dataclass(frozen=True, slots=True)
class SealedContent:
    """Encrypted content of a request, ready to be stored under the terms of its tenant."""

    request_id: str
    terms: ContentTerms
    sealed: bytes


class ContentWriter:
    """Writer of one gateway process, for one event loop. Owned by the entry point, which starts and stops it."""

    def __init__(
        self, database: Database, cipher: ContentCipher, redactor: ContentRedactor, *, now: Now = now_ms
    ) -> None:
        self._database = database
        self._redactor = redactor
        self._cipher = cipher
        self._now = now
        self._queue: deque[Queued] = deque()
        self._sealed: list[SealedContent] = []  # that the database has not taken yet
        self._queued_chars = 0
        self._is_full = False
        self._rounds = PeriodicTask("request-contents", self.write_queued, EVERY_S)
        self.num_dropped = 0

    def start(self) -> None:
        self._rounds.start()

    async def stop(self) -> None:
        """Stop, and write what is queued, if the database and the redaction answer in time. Idempotent."""
        await self._rounds.stop()
        try:
            async with asyncio.timeout(STOP_S):
                await self.write_queued()
        except (Unavailable, TimeoutError) as error:
            log.warning(
                "request_contents_lost",
                reason=str(error) or "timeout",
                queued=len(self._queue) + len(self._sealed),
                advice="stop gateways while the database and the endpoint of content_redaction_url answer",
            )

    def put(self, request_id: str, content: CapturedContent) -> None:
        """Queue the content of a request that has ended; drop it if the queue is full. Never waits."""
        if self._queued_chars + content.num_chars > MAX_QUEUED_CHARS:
            self.num_dropped += 1
            if not self._is_full:
                log.warning(
                    "request_contents_dropped",
                    queued=len(self._queue),
                    advice="check the database, and the endpoint of content_redaction_url if it is set: contents of "
                    "requests are not stored while one of them does not answer in time",
                )
            self._is_full = True
            return
        self._queue.append((request_id, content))
        self._queued_chars += content.num_chars

    async def write_queued(self) -> None:
        """Store what is queued, some at a time. Raises Unavailable, and then keeps the rest."""
        while self._sealed or self._queue:
            if not self._sealed:
                batch = list(islice(self._queue, BATCH_ROWS))
                wanted = batch if self._redactor.url is None else await self._of_opt_ins(batch)
                self._sealed = [one for one in await asyncio.gather(*map(self._seal, wanted)) if one is not None]
                for _, content in batch:
                    self._queue.popleft()
                    self._queued_chars -= content.num_chars
                self._is_full = False
            if self._sealed:
                async with self._database.write() as session:
                    await self._insert(session, self._sealed)
                self._sealed = []

    async def _of_opt_ins(self, batch: Sequence[Queued]) -> list[Queued]:
        """Return the contents whose tenants have not opted out meanwhile: only these may leave the gateway."""
        async with self._database.read() as session:
            present = await _opt_ins(session, [content.terms for _, content in batch])
        return [one for one in batch if present.get(one[1].terms.tenant_id) == one[1].terms.opt_in_id]

    async def _seal(self, queued: Queued) -> SealedContent | None:
        """Redact and encrypt a content; return None for one that is not redacted, and so not stored."""
        request_id, captured = queued
        tenant_id = captured.terms.tenant_id
        try:
            content = await self._redactor.redact(tenant_id, request_id, captured.content())
            sealed = await asyncio.to_thread(self._cipher.encrypt, tenant_id, request_id, content)
        except RedactionFailed as exc:
            self.num_dropped += 1
            log.warning(
                "request_content_not_redacted",
                request_id=request_id,
                reason=str(exc),
                advice=exc.advice,
            )
            return None
        except Exception:  # of one content, which must not hold up the others
            self.num_dropped += 1
            log.exception("request_content_not_sealed", request_id=request_id, advice="report this error")
            return None
        return SealedContent(request_id, captured.terms, sealed)

    async def _insert(self, session: AsyncSession, batch: Sequence[SealedContent]) -> None:
        """Insert the contents whose tenants have not opted out since the beginning of the request."""
        present = await _opt_ins(session, [one.terms for one in batch])
        at_ms = await session.scalar(select(self._now()))
        assert at_ms is not None, "the database has a clock"
        values: list[dict[str, Any]] = [
            {
                "request_id": one.request_id,
                "tenant_id": one.terms.tenant_id,
                "opt_in_id": one.terms.opt_in_id,
                "sealed": one.sealed,
                "stored_ms": at_ms,
                "expires_ms": at_ms + one.terms.keep_days * DAY_MS,
            }
            for one in batch
            if present.get(one.terms.tenant_id) == one.terms.opt_in_id
        ]
        if values:
            connection = await session.connection()
            await connection.execute(insert_into(session, RequestContent).on_conflict_do_nothing(), values)


async def _opt_ins(session: AsyncSession, terms: Iterable[ContentTerms]) -> dict[str, str]:
    """Return the id of the present opt-in of each of these terms' tenants that has one."""
    logging = select(ContentLogging.tenant_id, ContentLogging.opt_in_id)
    found = await session.execute(logging.where(ContentLogging.tenant_id.in_({one.tenant_id for one in terms})))
    return {row.tenant_id: row.opt_in_id for row in found}
