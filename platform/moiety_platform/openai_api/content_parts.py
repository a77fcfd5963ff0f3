"""Parts of a chat message's content in OpenAI's fields.

Text and images are served, images by models that see. Audio and files are known, so that their refusal says what is not
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
from moiety_platform.inference.generation import PromptImage
from moiety_platform.inference.prompt_images import IMAGE_URL_PATTERN, image_of_url, image_part, text_part

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


class FilePart(StrictBody):
    model_config = _UNSERVED

    type: Literal["file"]


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

_REASONS = {
    AudioPart: "is audio, which is not supported; send its transcript as text",
    FilePart: "is a file, which is not supported; send its text as a part of the type 'text'",
}


def why_unserved(parts: Sequence[ContentPart]) -> str | None:
    """Return why the content of a message cannot be served, or None."""
    for number, part in enumerate(parts):
        if isinstance(part, OtherPart):
            return f"part {number} is of the unknown type {part.type[:64]!r}; send parts of the type 'text'"
        reason = _REASONS.get(type(part))
        if reason is not None:
            return f"part {number} {reason}"
    return None


def why_unreadable(parts: Sequence[ContentPart]) -> str | None:
    """Return why an image among the parts cannot be read, or None."""
    for number, part in enumerate(parts):
        if isinstance(part, ImagePart):
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
    for is_image, run in groupby(enumerate(parts), lambda numbered: isinstance(numbered[1], ImagePart)):
        if is_image:
            for number, part in run:
                if isinstance(part, ImagePart):
                    image = msgspec.structs.replace(part.image, path=f"{path}.{number}.image_url")
                    found.append(image_part(image))
        else:
            found.append(text_part(text_of_parts([part for _, part in run])))
    return found


def text_of_parts(parts: Sequence[ContentPart]) -> str:
    """Return the text of parts that can all be served. Line breaks join them."""
    return "\n".join(part.text for part in parts if isinstance(part, TextPart | RefusalPart))
