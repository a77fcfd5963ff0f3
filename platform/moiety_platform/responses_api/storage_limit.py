"""Storage of a tenant's responses and conversations: how much there may be, and how much there is."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import exists, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.responses_api.models import StoredConversation, StoredResponse
from moiety_platform.tenants.models import Tenant, TenantDeletion


@dataclass(frozen=True, slots=True)
class StorageLimit:
    """Storage limits of a tenant. A conversation counts as a response, with the bytes of its items."""

    max_responses: int
    max_bytes: int


async def has_capacity(
    session: AsyncSession, tenant_id: str, storage: StorageLimit, num_bytes: int = 0, num_more: int = 1
) -> bool:
    """Return whether `num_more` responses or conversations of `num_bytes` bytes in all may be stored for the tenant."""
    num_stored, total_bytes = num_more, num_bytes
    for table in (StoredResponse, StoredConversation):
        sums = select(func.count(), func.sum(table.num_bytes)).where(table.tenant_id == tenant_id)
        count, total = (await session.execute(sums)).one()
        num_stored, total_bytes = num_stored + count, total_bytes + int(total or 0)
    return (num_more == 0 or num_stored <= storage.max_responses) and total_bytes <= storage.max_bytes


async def claim_storage(
    session: AsyncSession, tenant_id: str, storage: StorageLimit, num_bytes: int, num_more: int
) -> bool:
    """Return whether as much may be stored for the tenant, and it is not being deleted.

    The tenant's row is locked, so that concurrent requests do not use the same free space and nothing is added after a
    deletion has begun. Lock it before other rows.
    """
    await session.execute(select(Tenant.id).where(Tenant.id == tenant_id).with_for_update(key_share=True))
    if await session.scalar(select(exists().where(TenantDeletion.tenant_id == tenant_id))):
        return False
    return await has_capacity(session, tenant_id, storage, num_bytes, num_more)
