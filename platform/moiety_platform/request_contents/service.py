"""Opts tenants in and out, reads contents, and deletes expired ones, within the caller's transaction. Knows no HTTP."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from sqlalchemy import ColumnElement, delete, exists, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.db.now import now_ms
from moiety_platform.errors import BadRequest, NotFound
from moiety_platform.request_contents.cipher import ContentCipher
from moiety_platform.request_contents.models import ContentLogging, RequestContent
from moiety_platform.request_contents.schemas import ContentLoggingView, ContentView
from moiety_platform.request_contents.terms import MAX_KEEP_DAYS, MIN_KEEP_DAYS
from moiety_platform.tenants.admin_resource import TENANTS
from moiety_platform.tenants.checks import new_id
from moiety_platform.tenants.models import Tenant
from moiety_platform.tenants.rows import require_row
from moiety_wire.shared_fields import copy_fields

Now = Callable[[], ColumnElement[int]]

ROWS_AT_ONCE = 200
NOT_FOUND = "request_content_not_found"


async def get_logging(session: AsyncSession, tenant_id: str) -> ContentLoggingView:
    """Return whether a tenant's contents are logged. Raises NotFound for an unknown tenant."""
    await require_row(session, Tenant, tenant_id, TENANTS)
    return _view(tenant_id, await session.get(ContentLogging, tenant_id))


async def set_logging(session: AsyncSession, tenant_id: str, keep_days: int, now: datetime) -> ContentLoggingView:
    """Log the contents of a tenant's requests that begin from now on. Raises BadRequest or NotFound."""
    await require_row(session, Tenant, tenant_id, TENANTS)
    if not MIN_KEEP_DAYS <= keep_days <= MAX_KEEP_DAYS:
        message = f"'keep_days' must be from {MIN_KEEP_DAYS} to {MAX_KEEP_DAYS}, not {keep_days}."
        raise BadRequest(message, param="keep_days")
    record = await session.get(ContentLogging, tenant_id)
    if record is None:
        record = ContentLogging(tenant_id=tenant_id, keep_days=keep_days, set_at=now, opt_in_id=new_id("opt"))
        session.add(record)
    record.keep_days, record.set_at = keep_days, now
    await session.flush()
    return _view(tenant_id, record)


async def end_logging(session: AsyncSession, tenant_id: str) -> ContentLoggingView:
    """Log no more contents of a tenant. Those of before cannot be read any more, even after another opt-in.

    Retention deletes them.

    Raises NotFound for an unknown tenant.
    """
    await require_row(session, Tenant, tenant_id, TENANTS)
    record = await session.get(ContentLogging, tenant_id)
    if record is not None:
        await session.delete(record)
        await session.flush()
    return _view(tenant_id, None)


async def read_content(session: AsyncSession, cipher: ContentCipher, request_id: str, now: Now = now_ms) -> ContentView:
    """Return the content of a request. Raises NotFound, also for one that has expired."""
    found = select(RequestContent).where(
        RequestContent.request_id == request_id,
        RequestContent.expires_ms > now(),
        _of_present_opt_in(),
    )
    record = (await session.scalars(found)).one_or_none()
    content = None if record is None else cipher.decrypt(record.tenant_id, request_id, record.sealed)
    if record is None or content is None:
        raise NotFound(
            "There is no content of a request with this id: its tenant has not opted in, it has expired, or it is "
            "encrypted under a pepper that this gateway does not have.",
            code=NOT_FOUND,
            param="request_id",
        )
    return copy_fields(
        content,
        ContentView,
        request_id=request_id,
        tenant_id=record.tenant_id,
        stored_at=datetime.fromtimestamp(record.stored_ms / 1000, UTC),
        expires_at=datetime.fromtimestamp(record.expires_ms / 1000, UTC),
    )


async def purge_contents(session: AsyncSession, now: Now = now_ms) -> int:
    """Delete some contents that have expired, or whose tenants have opted out; return their number."""
    at_ms = await session.scalar(select(now()))
    wanted = select(RequestContent.request_id).where(or_(RequestContent.expires_ms <= at_ms, ~_of_present_opt_in()))
    ids = (await session.scalars(wanted.limit(ROWS_AT_ONCE).with_for_update(skip_locked=True))).all()
    if ids:
        await session.execute(delete(RequestContent).where(RequestContent.request_id.in_(ids)))
    return len(ids)


def _of_present_opt_in() -> ColumnElement[bool]:
    """Return the condition that the opt-in under which a content was stored has not ended."""
    return exists().where(
        ContentLogging.tenant_id == RequestContent.tenant_id, ContentLogging.opt_in_id == RequestContent.opt_in_id
    )


def _view(tenant_id: str, record: ContentLogging | None) -> ContentLoggingView:
    if record is None:
        return ContentLoggingView(tenant_id, is_on=False, keep_days=None, set_at=None)
    return ContentLoggingView(tenant_id, is_on=True, keep_days=record.keep_days, set_at=record.set_at)
