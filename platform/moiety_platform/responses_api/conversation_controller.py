"""OpenAI's `/v1/conversations`: maps HTTP to the stored conversations of the key's project."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from litestar import Controller, Request, Response, delete, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, SkipValidation

from moiety_platform.auth.client import AuthenticatedClient
from moiety_platform.auth.principal import Principal
from moiety_platform.db.keyset import Identified, Listing, list_fields
from moiety_platform.inference.body_fields import StrictBody
from moiety_platform.inference.request_body import BodyReader
from moiety_platform.inference.response_headers import field_headers
from moiety_platform.known_parameters import IGNORED
from moiety_platform.openapi.described import JSON, Described, describes, fails
from moiety_platform.openapi.documents import KEY
from moiety_platform.request_head import fields_of
from moiety_platform.responses_api.conversation_reader import ConversationReader
from moiety_platform.responses_api.conversation_schemas import (
    ChangedConversation,
    ConversationItemList,
    ConversationObject,
    DeletedConversation,
    NewConversation,
    NewItems,
)
from moiety_platform.responses_api.conversation_service import ConversationService
from moiety_platform.responses_api.input import InputItem, SkippedItem
from moiety_platform.responses_api.item_lists import ITEM_LIST, ListRequestDependency
from moiety_platform.responses_api.item_types import InputItem as ItemFields
from moiety_platform.responses_api.items import Continued, Item
from moiety_platform.responses_api.tools import readable_type

INCLUDE: dict[str, Any] = {IGNORED: frozenset({"include", "include[]"})}  # every item is returned whole

Body = TypeVar("Body", bound=StrictBody)
ConversationDependency = NamedDependency[SkipValidation["ConversationServices"]]


@dataclass(frozen=True, slots=True)
class ConversationServices:
    """Services of the endpoints of conversations."""

    bodies: BodyReader
    service: ConversationService
    reader: ConversationReader

    async def body(self, schema: type[Body], request: Request[Any, Any, Any], whose: Principal) -> Body:
        """Return the body of a request. Raises BadRequest or TooLarge."""
        return await self.bodies.read(schema, request.receive, fields_of(request.scope), whose.tenant_id)

    async def items(self, given: Sequence[InputItem] | None, whose: Principal) -> list[Item]:
        """Return a client's items as they are stored. Raises NotFound, BadRequest, TooLarge or Unavailable."""
        items = [checked for item in given or () if (checked := item.checked()) is not None]
        return await self.reader.without_references(whose, items, Continued())


class ConversationController(Controller):
    """Routes of conversations."""

    path = "/v1/conversations"
    tags = ("conversations",)
    security = [{KEY: list[str]()}]  # noqa: RUF012  read by the framework only

    @post(
        status_code=200,
        opt=describes(
            Described(body={JSON: NewConversation}, answers={200: {JSON: ConversationObject}}, errors=(404, 429))
        ),
    )
    async def create_conversation(
        self, owner: AuthenticatedClient, conversations: ConversationDependency, request: Request[Any, Any, Any]
    ) -> Response[ConversationObject]:
        """Create a conversation, which may have items from the beginning."""
        body = await conversations.body(NewConversation, request, owner)
        items = await conversations.items(body.items, owner)
        created = await conversations.service.create(owner, items, body.metadata or {})
        return Response(created, headers=_headers(body.items))

    @get("/{conversation_id:str}")
    async def retrieve_conversation(
        self, owner: AuthenticatedClient, conversations: ConversationDependency, conversation_id: FromPath[str]
    ) -> ConversationObject:
        """Return a conversation without its items."""
        return await conversations.service.get(owner, conversation_id)

    @post(
        "/{conversation_id:str}",
        status_code=200,
        opt=describes(Described(body={JSON: ChangedConversation}, errors=(429,))),
    )
    async def update_conversation(
        self,
        owner: AuthenticatedClient,
        conversations: ConversationDependency,
        request: Request[Any, Any, Any],
        conversation_id: FromPath[str],
    ) -> ConversationObject:
        """Replace the metadata of a conversation."""
        body = await conversations.body(ChangedConversation, request, owner)
        return await conversations.service.change(owner, conversation_id, body.metadata or {})

    @delete("/{conversation_id:str}", status_code=200)
    async def delete_conversation(
        self, owner: AuthenticatedClient, conversations: ConversationDependency, conversation_id: FromPath[str]
    ) -> DeletedConversation:
        """Delete a conversation and its items. Stored responses that belong to it can no longer be continued."""
        await conversations.service.delete(owner, conversation_id)
        return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}

    @post(
        "/{conversation_id:str}/items",
        status_code=200,
        opt={
            **INCLUDE,
            **describes(Described(body={JSON: NewItems}, answers={200: {JSON: ConversationItemList}}, errors=(429,))),
        },
    )
    async def create_items(
        self,
        owner: AuthenticatedClient,
        conversations: ConversationDependency,
        request: Request[Any, Any, Any],
        conversation_id: FromPath[str],
    ) -> Response[Listing[Identified]]:
        """Add items at the end of a conversation."""
        body = await conversations.body(NewItems, request, owner)
        items = await conversations.items(body.items, owner)
        added = await conversations.service.add_items(owner, conversation_id, items)
        shown = list_fields(cast("list[Identified]", added), has_more=False)
        return Response(shown, headers=_headers(body.items))

    @get("/{conversation_id:str}/items", opt=INCLUDE, dependencies=ITEM_LIST)
    async def list_items(
        self,
        owner: AuthenticatedClient,
        conversations: ConversationDependency,
        conversation_id: FromPath[str],
        list_request: ListRequestDependency,
    ) -> ConversationItemList:
        """List the items of a conversation, the latest first unless `order` is asc."""
        items, has_more = await conversations.service.page(owner, conversation_id, list_request)
        return list_fields(cast("list[Identified]", items), has_more)

    @get(
        "/{conversation_id:str}/items/{item_id:str}",
        opt={**INCLUDE, **describes(Described(answers={200: {JSON: ItemFields}}))},
    )
    async def retrieve_item(
        self,
        owner: AuthenticatedClient,
        conversations: ConversationDependency,
        conversation_id: FromPath[str],
        item_id: FromPath[str],
    ) -> dict[str, Any]:
        """Return one item of a conversation."""
        return await conversations.service.item(owner, conversation_id, item_id)

    @delete("/{conversation_id:str}/items/{item_id:str}", status_code=200, opt=fails())
    async def delete_item(
        self,
        owner: AuthenticatedClient,
        conversations: ConversationDependency,
        conversation_id: FromPath[str],
        item_id: FromPath[str],
    ) -> ConversationObject:
        """Delete one item of a conversation, and return the conversation."""
        return await conversations.service.delete_item(owner, conversation_id, item_id)


def _headers(items: Sequence[InputItem] | None) -> dict[str, str]:
    """Return the response headers that name the types of items that are not stored."""
    skipped = {f"items.{readable_type(item.type)}" for item in items or () if isinstance(item, SkippedItem)}
    return field_headers(sorted(skipped), {})
