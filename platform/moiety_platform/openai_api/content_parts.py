"""Parts of a chat message's content in OpenAI's fields.

Text, images and documents are served, images by models that see. Audio is known, so that its refusal says what is not
served.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import groupby
from typing import Annotated, Any, Literal

import msgspec
from pydantic import ConfigDict, Discriminator, Field, Tag

from moiety_platform.inference.body_fields import MAX_PARTS, StrictBody, shows
from moiety_platform.inference.field_support import ignored
from moiety_platform.inference.generation import PromptDocument, PromptImage
from moiety_platform.inference.prompt_documents import (
    FILE_DATA_PATTERN,
    INVALID_DOCUMENT,
    document_of_file_data,
    document_part,
)
from moiety_platform.inference.prompt_images import (
    DATA_IMAGE,
    IMAGE_URL_PATTERN,
    INVALID_IMAGE,
    image_of_url,
    image_part,
    text_part,
)

_TYPES = ("text", "refusal", "image_url", "input_audio", "file")
_UNSERVED = ConfigDict(json_schema_extra={"not": {}})  # no value is accepted


class TextPart(StrictBody):
    type: Literal["text"]
    text: str


class RefusalPart(StrictBody):
    """Refusal of an earlier answer. The model reads it as text."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class ImageUrl(StrictBody):
    url: Annotated[str, shows(pattern=IMAGE_URL_PATTERN)]
    detail: Annotated[
        Literal["auto", "low", "high", "original"] | None, ignored("The size of the image gives its number of tokens.")
    ] = None


class ImagePart(StrictBody):
    """Image as a data URL or a link. Links are followed where the operator has enabled it."""

    type: Literal["image_url"]
    image_url: ImageUrl

    @property
    def error_code(self) -> str:
        """Code of an error about the part."""
        return INVALID_IMAGE

    @cached_property
    def content(self) -> PromptImage:
        """The image file or its link. Raises ValueError."""
        return image_of_url(self.image_url.url)


class AudioPart(StrictBody):
    model_config = _UNSERVED

    type: Literal["input_audio"]


class FileOfPart(StrictBody):
    """A file by the id of its upload, or as a data URL or base64: an image, a PDF file or plain text."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"required": ["file_id"], "properties": {"file_id": {"type": "string"}, "file_data": {"type": "null"}}},
                {
                    "required": ["file_data"],
                    "properties": {"file_data": {"type": "string"}, "file_id": {"type": "null"}},
                },
            ]
        }
    )

    file_id: str | None = None
    file_data: Annotated[str, shows(pattern=FILE_DATA_PATTERN)] | None = None
    filename: str | None = None  # the model reads it as the title of a document


class FilePart(StrictBody):
    """An image or a document as a file. Of a PDF file the text is read, and images of its pages are not."""

    type: Literal["file"]
    file: FileOfPart

    @property
    def error_code(self) -> str:
        """Code of an error about the part."""
        return INVALID_IMAGE if (self.file.file_data or "").startswith(DATA_IMAGE) else INVALID_DOCUMENT

    @cached_property
    def content(self) -> PromptImage | PromptDocument:
        """The image or the document, or the id of an upload, which may be both. Raises ValueError."""
        file_id, data = self.file.file_id, self.file.file_data
        if (file_id is None) == (data is None):
            raise ValueError("it must have either the 'file_id' of its upload or its content in 'file_data'")
        if data is None:
            return PromptDocument(file_id=file_id or "", title=self.file.filename, may_be_image=True)
        if data.startswith(DATA_IMAGE):
            return image_of_url(data)
        return msgspec.structs.replace(document_of_file_data(data), title=self.file.filename)


PartWithFile = ImagePart | FilePart


class OtherPart(StrictBody):
    """Part of a type that OpenAI's API does not have."""

    model_config = _UNSERVED

    type: str


def _tag_of(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if isinstance(kind, str) and kind in _TYPES else "other"


ContentPart = Annotated[
    Annotated[TextPart, Tag("text")]
    | Annotated[RefusalPart, Tag("refusal")]
    | Annotated[ImagePart, Tag("image_url")]
    | Annotated[AudioPart, Tag("input_audio")]
    | Annotated[FilePart, Tag("file")]
    | Annotated[OtherPart, Tag("other")],
    Discriminator(_tag_of),
]
ContentParts = Annotated[list[ContentPart], Field(fail_fast=True, max_length=MAX_PARTS)]


def why_unserved(parts: Sequence[ContentPart]) -> str | None:
    """Return why the content of a message cannot be served, or None."""
    for number, part in enumerate(parts):
        if isinstance(part, OtherPart):
            return f"part {number} is of the unknown type {part.type[:64]!r}; send parts of the type 'text'"
        if isinstance(part, AudioPart):
            return f"part {number} is audio, which is not supported; send its transcript as text"
    return None


def why_unreadable(parts: Sequence[ContentPart]) -> tuple[str, str] | None:
    """Return why an image or a document among the parts cannot be read, with the error's code, or None."""
    for number, part in enumerate(parts):
        if isinstance(part, PartWithFile):
            try:
                _ = part.content
            except ValueError as exc:
                kind = "an image" if part.error_code == INVALID_IMAGE else "a file"
                return f"part {number} is {kind} that cannot be read: {exc}", part.error_code
    return None


def template_parts(parts: Sequence[ContentPart], path: str) -> list[dict[str, Any]]:
    """Return parts with files for the chat template. Consecutive texts are joined by line breaks.

    `path` is that of the parts in the request.
    """
    found: list[dict[str, Any]] = []
    for are_files, run in groupby(enumerate(parts), lambda numbered: isinstance(numbered[1], PartWithFile)):
        if are_files:
            for number, part in run:
                if isinstance(part, PartWithFile):
                    content = msgspec.structs.replace(part.content, path=f"{path}.{number}.{part.type}")
                    found.append(image_part(content) if isinstance(content, PromptImage) else document_part(content))
        else:
            found.append(text_part(text_of_parts([part for _, part in run])))
    return found


def text_of_parts(parts: Sequence[ContentPart]) -> str:
    """Return the text of parts that can all be served. Line breaks join them."""
    return "\n".join(part.text for part in parts if isinstance(part, TextPart | RefusalPart))
