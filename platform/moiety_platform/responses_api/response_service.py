"""Stored responses as one gateway process serves them.

A request that stores or continues a response fails closed before it is served: it is refused with 503 while the
database is unavailable. A response that cannot be stored after generation is still answered, and says so.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
import structlog
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.auth.principal import Principal
from moiety_platform.db.session import Database
from moiety_platform.errors import BadRequest, NotFound, RateLimited, TooLarge, Unavailable
from moiety_platform.responses_api.conversation_locks import unlock
from moiety_platform.responses_api.conversation_store import ConversationStore
from moiety_platform.responses_api.event_log import EventChunk
from moiety_platform.responses_api.items import Continued, Item
from moiety_platform.responses_api.limits import ConversationLimits
from moiety_platform.responses_api.models import StoredConversation, StoredResponse
from moiety_platform.responses_api.storage_limit import StorageLimit, claim_storage, has_capacity
from moiety_platform.responses_api.store import ResponseStore, RunHead, RunState

FULL_RETRY_S = 60.0
ABANDONED = {"code": "server_error", "message": "the gateway that generated this response has stopped; send it again"}
ENDED_BY_ITSELF = ("completed", "incomplete")  # statuses of responses whose items are added to conversations
MAX_REFERENCED = 256  # responses whose items a request may refer to

log = structlog.get_logger(__name__)


class ResponseService:
    """Stores and returns responses. Owned by the entry point. The retention job deletes expired responses."""

    def __init__(
        self,
        database: Database,
        limits: ConversationLimits,
        store: ResponseStore | None = None,
    ) -> None:
        self._database = database
        self._store = store or ResponseStore()
        self._conversations = ConversationStore(self._store.now)
        self.limits = limits  # may be replaced, for later requests

    # ── Requests that store or continue ──

    async def require_capacity(self, whose: Principal) -> None:
        """Check that a response can be stored.

        Raises BadRequest if this server stores none, RateLimited if the tenant's storage is full, or Unavailable.
        """
        storage = self.limits.storage
        if storage.max_responses == 0:
            raise BadRequest("this server does not store responses; leave 'store' out, or send false", param="store")
        async with self._database.read() as session:
            if await has_capacity(session, whose.tenant_id, storage):
                return
        raise storage_full(storage, "store")

    async def continued(self, whose: Principal, last_id: str) -> Continued:
        """Return the conversation up to a response.

        Raises NotFound, BadRequest or TooLarge if it is too long to continue, or Unavailable.
        """
        async with self._database.read() as session:
            last = await self._store.find(session, whose, last_id)
            if last is None:
                raise _not_found("previous response", last_id, "previous_response_id")
            if last.running_until_ms is not None:
                raise BadRequest(
                    f"the response {last_id!r} is still being made in the background; retrieve it until it has ended",
                    code="previous_response_running",
                    param="previous_response_id",
                )
            self.check_length(last.num_items, last.total_bytes, "previous_response_id")
            chain = await self._store.chain(session, whose, last)
            earlier = await self._earlier_items(session, whose, chain)
        if not chain or earlier is None:
            raise NotFound(
                f"the response {last_id!r} continues a response that is no longer stored; send the whole "
                "conversation as "
                "'input' instead",
                code="previous_response_not_found",
                param="previous_response_id",
            )
        return Continued(last.id, (*earlier, *_items_of(chain)), last.total_bytes)

    async def continued_conversation(self, whose: Principal, conversation_id: str) -> Continued:
        """Return the items of a conversation, for a request that adds to it.

        Raises NotFound, BadRequest or TooLarge if it is too long to continue, or Unavailable.
        """
        async with self._database.read() as session:
            found = await self._conversations.find(session, whose, conversation_id)
            if found is None:
                raise conversation_not_found(conversation_id)
            self.check_length(found.num_items, found.num_bytes, "conversation")
            items = await self._conversations.items(session, found.id, found.next_position)
        return Continued(None, tuple(items), found.num_bytes, found.id, found.next_position)

    async def _earlier_items(
        self, session: AsyncSession, whose: Principal, chain: Sequence[StoredResponse]
    ) -> list[Item] | None:
        """Return the items of the conversation that the first response of a chain has read.

        Returns None if the conversation is not kept any more.
        """
        if not chain or chain[0].conversation_id is None:
            return []
        found = await self._conversations.find(session, whose, chain[0].conversation_id)
        if found is None:
            return None
        return await self._conversations.items(session, found.id, chain[0].conversation_position)

    async def items_of_responses(self, whose: Principal, response_ids: Collection[str]) -> dict[str, Item]:
        """Return the items of stored responses by their ids, without the responses that are not visible to the key.

        Raises BadRequest or TooLarge if there are too many, or Unavailable.
        """
        if len(response_ids) > MAX_REFERENCED:
            raise BadRequest(
                f"'input' refers to items of {len(response_ids):,} responses; it may refer to {MAX_REFERENCED}. Send "
                "the items themselves, or use 'previous_response_id'",
                param="input",
            )
        async with self._database.read() as session:
            if await self._store.total_bytes(session, whose, response_ids) > self.limits.max_bytes:
                raise TooLarge(
                    f"the responses that 'input' refers to have more than {self.limits.max_bytes:,} bytes; send the "
                    "items themselves",
                    param="input",
                )
            found = await self._store.find_all(session, whose, response_ids)
        return {item["id"]: item for item in _items_of(found)}

    def check_length(self, num_items: int, num_bytes: int, param: str) -> None:
        """Check that a conversation can be continued. Raises BadRequest or TooLarge."""
        limits = self.limits
        if num_items >= limits.max_items:
            raise BadRequest(
                f"the conversation has {num_items:,} items; one may have {limits.max_items:,}. Begin a new one",
                param=param,
            )
        if num_bytes > limits.max_bytes:
            raise TooLarge(
                f"the conversation has {num_bytes:,} bytes; this server continues at most {limits.max_bytes:,}. "
                "Begin a new one",
                param=param,
            )

    async def keep(
        self,
        whose: Principal,
        response_id: str,
        model: str,
        continued: Continued,
        items: Sequence[Item],
        body: bytes,
        lease_ms: int | None = None,
        *,
        stores: bool = True,
        has_events: bool = False,
    ) -> bool:
        """Store a response and the input items of its request, and return whether that succeeded.

        With a lease it is made in the background, and `update_run` replaces it. One that has ended adds its items to
        the conversation that it continues, in the same transaction; without `stores` it does nothing else.
        """
        encoded = msgspec.json.encode(items)
        num_bytes = len(encoded) + len(body)
        output = _output_of(body)
        response = StoredResponse(
            id=response_id,
            tenant_id=whose.tenant_id,
            project_id=whose.project_id,
            model=model,
            previous_id=continued.last_id,
            num_items=len(continued.items) + len(items) + len(output),
            num_bytes=num_bytes,
            total_bytes=continued.num_bytes + num_bytes,
            conversation_id=continued.conversation_id,
            conversation_position=continued.conversation_position,
            num_events=0 if has_events else None,
            items=encoded,
            body=body,
        )
        try:
            async with self._database.write() as session:
                is_kept = await self._add(session, response, [*items, *output], lease_ms, stores=stores)
        except Unavailable as error:
            log.warning("response_not_stored", tenant_id=whose.tenant_id, reason=str(error))
            return False
        if not is_kept:
            reason = "the storage limit is reached, the tenant is erased, or the conversation is gone"
            log.warning("response_not_stored", tenant_id=whose.tenant_id, reason=reason)
        return is_kept

    async def _add(
        self,
        session: AsyncSession,
        response: StoredResponse,
        items: Sequence[Item],
        lease_ms: int | None,
        *,
        stores: bool,
    ) -> bool:
        """Store a response, and add its items to its conversation unless it is still made. Returns False if it cannot.

        Nothing is stored then.
        """
        adds = response.conversation_id is not None and lease_ms is None
        num_bytes = response.num_bytes * (stores + adds)
        if not await claim_storage(session, response.tenant_id, self.limits.storage, num_bytes, int(stores)):
            return False
        if adds and not await self._append(session, response, items):
            return False
        if adds and response.conversation_id is not None:
            await unlock(session, response.conversation_id, response.id)
        if stores:
            await self._store.add(session, response, self._ttl_ms, lease_ms)
        return True

    async def _append(self, session: AsyncSession, response: StoredResponse | RunHead, items: Sequence[Item]) -> bool:
        """Add the items of a response to its conversation, and return whether it still may. Room has been claimed."""
        found: StoredConversation | None = None
        if response.conversation_id is not None:
            found = await self._conversations.find_in_project(
                session, response.project_id, response.conversation_id, locks=True
            )
        if found is None or found.locked_by not in (None, response.id):
            return False  # its lock has run out, and another response is made that has not seen these items
        await self._conversations.append(session, found, items, self._ttl_ms, response.model)
        return True

    @property
    def _ttl_ms(self) -> int:
        return round(self.limits.ttl_s * 1000)

    # ── Access to stored responses ──

    async def body(self, whose: Principal, response_id: str) -> bytes:
        """Return the response as it was answered. Raises NotFound or Unavailable."""
        async with self._database.read() as session:
            found = await self._store.find(session, whose, response_id)
            if found is None:
                raise _not_found("response", response_id, "response_id")
            is_abandoned = await self._store.is_abandoned(session, found)
        if not is_abandoned:
            return found.body
        failed = with_end(found.body, "failed", ABANDONED)
        if await self.update_run(response_id, failed, ends=True):
            return failed
        return await self.body(whose, response_id)  # it has ended meanwhile

    async def cancel(self, whose: Principal, response_id: str) -> bytes:
        """End a response that is made in the background, and return it; one that has ended stays as it is.

        Raises NotFound, Unavailable, or BadRequest for a response that is not made in the background.
        """
        body = await self.body(whose, response_id)
        if not msgspec.json.decode(body, type=_Progress).background:
            raise BadRequest(
                "only responses that are made in the background can be cancelled; to stop one that is streamed, close "
                "the connection",
                code="response_not_cancellable",
                param="response_id",
            )
        cancelled = with_end(body, "cancelled", None)
        if await self.update_run(response_id, cancelled, ends=True):
            return cancelled
        return await self.body(whose, response_id)

    async def update_run(
        self,
        response_id: str,
        body: bytes,
        *,
        ends: bool,
        events: Collection[EventChunk] = (),
        num_events: int | None = None,
    ) -> bytes | None:
        """Replace the body of a running background response, and return it as stored, or None if it ran no longer.

        One that ends adds its items to its conversation, and its last events are stored with it. `num_events` is the
        number of all its events before the last one, if the caller knows it. Raises Unavailable.
        """
        async with self._database.write() as session:
            running = await self._store.find_run(session, response_id)
            if running is None:
                return None
            added: list[Item] = []
            has_claimed = False
            output = _output_of(body) if ends else []
            is_whole = ends and msgspec.json.decode(body, type=_Progress).status in ENDED_BY_ITSELF
            if is_whole and running.conversation_id is not None:
                items = await self._store.input_of(session, response_id)
                added = [*msgspec.json.decode(items), *output]
                num_bytes = len(items) + len(body)
                has_claimed = await claim_storage(session, running.tenant_id, self.limits.storage, num_bytes, 0)
            row = await self._store.find_run(session, response_id, locks=True)
            if row is None:
                return None
            if added and not (has_claimed and await self._append(session, row, added)):
                log.warning(
                    "conversation_not_extended",
                    tenant_id=row.tenant_id,
                    response_id=response_id,
                    advice="none needed: the conversation was deleted, or its limit is reached",
                )
                body = _with_fields(body, conversation=None)
            if ends and row.conversation_id is not None:
                await unlock(session, row.conversation_id, response_id)
            if events:
                await self._store.add_events(session, {response_id: events}, self.limits.storage)
            if ends and row.num_events is not None:
                if num_events is None:
                    num_events = await self._store.num_stored_events(session, response_id)
                await self._store.set_num_events(session, response_id, num_events)
            await self._store.update_run(session, response_id, body, len(output), ends=ends)
            return body

    # ── Events of streamed background responses ──

    async def add_events(self, chunks_of: Mapping[str, Collection[EventChunk]]) -> set[str]:
        """Store events of running responses, and return the ids of those that exceed the storage limit of their tenant.

        Raises Unavailable.
        """
        async with self._database.write() as session:
            return await self._store.add_events(session, chunks_of, self.limits.storage)

    async def run_state(self, whose: Principal, response_id: str) -> RunState:
        """Return the progress of a response. Raises NotFound or Unavailable."""
        async with self._database.read() as session:
            found = await self._store.run_state(session, whose, response_id)
        if found is None:
            raise _not_found("response", response_id, "response_id")
        return found

    async def events(self, response_id: str, number: int) -> list[EventChunk]:
        """Return some stored events of a response from a sequence number on, in chunks. Raises Unavailable."""
        async with self._database.read() as session:
            return await self._store.events(session, response_id, number)

    async def extend_runs(self, response_ids: Collection[str], lease_ms: int) -> set[str]:
        """Extend the leases of responses that this process makes, and return those that go on. Raises Unavailable."""
        async with self._database.write() as session:
            return await self._store.extend_runs(session, response_ids, lease_ms)

    async def input_items(self, whose: Principal, response_id: str) -> list[Item]:
        """Return the input items of a response, as far as they are still stored: earlier turns first, then its own.

        Raises NotFound or Unavailable.
        """
        async with self._database.read() as session:
            found = await self._store.find(session, whose, response_id)
            if found is None:
                raise _not_found("response", response_id, "response_id")
            chain = await self._store.chain(session, whose, found)
            earlier = await self._earlier_items(session, whose, chain)
        own: list[Item] = msgspec.json.decode(found.items)
        return [*(earlier or ()), *_items_of(chain[:-1]), *own]

    async def delete(self, whose: Principal, response_id: str) -> None:
        """Delete a response. Raises NotFound or Unavailable."""
        async with self._database.write() as session:
            if not await self._store.delete(session, whose, response_id):
                raise _not_found("response", response_id, "response_id")


class _Output(msgspec.Struct):
    output: list[Item]


class _Progress(msgspec.Struct):
    background: bool = False
    status: str = ""


def with_end(body: bytes, status: str, error: dict[str, str] | None) -> bytes:
    """Return a response that is made in the background with the status and error of its end."""
    return _with_fields(body, status=status, error=error)


def _with_fields(body: bytes, **fields: Any) -> bytes:
    return msgspec.json.encode({**msgspec.json.decode(body), **fields})


def _output_of(body: bytes) -> list[Item]:
    return msgspec.json.decode(body, type=_Output).output


def _items_of(chain: Sequence[StoredResponse]) -> list[Item]:
    """Return the input and output items of the responses in order."""
    items: list[Item] = []
    for response in chain:
        items += msgspec.json.decode(response.items)
        items += _output_of(response.body)
    return items


def _not_found(what: str, response_id: str, param: str) -> NotFound:
    return NotFound(
        f"there is no {what} {response_id[:64]!r} for this key; only responses that were created with 'store': true "
        "are stored, and only for some time",
        code=f"{what.replace(' ', '_')}_not_found",
        param=param,
    )


def conversation_not_found(conversation_id: str) -> NotFound:
    return NotFound(
        f"there is no conversation {conversation_id[:64]!r} for this key; create one with POST /v1/conversations",
        code="conversation_not_found",
        param="conversation",
    )


def storage_full(storage: StorageLimit, param: str | None = None) -> RateLimited:
    return RateLimited(
        f"the storage limit of this tenant is reached ({storage.max_responses:,} responses and conversations, "
        f"{storage.max_bytes:,} bytes); delete some, wait until the oldest expire, or leave 'store' out",
        code="response_storage_full",
        param=param,
        retry_after_s=FULL_RETRY_S,
    )
