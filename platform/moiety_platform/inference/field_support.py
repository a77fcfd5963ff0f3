"""Treatment of each field of a request body: served, mapped to a near feature, ignored or refused.

A field without a mark is served. A mark is the outermost metadata of the annotation:
`user: Annotated[str | None, ignored("…")] = None`.
The reference of all fields in the documentation is made from them. An answer names the ignored fields that its request
has set in `x-moiety-ignored-fields`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema
from pydantic_core.core_schema import no_info_before_validator_function

from moiety_platform.inference.body_fields import refuse


class FieldTreatment(StrEnum):
    """Treatment of a field by this server."""

    SERVED = "served"
    MAPPED = "mapped"
    IGNORED = "ignored"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class FieldSupport:
    """Mark of a field. `note` says what it is mapped to, why it is ignored, or why it is refused."""

    treatment: FieldTreatment
    note: str = ""


@dataclass(frozen=True, slots=True)
class FieldRefusal(FieldSupport):
    """Mark of a refused field that lets only `allowed` values pass, beside null."""

    allowed: tuple[Any, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_before_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": [None, *self.allowed]}

    def _check(self, value: Any) -> Any:
        if value is not None and not any(value == one and type(value) is type(one) for one in self.allowed):
            raise refuse(self.note)
        return value


SERVED = FieldSupport(FieldTreatment.SERVED)


def mapped(note: str) -> FieldSupport:
    """Return the mark of a field that is mapped to a near feature."""
    return FieldSupport(FieldTreatment.MAPPED, note)


def ignored(note: str) -> FieldSupport:
    """Return the mark of a field that is accepted with any valid value and has no effect."""
    return FieldSupport(FieldTreatment.IGNORED, note)


def refused(note: str, allowed: Sequence[Any] | None = None) -> FieldSupport:
    """Return the mark of a field that may only have values without effect, such as null.

    With `allowed` the mark itself refuses all values but these and null, and the error has the note. Otherwise the
    field's own validator does.
    """
    if allowed is None:
        return FieldSupport(FieldTreatment.REFUSED, note)
    return FieldRefusal(FieldTreatment.REFUSED, note, tuple(allowed))


def support_of(schema: type[BaseModel], field: str) -> FieldSupport:
    """Return the mark of a field."""
    marks = (one for one in schema.model_fields[field].metadata if isinstance(one, FieldSupport))
    return next(marks, SERVED)


@cache
def _ignored_of(schema: type[BaseModel]) -> frozenset[str]:
    return frozenset(
        name for name in schema.model_fields if support_of(schema, name).treatment is FieldTreatment.IGNORED
    )


@cache
def ignorable_fields(schema: type[BaseModel]) -> frozenset[str]:
    """Return the fields that `ignored_fields` can yield, or whose objects have such fields."""
    return _ignored_of(schema) | {
        name for name, field in schema.model_fields.items() if any(map(ignorable_fields, _objects_in(field.annotation)))
    }


def _objects_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the schemas of a field whose value may be an object; those of lists are not among them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Union, UnionType, Annotated):
        for part in get_args(annotation):
            yield from _objects_in(part)


def ignored_fields(body: BaseModel, path: str = "") -> Iterator[str]:
    """Yield the paths of ignored fields that the request has set, in the body and in the option objects in it.

    Lists, such as messages and tools, are not searched.
    """
    ignored_names = _ignored_of(type(body))
    for name in body.model_fields_set:
        value = getattr(body, name)
        if value is None:
            continue
        if name in ignored_names:
            yield path + name
        elif isinstance(value, BaseModel):
            yield from ignored_fields(value, f"{path}{name}.")
