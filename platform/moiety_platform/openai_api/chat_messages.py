"""Chat messages in OpenAI's fields, converted for the model's chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Self

from pydantic import AfterValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from moiety_platform.inference.body_fields import (
    MAX_MESSAGES,
    StrictBody,
    bounded,
    known_role,
    missing,
    refuse,
    shows,
)
from moiety_platform.inference.field_support import mapped, refused
from moiety_platform.inference.tool_fields import call_for_template
from moiety_platform.openai_api.content_parts import (
    ContentParts,
    ImagePart,
    PartWithFile,
    template_parts,
    text_of_parts,
    why_unreadable,
    why_unserved,
)
from moiety_platform.openai_api.tools import CalledFunction, ChatCalls

ROLES = ("system", "developer", "user", "assistant", "tool", "function")

_RESULTS = ("tool", "function")  # roles whose content may be null, as an assistant's may
_WITH_FILES = ("user", *_RESULTS)
_MAY_BE_EMPTY = ("assistant", *_RESULTS)
_RULES: dict[str, Any] = {
    "required": ["role"],
    "allOf": [
        {
            "if": {"properties": {"role": {"const": "assistant"}}},
            "else": {
                "required": ["content"],
                "properties": {"tool_calls": {"maxItems": 0}, "function_call": {"type": "null"}},
            },
        },
        {
            "if": {"properties": {"role": {"enum": list(_MAY_BE_EMPTY)}}},
            "else": {"properties": {"content": {"not": {"type": "null"}}}},
        },
        {
            "if": {"properties": {"role": {"const": "tool"}}},
            "then": {"required": ["tool_call_id"], "properties": {"tool_call_id": {"type": "string"}}},
        },
    ],
}


class ChatMessage(StrictBody):
    """One message.

    Several text parts are joined by line breaks. Null content means no text, for an assistant and for a result only.
    An assistant's message can be without content: an answer may have consisted of calls or of reasoning only.
    """

    model_config = ConfigDict(json_schema_extra=_RULES)

    role: Annotated[str, known_role(ROLES), shows(enum=list(ROLES))]
    content: str | ContentParts | None
    name: str | None = None
    refusal: str | None = None  # an assistant's, which the model reads as text
    reasoning_content: str | None = None  # an assistant's reasoning, which the template may omit
    reasoning: Annotated[Any, mapped("Name of `reasoning_content` in vLLM and OpenRouter.")] = (
        None  # others' values are not text
    )
    audio: Annotated[Any, refused("answers with audio are not supported; leave the field out", [])] = None
    tool_call_id: str | None = None
    tool_calls: ChatCalls | None = None
    function_call: CalledFunction | None = None  # OpenAI's older form of a call

    @model_validator(mode="before")
    @classmethod
    def _content_is_optional(cls, value: Any) -> Any:
        if isinstance(value, dict) and "content" not in value and value.get("role") == "assistant":
            return {"content": None, **value}
        return value

    @field_validator("content")
    @classmethod
    def _servable(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, str):
            return value
        if value is None:
            if info.data.get("role", "assistant") not in _MAY_BE_EMPTY:
                raise refuse("null is for the assistant and for results of tools only; send a text")
            return value
        if (reason := why_unserved(value)) is not None:
            raise refuse(reason)
        if (unreadable := why_unreadable(value)) is not None:
            raise refuse(*unreadable)
        files = [part for part in value if isinstance(part, PartWithFile)]
        if files and info.data.get("role", "user") not in _WITH_FILES:
            reason = "images and files are for the user's messages and results of tools only; send them in one of those"
            raise refuse(reason, files[0].error_code)
        return value

    @field_validator("tool_calls", "function_call")
    @classmethod
    def _calls_are_the_assistants(cls, value: Any, info: ValidationInfo) -> Any:
        if value and info.data.get("role", "assistant") != "assistant":
            raise refuse("only messages of the assistant can have calls")
        return value

    @model_validator(mode="after")
    def _check_fields_together(self) -> Self:
        if self.role == "tool" and self.tool_call_id is None:
            raise missing("tool_call_id")
        if self.role == "function" and self.name is None:
            raise missing("name")
        if self.tool_calls and self.function_call is not None:
            raise refuse("it has 'tool_calls' and 'function_call', which is the older form; send only one of the two")
        return self

    @property
    def has_detail(self) -> bool:
        """True if an image asks for a level of detail, which has no effect."""
        parts = self.content if isinstance(self.content, list) else []
        details = (part.image_url.detail for part in parts if isinstance(part, ImagePart))
        return any(detail not in (None, "auto") for detail in details)

    @property
    def text(self) -> str | None:
        """The message's text, or None for an assistant's message without any."""
        text = text_of_parts(self.content) if isinstance(self.content, list) else self.content
        if self.role == "assistant":
            return text or self.refusal or text
        return text or ""

    def for_template(self, path: str) -> dict[str, Any]:
        """Return the message for the chat template; `path` is its own in the request.

        Calls of the older form are left out: see `messages_of`.
        """
        role = {"developer": "system", "function": "tool"}.get(self.role, self.role)
        content: Any = self.text
        if isinstance(self.content, list) and any(isinstance(part, PartWithFile) for part in self.content):
            content = template_parts(self.content, f"{path}.content")
        message: dict[str, Any] = {"role": role, "content": content}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        reasoning = self.reasoning_content or self.reasoning
        if isinstance(reasoning, str) and reasoning and self.role == "assistant":
            message["reasoning_content"] = reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return message


def messages_of(messages: Sequence[ChatMessage]) -> tuple[dict[str, Any], ...]:
    """Return the messages for the chat template.

    A call of OpenAI's older form, which has no id, gets one, and so does its result.
    """
    found: list[dict[str, Any]] = []
    num_calls, last_ids = 0, dict[str, str]()
    for place, message in enumerate(messages):
        converted = message.for_template(f"messages.{place}")
        if message.function_call is not None:
            called = message.function_call
            call_id, num_calls = f"call_{num_calls}", num_calls + 1
            last_ids[called.name] = call_id
            converted["tool_calls"] = [call_for_template(call_id, called.name, called.arguments)]
        elif message.role == "function":
            name = message.name or ""
            converted["tool_call_id"] = last_ids.get(name, f"call_{name}")
        found.append(converted)
    return tuple(found)


def _check_results(messages: list[ChatMessage]) -> list[ChatMessage]:
    made: set[str] = set()
    for place, message in enumerate(messages):
        if message.tool_calls:
            made.update(call.id for call in message.tool_calls)
        if message.role == "tool" and message.tool_call_id not in made:
            call_id = (message.tool_call_id or "")[:64]
            raise refuse(
                f"message {place} is the result of the call {call_id!r}, but no earlier message of the assistant has "
                "this call in its 'tool_calls'"
            )
    return messages


Messages = Annotated[
    list[ChatMessage],
    Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES),
    bounded(lambda shape: shape.max_messages),
    AfterValidator(_check_results),
]
