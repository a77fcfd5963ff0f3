"""Stored conversations in the database, within the caller's transaction. Times are the database's.

A conversation is visible to keys of its project that may use all models that have answered in it. For all other keys it
does not exist. Items are added under a lock of the conversation's row, so the items of one request are consecutive.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
from sqlalchemy import ColumnElement, delete, func, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.auth.principal import Principal
from moiety_platform.db.expired import oldest_expired
from moiety_platform.db.keyset import ListRequest
from moiety_platform.db.now import now_ms
from moiety_platform.errors import BadRequest
from moiety_platform.responses_api.askable_names import askable_names
from moiety_platform.responses_api.items import Item
from moiety_platform.responses_api.models import MAX_ITEM_ID_LENGTH, ConversationItem, StoredConversation

PURGE_ROWS = 10  # per transaction, each with all its items

_ID = re.compile(r"conv_[0-9a-f]{32}", re.ASCII)


@dataclass(frozen=True, slots=True)
class ConversationStore:
    """Stored conversations of all tenants. `now` is the database's clock."""

    now: Callable[[], ColumnElement[int]] = now_ms

    async def add(self, session: AsyncSession, conversation: StoredConversation, ttl_ms: int) -> None:
        """Store a conversation without items for `ttl_ms`. The caller has claimed storage for it."""
        conversation.created_ms = int(await session.scalar(select(self.now())) or 0)
        conversation.expires_ms = conversation.created_ms + ttl_ms
        session.add(conversation)
        await session.flush()

    async def find(
        self, session: AsyncSession, whose: Principal, conversation_id: str, *, locks: bool = False
    ) -> StoredConversation | None:
        """Return the conversation if it is visible to the key, locked on demand until the transaction ends."""
        if not _ID.fullmatch(conversation_id):
            return None
        found = await self.find_in_project(session, whose.project_id, conversation_id, locks=locks)
        if found is None or found.tenant_id != whose.tenant_id:
            return None
        names = await askable_names(session, whose)
        return found if all(map(names.has, msgspec.json.decode(found.models))) else None

    async def find_in_project(
        self, session: AsyncSession, project_id: str, conversation_id: str, *, locks: bool = False
    ) -> StoredConversation | None:
        """Return the project's conversation, locked on demand until the transaction ends."""
        statement = select(StoredConversation).where(
            StoredConversation.id == conversation_id,
            StoredConversation.project_id == project_id,
            StoredConversation.expires_ms > self.now(),
        )
        return (await session.scalars(statement.with_for_update() if locks else statement)).first()

    async def lock(self, session: AsyncSession, conversation_id: str, response_id: str, lock_ms: int) -> bool:
        """Lock a conversation for a response, unless another one has it; return whether that succeeded."""
        now = self.now()
        is_free = or_(StoredConversation.locked_until_ms.is_(None), StoredConversation.locked_until_ms <= now)
        taken = update(StoredConversation).where(StoredConversation.id == conversation_id, is_free)
        values = {"locked_by": response_id, "locked_until_ms": now + lock_ms}
        locked = await session.scalar(taken.values(values).returning(StoredConversation.id))
        return locked is not None

    async def append(
        self,
        session: AsyncSession,
        conversation: StoredConversation,
        items: Sequence[Item],
        ttl_ms: int,
        model: str | None = None,
    ) -> None:
        """Add items, which a model has answered, at the end of a locked conversation, and keep it for `ttl_ms`."""
        rows = []
        for number, item in enumerate(items, conversation.next_position):
            encoded = msgspec.json.encode(item)
            rows.append(
                {
                    "conversation_id": conversation.id,
                    "position": number,
                    "tenant_id": conversation.tenant_id,
                    "item_id": item["id"],
                    "num_bytes": len(encoded),
                    "item": encoded,
                }
            )
        if rows:
            await session.execute(insert(ConversationItem), rows)
        conversation.next_position += len(rows)
        conversation.num_items += len(rows)
        conversation.num_bytes += sum(row["num_bytes"] for row in rows)
        conversation.expires_ms = int(await session.scalar(select(self.now())) or 0) + ttl_ms
        models: list[str] = msgspec.json.decode(conversation.models)
        if model is not None and model not in models:
            conversation.models = msgspec.json.encode([*models, model]).decode()

    async def items(self, session: AsyncSession, conversation_id: str, before: int | None = None) -> list[Item]:
        """Return the items of a conversation in order, those before a position if it is given."""
        statement = select(ConversationItem.item).where(ConversationItem.conversation_id == conversation_id)
        if before is not None:
            statement = statement.where(ConversationItem.position < before)
        found = await session.scalars(statement.order_by(ConversationItem.position))
        return [msgspec.json.decode(item) for item in found]

    async def item(self, session: AsyncSession, conversation_id: str, item_id: str) -> Item | None:
        """Return one item of a conversation."""
        found = await session.scalar(select(ConversationItem.item).where(*_one(conversation_id, item_id)))
        return None if found is None else msgspec.json.decode(found)

    async def page(
        self, session: AsyncSession, conversation_id: str, list_request: ListRequest
    ) -> tuple[list[Item], bool]:
        """Return the requested page of a conversation's items, and whether more follow. Raises BadRequest."""
        place = ConversationItem.position
        rows = select(ConversationItem.item).where(ConversationItem.conversation_id == conversation_id)
        if list_request.after is not None:
            last = await session.scalar(select(place).where(*_one(conversation_id, list_request.after)))
            if last is None:
                raise BadRequest("'after' must be the id of an item in this list", param="after")
            rows = rows.where(place < last if list_request.newest_first else place > last)
        rows = rows.order_by(place.desc() if list_request.newest_first else place.asc()).limit(list_request.limit + 1)
        found = [msgspec.json.decode(item) for item in await session.scalars(rows)]
        return found[: list_request.limit], len(found) > list_request.limit

    async def delete_item(self, session: AsyncSession, conversation: StoredConversation, item_id: str) -> bool:
        """Delete an item of a locked conversation, and return whether it existed."""
        gone = delete(ConversationItem).where(*_one(conversation.id, item_id)).returning(ConversationItem.num_bytes)
        num_bytes = await session.scalar(gone)
        if num_bytes is None:
            return False
        conversation.num_items -= 1
        conversation.num_bytes -= num_bytes
        return True

    async def purge(self, session: AsyncSession, limit: int = PURGE_ROWS) -> int:
        """Delete at most `limit` expired conversations, the oldest first, and return their number."""
        ids = await oldest_expired(session, StoredConversation.id, StoredConversation.expires_ms, self.now(), limit)
        if ids:
            await session.execute(delete(StoredConversation).where(StoredConversation.id.in_(ids)))
        return len(ids)

    async def num_bytes_before(self, session: AsyncSession, conversation_id: str, position: int) -> int:
        """Return the size of the items before a position."""
        before = ConversationItem.conversation_id == conversation_id, ConversationItem.position < position
        return int(await session.scalar(select(func.sum(ConversationItem.num_bytes)).where(*before)) or 0)


def _one(conversation_id: str, item_id: str) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    return ConversationItem.conversation_id == conversation_id, ConversationItem.item_id == item_id[:MAX_ITEM_ID_LENGTH]
