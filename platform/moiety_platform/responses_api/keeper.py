"""Stored conversations as one gateway process serves them.

A request that stores or continues a response fails closed before it is served: it is refused with 503 while the
database is unavailable. A response that cannot be stored after generation is still answered, and says so.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec
import structlog

from moiety_platform.auth.principal import Principal
from moiety_platform.db.session import Database
from moiety_platform.errors import BadRequest, NotFound, RateLimited, TooLarge, Unavailable
from moiety_platform.responses_api.items import Continued, Item
from moiety_platform.responses_api.models import StoredResponse
from moiety_platform.responses_api.store import ResponseStore, StorageRoom
from moiety_platform.settings import GatewaySettings

FULL_RETRY_S = 60.0
FORSAKEN = {"code": "server_error", "message": "the gateway that made this response has stopped; send it again"}
MAX_REFERENCED = 256  # responses whose items a request may refer to

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ConversationLimits:
    """Limits on stored responses, their lifetime, and the size of a conversation that a request may continue."""

    ttl_s: float
    room: StorageRoom
    max_items: int
    max_bytes: int
    stores_by_default: bool = False

    @classmethod
    def of(cls, settings: GatewaySettings) -> ConversationLimits:
        return cls(
            settings.responses_ttl_s,
            StorageRoom(settings.responses_max_per_tenant, settings.responses_max_bytes_per_tenant),
            settings.max_messages,
            settings.max_body_bytes,
            settings.responses_store_by_default and settings.responses_max_per_tenant > 0,
        )


class ResponseKeeper:
    """Stores and returns responses. Owned by the entry point. The retention job deletes expired responses."""

    def __init__(
        self,
        database: Database,
        limits: ConversationLimits,
        store: ResponseStore | None = None,
    ) -> None:
        self._database = database
        self._store = store or ResponseStore()
        self.limits = limits  # may be replaced, for later requests

    # ── Requests that store or continue ──

    async def require_room(self, whose: Principal) -> None:
        """Check that a response can be stored.

        Raises BadRequest if this server stores none, RateLimited if the tenant's storage is full, or Unavailable.
        """
        room = self.limits.room
        if room.max_responses == 0:
            raise BadRequest("this server keeps no responses; leave 'store' out, or send false", param="store")
        async with self._database.read() as session:
            if await self._store.has_room(session, whose.tenant_id, room):
                return
        raise RateLimited(
            f"as much is kept for this tenant as may be ({room.max_responses:,} responses, {room.max_bytes:,} bytes); "
            "delete some, wait until the oldest expire, or leave 'store' out",
            code="response_storage_full",
            param="store",
            retry_after_s=FULL_RETRY_S,
        )

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
            self._check_length(last)
            chain = await self._store.chain(session, whose, last)
        if not chain:
            raise NotFound(
                f"the response {last_id!r} continues one that is not kept any more; send the whole conversation as "
                "'input' instead",
                code="previous_response_not_found",
                param="previous_response_id",
            )
        return Continued(last.id, tuple(_items_of(chain)), last.total_bytes)

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

    def _check_length(self, last: StoredResponse) -> None:
        limits = self.limits
        if last.num_items >= limits.max_items:
            raise BadRequest(
                f"the conversation has {last.num_items:,} items; one may have {limits.max_items:,}. Begin a new one",
                param="previous_response_id",
            )
        if last.total_bytes > limits.max_bytes:
            raise TooLarge(
                f"the conversation has {last.total_bytes:,} bytes; this server continues at most {limits.max_bytes:,}. "
                "Begin a new one",
                param="previous_response_id",
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
    ) -> bool:
        """Store a response and the input items of its request, and return whether that succeeded.

        With a lease it is made in the background, and `update_run` replaces it.
        """
        encoded = msgspec.json.encode(items)
        num_bytes = len(encoded) + len(body)
        response = StoredResponse(
            id=response_id,
            tenant_id=whose.tenant_id,
            project_id=whose.project_id,
            model=model,
            previous_id=continued.last_id,
            num_items=len(continued.items) + len(items) + len(_output_of(body)),
            num_bytes=num_bytes,
            total_bytes=continued.num_bytes + num_bytes,
            items=encoded,
            body=body,
        )
        try:
            async with self._database.write() as session:
                ttl_ms = round(self.limits.ttl_s * 1000)
                is_kept = await self._store.add(session, response, self.limits.room, ttl_ms, lease_ms)
        except Unavailable as error:
            log.warning("response_not_kept", tenant_id=whose.tenant_id, reason=str(error))
            return False
        if not is_kept:
            log.warning("response_not_kept", tenant_id=whose.tenant_id, reason="no room, or the tenant is erased")
        return is_kept

    # ── Access to stored responses ──

    async def body(self, whose: Principal, response_id: str) -> bytes:
        """Return the response as it was answered. Raises NotFound or Unavailable."""
        async with self._database.read() as session:
            found = await self._store.find(session, whose, response_id)
            if found is None:
                raise _not_found("response", response_id, "response_id")
            is_forsaken = await self._store.is_forsaken(session, found)
        if not is_forsaken:
            return found.body
        failed = with_end(found.body, "failed", FORSAKEN)
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

    async def update_run(self, response_id: str, body: bytes, *, ends: bool) -> bool:
        """Replace the body of a response that is made in the background, and return whether it was still running.

        Raises Unavailable.
        """
        num_items = len(_output_of(body)) if ends else 0
        async with self._database.write() as session:
            return await self._store.update_run(session, response_id, body, num_items, ends=ends)

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
        own: list[Item] = msgspec.json.decode(found.items)
        return [*_items_of(chain[:-1]), *own]

    async def delete(self, whose: Principal, response_id: str) -> None:
        """Delete a response. Raises NotFound or Unavailable."""
        async with self._database.write() as session:
            if not await self._store.delete(session, whose, response_id):
                raise _not_found("response", response_id, "response_id")


class _Output(msgspec.Struct):
    output: list[Item]


class _Progress(msgspec.Struct):
    background: bool = False


def with_end(body: bytes, status: str, error: dict[str, str] | None) -> bytes:
    """Return a response that is made in the background with the status and error of its end."""
    return msgspec.json.encode({**msgspec.json.decode(body), "status": status, "error": error})


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
        "are kept, and only for some time",
        code=f"{what.replace(' ', '_')}_not_found",
        param=param,
    )
