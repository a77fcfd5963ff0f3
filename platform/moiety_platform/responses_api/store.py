"""Stored responses in the database, within the caller's transaction. Times are the database's.

A response is visible to keys of its project that may use its model. For all other keys it does not exist.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import accumulate
from typing import Any

from sqlalchemy import BigInteger, ColumnElement, delete, func, literal, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.auth.principal import Principal
from moiety_platform.db.dialect import insert_into
from moiety_platform.db.expired import oldest_expired
from moiety_platform.db.now import now_ms
from moiety_platform.responses_api.askable_names import askable_names
from moiety_platform.responses_api.event_log import EventChunk, statements_of
from moiety_platform.responses_api.models import StoredEvents, StoredResponse
from moiety_platform.responses_api.storage_limit import StorageLimit, has_capacity

PURGE_ROWS = 100  # per transaction, each with one turn of a conversation
PURGE_BYTES = 64 * 1024 * 1024  # per transaction, unless a single response has more
READ_CHUNKS = 16  # of events, per transaction
# growth of a response between two checks of the limit: a check sums all rows of the tenant
STORAGE_CHECK_BYTES = 64 * 1024

_ID = re.compile(r"resp_[0-9a-f]{32}", re.ASCII)


@dataclass(frozen=True, slots=True)
class RunState:
    """Progress of a response. `num_events` is None if it has no stored events, and `num_bytes` grows with them."""

    is_running: bool
    is_abandoned: bool
    num_events: int | None
    num_bytes: int


@dataclass(frozen=True, slots=True)
class RunHead:
    """A running response without its input and body, which may be large."""

    id: str
    tenant_id: str
    project_id: str
    model: str
    conversation_id: str | None
    num_events: int | None


@dataclass(frozen=True, slots=True)
class ResponseStore:
    """Stored responses of all tenants. `now` is the database's clock."""

    now: Callable[[], ColumnElement[int]] = now_ms

    async def add(
        self, session: AsyncSession, response: StoredResponse, ttl_ms: int, lease_ms: int | None = None
    ) -> None:
        """Store a response for `ttl_ms`. One that is made in the background is running for `lease_ms`.

        The caller has claimed storage for it.
        """
        now_ms = int(await session.scalar(select(self.now())) or 0)
        response.expires_ms = now_ms + ttl_ms
        if lease_ms is not None:
            response.running_until_ms = now_ms + lease_ms
        session.add(response)

    async def find(self, session: AsyncSession, whose: Principal, response_id: str) -> StoredResponse | None:
        """Return the response if it is visible to the key."""
        statement = select(StoredResponse).where(
            StoredResponse.id == _possible(response_id), *await self._visible(session, whose)
        )
        return (await session.scalars(statement)).first()

    async def find_all(
        self, session: AsyncSession, whose: Principal, response_ids: Collection[str]
    ) -> Sequence[StoredResponse]:
        """Return those of the responses that are visible to the key."""
        statement = select(StoredResponse).where(
            StoredResponse.id.in_(response_ids), *await self._visible(session, whose)
        )
        return (await session.scalars(statement)).all()

    async def total_bytes(self, session: AsyncSession, whose: Principal, response_ids: Collection[str]) -> int:
        """Return the size of those of the responses that are visible to the key."""
        total = select(func.sum(StoredResponse.num_bytes)).where(
            StoredResponse.id.in_(response_ids), *await self._visible(session, whose)
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
            .where(*await self._visible(session, whose))
        )
        statement = select(StoredResponse).join(earlier, StoredResponse.id == earlier.c.id)
        found = (await session.scalars(statement.order_by(earlier.c.distance.desc()))).all()
        return found if found and found[0].previous_id is None else ()

    async def delete(self, session: AsyncSession, whose: Principal, response_id: str) -> bool:
        """Delete the response and return whether it existed for the key."""
        gone = delete(StoredResponse).where(
            StoredResponse.id == _possible(response_id), *await self._visible(session, whose)
        )
        return await session.scalar(gone.returning(StoredResponse.id)) is not None

    async def is_abandoned(self, session: AsyncSession, response: StoredResponse) -> bool:
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

    async def find_run(self, session: AsyncSession, response_id: str, *, locks: bool = False) -> RunHead | None:
        """Return the response if it is running, locked on demand until the transaction ends."""
        columns = (getattr(StoredResponse, field.name) for field in fields(RunHead))
        running = select(*columns).where(StoredResponse.id == response_id, StoredResponse.running_until_ms.is_not(None))
        row = (await session.execute(running.with_for_update() if locks else running)).first()
        return None if row is None else RunHead(*row)

    async def input_of(self, session: AsyncSession, response_id: str) -> bytes:
        """Return the encoded input items of a response, or nothing if it is gone."""
        return await session.scalar(select(StoredResponse.items).where(StoredResponse.id == response_id)) or b"[]"

    async def update_run(
        self, session: AsyncSession, response_id: str, body: bytes, num_new_items: int = 0, *, ends: bool
    ) -> None:
        """Replace the body of a running response, which is locked. The old one is not read."""
        more = literal(len(body), BigInteger) - func.length(StoredResponse.body)
        values: dict[str, Any] = {
            "body": body,
            "num_items": StoredResponse.num_items + num_new_items,
            "num_bytes": StoredResponse.num_bytes + more,
            "total_bytes": StoredResponse.total_bytes + more,
        }
        await self._set(session, response_id, values | ({"running_until_ms": None} if ends else {}))

    async def set_num_events(self, session: AsyncSession, response_id: str, num_events: int) -> None:
        """Set the number of all events of a response before the last one."""
        await self._set(session, response_id, {"num_events": num_events})

    async def _set(self, session: AsyncSession, response_id: str, values: Mapping[str, Any]) -> None:
        changed = update(StoredResponse).where(StoredResponse.id == response_id).values(**values)
        await session.execute(changed, execution_options={"synchronize_session": False})

    # ── Events ──

    async def run_state(self, session: AsyncSession, whose: Principal, response_id: str) -> RunState | None:
        """Return the progress of a response that is visible to the key."""
        until, now = StoredResponse.running_until_ms, self.now()
        statement = select(until.is_not(None), until < now, StoredResponse.num_events, StoredResponse.num_bytes)
        found = await session.execute(
            statement.where(StoredResponse.id == _possible(response_id), *await self._visible(session, whose))
        )
        row = found.first()
        return None if row is None else RunState(bool(row[0]), bool(row[1]), row[2], row[3])

    async def add_events(
        self, session: AsyncSession, chunks_of: Mapping[str, Collection[EventChunk]], storage: StorageLimit
    ) -> set[str]:
        """Store chunks of running responses, and return the ids of those that exceed the storage limit of their tenant.

        A chunk that is stored already stays as it is. The limit is checked whenever a response has grown by
        `STORAGE_CHECK_BYTES`.
        """
        columns = StoredResponse.id, StoredResponse.tenant_id, StoredResponse.num_bytes
        running = select(*columns).where(StoredResponse.id.in_(chunks_of), StoredResponse.running_until_ms.is_not(None))
        locked = running.order_by(StoredResponse.id).with_for_update()
        refused = set()
        for response_id, tenant_id, num_bytes in (await session.execute(locked)).all():
            total_bytes = num_bytes
            for chunks in statements_of(chunks_of[response_id]):
                sizes = {chunk.first_number: len(chunk.events) for chunk in chunks}
                num_more = sum(sizes.values())
                crosses = (total_bytes + num_more) // STORAGE_CHECK_BYTES > total_bytes // STORAGE_CHECK_BYTES
                unstored = total_bytes - num_bytes + num_more
                if crosses and not await has_capacity(session, tenant_id, storage, unstored, 0):
                    refused.add(response_id)
                    break
                rows = [{"response_id": response_id, "tenant_id": tenant_id, **asdict(chunk)} for chunk in chunks]
                added = insert_into(session, StoredEvents).values(rows)
                added = added.on_conflict_do_nothing().returning(StoredEvents.first_number)
                total_bytes += sum(sizes[number] for number in await session.scalars(added))
            more = total_bytes - num_bytes
            await self._set(session, response_id, {"num_bytes": StoredResponse.num_bytes + more})
        return refused

    async def events(
        self, session: AsyncSession, response_id: str, number: int, limit: int = READ_CHUNKS
    ) -> list[EventChunk]:
        """Return stored chunks with the event of this sequence number and later ones, in order."""
        last_number = StoredEvents.first_number + StoredEvents.num_events
        statement = select(StoredEvents.first_number, StoredEvents.num_events, StoredEvents.events)
        statement = statement.where(StoredEvents.response_id == response_id, last_number > number)
        found = await session.execute(statement.order_by(StoredEvents.first_number).limit(limit))
        return [EventChunk(*row) for row in found]

    async def num_stored_events(self, session: AsyncSession, response_id: str) -> int:
        """Return the number of events in the stored chunks of a response."""
        total = select(func.sum(StoredEvents.num_events)).where(StoredEvents.response_id == response_id)
        return int(await session.scalar(total) or 0)

    async def purge(self, session: AsyncSession, limit: int = PURGE_ROWS, max_bytes: int = PURGE_BYTES) -> int:
        """Delete at most `limit` expired responses of `max_bytes`, the oldest first, and return their number.

        The first one is deleted whatever its size.
        """
        ids = await oldest_expired(session, StoredResponse.id, StoredResponse.expires_ms, self.now(), limit)
        if not ids:
            return 0
        sizes = select(StoredResponse.id, StoredResponse.num_bytes).where(StoredResponse.id.in_(ids))
        rows = (await session.execute(sizes.order_by(StoredResponse.expires_ms))).all()
        totals = accumulate(row.num_bytes for row in rows)
        gone = [row.id for row, total in zip(rows, totals, strict=True) if total <= max_bytes] or [rows[0].id]
        await session.execute(delete(StoredResponse).where(StoredResponse.id.in_(gone)))
        return len(gone)

    async def _visible(self, session: AsyncSession, whose: Principal) -> tuple[ColumnElement[bool], ...]:
        names = await askable_names(session, whose)
        return (
            StoredResponse.tenant_id == whose.tenant_id,
            StoredResponse.project_id == whose.project_id,
            StoredResponse.expires_ms > self.now(),
            *(() if names.names is None else (names.condition(StoredResponse.model),)),
        )


def _possible(response_id: str) -> str:
    """Return the id, or an empty string that matches nothing if it cannot be an id."""
    return response_id if _ID.fullmatch(response_id) else ""
