"""Building blocks of all APIs' request bodies: strict, frozen, unknown fields ignored, and every list bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError, PydanticKnownError

from moiety_platform.inference.generation import Generation, Prompt
from moiety_platform.inference.shape_limits import DEFAULT_SHAPE, ShapeLimits
from moiety_platform.usage.attribution import UNATTRIBUTED, Attribution, attribution_of, stable_user_id

INT32_MAX = 2**31 - 1
MAX_MESSAGES = 16_384  # upper bound of the setting, like MAX_STOPS
MAX_STOPS = 64
MAX_PARTS = 2048  # per message
MAX_PROMPTS = 2048
MAX_TOKEN_IDS = 2**20  # per prompt or text
MAX_PAIRS = 16  # in a request's metadata

_ATTRIBUTING = frozenset(("user", "safety_identifier", "metadata"))

Retention = Literal["in_memory", "24h"]  # prefix-cache retention for a conversation that will continue
KEEP_S: Mapping[Retention, float] = MappingProxyType({"in_memory": 0.0, "24h": 86_400.0})


def refuse(message: str, code: str | None = None) -> PydanticCustomError:
    """Return a validator's error with a message for the client, and optionally with a stable error code."""
    return PydanticCustomError("refused", "{reason}", {"reason": message, "code": code})


def refuse_all(problems: Sequence[PydanticCustomError]) -> ValidationError:
    """Return a validator's error that holds several errors made by `refuse`, at least one."""
    errors = [InitErrorDetails(type=problem, input=None) for problem in problems]
    return ValidationError.from_exception_data("body", errors)


def missing(field: str) -> ValidationError:
    """Return a validator's error for a field that another field of the same object requires."""
    return ValidationError.from_exception_data("body", [InitErrorDetails(type="missing", loc=(field,), input=None)])


def shape_of(info: ValidationInfo) -> ShapeLimits:
    """Return the operator's limits."""
    return info.context if isinstance(info.context, ShapeLimits) else DEFAULT_SHAPE


Most = Callable[[ShapeLimits], int]


@dataclass(frozen=True, slots=True)
class _Bound:
    """Limit of the operator, which a schema has as `keyword`."""

    keyword: ClassVar[str]
    most: Most

    def shown(self, schema: dict[str, Any], settings: ShapeLimits) -> dict[str, Any]:
        return {**schema, self.keyword: self.most(settings)}


class _FewEntries(_Bound):
    __slots__ = ()
    keyword = "maxItems"

    def __call__(self, value: list[Any], info: ValidationInfo) -> list[Any]:
        limit = self.most(info.context if isinstance(info.context, ShapeLimits) else DEFAULT_SHAPE)
        if len(value) > limit:
            fields = {"field_type": "List", "max_length": limit, "actual_length": len(value)}
            raise PydanticKnownError("too_long", fields)
        return value


class _FewCharacters(_Bound):
    __slots__ = ()
    keyword = "maxLength"

    def __call__(self, value: str, info: ValidationInfo) -> str:
        limit = self.most(shape_of(info))
        if len(value) > limit:
            raise refuse(f"it has {len(value):,} characters; it may have {limit:,}")
        return value


class _AtMost(_Bound):
    __slots__ = ()
    keyword = "maximum"

    def __call__(self, value: int, info: ValidationInfo) -> int:
        limit = self.most(shape_of(info))
        if value > limit:
            raise refuse(f"it is {value}; it may be {limit} at most")
        return value


def bounded(most: Most) -> AfterValidator:
    """Return a validator that limits the number of list entries to the operator's limit."""
    return AfterValidator(_FewEntries(most))


def at_most(most: Most) -> AfterValidator:
    """Return a validator that limits a number to the operator's limit."""
    return AfterValidator(_AtMost(most))


@dataclass(frozen=True, slots=True)
class _OrText:
    entry: Callable[[str, ValidationInfo], Any]
    entries: str

    def __call__(self, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, str):
            return [self.entry(value, info)]
        if not isinstance(value, list):
            raise refuse(f"it must be a string or a list of {self.entries}")
        return value

    def shown(self, schema: dict[str, Any], _settings: ShapeLimits) -> dict[str, Any]:
        return {"anyOf": [{"type": "string"}, schema]}


def or_text(entry: Callable[[str, ValidationInfo], Any], entries: str) -> BeforeValidator:
    """Return a validator that accepts a string as a list of one entry.

    Because only the list is validated, errors name the exact place.
    """
    return BeforeValidator(_OrText(entry, entries))


def known_role(roles: Sequence[str]) -> AfterValidator:
    """Return a validator of a message's role."""

    def check(value: str) -> str:
        if value not in roles:
            raise refuse(f"{value[:64]!r} is not a role; use one of {', '.join(roles)}")
        return value

    return AfterValidator(check)


def _without_nul(value: str) -> str:
    if "\0" in value:
        raise refuse("it must not contain NUL characters")
    return value


def _few_pairs(value: Any) -> Any:
    """Check the number of pairs before any of them, since each bad one has an error of its own."""
    if isinstance(value, dict) and len(value) > MAX_PAIRS:
        raise refuse(f"it has {len(value):,} pairs; it may have {MAX_PAIRS} at most")
    return value


def shows(**schema: Any) -> Any:
    """Return metadata that adds to the JSON schema of a field, for constraints that a validator checks."""
    return Field(json_schema_extra=schema)


def only_with(field: str, flag: str) -> dict[str, Any]:
    """Return a JSON schema that allows a non-null field only where the flag is true."""
    return {
        "if": {"required": [field], "properties": {field: {"not": {"type": "null"}}}},
        "then": {"required": [flag], "properties": {flag: {"const": True}}},
    }


ModelName = Annotated[str, StringConstraints(min_length=1, max_length=512)]
StopString = Annotated[
    str, StringConstraints(min_length=1), AfterValidator(_FewCharacters(lambda shape: shape.max_stop_chars))
]
StopStrings = Annotated[
    list[StopString], Field(fail_fast=True, max_length=MAX_STOPS), bounded(lambda shape: shape.max_stop_strings)
]
TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]

_NO_NUL = "^[^\\u0000]*$"
MetadataKey = Annotated[str, StringConstraints(min_length=1, max_length=64), AfterValidator(_without_nul)]
MetadataValue = Annotated[str, StringConstraints(max_length=512), AfterValidator(_without_nul), shows(pattern=_NO_NUL)]
MetadataPairs = Annotated[
    dict[MetadataKey, MetadataValue],
    BeforeValidator(_few_pairs),
    shows(maxProperties=MAX_PAIRS, propertyNames={"minLength": 1, "maxLength": 64, "pattern": _NO_NUL}),
]

# Most tokens of one input, special tokens included; -1: the model's context. The ends of longer inputs are cut off.
TruncateTokens = Annotated[int, Field(ge=-1, le=INT32_MAX)]

# Validation of a list stops at its first bad entry: errors for every entry of a large body would take seconds.
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_TOKEN_IDS)]

# A text or its token ids, or a list of either. Other validators reject empty ones, with better messages than
# pydantic's.
_Text = Annotated[str, shows(minLength=1)]
_Ids = Annotated[TokenIds, shows(minItems=1)]
RawPrompts = (
    _Text
    | Annotated[list[_Text], Field(fail_fast=True, max_length=MAX_PROMPTS), shows(minItems=1)]
    | _Ids
    | Annotated[list[_Ids], Field(fail_fast=True, max_length=MAX_PROMPTS), shows(minItems=1)]
)


class StrictBody(BaseModel):
    """Base of all request bodies.

    `forms` has error messages for fields that accept several types, where pydantic would report one error per type.
    Names in braces are fields of `ShapeLimits`.
    """

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, defer_build=True)

    forms: ClassVar[Mapping[str, str]] = MappingProxyType({})

    @classmethod
    def translated(cls, _data: bytes) -> bytes | None:
        """Return a body in the form of another API as one of this schema; None if it does not have that form.

        Called for bodies that are not valid as they are. May raise ValidationError.
        """
        return None


class InferenceBody(StrictBody):
    """Base of request bodies that are served by an engine."""

    @model_validator(mode="after")
    def _check_fields_together(self) -> Self:
        problems = list(self.problems())
        if problems:
            raise refuse_all(problems)
        return self

    def problems(self) -> Iterator[PydanticCustomError]:
        """Yield the errors of fields that do not go together. Called once every field is valid."""
        yield from ()

    def generation(self) -> Generation:
        raise NotImplementedError

    def check(self) -> None:
        """Check what the schema cannot express, without what the request refers to. Raises BadRequest."""
        self.generation()

    def skipped_entries(self) -> Iterator[str]:
        """Yield the paths of list entries that have no effect, such as tools of an unknown type."""
        yield from ()

    def attribution(self, tags: bytes | None) -> Attribution:
        """Return the request's attribution, by whatever fields its API has for it and the header of tags, if any.

        Raises BadRequest for tags in the header that are not in their form.
        """
        if tags is None and self.model_fields_set.isdisjoint(_ATTRIBUTING):
            return UNATTRIBUTED
        end_user, metadata = getattr(self, "safety_identifier", None) or getattr(self, "user", None), None
        if (given := getattr(self, "metadata", None)) is not None:
            user_id = getattr(given, "user_id", None)
            end_user = end_user or (stable_user_id(user_id) if user_id else None)
            metadata = given if isinstance(given, dict) else None
        return attribution_of(end_user, metadata or {}, tags)

    @property
    def wants_stream(self) -> bool:
        return False


class GeneratingBody(InferenceBody):
    """Base of request bodies that generate text, streamed or not."""

    stream: bool | None = None

    @property
    def wants_stream(self) -> bool:
        return bool(self.stream)


def forms_of_prompts(each: str) -> str:
    """Return the error message for a field of type `RawPrompts`. `each` is the plural noun for its entries."""
    return (
        "must be a string, a list of strings, a list of token ids or a list of lists of token ids, and a list of "
        f"{each} has at most {MAX_PROMPTS:,}"
    )


def as_prompts(given: str | list[str] | list[int] | list[list[int]]) -> tuple[Prompt, ...]:
    """Return the prompts of a `RawPrompts` field, which must not be empty."""
    if isinstance(given, str):
        return (given,)
    if isinstance(given[0], int):
        return (tuple(given),)
    return tuple(one if isinstance(one, str) else tuple(one) for one in given)
