"""Items of `input` in OpenAI's fields, strictly typed."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from pydantic import (
    ConfigDict,
    Field,
    PlainValidator,
    StringConstraints,
    ValidationInfo,
    field_validator,
)

from moiety_platform.inference.body_fields import MAX_MESSAGES, MAX_PARTS, StrictBody, bounded, or_text, refuse, shows
from moiety_platform.inference.tool_fields import ArgumentsText, ToolName
from moiety_platform.responses_api.items import (
    CALL,
    MESSAGE,
    RESULT,
    THOUGHT,
    Item,
    call_item,
    message_item,
    result_item,
    text_part,
    thought_item,
)

ROLES = ("user", "assistant", "system", "developer")

_INPUT_TEXT = "input_text"
_OUTPUT_TEXT = "output_text"
_CallId = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class ItemText(StrictBody):
    type: Annotated[str, shows(enum=[_INPUT_TEXT, _OUTPUT_TEXT])]
    text: str

    @field_validator("type")
    @classmethod
    def _only_text(cls, value: str) -> str:
        if value not in (_INPUT_TEXT, _OUTPUT_TEXT):
            raise refuse(
                f"parts of type {value[:64]!r} are not supported; send text as {_INPUT_TEXT!r}, or an assistant's as "
                f"{_OUTPUT_TEXT!r}"
            )
        return value


def _part_type(role: str | None) -> str:
    return _OUTPUT_TEXT if role == "assistant" else _INPUT_TEXT


def _as_part(text: str, info: ValidationInfo) -> dict[str, str]:
    return {"type": _part_type(info.data.get("role")), "text": text}


Parts = Annotated[list[ItemText], Field(fail_fast=True, max_length=MAX_PARTS), or_text(_as_part, "text parts")]


class MessageItem(StrictBody):
    """One message. An assistant's message may be an unchanged message of an earlier answer."""

    model_config = ConfigDict(
        json_schema_extra={
            "if": {"properties": {"role": {"const": "assistant"}}},
            "then": {"properties": {"content": {"items": {"properties": {"type": {"const": _OUTPUT_TEXT}}}}}},
            "else": {"properties": {"content": {"items": {"properties": {"type": {"const": _INPUT_TEXT}}}}}},
        }
    )

    type: Literal["message"] | None = None
    role: Annotated[str, shows(enum=list(ROLES))]
    content: Parts

    @field_validator("role")
    @classmethod
    def _known_role(cls, value: str) -> str:
        if value not in ROLES:
            raise refuse(f"{value[:64]!r} is not a role; use one of {', '.join(ROLES)}")
        return value

    @field_validator("content")
    @classmethod
    def _of_the_role(cls, value: list[ItemText], info: ValidationInfo) -> list[ItemText]:
        role = info.data.get("role")
        for place, part in enumerate(value):
            if role is not None and part.type != _part_type(role):
                raise refuse(f"part {place} is of type {part.type!r}; those of role {role!r} are {_part_type(role)!r}")
        return value

    def checked(self) -> Item:
        if self.role == "assistant":
            return message_item([text_part(part.text) for part in self.content])
        content = [{"type": _INPUT_TEXT, "text": part.text} for part in self.content]
        return {"type": MESSAGE, "status": "completed", "role": self.role, "content": content}


class CallItem(StrictBody):
    """A function call of an earlier answer."""

    type: Literal["function_call"]
    call_id: _CallId
    name: ToolName
    arguments: ArgumentsText

    def checked(self) -> Item:
        return call_item(self.call_id, self.name, msgspec.json.encode(self.arguments).decode())


class ResultItem(StrictBody):
    """The result of a function call."""

    type: Literal["function_call_output"]
    call_id: _CallId
    output: Parts

    def checked(self) -> Item:
        return result_item(self.call_id, "\n".join(part.text for part in self.output))


class GivenThought(StrictBody):
    type: Literal["reasoning_text"]
    text: str


class ThoughtItem(StrictBody):
    """Reasoning of an earlier answer. Its summary is ignored, since it says less than the reasoning itself."""

    type: Literal["reasoning"]
    content: Annotated[list[GivenThought], Field(fail_fast=True, max_length=MAX_PARTS)] | None = None

    def checked(self) -> Item:
        return thought_item("\n".join(part.text for part in self.content or ()))


InputItem = MessageItem | CallItem | ResultItem | ThoughtItem

_ITEMS: dict[str, type[InputItem]] = {MESSAGE: MessageItem, CALL: CallItem, RESULT: ResultItem, THOUGHT: ThoughtItem}


class _Typed(StrictBody):
    """An item of unknown type. Validation raises an error that names the field."""

    type: str

    @field_validator("type")
    @classmethod
    def _known_type(cls, value: str) -> str:
        if value == "item_reference":
            raise refuse("references are not supported; send the item itself, or use 'previous_response_id'")
        raise refuse(f"items of type {value[:64]!r} are not supported; send {', '.join(_ITEMS)}")


def _as_item(value: Any, info: ValidationInfo) -> InputItem:
    """Validate an item as the type that it names, so that errors refer to that type only.

    A message may omit its type.
    """
    kind = (value.get("type") or MESSAGE) if isinstance(value, dict) else MESSAGE
    if not isinstance(kind, str) or kind not in _ITEMS:
        _Typed.model_validate(value)
    return _ITEMS[kind].model_validate(value, context=info.context)


InputItems = Annotated[
    list[Annotated[InputItem, PlainValidator(_as_item, json_schema_input_type=InputItem)]],
    Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES),
    bounded(lambda shape: shape.max_messages),
    or_text(lambda text, _info: {"role": "user", "content": text}, "items"),
]
