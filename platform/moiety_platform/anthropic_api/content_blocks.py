"""Content blocks of messages in Anthropic's fields, and the text that the model reads of each.

Blocks of Anthropic's own tools, in a history from elsewhere, become text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec
from pydantic import ConfigDict, PlainValidator, ValidationInfo

from moiety_platform.anthropic_api.basic_blocks import (
    BLOCK_LIST,
    OR_TEXT,
    Citations,
    ContentBlock,
    DocumentBlock,
    ImageBlock,
    TextBlock,
    text_of,
)
from moiety_platform.anthropic_api.cache_control import longest
from moiety_platform.anthropic_api.thinking_signatures import text_of_signature
from moiety_platform.anthropic_api.tool_changes import ToolChangeBlock
from moiety_platform.inference.body_fields import refuse, shows
from moiety_platform.inference.prompt_documents import tagged
from moiety_platform.inference.prompt_images import (
    is_text,
    only_text,
    text_part,
)
from moiety_platform.inference.tool_fields import ArgumentsObject, ToolName, call_for_template
from moiety_platform.inference.typed_values import as_named_type

ERROR_PREFIX = "Error: "  # chat templates have no field for failed tool results, so the text says it
HOSTED_TYPES = (
    "advisor_tool_result",
    "bash_code_execution_tool_result",
    "code_execution_tool_result",
    "mcp_tool_result",
    "mcp_tool_use",
    "server_tool_use",
    "text_editor_code_execution_tool_result",
    "tool_search_tool_result",
    "web_fetch_tool_result",
    "web_search_tool_result",
)
SKIPPED_TYPES = ("container_upload", "fallback", "mcp_tool_listing", "redacted_thinking")
_HIDDEN_FIELDS = ("cache_control", "caller", "id", "signature", "tool_use_id", "type")


class SearchResultBlock(ContentBlock):
    type: Literal["search_result"]
    source: str
    title: str
    content: Annotated[list[TextBlock], BLOCK_LIST]
    citations: Citations = None

    @property
    def read_text(self) -> str:
        return tagged("search_result", text_of(self.content), source=self.source, title=self.title)


class ToolReferenceBlock(ContentBlock):
    """Tool that a search of the client's has found. A deferred tool is offered from then on."""

    type: Literal["tool_reference"]
    tool_name: str

    @property
    def read_text(self) -> str:
        return f"Tool found: {self.tool_name}"


class HostedToolBlock(ContentBlock):
    """Call of a tool that Anthropic runs, or its result, from a history. The model reads its fields as JSON."""

    model_config = ConfigDict(extra="allow")

    type: Annotated[str, shows(enum=list(HOSTED_TYPES))]

    @property
    def read_text(self) -> str:
        return tagged(self.type, msgspec.json.encode(_readable(self.model_extra or {})).decode())


class BrowserStateBlock(HostedToolBlock):
    """State of the client's browser. The model reads its fields as JSON."""

    type: Literal["browser_state"]


class SkippedBlock(ContentBlock):
    """Block that says nothing to the model."""

    type: Annotated[str, shows(enum=list(SKIPPED_TYPES))]

    @property
    def is_skipped(self) -> bool:
        return True


class CompactionBlock(ContentBlock):
    """Summary of earlier messages."""

    type: Literal["compaction"]
    content: str | None = None

    @property
    def read_text(self) -> str:
        return self.content or ""

    @property
    def is_skipped(self) -> bool:
        return not self.content


class ToolUseBlock(ContentBlock):
    """A tool call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: ToolName
    input: ArgumentsObject

    def for_template(self) -> dict[str, Any]:
        return call_for_template(self.id, self.name, self.input)


class ThinkingBlock(ContentBlock):
    """Reasoning of an earlier answer. Its signature holds the text where the answer omitted it."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None

    @property
    def thought(self) -> str:
        return self.thinking or text_of_signature(self.signature or "")


class OtherBlock(ContentBlock):
    """Block of a type that Anthropic's API does not have, or not at this place."""

    type: str

    @property
    def why_unserved(self) -> str:
        return f"is of the type {self.type[:64]!r}, which is not supported here; send text"


_RESULT_SCHEMAS: Mapping[str, type[ContentBlock]] = MappingProxyType(
    {
        "text": TextBlock,
        "image": ImageBlock,
        "document": DocumentBlock,
        "search_result": SearchResultBlock,
        "tool_reference": ToolReferenceBlock,
        "browser_state": BrowserStateBlock,
    }
)


def _as_result_block(value: Any, info: ValidationInfo) -> ContentBlock:
    block = as_named_type(value, info, _RESULT_SCHEMAS, OtherBlock)
    if isinstance(block, OtherBlock):
        raise refuse(f"it {block.why_unserved}")
    return block


_ResultBlock = Annotated[
    ContentBlock,
    PlainValidator(
        _as_result_block,
        json_schema_input_type=TextBlock
        | ImageBlock
        | DocumentBlock
        | SearchResultBlock
        | ToolReferenceBlock
        | BrowserStateBlock,
    ),
]


class ToolResultBlock(ContentBlock):
    """Result of a tool call.

    An image or a document in it that cannot be read is replaced by a text that says so: the client's tool has made it,
    and the conversation can go on without it.
    """

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[list[_ResultBlock], BLOCK_LIST, OR_TEXT] | None = None
    is_error: bool | None = None

    @property
    def found_tools(self) -> list[str]:
        """Names of the tools that a search has found."""
        return [block.tool_name for block in self.content or () if isinstance(block, ToolReferenceBlock)]

    def for_template(self, path: str) -> dict[str, Any]:
        """Return the result for the chat template; `path` is that of the block in the request."""
        parts = [_result_part(block, f"{path}.content.{place}") for place, block in enumerate(self.content or ())]
        if self.is_error:
            first = [part for part in parts[:1] if is_text(part)]
            parts = [text_part(ERROR_PREFIX + "".join(one["text"] for one in first)), *parts[len(first) :]]
        return {"role": "tool", "content": only_text(parts), "tool_call_id": self.tool_use_id}


def _result_part(block: ContentBlock, path: str) -> dict[str, Any]:
    if block.why_unserved:
        return text_part(f"[This {block.type} is not shown: it cannot be read here.]")
    return block.part(path)


_SCHEMAS: Mapping[str, type[ContentBlock]] = MappingProxyType(
    {
        "text": TextBlock,
        "image": ImageBlock,
        "document": DocumentBlock,
        "search_result": SearchResultBlock,
        "thinking": ThinkingBlock,
        "tool_use": ToolUseBlock,
        "tool_result": ToolResultBlock,
        "compaction": CompactionBlock,
        "tool_addition": ToolChangeBlock,
        "tool_removal": ToolChangeBlock,
        **dict.fromkeys(HOSTED_TYPES, HostedToolBlock),
        **dict.fromkeys(SKIPPED_TYPES, SkippedBlock),
    }
)


def _as_block(value: Any, info: ValidationInfo) -> ContentBlock:
    return as_named_type(value, info, _SCHEMAS, OtherBlock)


Blocks = Annotated[
    list[
        Annotated[
            ContentBlock,
            PlainValidator(
                _as_block,
                json_schema_input_type=TextBlock
                | ImageBlock
                | DocumentBlock
                | SearchResultBlock
                | ThinkingBlock
                | ToolUseBlock
                | ToolResultBlock
                | CompactionBlock
                | ToolChangeBlock
                | HostedToolBlock
                | SkippedBlock,
            ),
        ]
    ],
    BLOCK_LIST,
    OR_TEXT,
]


def keep_s_of(blocks: Iterable[ContentBlock]) -> float:
    """Return how long to retain the blocks in the prefix cache, in seconds: the longest TTL of any block."""
    return longest(block.cache_control for block in blocks)


def skipped_of(blocks: Sequence[ContentBlock], path: str) -> Iterator[str]:
    """Yield the paths of blocks that have no effect, with those in tool results that cannot be read here.

    `path` is that of the blocks.
    """
    for place, block in enumerate(blocks):
        if block.is_skipped:
            yield f"{path}.{place}"
        elif isinstance(block, ToolResultBlock):
            unread = (number for number, inner_block in enumerate(block.content or ()) if inner_block.why_unserved)
            yield from (f"{path}.{place}.content.{number}" for number in unread)


def _readable(value: Any) -> Any:
    """Return a block's value without the fields that are for Anthropic's servers only."""
    if isinstance(value, Mapping):
        return {
            name: _readable(inner)
            for name, inner in value.items()
            if name not in _HIDDEN_FIELDS and not name.startswith("encrypted_")
        }
    return [_readable(inner) for inner in value] if isinstance(value, list) else value
