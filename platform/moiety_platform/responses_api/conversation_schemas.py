"""Bodies and answers of `/v1/conversations` in OpenAI's fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypedDict

from pydantic import BeforeValidator

from moiety_platform.inference.body_fields import MetadataPairs, StrictBody
from moiety_platform.responses_api.input import InputItems
from moiety_platform.responses_api.item_types import InputItem


def _none_if_empty(value: Any) -> Any:
    return None if value == [] else value


class NewConversation(StrictBody):
    """`POST /v1/conversations`. null means the default."""

    items: Annotated[InputItems | None, BeforeValidator(_none_if_empty)] = None
    metadata: MetadataPairs | None = None


class ChangedConversation(StrictBody):
    """`POST /v1/conversations/{id}`: the metadata in place of the earlier one."""

    metadata: MetadataPairs | None


class NewItems(StrictBody):
    """`POST /v1/conversations/{id}/items`."""

    items: InputItems


class ConversationObject(TypedDict):
    """A conversation without its items. The time is in Unix seconds."""

    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


class DeletedConversation(TypedDict):
    """A deleted conversation."""

    id: str
    object: Literal["conversation.deleted"]
    deleted: Literal[True]


class ConversationItemList(TypedDict):
    """One page of a conversation's items. `has_more` says whether others follow after `last_id`."""

    object: Literal["list"]
    data: list[InputItem]
    first_id: str | None
    last_id: str | None
    has_more: bool
