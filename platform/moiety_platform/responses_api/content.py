"""Content parts of messages and results in OpenAI's fields for responses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal, Self

import msgspec
from pydantic import ConfigDict, Field, ValidationInfo, field_validator, model_validator

from moiety_platform.inference.body_fields import MAX_PARTS, StrictBody, or_text, refuse, shows
from moiety_platform.inference.field_support import ignored
from moiety_platform.inference.generation import PromptDocument
from moiety_platform.inference.prompt_documents import (
    FILE_DATA_PATTERN,
    INVALID_DOCUMENT,
    document_of_file_data,
    document_of_link,
    document_part,
)
from moiety_platform.inference.prompt_images import (
    IMAGE_URL_PATTERN,
    INVALID_IMAGE,
    LINK_PATTERN,
    image_of_file,
    image_of_url,
    image_part,
    only_text,
    text_part,
)
from moiety_platform.inference.text_parts import RefusalContent, TextContent
from moiety_platform.inference.typed_values import named_type

INPUT_TEXT = "input_text"
OUTPUT_TEXT = "output_text"
INPUT_IMAGE = "input_image"
INPUT_FILE = "input_file"
REFUSAL = "refusal"
_OTHERS = {
    "input_audio": "audio is not supported; send text",
    "computer_screenshot": "there is no computer tool; send the image as 'input_image'",
}


def _only(field: str, *others: str) -> dict[str, Any]:
    """Return the JSON schema of a part with one of some fields."""
    return {"required": [field], "properties": {field: {"type": "string"}, **{one: {"type": "null"} for one in others}}}


def _checked(value: str | None, read: Callable[[str], object], noun: str, code: str) -> str | None:
    """Return the value after `read` has accepted it."""
    try:
        if value is not None:
            read(value)
    except ValueError as exc:
        raise refuse(f"it is {noun} that cannot be read: {exc}", code) from exc
    return value


class ImageContent(StrictBody):
    """An image as a data URL, a link or an uploaded file. Links are followed where the operator has enabled it."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [_only("image_url", "file_id"), _only("file_id", "image_url")]}
    )

    type: Literal["input_image"]
    image_url: Annotated[str, shows(pattern=IMAGE_URL_PATTERN)] | None = None
    detail: Annotated[
        Literal["auto", "low", "high", "original"] | None, ignored("The size of the image gives its number of tokens.")
    ] = None
    file_id: str | None = None
    prompt_cache_breakpoint: Annotated[Any, ignored("Every prefix is cached.")] = None

    @field_validator("image_url")
    @classmethod
    def _readable(cls, value: str | None) -> str | None:
        return _checked(value, image_of_url, "an image", INVALID_IMAGE)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.image_url is None) == (self.file_id is None):
            raise refuse(
                "an image has either an 'image_url' or the 'file_id' of an uploaded image; send only one of the two"
            )
        return self

    def stored(self) -> dict[str, Any]:
        """Return the part as it is stored and listed."""
        source = {"image_url": self.image_url} if self.file_id is None else {"file_id": self.file_id}
        return {"type": INPUT_IMAGE, **source, "detail": self.detail or "auto"}


class FileContent(StrictBody):
    """A PDF file or plain text, by its content, the id of its upload or a link. Of a PDF file only the text is read.

    Links are followed where the operator has enabled it.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                _only("file_data", "file_id", "file_url"),
                _only("file_id", "file_data", "file_url"),
                _only("file_url", "file_data", "file_id"),
            ]
        }
    )

    type: Literal["input_file"]
    file_data: Annotated[str, shows(pattern=FILE_DATA_PATTERN)] | None = None
    file_id: str | None = None
    file_url: Annotated[str, shows(pattern=LINK_PATTERN)] | None = None
    filename: str | None = None  # the model reads it as the title of the document
    detail: Annotated[str | None, ignored("The text of a document is read, and images of its pages are not.")] = None
    prompt_cache_breakpoint: Annotated[Any, ignored("Every prefix is cached.")] = None

    @field_validator("file_data")
    @classmethod
    def _readable(cls, value: str | None) -> str | None:
        return _checked(value, document_of_file_data, "a file", INVALID_DOCUMENT)

    @field_validator("file_url")
    @classmethod
    def _is_link(cls, value: str | None) -> str | None:
        return _checked(value, document_of_link, "a file", INVALID_DOCUMENT)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if sum(source is not None for source in (self.file_data, self.file_id, self.file_url)) != 1:
            raise refuse(
                "a file has one of 'file_data', 'file_url' and the 'file_id' of an uploaded file; send only one"
            )
        return self

    def stored(self) -> dict[str, Any]:
        """Return the part as it is stored and listed."""
        sources = {"file_data": self.file_data, "file_id": self.file_id, "file_url": self.file_url}
        source = {name: value for name, value in sources.items() if value is not None}
        return {"type": INPUT_FILE, **source, **({"filename": self.filename} if self.filename else {})}


class _OtherContent(StrictBody):
    """A part that no model reads here. Validation raises an error that names the type."""

    type: Annotated[str, shows(enum=[INPUT_TEXT, INPUT_IMAGE, INPUT_FILE, OUTPUT_TEXT, REFUSAL])]

    @field_validator("type")
    @classmethod
    def _only_text(cls, value: str) -> str:
        if value in _OTHERS:
            raise refuse(f"parts of type {value!r} are not supported: {_OTHERS[value]}")
        raise refuse(
            f"parts of type {value[:64]!r} are not supported; send text as {INPUT_TEXT!r}, an image as "
            f"{INPUT_IMAGE!r}, a document as {INPUT_FILE!r}, or an assistant's text as {OUTPUT_TEXT!r}"
        )


ItemContent = TextContent | ImageContent | FileContent | RefusalContent
WithFile = ImageContent | FileContent
_PARTS: dict[str, type[ItemContent]] = {
    INPUT_TEXT: TextContent, INPUT_IMAGE: ImageContent, INPUT_FILE: FileContent,
    OUTPUT_TEXT: TextContent, REFUSAL: RefusalContent,
}  # fmt: skip


def _as_text_part(text: str, info: ValidationInfo) -> dict[str, str]:
    kind = OUTPUT_TEXT if info.data.get("role") == "assistant" else INPUT_TEXT
    return {"type": kind, "text": text}


ContentParts = Annotated[
    list[Annotated[ItemContent, named_type(_PARTS, _OtherContent, ItemContent)]],
    Field(fail_fast=True, max_length=MAX_PARTS),
    or_text(_as_text_part, "text parts"),
]


def text_of(parts: Sequence[ItemContent]) -> str:
    """Return the text that the model reads."""
    return "\n".join(part.readable for part in parts if not isinstance(part, WithFile))


def has_detail(parts: Sequence[ItemContent]) -> bool:
    """Return whether an image asks for a level of detail, which has no effect."""
    return any(isinstance(part, ImageContent) and part.detail not in (None, "auto") for part in parts)


def stored_parts(parts: Sequence[ItemContent]) -> list[dict[str, Any]]:
    """Return a client's parts as they are stored and listed."""
    return [
        part.stored() if isinstance(part, WithFile) else {"type": INPUT_TEXT, "text": part.readable} for part in parts
    ]


def stored_output(parts: Sequence[ItemContent]) -> str | list[dict[str, Any]]:
    """Return the output of a tool as it is stored and listed: a text, or parts if it has images or files."""
    return stored_parts(parts) if any(isinstance(part, WithFile) for part in parts) else text_of(parts)


def content_for_template(content: str | Sequence[Mapping[str, Any]], path: str) -> Any:
    """Return stored parts as a message's content for the chat template. Consecutive texts are joined by line breaks.

    `path` is that of the parts in the request.
    """
    if isinstance(content, str):
        return content
    found: list[dict[str, Any]] = []
    for is_text, run in groupby(content, lambda part: part["type"] not in (INPUT_IMAGE, INPUT_FILE)):
        if is_text:
            found.append(text_part("\n".join(part["text"] for part in run)))
        else:
            found += [_file_part(part, f"{path}.{part['type']}") for part in run]
    return only_text(found)


def _file_part(part: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return the part of an image or a document for the chat template."""
    file_id = part.get("file_id")
    if part["type"] == INPUT_IMAGE:
        image = image_of_url(part["image_url"]) if file_id is None else image_of_file(file_id)
        return image_part(msgspec.structs.replace(image, path=path))
    if file_id is not None:
        document = PromptDocument(file_id=file_id)
    elif "file_url" in part:
        document = document_of_link(part["file_url"])
    else:
        document = document_of_file_data(part["file_data"])
    return document_part(msgspec.structs.replace(document, title=part.get("filename"), path=path))
