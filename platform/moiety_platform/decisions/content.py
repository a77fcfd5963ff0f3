"""Content parts of inputs and instructions: text, JSON, and what assistants have written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from moiety_platform.errors import BadRequest
from moiety_platform.inference.body_fields import MAX_PARTS, StrictBody, or_text, refuse, shows
from moiety_platform.inference.text_parts import RefusalContent, TextContent
from moiety_platform.inference.typed_values import named_type
from moiety_platform.json_depth import check_depth

MAX_JSON_BYTES = 256 * 1024
MAX_JSON_DEPTH = 32
MAX_JSON_VALUES = 10_000
INPUT_TEXT, INPUT_JSON, OUTPUT_TEXT, REFUSAL = "input_text", "input_json", "output_text", "refusal"

_OTHERS = {
    "input_image": "decisions take text input only; describe the image in text",
    "input_file": "files are not read by this endpoint; send their text as 'input_text'",
    "input_audio": "audio is not supported; send text",
}


def _check_json(value: Any) -> Any:
    """Check the published limits of the vendor's API."""
    data = msgspec.json.encode(value)
    if len(data) > MAX_JSON_BYTES:
        raise refuse(f"it has {len(data):,} bytes as JSON; it may have {MAX_JSON_BYTES:,}. Send less")
    try:
        check_depth(data, MAX_JSON_DEPTH)
    except BadRequest as exc:
        raise refuse(exc.message) from exc
    if _num_values(value) > MAX_JSON_VALUES:
        raise refuse(f"it has more than {MAX_JSON_VALUES:,} values; send less")
    return value


def _num_values(value: Any) -> int:
    waiting, count = [value], 0
    while waiting and count <= MAX_JSON_VALUES:
        one = waiting.pop()
        count += 1
        if isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
    return count


class DecisionJson(StrictBody):
    """A JSON object or a list of objects, which the model reads as compact JSON."""

    type: Literal["input_json"]
    data: Annotated[dict[str, Any] | list[dict[str, Any]], AfterValidator(_check_json)]

    @property
    def readable(self) -> str:
        """The text that the model reads."""
        return msgspec.json.encode(self.data).decode()


class _OtherDecisionPart(StrictBody):
    """A part that no model reads here. Validation raises an error that names the type."""

    type: Annotated[str, shows(enum=[INPUT_TEXT, INPUT_JSON, OUTPUT_TEXT, REFUSAL])]

    @field_validator("type")
    @classmethod
    def _only_text(cls, value: str) -> str:
        advice = _OTHERS.get(value, f"send text as {INPUT_TEXT!r} or an object as {INPUT_JSON!r}")
        raise refuse(f"parts of type {value[:64]!r} are not supported: {advice}")


DecisionPart = TextContent | DecisionJson | RefusalContent
_PARTS: dict[str, type[DecisionPart]] = {
    INPUT_TEXT: TextContent, INPUT_JSON: DecisionJson, OUTPUT_TEXT: TextContent, REFUSAL: RefusalContent,
}  # fmt: skip


def _as_text_part(text: str, _info: ValidationInfo) -> dict[str, str]:
    return {"type": INPUT_TEXT, "text": text}


Parts = Annotated[
    list[Annotated[DecisionPart, named_type(_PARTS, _OtherDecisionPart, DecisionPart)]],
    Field(fail_fast=True, max_length=MAX_PARTS),
    or_text(_as_text_part, "parts"),
]


def text_of(parts: Sequence[DecisionPart]) -> str:
    """Return the text that the model reads."""
    return "\n".join(part.readable for part in parts)
