"""Base of the content blocks of messages in Anthropic's fields, and blocks of text, images and documents.

Images and documents with a file are parts of a message until they are prepared.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field

from moiety_platform.anthropic_api.cache_control import CacheControl
from moiety_platform.anthropic_api.content_sources import Base64Source, PlainTextSource, UploadedSource, UrlSource
from moiety_platform.inference.body_fields import MAX_PARTS, StrictBody, or_text, shows
from moiety_platform.inference.field_support import ignored
from moiety_platform.inference.generation import PromptDocument, PromptImage
from moiety_platform.inference.prompt_documents import (
    document_of_base64,
    document_of_link,
    document_part,
    shown_document,
)
from moiety_platform.inference.prompt_images import (
    decode_base64,
    image_of_file,
    image_of_link,
    image_part,
    text_part,
)

IMAGE_IN_DOCUMENT = "has an image in a document; send the image as a block of its own"

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
    def has_file(self) -> bool:
        """True if the block is a file, which `part` returns to be prepared."""
        return False

    @property
    def is_skipped(self) -> bool:
        """True if the block has no effect."""
        return False

    def part(self, path: str) -> dict[str, Any]:
        """Return the block for the chat template; `path` is its own in the request."""
        return text_part(self.read_text)


class TextBlock(ContentBlock):
    type: Literal["text"]
    text: str
    citations: Citations = None

    @property
    def read_text(self) -> str:
        return self.text


BLOCK_LIST = Field(fail_fast=True, max_length=MAX_PARTS)
OR_TEXT = or_text(lambda text, _info: {"type": "text", "text": text}, "text blocks")

TextBlocks = Annotated[list[TextBlock], BLOCK_LIST, OR_TEXT]


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

    @property
    def has_file(self) -> bool:
        return True

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
        return image_part(msgspec.structs.replace(self.image, path=path))


class ContentSource(StrictBody):
    """Content of a document, as text or blocks."""

    type: Literal["content"]
    content: Annotated[
        list[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]],
        BLOCK_LIST,
        OR_TEXT,
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

    @property
    def has_file(self) -> bool:
        return isinstance(self.source, Base64Source | UrlSource | UploadedSource)

    @property
    def read_text(self) -> str:
        if isinstance(self.source, PlainTextSource):
            text = self.source.data
        elif isinstance(self.source, ContentSource):
            text = text_of(self.source.content)
        else:
            return ""
        return shown_document(text, self.title, self.context)

    @cached_property
    def document(self) -> PromptDocument:
        """The file of a document, its link, or the id of its upload. Raises ValueError."""
        match self.source:
            case Base64Source(data=data):
                found = document_of_base64(data)
            case UrlSource(url=url):
                found = document_of_link(url)
            case UploadedSource(file_id=file_id):
                found = PromptDocument(file_id=file_id)
            case _:
                raise ValueError("the document has no file")
        return msgspec.structs.replace(found, title=self.title, context=self.context)

    def part(self, path: str) -> dict[str, Any]:
        if not self.has_file:
            return super().part(path)
        return document_part(msgspec.structs.replace(self.document, path=path))

    @property
    def why_unserved(self) -> str:
        if isinstance(self.source, ContentSource):
            has_images = any(isinstance(block, ImageBlock) for block in self.source.content)
            return IMAGE_IN_DOCUMENT if has_images else ""
        try:
            _ = self.document if self.has_file else None
        except ValueError as exc:
            return f"cannot be read: {exc}"
        return ""


def text_of(blocks: Sequence[ContentBlock]) -> str:
    """Return the text that the model reads of the blocks. Line breaks join it."""
    return "\n".join(block.read_text for block in blocks if isinstance(block, TextBlock) or block.read_text)
