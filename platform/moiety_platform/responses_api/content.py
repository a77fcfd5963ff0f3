"""Content parts of messages and results in OpenAI's fields for responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field, PlainValidator, ValidationInfo, field_validator, model_validator

from moiety_platform.inference.body_fields import MAX_PARTS, StrictBody, or_text, refuse, shows
from moiety_platform.inference.field_support import ignored, refused
from moiety_platform.inference.prompt_images import (
    IMAGE_URL_PATTERN,
    INVALID_IMAGE,
    has_images,
    image_of_url,
    image_part,
    text_part,
)

INPUT_TEXT = "input_text"
OUTPUT_TEXT = "output_text"
INPUT_IMAGE = "input_image"
REFUSAL = "refusal"
_OTHERS = {
    "input_file": "files are not read by this endpoint; send their text as 'input_text'",
    "input_audio": "audio is not supported; send text",
    "computer_screenshot": "there is no computer tool; send the image as 'input_image'",
}


class TextContent(StrictBody):
    type: Literal["input_text", "output_text"]
    text: str

    @property
    def readable(self) -> str:
        """The text that the model reads."""
        return self.text


class ImageContent(StrictBody):
    """An image as a data URL or a link. Links are followed where the operator has enabled it."""

    type: Literal["input_image"]
    image_url: Annotated[str, shows(pattern=IMAGE_URL_PATTERN)]
    detail: Annotated[
        Literal["auto", "low", "high", "original"] | None, ignored("The size of the image gives its number of tokens.")
    ] = None
    file_id: Annotated[None, refused("images are not kept as files; send the image in 'image_url'")] = None
    prompt_cache_breakpoint: Annotated[Any, ignored("Every prefix is cached.")] = None

    @model_validator(mode="before")
    @classmethod
    def _has_a_url(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("file_id") is not None:
            raise refuse("images are not kept as files; leave 'file_id' out and send the image in 'image_url'")
        return value

    @field_validator("image_url")
    @classmethod
    def _readable(cls, value: str) -> str:
        try:
            image_of_url(value)
        except ValueError as exc:
            raise refuse(f"it is an image that cannot be read: {exc}", INVALID_IMAGE) from exc
        return value

    def stored(self) -> dict[str, Any]:
        """Return the part as it is stored and listed."""
        return {"type": INPUT_IMAGE, "image_url": self.image_url, "detail": self.detail or "auto"}


class RefusalContent(StrictBody):
    """An assistant's refusal of an earlier answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def readable(self) -> str:
        """The text that the model reads."""
        return self.refusal


class _OtherContent(StrictBody):
    """A part that no model reads here. Validation raises an error that names the type."""

    type: Annotated[str, shows(enum=[INPUT_TEXT, INPUT_IMAGE, OUTPUT_TEXT, REFUSAL])]

    @field_validator("type")
    @classmethod
    def _only_text(cls, value: str) -> str:
        if value in _OTHERS:
            raise refuse(f"parts of type {value!r} are not supported: {_OTHERS[value]}")
        raise refuse(
            f"parts of type {value[:64]!r} are not supported; send text as {INPUT_TEXT!r}, an image as "
            f"{INPUT_IMAGE!r}, or an assistant's text as {OUTPUT_TEXT!r}"
        )


ItemContent = TextContent | ImageContent | RefusalContent
_PARTS: dict[str, type[ItemContent]] = {
    INPUT_TEXT: TextContent, INPUT_IMAGE: ImageContent, OUTPUT_TEXT: TextContent, REFUSAL: RefusalContent,
}  # fmt: skip


def _as_content(value: Any, info: ValidationInfo) -> ItemContent:
    """Validate a part as the type that it names, so that errors refer to that type only."""
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in _PARTS:
        _OtherContent.model_validate(value)
    return _PARTS[str(kind)].model_validate(value, context=info.context)


def _as_text_part(text: str, info: ValidationInfo) -> dict[str, str]:
    kind = OUTPUT_TEXT if info.data.get("role") == "assistant" else INPUT_TEXT
    return {"type": kind, "text": text}


ContentParts = Annotated[
    list[Annotated[ItemContent, PlainValidator(_as_content, json_schema_input_type=ItemContent)]],
    Field(fail_fast=True, max_length=MAX_PARTS),
    or_text(_as_text_part, "text parts"),
]


def text_of(parts: Sequence[ItemContent]) -> str:
    """Return the text that the model reads."""
    return "\n".join(part.readable for part in parts if not isinstance(part, ImageContent))


def has_detail(parts: Sequence[ItemContent]) -> bool:
    """Return whether an image asks for a level of detail, which has no effect."""
    return any(isinstance(part, ImageContent) and part.detail not in (None, "auto") for part in parts)


def stored_parts(parts: Sequence[ItemContent]) -> list[dict[str, Any]]:
    """Return a client's parts as they are stored and listed."""
    return [
        part.stored() if isinstance(part, ImageContent) else {"type": INPUT_TEXT, "text": part.readable}
        for part in parts
    ]


def stored_output(parts: Sequence[ItemContent]) -> str | list[dict[str, Any]]:
    """Return the output of a tool as it is stored and listed: a text, or parts if it has images."""
    return stored_parts(parts) if any(isinstance(part, ImageContent) for part in parts) else text_of(parts)


def content_for_template(content: str | Sequence[Mapping[str, Any]], path: str) -> Any:
    """Return stored parts as a message's content for the chat template. Consecutive texts are joined by line breaks.

    `path` is that of the parts in the request.
    """
    if isinstance(content, str):
        return content
    found: list[dict[str, Any]] = []
    for is_image, run in groupby(content, lambda part: part["type"] == INPUT_IMAGE):
        if is_image:
            images = [msgspec.structs.replace(image_of_url(part["image_url"]), path=path) for part in run]
            found += map(image_part, images)
        else:
            found.append(text_part("\n".join(part["text"] for part in run)))
    return found if has_images(found) else "".join(part["text"] for part in found)
