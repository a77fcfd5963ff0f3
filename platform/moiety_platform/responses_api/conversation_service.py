"""Stored conversations as one gateway process serves them. Every method raises Unavailable without the database."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import msgspec
from sqlalchemy import delete
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.auth.principal import Principal
from moiety_platform.db.keyset import ListRequest
from moiety_platform.db.session import Database
from moiety_platform.errors import BadRequest, NotFound
from moiety_platform.responses_api.conversation_schemas import ConversationObject
from moiety_platform.responses_api.conversation_store import ConversationStore
from moiety_platform.responses_api.items import FIRST_INPUT, Item, with_id
from moiety_platform.responses_api.models import StoredConversation
from moiety_platform.responses_api.response_service import ResponseService, conversation_not_found, storage_full
from moiety_platform.responses_api.storage_limit import claim_storage

ID_PREFIX = "conv_"


class ConversationService:
    """Stores, changes and returns conversations, under the limits of stored responses. Owned by the entry point."""

    def __init__(self, database: Database, responses: ResponseService, store: ConversationStore) -> None:
        self._database = database
        self._responses = responses
        self._store = store

    async def create(self, whose: Principal, items: Sequence[Item], metadata: dict[str, str]) -> ConversationObject:
        """Create a conversation with these items. Raises BadRequest, TooLarge or RateLimited."""
        limits = self._responses.limits
        if limits.storage.max_responses == 0:
            raise BadRequest("this server does not store conversations; send the items with each request as 'input'")
        labels = msgspec.json.encode(metadata).decode()
        conversation = StoredConversation(
            id=ID_PREFIX + secrets.token_hex(16),
            tenant_id=whose.tenant_id,
            project_id=whose.project_id,
            models="[]",
            labels=labels,
            next_position=0,
            num_items=0,
            num_bytes=len(labels),
        )
        async with self._database.write() as session:
            await self._claim(session, whose, items, len(labels), num_more=1)
            await self._store.add(session, conversation, self._ttl_ms)
            await self._append(session, conversation, items)
            return _view(conversation)

    async def get(self, whose: Principal, conversation_id: str) -> ConversationObject:
        """Return a conversation. Raises NotFound."""
        async with self._database.read() as session:
            return _view(await self._find(session, whose, conversation_id))

    async def change(self, whose: Principal, conversation_id: str, metadata: dict[str, str]) -> ConversationObject:
        """Replace the metadata of a conversation, and return it. Raises NotFound or RateLimited."""
        labels = msgspec.json.encode(metadata).decode()
        async with self._database.write() as session:
            await self._claim(session, whose, (), len(labels))
            found = await self._find(session, whose, conversation_id, locks=True)
            found.num_bytes += len(labels) - len(found.labels)
            found.labels = labels
            return _view(found)

    async def delete(self, whose: Principal, conversation_id: str) -> None:
        """Delete a conversation and its items. Raises NotFound."""
        async with self._database.write() as session:
            found = await self._find(session, whose, conversation_id, locks=True)
            await session.execute(delete(StoredConversation).where(StoredConversation.id == found.id))

    async def add_items(self, whose: Principal, conversation_id: str, items: Sequence[Item]) -> list[Item]:
        """Add items at the end of a conversation, and return them with their ids.

        Raises NotFound, BadRequest, TooLarge or RateLimited.
        """
        async with self._database.write() as session:
            await self._claim(session, whose, items)
            found = await self._find(session, whose, conversation_id, locks=True)
            return await self._append(session, found, items)

    async def page(self, whose: Principal, conversation_id: str, list_request: ListRequest) -> tuple[list[Item], bool]:
        """Return a page of a conversation's items, and whether more follow. Raises NotFound or BadRequest."""
        async with self._database.read() as session:
            found = await self._find(session, whose, conversation_id)
            return await self._store.page(session, found.id, list_request)

    async def item(self, whose: Principal, conversation_id: str, item_id: str) -> Item:
        """Return one item of a conversation. Raises NotFound."""
        async with self._database.read() as session:
            found = await self._find(session, whose, conversation_id)
            item = await self._store.item(session, found.id, item_id)
        if item is None:
            raise _item_not_found(item_id)
        return item

    async def delete_item(self, whose: Principal, conversation_id: str, item_id: str) -> ConversationObject:
        """Delete one item of a conversation, and return the conversation. Raises NotFound."""
        async with self._database.write() as session:
            found = await self._find(session, whose, conversation_id, locks=True)
            if not await self._store.delete_item(session, found, item_id):
                raise _item_not_found(item_id)
            return _view(found)

    @property
    def _ttl_ms(self) -> int:
        return round(self._responses.limits.ttl_s * 1000)

    async def _claim(
        self, session: AsyncSession, whose: Principal, items: Sequence[Item], num_bytes: int = 0, num_more: int = 0
    ) -> None:
        """Check that the tenant can store new items and `num_bytes` more bytes. Raises RateLimited."""
        storage = self._responses.limits.storage
        total = num_bytes + sum(len(msgspec.json.encode(item)) for item in items)
        if not await claim_storage(session, whose.tenant_id, storage, total, num_more):
            raise storage_full(storage)

    async def _append(
        self, session: AsyncSession, conversation: StoredConversation, items: Sequence[Item]
    ) -> list[Item]:
        addition_id = ID_PREFIX + secrets.token_hex(16)
        added = [with_id(item, addition_id, FIRST_INPUT + number) for number, item in enumerate(items)]
        await self._store.append(session, conversation, added, self._ttl_ms)
        limits = self._responses.limits
        if conversation.num_items > limits.max_items:
            raise BadRequest(
                f"the conversation would have {conversation.num_items:,} items; one may have {limits.max_items:,}. Add "
                "fewer, or begin a new one",
                param="items",
            )
        self._responses.check_length(0, conversation.num_bytes, "items")
        return added

    async def _find(
        self, session: AsyncSession, whose: Principal, conversation_id: str, *, locks: bool = False
    ) -> StoredConversation:
        found = await self._store.find(session, whose, conversation_id, locks=locks)
        if found is None:
            raise conversation_not_found(conversation_id)
        return found


def _view(conversation: StoredConversation) -> ConversationObject:
    return {
        "id": conversation.id,
        "object": "conversation",
        "created_at": conversation.created_ms // 1000,
        "metadata": msgspec.json.decode(conversation.labels),
    }


def _item_not_found(item_id: str) -> NotFound:
    return NotFound(
        f"there is no item {item_id[:64]!r} in this conversation; list its items",
        code="item_not_found",
        param="item_id",
    )
