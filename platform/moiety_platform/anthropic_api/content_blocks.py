"""Content blocks of messages in Anthropic's fields, and the text that the model reads of each.

Text and images are served. Documents that must be decoded are known, so that their refusal says what is not served.
Blocks of Anthropic's own tools, in a history from elsewhere, become text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from html import escape
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec
from pydantic import ConfigDict, Field, PlainValidator, PrivateAttr, ValidationInfo

from moiety_platform.anthropic_api.cache_control import CacheControl, longest
from moiety_platform.anthropic_api.content_sources import Base64Source, PlainTextSource, UploadedSource, UrlSource
from moiety_platform.anthropic_api.thinking_signatures import text_of_signature
from moiety_platform.inference.body_fields import MAX_PARTS, StrictBody, or_text, refuse, shows
from moiety_platform.inference.field_support import ignored
from moiety_platform.inference.generation import PromptImage
from moiety_platform.inference.prompt_images import (
    decode_base64,
    has_images,
    image_of_file,
    image_of_link,
    image_part,
    text_part,
)
from moiety_platform.inference.tool_fields import ArgumentsObject, ToolName, call_for_template
from moiety_platform.inference.typed_values import as_named_type

ERROR_PREFIX = "Error: "  # chat templates have no field for failed tool results, so the text says it
IMAGE_IN_DOCUMENT = "has an image in a document; send the image as a block of its own"
DOCUMENT_UNSERVED = "is a document that is not plain text; send its text, in a document whose source has type 'text'"
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

Citations = Annotated[Any, ignored("Answers have no citations.")]


class ContentBlock(StrictBody):
    """Base of all content blocks."""

    type: str
    cache_control: CacheControl | None = None

    @property
    def read_text(self) -> str:
        """Text that the model reads."""
        return ""

    @property
    def why_unserved(self) -> str:
        """Why the block cannot be served, or an empty text."""
        return ""

    @property
    def is_skipped(self) -> bool:
        """True if the block has no effect."""
        return False


class TextBlock(ContentBlock):
    type: Literal["text"]
    text: str
    citations: Citations = None

    @property
    def read_text(self) -> str:
        return self.text


_MANY = Field(fail_fast=True, max_length=MAX_PARTS)
_OR_TEXT = or_text(lambda text, _info: {"type": "text", "text": text}, "text blocks")

TextBlocks = Annotated[list[TextBlock], _MANY, _OR_TEXT]


class ImageBlock(ContentBlock):
    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource | UploadedSource, Field(discriminator="type")]

    @property
    def why_unserved(self) -> str:
        try:
            _ = self.image
        except ValueError as exc:
            return f"cannot be read: {exc}"
        return ""

    @cached_property
    def image(self) -> PromptImage:
        """The image file, its link, or the id of its upload. Raises ValueError."""
        match self.source:
            case Base64Source(data=data):
                return PromptImage(decode_base64(data))
            case UrlSource(url=url):
                return image_of_link(url)
            case UploadedSource(file_id=file_id):
                return image_of_file(file_id)

    def part(self, path: str) -> dict[str, Any]:
        """Return the image for the chat template; `path` is that of the block in the request."""
        return image_part(msgspec.structs.replace(self.image, path=path))


class ContentSource(StrictBody):
    """Content of a document, as text or blocks."""

    type: Literal["content"]
    content: Annotated[
        list[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]],
        _MANY,
        _OR_TEXT,
        shows(allOf=[{"if": {"type": "array"}, "then": {"items": {"properties": {"type": {"const": "text"}}}}}]),
    ]


class DocumentBlock(ContentBlock):
    type: Literal["document"]
    source: Annotated[
        PlainTextSource | ContentSource | Base64Source | UrlSource | UploadedSource, Field(discriminator="type")
    ]
    title: str | None = None
    context: str | None = None
    citations: Citations = None
    _uploaded_text: str | None = PrivateAttr(None)  # `load_documents` sets it

    @property
    def file_id(self) -> str | None:
        """Id of the uploaded file that the document is; None if the request has the document itself."""
        return self.source.file_id if isinstance(self.source, UploadedSource) else None

    def set_text(self, text: str | None) -> None:
        """Set the text of the uploaded file, before the prompt is made; None: it is not read yet."""
        self._uploaded_text = text

    @property
    def read_text(self) -> str:
        if isinstance(self.source, PlainTextSource):
            text = self.source.data
        elif isinstance(self.source, ContentSource):
            text = text_of(self.source.content)
        elif isinstance(self.source, UploadedSource):
            if self._uploaded_text is None:
                raise RuntimeError("an uploaded document is used before `load_documents` has read it")
            text = self._uploaded_text
        else:
            return ""
        parts = [part for part in (self.context, text) if part]
        return _tagged("document", "\n".join(parts), title=self.title)

    @property
    def why_unserved(self) -> str:
        if isinstance(self.source, ContentSource):
            has_images = any(isinstance(block, ImageBlock) for block in self.source.content)
            return IMAGE_IN_DOCUMENT if has_images else ""
        return "" if isinstance(self.source, PlainTextSource | UploadedSource) else DOCUMENT_UNSERVED


class SearchResultBlock(ContentBlock):
    type: Literal["search_result"]
    source: str
    title: str
    content: Annotated[list[TextBlock], _MANY]
    citations: Citations = None

    @property
    def read_text(self) -> str:
        return _tagged("search_result", text_of(self.content), source=self.source, title=self.title)


class ToolReferenceBlock(ContentBlock):
    """Tool that a search of the client's has found. All tools are offered from the beginning."""

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
        return _tagged(self.type, msgspec.json.encode(_readable(self.model_extra or {})).decode())


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


class ToolChangeBlock(ContentBlock):
    """Withdrawal of a tool by name, or its return. Other changes have no effect."""

    type: Literal["tool_addition", "tool_removal"]
    tool: dict[str, Any]

    @property
    def tool_name(self) -> str | None:
        """Name of the tool, or None where the block has no effect."""
        name = self.tool.get("name")
        return name if self.tool.get("type") == "tool_reference" and isinstance(name, str) else None

    @property
    def is_skipped(self) -> bool:
        return self.tool_name is None


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
    content: Annotated[list[_ResultBlock], _MANY, _OR_TEXT] | None = None
    is_error: bool | None = None

    def for_template(self, path: str) -> dict[str, Any]:
        """Return the result for the chat template; `path` is that of the block in the request."""
        parts = [_result_part(block, f"{path}.content.{place}") for place, block in enumerate(self.content or ())]
        if self.is_error:
            first = [] if has_images(parts[:1]) else parts[:1]
            parts = [text_part(ERROR_PREFIX + "".join(one["text"] for one in first)), *parts[len(first) :]]
        content: Any = parts if has_images(parts) else "\n".join(part["text"] for part in parts)
        return {"role": "tool", "content": content, "tool_call_id": self.tool_use_id}


def _result_part(block: ContentBlock, path: str) -> dict[str, Any]:
    if block.why_unserved:
        return text_part(f"[This {block.type} is not shown: it cannot be read here.]")
    return block.part(path) if isinstance(block, ImageBlock) else text_part(block.read_text)


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
    _MANY,
    _OR_TEXT,
]


def keep_s_of(blocks: Iterable[ContentBlock]) -> float:
    """Return how long to retain the blocks in the prefix cache, in seconds: the longest TTL of any block."""
    return longest(block.cache_control for block in blocks)


def text_of(blocks: Sequence[ContentBlock]) -> str:
    """Return the text that the model reads of the blocks. Line breaks join it."""
    return "\n".join(block.read_text for block in blocks if isinstance(block, TextBlock) or block.read_text)


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


def _tagged(tag: str, text: str, **attributes: str | None) -> str:
    named = "".join(f' {name}="{escape(value)}"' for name, value in attributes.items() if value)
    return f"<{tag}{named}>\n{text}\n</{tag}>"


def _readable(value: Any) -> Any:
    """Return a block's value without the fields that are for Anthropic's servers only."""
    if isinstance(value, Mapping):
        return {
            name: _readable(inner)
            for name, inner in value.items()
            if name not in _HIDDEN_FIELDS and not name.startswith("encrypted_")
        }
    return [_readable(inner) for inner in value] if isinstance(value, list) else value
