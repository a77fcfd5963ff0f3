"""Locks of conversations: one response at a time adds to a conversation, at all gateways of a database.

A request that names a conversation locks it before it reads the items, and the lock ends with the response. A gateway
extends the locks of its requests, so the lock of a gateway that died runs out.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.auth.principal import Principal
from moiety_platform.db.session import Database
from moiety_platform.errors import BadRequest
from moiety_platform.responses_api.conversation_store import ConversationStore
from moiety_platform.responses_api.models import StoredConversation

LOCK_MS = 30_000
CONVERSATION_LOCKED = "conversation_locked"  # an error code


@dataclass(frozen=True, slots=True)
class ConversationLocks:
    """Locks of the requests of one gateway process. Every method raises Unavailable without the database."""

    database: Database
    store: ConversationStore

    async def acquire(self, whose: Principal, conversation_id: str, response_id: str) -> None:
        """Lock a conversation for a response; one that is not visible to the key is left to its reader.

        Raises BadRequest if another response has it.
        """
        async with self.database.write() as session:
            found = await self.store.find(session, whose, conversation_id, locks=True)
            if found is None:
                return
            if not await self.store.lock(session, found.id, response_id, LOCK_MS):
                raise BadRequest(
                    f"another response is being made in the conversation {conversation_id!r}; wait for its end, then "
                    "send the request again",
                    code=CONVERSATION_LOCKED,
                    param="conversation",
                )

    async def extend(self, response_ids: Collection[str]) -> None:
        """Extend the locks of responses that are being made."""
        async with self.database.write() as session:
            until = self.store.now() + LOCK_MS
            held = StoredConversation.locked_by.in_(response_ids)
            await session.execute(update(StoredConversation).where(held).values(locked_until_ms=until))

    async def release(self, conversation_id: str, response_id: str) -> None:
        """Unlock a conversation, if the response has locked it."""
        async with self.database.write() as session:
            await unlock(session, conversation_id, response_id)


async def unlock(session: AsyncSession, conversation_id: str, response_id: str) -> None:
    """Unlock a conversation, if the response has locked it, within the caller's transaction."""
    held = StoredConversation.id == conversation_id, StoredConversation.locked_by == response_id
    free = {"locked_by": None, "locked_until_ms": None}
    await session.execute(update(StoredConversation).where(*held).values(free))
