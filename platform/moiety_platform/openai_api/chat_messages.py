"""Chat messages in OpenAI's fields, converted for the model's chat template."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticKnownError

from moiety_platform.inference.body_fields import MAX_MESSAGES, MAX_PARTS, StrictBody, bounded, refuse, shows
from moiety_platform.openai_api.tools import ChatCalls

ROLES = ("system", "developer", "user", "assistant", "tool")


class TextPart(StrictBody):
    type: Literal["text"]
    text: str


_RULES: dict[str, Any] = {
    "required": ["role"],
    "anyOf": [
        {"required": ["content"]},
        {"required": ["tool_calls"], "properties": {"tool_calls": {"type": "array", "minItems": 1}}},
    ],
    "allOf": [
        {
            "if": {"properties": {"role": {"const": "assistant"}}},
            "else": {"properties": {"content": {"not": {"type": "null"}}, "tool_calls": {"maxItems": 0}}},
        },
        {
            "if": {"properties": {"role": {"const": "tool"}}},
            "then": {"required": ["tool_call_id"], "properties": {"tool_call_id": {"type": "string"}}},
        },
    ],
}


class ChatMessage(StrictBody):
    """One message.

    Several text parts are joined by line breaks. Only an assistant may send null, which means no text, and content is
    optional beside tool calls.
    """

    model_config = ConfigDict(json_schema_extra=_RULES)

    role: Annotated[str, shows(enum=list(ROLES))]
    content: str | Annotated[list[TextPart], Field(fail_fast=True, max_length=MAX_PARTS)] | None
    name: str | None = None
    reasoning_content: str | None = None  # an assistant's reasoning, which the template may omit
    tool_call_id: Annotated[str | None, Field(validate_default=True)] = None
    tool_calls: ChatCalls | None = None
    function_call: Annotated[Any, shows(enum=[None])] = None

    @model_validator(mode="before")
    @classmethod
    def _calls_may_stand_alone(cls, value: Any) -> Any:
        return {"content": None, **value} if isinstance(value, dict) and value.get("tool_calls") else value

    @field_validator("role")
    @classmethod
    def _known_role(cls, value: str) -> str:
        if value not in ROLES:
            raise refuse(f"{value[:64]!r} is not a role; use one of {', '.join(ROLES)}")
        return value

    @field_validator("content")
    @classmethod
    def _null_is_the_assistants(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None and info.data.get("role", "assistant") != "assistant":
            raise refuse("null is for the assistant only")
        return value

    @field_validator("tool_call_id")
    @classmethod
    def _results_name_their_call(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None and info.data.get("role") == "tool":
            raise PydanticKnownError("missing")
        return value

    @field_validator("tool_calls")
    @classmethod
    def _calls_are_the_assistants(cls, value: ChatCalls | None, info: ValidationInfo) -> ChatCalls | None:
        if value and info.data.get("role", "assistant") != "assistant":
            raise refuse("calls are for the assistant only")
        return value

    @field_validator("function_call")
    @classmethod
    def _no_function_call(cls, value: Any) -> Any:
        if value is not None:
            raise refuse("this is OpenAI's older form; send 'tool_calls'")
        return value

    def for_template(self) -> dict[str, Any]:
        text = self.content
        if isinstance(text, list):
            text = "\n".join(part.text for part in text)
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": text}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.reasoning_content and self.role == "assistant":
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return message


def _check_results(messages: list[ChatMessage]) -> list[ChatMessage]:
    made: set[str] = set()
    for place, message in enumerate(messages):
        if message.tool_calls:
            made.update(call.id for call in message.tool_calls)
        if message.role == "tool" and message.tool_call_id not in made:
            raise refuse(
                f"message {place} is the result of the call {message.tool_call_id!r}, which no message of the "
                "assistant's before it has among its 'tool_calls'"
            )
    return messages


Messages = Annotated[
    list[ChatMessage],
    Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES),
    bounded(lambda shape: shape.max_messages),
    AfterValidator(_check_results),
]
