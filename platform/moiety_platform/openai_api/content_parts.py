"""Parts of a chat message's content in OpenAI's fields.

Text is served. Images, audio and files are known, so that their refusal says what is not served.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from moiety_platform.inference.body_fields import MAX_PARTS, StrictBody

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
    url: str
    detail: Literal["auto", "low", "high", "original"] | None = None


class ImagePart(StrictBody):
    """Image, as a data URL or a link."""

    model_config = _UNSERVED

    type: Literal["image_url"]
    image_url: ImageUrl


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
    ImagePart: "is an image; the models here read text only. Leave images out, or describe them in words",
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


def text_of_parts(parts: Sequence[ContentPart]) -> str:
    """Return the text of parts that can all be served. Line breaks join them."""
    return "\n".join(part.text for part in parts if isinstance(part, TextPart | RefusalPart))
