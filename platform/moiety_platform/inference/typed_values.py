"""Validation of JSON objects that name their type in the field `type`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import PlainValidator, ValidationInfo, field_validator

from moiety_platform.inference.body_fields import StrictBody, refuse

Body = TypeVar("Body", bound=StrictBody)


def as_named_type(
    value: Any,
    info: ValidationInfo,
    schemas: Mapping[str, type[Body]],
    other: type[StrictBody],
    default: str | None = None,
) -> Body:
    """Validate a value as the type that it names, so that errors refer to that type only.

    `default` is the type of a value that names none. A value of an unknown type is validated as `other`, which must be
    one of the types or raise an error.
    """
    kind = (value.get("type") if isinstance(value, dict) else None) or default
    schema: type[Any] = schemas.get(kind, other) if isinstance(kind, str) else other
    validated: Body = schema.model_validate(value, context=info.context)
    return validated


class UnknownType(StrictBody):
    """Base of values of an unknown type. Validation raises an error that names the type."""

    type: str

    @staticmethod
    def refusal(kind: str) -> str:
        """Return the error's text for the beginning of a type's name."""
        raise NotImplementedError

    @field_validator("type")
    @classmethod
    def _known_type(cls, value: str) -> str:
        raise refuse(cls.refusal(value[:64]))


def named_type(
    schemas: Mapping[str, type[Body]], other: type[StrictBody], shown: Any, default: str | None = None
) -> PlainValidator:
    """Return a validator that reads a value with `as_named_type`; OpenAPI documents show it as the type `shown`."""

    def validate(value: Any, info: ValidationInfo) -> Body:
        return as_named_type(value, info, schemas, other, default)

    return PlainValidator(validate, json_schema_input_type=shown)
