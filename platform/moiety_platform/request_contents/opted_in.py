"""Tenants that opted in to the logging of contents, for the rules of requests."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.request_contents.models import ContentLogging
from moiety_platform.request_contents.terms import ContentTerms


async def load_terms(session: AsyncSession) -> list[ContentTerms]:
    """Return the terms of all tenants that opted in."""
    opted_in = await session.scalars(select(ContentLogging))
    return [ContentTerms(one.tenant_id, one.keep_days, one.opt_in_id) for one in opted_in]
