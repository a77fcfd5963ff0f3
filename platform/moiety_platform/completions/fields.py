"""What the bodies of all APIs are made of: strict, frozen, unknown fields ignored, and every list bounded."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from pydantic_core import PydanticCustomError

from moiety_platform.completions.generation import Generation, Prompt

INT32_MAX = 2**31 - 1
MAX_MESSAGES = 2048
MAX_PARTS = 2048  # of one message
MAX_PROMPTS = 2048
MAX_TOKEN_IDS = 2**20  # of one prompt or text
MAX_STOPS = 16

ModelName = Annotated[str, StringConstraints(min_length=1, max_length=512)]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]

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
    """`forms` says what a field with several forms must be; pydantic would report each form's own complaint."""

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


def refuse(message: str) -> PydanticCustomError:
    """What a validator raises, in words for the client."""
    return PydanticCustomError("refused", "{reason}", {"reason": message})
