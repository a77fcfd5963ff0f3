"""Resolution of a request's items: the conversation that it continues, references, and what clients keep encrypted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from moiety_platform.auth.principal import Principal
from moiety_platform.errors import BadRequest, NotFound
from moiety_platform.responses_api.input import REFERENCE
from moiety_platform.responses_api.item_bodies import ItemsBody
from moiety_platform.responses_api.items import (
    COMPACTION,
    THOUGHT,
    Continued,
    Item,
    response_id_of,
    thought_item,
    without_id,
)
from moiety_platform.responses_api.reasoning_cipher import ReasoningCipher
from moiety_platform.responses_api.response_service import ResponseService

_ENCRYPTED = "encrypted_content"

Body = TypeVar("Body", bound=ItemsBody)


@dataclass(frozen=True, slots=True)
class ConversationReader:
    """Reads the items of requests."""

    service: ResponseService
    cipher: ReasoningCipher

    async def resolve(self, body: Body, whose: Principal) -> tuple[Body, list[str]]:
        """Return the body with all items of its conversation, and the paths of what is ignored.

        What was encrypted elsewhere or has been changed is left out. The store is queried only for conversations that
        are continued and for references. Raises NotFound, BadRequest, TooLarge or Unavailable.
        """
        continued = Continued()
        if body.previous_response_id is not None:
            continued = await self.service.continued(whose, body.previous_response_id)
        elif body.conversation_id is not None:
            continued = await self.service.continued_conversation(whose, body.conversation_id)
        given = await self.without_references(whose, body.items(), continued)
        notes: set[str] = set()
        read = list(self._decrypted(whose.tenant_id, [*continued.items, *given], notes))
        return body.resolved(continued, given, read), sorted(notes)

    def encrypt_for(self, tenant_id: str, kind: str) -> Callable[[str], str]:
        """Return the function that encrypts the texts of a tenant's items of a type."""
        return partial(self.cipher.encrypt, tenant_id, kind)

    async def without_references(self, whose: Principal, items: list[Item], continued: Continued) -> list[Item]:
        """Return the items with those of stored responses in place of references.

        Raises NotFound, BadRequest, TooLarge or Unavailable.
        """
        item_ids = [item["id"] for item in items if item["type"] == REFERENCE]
        if not item_ids:
            return items
        known = {item["id"]: item for item in continued.items}
        response_ids = {response_id_of(item_id) for item_id in item_ids if item_id not in known} - {None}
        known |= await self.service.items_of_responses(whose, [one for one in response_ids if one is not None])
        for item_id in item_ids:
            if item_id not in known:
                raise NotFound(
                    f"there is no item {item_id[:64]!r} for this key; only items of responses that were created with "
                    "'store': true are kept. Send the item itself",
                    code="item_not_found",
                    param="input",
                )
        if len(set(item_ids)) < len(item_ids):  # a small request must not become a large conversation
            twice = next(item_id for item_id in item_ids if item_ids.count(item_id) > 1)
            raise BadRequest(
                f"'input' refers to the item {twice[:64]!r} more than once; refer to it once", param="input"
            )
        return [without_id(known[item["id"]]) if item["type"] == REFERENCE else item for item in items]

    def _decrypted(self, tenant_id: str, items: Sequence[Item], notes: set[str]) -> Iterator[Item]:
        for item in items:
            kind, encrypted = item["type"], item.get(_ENCRYPTED)
            if encrypted is None or (kind == THOUGHT and item["content"]):
                yield item
                continue
            text = self.cipher.decrypt(tenant_id, kind, encrypted)
            if text is None:
                notes.add(f"input.{kind}.{_ENCRYPTED}")
            elif kind == COMPACTION:
                yield {**item, "summary": text}
            else:
                yield thought_item(text)
