"""Stored responses in the database, within the caller's transaction. Times are the database's.

A response is visible to keys of its project that may use its model. For all other keys it does not exist.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from sqlalchemy import BigInteger, ColumnElement, delete, exists, func, literal, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.auth.principal import Principal
from moiety_platform.db.expired import oldest_expired
from moiety_platform.db.now import now_ms
from moiety_platform.responses_api.models import StoredResponse
from moiety_platform.tenants.models import Tenant, TenantDeletion

PURGE_ROWS = 100  # per transaction, each with one turn of a conversation

_ID = re.compile(r"resp_[0-9a-f]{32}", re.ASCII)


@dataclass(frozen=True, slots=True)
class StorageRoom:
    """Storage limits of a tenant."""

    max_responses: int
    max_bytes: int


@dataclass(frozen=True, slots=True)
class ResponseStore:
    """Stored responses of all tenants. `now` is the database's clock."""

    now: Callable[[], ColumnElement[int]] = now_ms

    async def has_room(self, session: AsyncSession, tenant_id: str, room: StorageRoom, num_bytes: int = 0) -> bool:
        """Return whether one more response of `num_bytes` bytes may be stored for the tenant."""
        sums = select(func.count(), func.sum(StoredResponse.num_bytes)).where(StoredResponse.tenant_id == tenant_id)
        num_responses, total = (await session.execute(sums)).one()
        return num_responses < room.max_responses and int(total or 0) + num_bytes <= room.max_bytes

    async def add(
        self,
        session: AsyncSession,
        response: StoredResponse,
        room: StorageRoom,
        ttl_ms: int,
        lease_ms: int | None = None,
    ) -> bool:
        """Store a response for `ttl_ms`. One that is made in the background is running for `lease_ms`.

        Returns False if the tenant's storage is full or the tenant is being deleted. The tenant's row is locked, so
        that concurrent requests do not use the same free space and none is added after a deletion has begun.
        """
        tenant_id = response.tenant_id
        await session.execute(select(Tenant.id).where(Tenant.id == tenant_id).with_for_update(key_share=True))
        if await session.scalar(select(exists().where(TenantDeletion.tenant_id == tenant_id))):
            return False
        if not await self.has_room(session, tenant_id, room, response.num_bytes):
            return False
        now_ms = int(await session.scalar(select(self.now())) or 0)
        response.expires_ms = now_ms + ttl_ms
        if lease_ms is not None:
            response.running_until_ms = now_ms + lease_ms
        session.add(response)
        return True

    async def find(self, session: AsyncSession, whose: Principal, response_id: str) -> StoredResponse | None:
        """Return the response if it is visible to the key."""
        wanted = select(StoredResponse).where(StoredResponse.id == _possible(response_id), *self._visible(whose))
        return (await session.scalars(wanted)).first()

    async def find_all(
        self, session: AsyncSession, whose: Principal, response_ids: Collection[str]
    ) -> Sequence[StoredResponse]:
        """Return those of the responses that are visible to the key."""
        wanted = select(StoredResponse).where(StoredResponse.id.in_(response_ids), *self._visible(whose))
        return (await session.scalars(wanted)).all()

    async def total_bytes(self, session: AsyncSession, whose: Principal, response_ids: Collection[str]) -> int:
        """Return the size of those of the responses that are visible to the key."""
        total = select(func.sum(StoredResponse.num_bytes)).where(
            StoredResponse.id.in_(response_ids), *self._visible(whose)
        )
        return int(await session.scalar(total) or 0)

    async def chain(self, session: AsyncSession, whose: Principal, last: StoredResponse) -> Sequence[StoredResponse]:
        """Return the response and all that it continues, the first one first.

        Returns nothing if one of them is missing.
        """
        earlier = (
            select(StoredResponse.id, StoredResponse.previous_id, literal(0, BigInteger).label("distance"))
            .where(StoredResponse.id == last.id)
            .cte("earlier", recursive=True)
        )
        earlier = earlier.union_all(
            select(StoredResponse.id, StoredResponse.previous_id, earlier.c.distance + 1)
            .join(earlier, StoredResponse.id == earlier.c.previous_id)
            .where(*self._visible(whose))
        )
        wanted = select(StoredResponse).join(earlier, StoredResponse.id == earlier.c.id)
        found = (await session.scalars(wanted.order_by(earlier.c.distance.desc()))).all()
        return found if found and found[0].previous_id is None else ()

    async def delete(self, session: AsyncSession, whose: Principal, response_id: str) -> bool:
        """Delete the response and return whether it existed for the key."""
        gone = delete(StoredResponse).where(StoredResponse.id == _possible(response_id), *self._visible(whose))
        return await session.scalar(gone.returning(StoredResponse.id)) is not None

    async def is_forsaken(self, session: AsyncSession, response: StoredResponse) -> bool:
        """Return whether the gateway that makes a response in the background has died."""
        now_ms = int(await session.scalar(select(self.now())) or 0)
        return response.running_until_ms is not None and response.running_until_ms < now_ms

    async def extend_runs(self, session: AsyncSession, response_ids: Collection[str], lease_ms: int) -> set[str]:
        """Extend the leases of running responses, and return the ids of those that are still running."""
        extended = (
            update(StoredResponse)
            .where(StoredResponse.id.in_(response_ids), StoredResponse.running_until_ms.is_not(None))
            .values(running_until_ms=self.now() + lease_ms)
            .returning(StoredResponse.id)
        )
        return set((await session.scalars(extended)).all())

    async def update_run(
        self, session: AsyncSession, response_id: str, body: bytes, num_new_items: int = 0, *, ends: bool
    ) -> bool:
        """Replace the body of a running response, and return whether it was running."""
        row = await session.scalar(
            select(StoredResponse)
            .where(StoredResponse.id == response_id, StoredResponse.running_until_ms.is_not(None))
            .with_for_update()
        )
        if row is None:
            return False
        more = len(body) - len(row.body)
        row.body, row.num_items = body, row.num_items + num_new_items
        row.num_bytes, row.total_bytes = row.num_bytes + more, row.total_bytes + more
        if ends:
            row.running_until_ms = None
        return True

    async def purge(self, session: AsyncSession, limit: int = PURGE_ROWS) -> int:
        """Delete at most `limit` expired responses, the oldest first, and return their number."""
        ids = await oldest_expired(session, StoredResponse.id, StoredResponse.expires_ms, self.now(), limit)
        if ids:
            await session.execute(delete(StoredResponse).where(StoredResponse.id.in_(ids)))
        return len(ids)

    def _visible(self, whose: Principal) -> tuple[ColumnElement[bool], ...]:
        models = whose.allowed_models
        return (
            StoredResponse.tenant_id == whose.tenant_id,
            StoredResponse.project_id == whose.project_id,
            StoredResponse.expires_ms > self.now(),
            *(() if models is None else (StoredResponse.model.in_(sorted(models)),)),
        )


def _possible(response_id: str) -> str:
    """Return the id, or an empty string that matches nothing if it cannot be an id."""
    return response_id if _ID.fullmatch(response_id) else ""
