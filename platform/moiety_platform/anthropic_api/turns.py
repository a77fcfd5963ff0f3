"""Messages of a conversation in Anthropic's fields, and their form for chat templates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, takewhile
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, ValidationInfo, field_validator

from moiety_platform.anthropic_api.basic_blocks import ContentBlock, DocumentBlock, ImageBlock, TextBlock, text_of
from moiety_platform.anthropic_api.content_blocks import (
    Blocks,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    skipped_of,
)
from moiety_platform.anthropic_api.output_config import Effort
from moiety_platform.anthropic_api.tool_changes import ToolChangeBlock
from moiety_platform.anthropic_api.tools import MessageTool
from moiety_platform.inference.body_fields import StrictBody, known_role, refuse, shape_of, shows
from moiety_platform.inference.context_edits import REASONING
from moiety_platform.inference.prompt_documents import INVALID_DOCUMENT
from moiety_platform.inference.prompt_images import (
    BASE64_PATTERN,
    INVALID_IMAGE,
    LINK_PATTERN,
    MAX_URL_CHARACTERS,
    text_part,
)

ROLES = ("user", "assistant", "system")
_ROLES_OF_BLOCK = {"thinking": ("assistant",), "redacted_thinking": ("assistant",), "tool_use": ("assistant",)} | {
    "tool_result": ("user",),
    "image": ("user",),
    "document": ("user",),
    "tool_addition": ("system",),
    "tool_removal": ("system",),
}
_PLAIN_DOCUMENTS: dict[str, Any] = {
    "if": {"properties": {"type": {"const": "document"}}},
    "then": {"properties": {"source": {"properties": {"type": {"enum": ["text", "content", "base64", "file"]}}}}},
}
_SENT_IMAGES: dict[str, Any] = {
    "if": {"properties": {"type": {"const": "image"}}},
    "then": {
        "properties": {
            "source": {
                "properties": {
                    "type": {"enum": ["base64", "url", "file"]},
                    "data": {"pattern": BASE64_PATTERN},
                    "url": {"pattern": LINK_PATTERN, "maxLength": MAX_URL_CHARACTERS},
                }
            }
        }
    },
}
_CODES: dict[type[ContentBlock], str] = {ImageBlock: INVALID_IMAGE, DocumentBlock: INVALID_DOCUMENT}
_SYSTEM_BLOCKS = ("text", "tool_addition", "tool_removal")


def _blocks_of(role: str) -> dict[str, Any]:
    """Return a JSON schema of the blocks that a turn of the role may have."""
    kinds = {"enum": list(_SYSTEM_BLOCKS)} if role == "system" else {"not": {"enum": _unaccepted_blocks(role)}}
    return {
        "if": {"properties": {"role": {"const": role}}},
        "then": {
            "properties": {
                "content": {"items": {"properties": {"type": kinds}, "allOf": [_PLAIN_DOCUMENTS, _SENT_IMAGES]}}
            }
        },
    }


def _unaccepted_blocks(role: str) -> list[str]:
    return [kind for kind, roles in _ROLES_OF_BLOCK.items() if role not in roles]


class TurnOutputConfig(StrictBody):
    """Output options of a system message, for the answers after it."""

    effort: Effort = None


class MessageTurn(StrictBody):
    """One message. Tool calls and reasoning belong to the assistant, tool results to the user."""

    model_config = ConfigDict(json_schema_extra={"allOf": [_blocks_of(role) for role in ROLES]})

    role: Annotated[str, known_role(ROLES), shows(enum=list(ROLES))]
    content: Blocks
    clear_at: Literal["next_user_message", "never"] | None = None  # of a system message
    output_config: TurnOutputConfig | None = None  # of a system message

    @field_validator("content")
    @classmethod
    def _of_the_role(cls, value: list[ContentBlock], info: ValidationInfo) -> list[ContentBlock]:
        role = info.data.get("role")
        for place, block in enumerate(value):
            kind = block.type
            is_foreign = (
                kind not in _SYSTEM_BLOCKS if role == "system" else role not in _ROLES_OF_BLOCK.get(kind, ROLES)
            )
            if role is not None and is_foreign:
                raise refuse(f"block {place} is of type {kind[:64]!r}, which the role {role!r} cannot send")
            if block.why_unserved:
                code = _CODES.get(type(block))
                raise refuse(f"block {place} {block.why_unserved}", code)
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
                    f"message {place} has the result of {result.tool_use_id!r}, but no earlier 'tool_use' has this id"
                )
    for turn in takewhile(lambda turn: turn.role != "user", reversed(turns)):
        if turn.calls:
            raise refuse("the last message calls a tool; send its result in a user's message after it")
    return turns


def messages_of(turns: Sequence[MessageTurn]) -> list[dict[str, Any]]:
    """Return the turns as messages for the chat template. Consecutive turns of one role become one message."""
    return [
        message
        for role, group in groupby(_shown_turns(turns), key=lambda placed: placed[1].role)
        for message in _messages_of_role(role, list(group))
    ]


def _shown_turns(turns: Sequence[MessageTurn]) -> list[tuple[int, MessageTurn]]:
    """Return the turns with their places, without system messages for an earlier message of the user's only."""
    last_user = max((place for place, turn in enumerate(turns) if turn.role == "user"), default=-1)
    return [
        (place, turn)
        for place, turn in enumerate(turns)
        if turn.role != "system" or turn.clear_at != "next_user_message" or place > last_user
    ]


def tool_changes(turns: Sequence[MessageTurn]) -> dict[str, bool]:
    """Return of tools, by name, whether the last change in the conversation has shown or withdrawn them.

    System messages show and withdraw tools. A search of the client's shows those that it finds, unless they are
    withdrawn.
    """
    changes: dict[str, bool] = {}
    for turn in turns:
        for block in turn.content:
            if isinstance(block, ToolChangeBlock) and block.tool_name is not None:
                changes[block.tool_name] = block.type == "tool_addition"
            elif isinstance(block, ToolResultBlock):
                for found in block.found_tools:
                    changes.setdefault(found, True)
    return changes


def defined_tools(turns: Sequence[MessageTurn]) -> list[MessageTool]:
    """Return the tools that system messages define, the last definition of each name."""
    blocks = (block for turn in turns for block in turn.content if isinstance(block, ToolChangeBlock))
    found = {tool.name: tool for block in blocks if (tool := block.defined_tool) is not None}
    return list(found.values())


def check_definitions(turns: list[MessageTurn], info: ValidationInfo) -> list[MessageTurn]:
    """Check that messages define no more tools than `tools` may have."""
    num_tools, most = len(defined_tools(turns)), shape_of(info).max_tools
    if num_tools > most:
        raise refuse(f"they define {num_tools} tools; they may define {most}")
    return turns


def last_effort(turns: Sequence[MessageTurn]) -> str | None:
    """Return the effort that the last system message with one has set."""
    configs = (turn.output_config for turn in reversed(turns) if turn.output_config is not None)
    return next((config.effort for config in configs if config.effort is not None), None)


def skipped_blocks(turns: Sequence[MessageTurn]) -> Iterator[str]:
    """Yield the paths of blocks that have no effect."""
    for place, turn in enumerate(turns):
        yield from skipped_of(turn.content, f"messages.{place}.content")


def _messages_of_role(role: str, placed: Sequence[tuple[int, MessageTurn]]) -> list[dict[str, Any]]:
    """Return consecutive turns of one role. Results come first, right after their calls."""
    turns = [turn for _, turn in placed]
    results = [block.for_template(path) for path, block in _paths_of(placed) if isinstance(block, ToolResultBlock)]
    shown = [
        (place, turn) for place, turn in placed if not turn.results or any(_is_shown(block) for block in turn.content)
    ]
    texts = [text_of(turn.content) for _, turn in shown]
    blocks = list(_paths_of(shown))
    has_files = any(block.has_file for _, block in blocks)
    if not shown or (role == "system" and not any(texts)):
        return results
    message: dict[str, Any] = {"role": role, "content": _parts_of(blocks) if has_files else "\n".join(texts)}
    thoughts = [thought for turn in turns for block in turn.content if (thought := _thought_of(block))]
    if thoughts:
        message[REASONING] = "\n".join(thoughts)
    calls = [call.for_template() for turn in turns for call in turn.calls]
    return [*results, {**message, "tool_calls": calls} if calls else message]


def _is_shown(block: ContentBlock) -> bool:
    return isinstance(block, TextBlock) or block.has_file or bool(block.read_text)


def _paths_of(placed: Sequence[tuple[int, MessageTurn]]) -> Iterator[tuple[str, ContentBlock]]:
    """Yield the blocks of turns with their paths in the request."""
    for place, turn in placed:
        for number, block in enumerate(turn.content):
            yield f"messages.{place}.content.{number}", block


def _parts_of(blocks: Sequence[tuple[str, ContentBlock]]) -> list[dict[str, Any]]:
    """Return blocks with files for the chat template. Consecutive texts are joined by line breaks."""
    found: list[dict[str, Any]] = []
    for are_files, run in groupby(blocks, lambda named: named[1].has_file):
        if are_files:
            found += [block.part(path) for path, block in run]
        elif text := text_of([block for _, block in run]):
            found.append(text_part(text))
    return found


def _thought_of(block: ContentBlock) -> str:
    return block.thought if isinstance(block, ThinkingBlock) else ""
