"""`/admin/v1/batches`: batches of all tenants with their progress. The admin router decides on access."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
from litestar import Controller, get
from litestar.di import NamedDependency
from sqlalchemy import select

from moiety_platform.access.actions import needs
from moiety_platform.access.views import READ_BATCHES
from moiety_platform.batches.models import Batch
from moiety_platform.db.session import Database
from moiety_platform.query_parameters import Filter, parse_text
from moiety_wire.shared_fields import copy_fields

MAX_LISTED = 500


class BatchProgress(msgspec.Struct, frozen=True):
    """A batch with the numbers of its lines. `ended_at` is null until it has ended."""

    id: str
    tenant_id: str
    project_id: str
    key_id: str
    endpoint: str
    status: str
    total: int
    completed: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    created_at: datetime
    expires_at: datetime
    ended_at: datetime | None

    @classmethod
    def of(cls, batch: Batch) -> BatchProgress:
        ended_ms = batch.completed_ms or batch.failed_ms or batch.expired_ms or batch.cancelled_ms
        return copy_fields(
            batch,
            cls,
            created_at=_moment(batch.created_ms),
            expires_at=_moment(batch.expires_ms),
            ended_at=None if ended_ms is None else _moment(ended_ms),
        )


class BatchProgressList(msgspec.Struct, frozen=True):
    """The newest batches; `truncated` says that there are more."""

    data: list[BatchProgress]
    truncated: bool


class BatchAdminController(Controller):
    """Route of batches for administrators."""

    path = "/batches"
    tags = ("batches",)

    @get(opt=needs(READ_BATCHES))
    async def list_batches(self, database: NamedDependency[Database], tenant_id: Filter = None) -> BatchProgressList:
        """List the newest 500 batches, of one tenant if given, with the progress of each."""
        wanted = select(Batch).order_by(Batch.created_ms.desc(), Batch.id.desc())
        if tenant_id is not None:
            wanted = wanted.where(Batch.tenant_id == parse_text(tenant_id, "tenant_id"))
        async with database.read() as session:
            found = (await session.scalars(wanted.limit(MAX_LISTED + 1))).all()
        return BatchProgressList([BatchProgress.of(one) for one in found[:MAX_LISTED]], len(found) > MAX_LISTED)


def _moment(unix_ms: int) -> datetime:
    return datetime.fromtimestamp(unix_ms / 1000, UTC)
