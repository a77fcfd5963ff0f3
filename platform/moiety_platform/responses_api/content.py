"""Content parts of messages and results in OpenAI's fields for responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, ValidationInfo, field_validator

from moiety_platform.inference.body_fields import MAX_PARTS, StrictBody, or_text, refuse, shows

INPUT_TEXT = "input_text"
OUTPUT_TEXT = "output_text"
REFUSAL = "refusal"
_OTHERS = {
    "input_image": "images are not read by this endpoint yet; send text, or describe the image in it",
    "input_file": "files are not read by this endpoint; send their text as 'input_text'",
    "input_audio": "audio is not supported; send text",
    "computer_screenshot": "images are not read by this endpoint yet; send text, or describe the image in it",
}


class TextContent(StrictBody):
    type: Literal["input_text", "output_text"]
    text: str

    @property
    def readable(self) -> str:
        """The text that the model reads."""
        return self.text


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

    type: Annotated[str, shows(enum=[INPUT_TEXT, OUTPUT_TEXT, REFUSAL])]

    @field_validator("type")
    @classmethod
    def _only_text(cls, value: str) -> str:
        if value in _OTHERS:
            raise refuse(f"parts of type {value!r} are not supported: {_OTHERS[value]}")
        raise refuse(
            f"parts of type {value[:64]!r} are not supported; send text as {INPUT_TEXT!r}, or an assistant's as "
            f"{OUTPUT_TEXT!r}"
        )


ItemContent = TextContent | RefusalContent
_PARTS: dict[str, type[ItemContent]] = {
    INPUT_TEXT: TextContent, OUTPUT_TEXT: TextContent, REFUSAL: RefusalContent,
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


def text_of(parts: list[ItemContent]) -> str:
    """Return the text that the model reads."""
    return "\n".join(part.readable for part in parts)
