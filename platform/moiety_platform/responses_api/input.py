"""Items of `input` in OpenAI's fields, strictly typed."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, PlainValidator, StringConstraints, ValidationInfo, field_validator

from moiety_platform.inference.body_fields import (
    MAX_MESSAGES,
    MAX_PARTS,
    StrictBody,
    bounded,
    known_role,
    or_text,
    refuse,
    shows,
)
from moiety_platform.responses_api.call_input import CALL_ITEMS, CallInput
from moiety_platform.responses_api.content import (
    INPUT_FILE,
    INPUT_IMAGE,
    INPUT_TEXT,
    OUTPUT_TEXT,
    REFUSAL,
    ContentParts,
    ItemContent,
    stored_parts,
    text_of,
)
from moiety_platform.responses_api.items import (
    ADDITIONAL_TOOLS,
    COMPACTION,
    MESSAGE,
    THOUGHT,
    Item,
    message_item,
    text_part,
    thought_item,
)
from moiety_platform.responses_api.tools import ResponseTools

ROLES = ("user", "assistant", "system", "developer")
REFERENCE = "item_reference"
TRIGGER = "compaction_trigger"

SKIPPED = (  # items of hosted tools and of features that are not offered; they carry nothing that a model here reads
    "agent_message",
    "code_interpreter_call",
    "computer_call",
    "computer_call_output",
    "configuration_update",
    "file_search_call",
    "image_generation_call",
    "mcp_approval_request",
    "mcp_approval_response",
    "mcp_call",
    "mcp_list_tools",
    "multi_agent_call",
    "multi_agent_call_output",
    "program",
    "program_output",
    "web_search_call",
)

_ItemId = Annotated[str, StringConstraints(min_length=1, max_length=256)]


_PARTS_OF = (
    ("user", (INPUT_TEXT, INPUT_IMAGE, INPUT_FILE)),
    ("assistant", (INPUT_TEXT, OUTPUT_TEXT, REFUSAL)),
    ("system", (INPUT_TEXT,)),
    ("developer", (INPUT_TEXT,)),
)


def _parts_by_role(role: str, types: tuple[str, ...]) -> dict[str, Any]:
    """Return a JSON schema of the parts that a message of the role may have."""
    return {
        "if": {"properties": {"role": {"const": role}}},
        "then": {"properties": {"content": {"items": {"properties": {"type": {"enum": list(types)}}}}}},
    }


class MessageItem(StrictBody):
    """One message. An assistant's message may be an unchanged message of an earlier answer."""

    model_config = ConfigDict(json_schema_extra={"allOf": [_parts_by_role(role, types) for role, types in _PARTS_OF]})

    type: Literal["message"] | None = None
    role: Annotated[str, known_role(ROLES), shows(enum=list(ROLES))]
    content: ContentParts

    @field_validator("content")
    @classmethod
    def _of_the_role(cls, value: list[ItemContent], info: ValidationInfo) -> list[ItemContent]:
        role = info.data.get("role")
        for place, part in enumerate(value):
            if role not in (None, "assistant") and part.type in (OUTPUT_TEXT, REFUSAL):
                raise refuse(f"part {place} is of type {part.type!r}; those of role {role!r} are {INPUT_TEXT!r}")
            if role not in (None, "user") and part.type in (INPUT_IMAGE, INPUT_FILE):
                kind = "an image" if part.type == INPUT_IMAGE else "a file"
                raise refuse(f"part {place} is {kind}; images and files are for the user and for results of tools only")
        return value

    def checked(self) -> Item:
        if self.role == "assistant":
            return message_item([text_part(text_of([part])) for part in self.content])
        return {"type": MESSAGE, "status": "completed", "role": self.role, "content": stored_parts(self.content)}


class GivenThought(StrictBody):
    type: Literal["reasoning_text"]
    text: str


class ThoughtItem(StrictBody):
    """Reasoning of an earlier answer, or the same encrypted. The summary is ignored, since it says less."""

    type: Literal["reasoning"]
    content: Annotated[list[GivenThought], Field(fail_fast=True, max_length=MAX_PARTS)] | None = None
    encrypted_content: str | None = None

    def checked(self) -> Item:
        if self.content:
            return thought_item("\n".join(part.text for part in self.content))
        item = thought_item(None)
        return item if self.encrypted_content is None else {**item, "encrypted_content": self.encrypted_content}


class CompactionItem(StrictBody):
    """The summary of a compacted conversation, encrypted."""

    type: Literal["compaction"]
    encrypted_content: str

    def checked(self) -> Item:
        return {"type": COMPACTION, "encrypted_content": self.encrypted_content}


class ItemReference(StrictBody):
    """An item of a stored response, by its id."""

    type: Literal["item_reference"] | None = None
    id: _ItemId

    def checked(self) -> Item:
        return {"type": REFERENCE, "id": self.id}


class CompactionTrigger(StrictBody):
    """Asks for a compaction of the conversation in place of an answer, as the last item of `input`."""

    type: Literal["compaction_trigger"]

    def checked(self) -> None:
        """Return nothing, since it is not part of the conversation."""


class AdditionalTools(StrictBody):
    """Tools that are offered beside those in `tools`."""

    type: Literal["additional_tools"]
    tools: ResponseTools

    def checked(self) -> Item:
        return {"type": ADDITIONAL_TOOLS, "role": "developer", "tools": [tool.fields() for tool in self.tools]}


class SkippedItem(StrictBody):
    """An item of a tool that does not exist here, such as a search of OpenAI's."""

    type: Annotated[str, shows(enum=list(SKIPPED))]

    @field_validator("type")
    @classmethod
    def _known_type(cls, value: str) -> str:
        if value not in SKIPPED:
            raise refuse(f"items of type {value[:64]!r} are unknown; send {', '.join(_ITEMS)}")
        return value

    def checked(self) -> None:
        """Return nothing, since it is not part of the conversation."""


InputItem = (
    MessageItem
    | ThoughtItem
    | CompactionItem
    | ItemReference
    | CompactionTrigger
    | CallInput
    | AdditionalTools
    | SkippedItem
)

_ITEMS: dict[str, type[InputItem]] = {
    MESSAGE: MessageItem,
    THOUGHT: ThoughtItem,
    **CALL_ITEMS,
    COMPACTION: CompactionItem,
    TRIGGER: CompactionTrigger,
    REFERENCE: ItemReference,
    ADDITIONAL_TOOLS: AdditionalTools,
}


def _as_item(value: Any, info: ValidationInfo) -> InputItem:
    """Validate an item as the type that it names, so that errors refer to that type only.

    A message may omit its type, and so may a reference, which has an id and neither role nor content.
    """
    kind = MESSAGE
    if isinstance(value, dict):
        is_reference = "id" in value and not value.keys() & {"role", "content"}
        kind = value.get("type") or (REFERENCE if is_reference else MESSAGE)
    schema = _ITEMS.get(kind, SkippedItem) if isinstance(kind, str) else SkippedItem
    return schema.model_validate(value, context=info.context)


InputItems = Annotated[
    list[Annotated[InputItem, PlainValidator(_as_item, json_schema_input_type=InputItem)]],
    Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES),
    bounded(lambda shape: shape.max_messages),
    or_text(lambda text, _info: {"role": "user", "content": text}, "items"),
]
