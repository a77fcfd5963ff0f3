"""Content blocks of messages in Anthropic's fields: text, reasoning, tool calls and tool results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Annotated, Any

from pydantic import ConfigDict, Field, PlainValidator, ValidationInfo, field_validator

from moiety_platform.anthropic_api.cache_control import CacheControl, longest
from moiety_platform.inference.body_fields import MAX_PARTS, StrictBody, or_text, refuse, shows
from moiety_platform.inference.tool_fields import ArgumentsObject, ToolName, call_for_template

ERROR_PREFIX = "Error: "  # chat templates have no field for failed tool results, so the text says it


class TextBlock(StrictBody):
    type: Annotated[str, shows(enum=["text"])]
    text: str
    cache_control: CacheControl | None = None

    @field_validator("type")
    @classmethod
    def _only_text(cls, value: str) -> str:
        if value != "text":
            raise refuse(f"blocks of type {value[:64]!r} are not supported yet here; send blocks of type 'text'")
        return value


_MANY = Field(fail_fast=True, max_length=MAX_PARTS)
_OR_TEXT = or_text(lambda text, _info: {"type": "text", "text": text}, "text blocks")

TextBlocks = Annotated[list[TextBlock], _MANY, _OR_TEXT]


class ToolUseBlock(StrictBody):
    """A tool call of an earlier answer."""

    type: Annotated[str, shows(enum=["tool_use"])]
    id: str
    name: ToolName
    input: ArgumentsObject
    cache_control: CacheControl | None = None

    def for_template(self) -> dict[str, Any]:
        return call_for_template(self.id, self.name, self.input)


class ThinkingBlock(StrictBody):
    """Reasoning of an earlier answer. Its signature, which this server leaves empty, is ignored."""

    type: Annotated[str, shows(enum=["thinking"])]
    thinking: str
    signature: str | None = None


class ToolResultBlock(StrictBody):
    type: Annotated[str, shows(enum=["tool_result"])]
    tool_use_id: str
    content: TextBlocks | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None

    def for_template(self) -> dict[str, Any]:
        text = text_of(self.content or ())
        content = ERROR_PREFIX + text if self.is_error else text
        return {"role": "tool", "content": content, "tool_call_id": self.tool_use_id}


Block = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock

_OF_ROLE: dict[str, dict[str, type[Block]]] = {
    "assistant": {"thinking": ThinkingBlock, "tool_use": ToolUseBlock},
    "user": {"tool_result": ToolResultBlock},
}
_BY_TYPE = {name: schema for schemas in _OF_ROLE.values() for name, schema in schemas.items()}


def _as_block(value: Any, info: ValidationInfo) -> Block:
    """Validate a block as the type that it names, so that errors refer to that type only."""
    kind = value.get("type") if isinstance(value, dict) else None
    schema = _BY_TYPE.get(kind, TextBlock) if isinstance(kind, str) else TextBlock
    return schema.model_validate(value, context=info.context)


Blocks = Annotated[
    list[Annotated[Block, PlainValidator(_as_block, json_schema_input_type=Block)]],
    _MANY,
    _OR_TEXT,
]


def keep_s_of(blocks: Iterable[Block]) -> float:
    """Return how long to retain the blocks in the prefix cache, in seconds: the longest TTL of any block."""
    return longest(None if isinstance(block, ThinkingBlock) else block.cache_control for block in blocks)


def text_of(blocks: Sequence[Block]) -> str:
    return "\n".join(block.text for block in blocks if isinstance(block, TextBlock))


def _blocks_of(role: str) -> dict[str, Any]:
    """Return a JSON schema of the blocks that a turn of the role may have."""
    types = {"properties": {"type": {"enum": ["text", *_OF_ROLE[role]]}}}
    return {
        "if": {"properties": {"role": {"const": role}}},
        "then": {"properties": {"content": {"items": types}}},
    }


class MessageTurn(StrictBody):
    """One message. Tool calls and reasoning belong to the assistant, tool results to the user."""

    model_config = ConfigDict(json_schema_extra={"allOf": [_blocks_of(role) for role in _OF_ROLE]})

    role: Annotated[str, shows(enum=list(_OF_ROLE))]
    content: Blocks

    @field_validator("role")
    @classmethod
    def _known_role(cls, value: str) -> str:
        if value == "system":
            raise refuse("a system prompt is no message; send it as 'system'")
        if value not in _OF_ROLE:
            raise refuse(f"{value[:64]!r} is not a role; use one of user, assistant")
        return value

    @field_validator("content")
    @classmethod
    def _of_the_role(cls, value: list[Block], info: ValidationInfo) -> list[Block]:
        role = info.data.get("role")
        for place, block in enumerate(value):
            if role is not None and block.type not in ("text", *_OF_ROLE[role]):
                raise refuse(f"block {place} is of type {block.type!r}, which is not the {role}'s")
        return value

    @property
    def calls(self) -> list[ToolUseBlock]:
        return [block for block in self.content if isinstance(block, ToolUseBlock)]

    @property
    def results(self) -> list[ToolResultBlock]:
        return [block for block in self.content if isinstance(block, ToolResultBlock)]


def check_results(turns: list[MessageTurn]) -> list[MessageTurn]:
    """Check that every result has an earlier call, and that the last calls have results."""
    made: set[str] = set()
    for place, turn in enumerate(turns):
        made.update(call.id for call in turn.calls)
        for result in turn.results:
            if result.tool_use_id not in made:
                raise refuse(
                    f"message {place} has the result of {result.tool_use_id!r}, which no 'tool_use' has before it"
                )
    for turn in takewhile(lambda turn: turn.role == "assistant", reversed(turns)):
        if turn.calls:
            raise refuse("the last message calls a tool; send its result in a user's message after it")
    return turns


def turn_messages(role: str, turns: Sequence[MessageTurn]) -> list[dict[str, Any]]:
    """Return consecutive turns of one role for the chat template. Results come first, right after their calls."""
    results = [result.for_template() for turn in turns for result in turn.results]
    spoken = [turn for turn in turns if not turn.results or any(isinstance(block, TextBlock) for block in turn.content)]
    if not spoken:
        return results
    message: dict[str, Any] = {"role": role, "content": "\n".join(text_of(turn.content) for turn in spoken)}
    thoughts = [block.thinking for turn in turns for block in turn.content if isinstance(block, ThinkingBlock)]
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    calls = [call.for_template() for turn in turns for call in turn.calls]
    return [*results, {**message, "tool_calls": calls} if calls else message]
