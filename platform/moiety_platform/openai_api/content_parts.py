"""Parts of a chat message's content in OpenAI's fields.

Text and images are served, images by models that see. Audio and other files are known, so that their refusal says what
is not served.
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
from moiety_platform.inference.generation import PromptImage
from moiety_platform.inference.prompt_images import (
    DATA_IMAGE,
    IMAGE_URL_PATTERN,
    image_of_file,
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

    @cached_property
    def image(self) -> PromptImage:
        """The image file or its link. Raises ValueError."""
        return image_of_url(self.image_url.url)


class AudioPart(StrictBody):
    model_config = _UNSERVED

    type: Literal["input_audio"]


class FileOfPart(StrictBody):
    """A file by the id of its upload, or as a data URL. It must be an image."""

    file_id: str | None = None
    file_data: Annotated[str, shows(pattern=f"^{DATA_IMAGE}[^,]*;base64,")] | None = None
    filename: Annotated[str | None, ignored("The model does not receive file names.")] = None


class FilePart(StrictBody):
    """An image as a file."""

    model_config = ConfigDict(
        json_schema_extra={
            "properties": {"file": {"oneOf": [{"required": [name]} for name in ("file_id", "file_data")]}}
        }
    )

    type: Literal["file"]
    file: FileOfPart

    @cached_property
    def image(self) -> PromptImage:
        """The image file, or the id of its upload. Raises ValueError."""
        if self.file.file_id is not None and self.file.file_data is None:
            return image_of_file(self.file.file_id)
        if self.file.file_id is None and (self.file.file_data or "").startswith(DATA_IMAGE):
            return image_of_url(self.file.file_data or "")
        raise ValueError(
            "a file must be an image, by the 'file_id' of its upload or a data URL in 'file_data'; send others as text"
        )


PartWithImage = ImagePart | FilePart


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


def why_unreadable(parts: Sequence[ContentPart]) -> str | None:
    """Return why an image among the parts cannot be read, or None."""
    for number, part in enumerate(parts):
        if isinstance(part, PartWithImage):
            try:
                _ = part.image
            except ValueError as exc:
                return f"part {number} is an image that cannot be read: {exc}"
    return None


def template_parts(parts: Sequence[ContentPart], path: str) -> list[dict[str, Any]]:
    """Return parts with images for the chat template. Consecutive texts are joined by line breaks.

    `path` is that of the parts in the request.
    """
    found: list[dict[str, Any]] = []
    for is_image, run in groupby(enumerate(parts), lambda numbered: isinstance(numbered[1], PartWithImage)):
        if is_image:
            for number, part in run:
                if isinstance(part, PartWithImage):
                    image = msgspec.structs.replace(part.image, path=f"{path}.{number}.{part.type}")
                    found.append(image_part(image))
        else:
            found.append(text_part(text_of_parts([part for _, part in run])))
    return found


def text_of_parts(parts: Sequence[ContentPart]) -> str:
    """Return the text of parts that can all be served. Line breaks join them."""
    return "\n".join(part.text for part in parts if isinstance(part, TextPart | RefusalPart))
