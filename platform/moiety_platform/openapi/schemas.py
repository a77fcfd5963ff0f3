"""JSON schemas of pydantic models and of all types that msgspec supports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Protocol, runtime_checkable

import msgspec
from msgspec import Meta, inspect
from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

RULES = "rules"
"""Name of a msgspec struct's optional ClassVar with JSON schemas of the constraints between its fields."""

_EITHER = "either"
_REFERENCE = "#/components/schemas/"
_SCALARS = (str, int, float, bool, type(None))


def shows(**schema: Any) -> Meta:
    """Return metadata that adds to the JSON schema of a struct's field, for constraints that a service checks."""
    return Meta(extra_json_schema=schema)


def either(*types: type) -> Meta:
    """Return metadata for a field that holds one of these types. msgspec's types cannot express that."""
    references = [{"$ref": _REFERENCE + one.__name__} for one in types]
    return Meta(extra_json_schema={"anyOf": references}, extra={_EITHER: types})


class NameTaken(Exception):
    """Two types with the same name would share one schema. This is a bug: rename one of them."""


@runtime_checkable
class ValidatorRule(Protocol):
    """A pydantic validator that describes its check in the schema. `settings` are the gateway's limits."""

    def shown(self, schema: JsonSchemaValue, settings: Any) -> JsonSchemaValue:
        """Return the schema of accepted values, given the schema of the values before or after validation."""
        ...


class Schemas:
    """Schemas of one document: the requested types and the types that they refer to."""

    def __init__(self, settings: Any) -> None:
        self.components: dict[str, Any] = {}
        self._generator = type("_BodySchema", (_BodySchema,), {"settings": settings})

    def of(self, what: Any) -> Any:
        """Return the schema of a type, or a schema in which types are replaced by theirs. Raises NameTaken."""
        if isinstance(what, Mapping):
            return {key: self.of(value) for key, value in what.items()}
        if isinstance(what, list | tuple):
            return [self.of(value) for value in what]
        if isinstance(what, _SCALARS):
            return what
        if isinstance(what, type) and issubclass(what, BaseModel):
            return self._of_model(what)
        for one in _eithers(inspect.type_info(what)):
            self.of(one)
        (schema,), components = msgspec.json.schema_components([what], ref_template=_REFERENCE + "{name}")
        if rules := getattr(what, RULES, None):
            components[what.__name__]["allOf"] = rules
        self._add(components)
        return schema

    def _of_model(self, model: type[BaseModel]) -> dict[str, Any]:
        schema = model.model_json_schema(ref_template=_REFERENCE + "{model}", schema_generator=self._generator)
        self._add(schema.pop("$defs", {}))
        self._add({model.__name__: schema})
        return {"$ref": _REFERENCE + model.__name__}

    def _add(self, components: Mapping[str, Any]) -> None:
        for name, schema in components.items():
            if "description" in schema:
                schema["description"] = " ".join(schema["description"].split())
            if self.components.setdefault(name, schema) != schema:
                raise NameTaken(f"two types of the API are named {name}; rename one of them")


def _eithers(info: Any) -> Iterator[type]:
    """Yield the types of all `either` fields in msgspec's description of a type."""
    waiting, seen = [info], set[int]()
    while waiting:
        one = waiting.pop()
        if isinstance(one, list | tuple):
            waiting += one
        elif isinstance(one, inspect.Type | inspect.Field) and id(one) not in seen:
            seen.add(id(one))
            if isinstance(one, inspect.Metadata):
                yield from (one.extra or {}).get(_EITHER, ())
            waiting += [getattr(one, name) for name in one.__struct_fields__]


class _BodySchema(GenerateJsonSchema):
    """pydantic's schema generator, extended by the rules of our validators."""

    settings: ClassVar[Any]

    def function_after_schema(self, schema: core_schema.AfterValidatorFunctionSchema) -> JsonSchemaValue:
        return self._ruled(super().function_after_schema(schema), schema["function"]["function"])

    def function_before_schema(self, schema: core_schema.BeforeValidatorFunctionSchema) -> JsonSchemaValue:
        return self._ruled(super().function_before_schema(schema), schema["function"]["function"])

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def _ruled(self, schema: JsonSchemaValue, rule: Any) -> JsonSchemaValue:
        return rule.shown(schema, self.settings) if isinstance(rule, ValidatorRule) else schema
