"""What the bodies of all APIs are made of: strict, frozen, unknown fields ignored, and every list bounded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationInfo
from pydantic_core import PydanticCustomError, PydanticKnownError

from moiety_platform.completions.generation import Generation, Prompt
from moiety_platform.completions.limits import DEFAULT_SHAPE, ShapeLimits

INT32_MAX = 2**31 - 1
MAX_MESSAGES = 16_384  # what the settings allow at most, as the next
MAX_STOPS = 64
MAX_PARTS = 2048  # of one message
MAX_PROMPTS = 2048
MAX_TOKEN_IDS = 2**20  # of one prompt or text
MAX_PAIRS = 16  # of a request's metadata


def refuse(message: str, code: str | None = None) -> PydanticCustomError:
    """What a validator raises, in words for the client; with a stable code of its own, if clients go by one."""
    return PydanticCustomError("refused", "{reason}", {"reason": message, "code": code})


def shape_of(info: ValidationInfo) -> ShapeLimits:
    """What the operator allows."""
    return info.context if isinstance(info.context, ShapeLimits) else DEFAULT_SHAPE


def bounded(most: Callable[[ShapeLimits], int]) -> AfterValidator:
    """Of a list: it may have as many entries as the operator allows."""

    def check(value: list[Any], info: ValidationInfo) -> list[Any]:
        limit = most(shape_of(info))
        if len(value) > limit:
            fields = {"field_type": "List", "max_length": limit, "actual_length": len(value)}
            raise PydanticKnownError("too_long", fields)
        return value

    return AfterValidator(check)


def _short_stop(value: str, info: ValidationInfo) -> str:
    most = shape_of(info).max_stop_chars
    if len(value) > most:
        raise refuse(f"it has {len(value):,} characters; it may have {most:,}")
    return value


ModelName = Annotated[str, StringConstraints(min_length=1, max_length=512)]
StopString = Annotated[str, StringConstraints(min_length=1), AfterValidator(_short_stop)]
StopStrings = Annotated[
    list[StopString], Field(fail_fast=True, max_length=MAX_STOPS), bounded(lambda shape: shape.max_stop_strings)
]
TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]

MetadataKey = Annotated[str, StringConstraints(min_length=1, max_length=64)]
MetadataValue = Annotated[str, StringConstraints(max_length=512)]
MetadataPairs = Annotated[dict[MetadataKey, MetadataValue], Field(max_length=MAX_PAIRS)]

# Lists end at their first bad entry: complaints about every entry of a large body would take seconds to collect.
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_TOKEN_IDS)]

# A text or its token ids, or a list of either.
RawPrompts = (
    str
    | Annotated[list[str], Field(fail_fast=True, max_length=MAX_PROMPTS)]
    | TokenIds
    | Annotated[list[TokenIds], Field(fail_fast=True, max_length=MAX_PROMPTS)]
)


class StrictBody(BaseModel):
    """`forms` says what a field with several forms must be, where pydantic would report each form's own complaint; a
    name in braces there is one of `ShapeLimits`."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    forms: ClassVar[Mapping[str, str]] = MappingProxyType({})


class AskingBody(StrictBody):
    """A body that asks something of an engine."""

    def generation(self) -> Generation:
        raise NotImplementedError

    @property
    def wants_stream(self) -> bool:
        return False


class GeneratingBody(AskingBody):
    """A body that asks for text, whole or streamed."""

    stream: bool | None = None

    @property
    def wants_stream(self) -> bool:
        return bool(self.stream)


def forms_of_prompts(each: str) -> str:
    """What a field of `RawPrompts` must be; `each` names them in the plural."""
    return (
        "must be a string, a list of strings, a list of token ids or a list of lists of token ids, and a list of "
        f"{each} has at most {MAX_PROMPTS:,}"
    )


def as_prompts(given: str | list[str] | list[int] | list[list[int]]) -> tuple[Prompt, ...]:
    """Each of `RawPrompts`, which must not be empty."""
    if isinstance(given, str):
        return (given,)
    if isinstance(given[0], int):
        return (tuple(given),)
    return tuple(one if isinstance(one, str) else tuple(one) for one in given)
