"""JSON schemas of types, from what decodes and encodes them: pydantic's models, and whatever msgspec knows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Protocol, runtime_checkable

import msgspec
from msgspec import Meta, inspect
from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

RULES = "rules"
"""What a msgspec struct may have, as a ClassVar: JSON schemas of what holds between its fields."""

_EITHER = "either"
_REFERENCE = "#/components/schemas/"
_SCALARS = (str, int, float, bool, type(None))


def shows(**schema: Any) -> Meta:
    """Of a struct's field that a service checks: what its JSON schema has to say of that."""
    return Meta(extra_json_schema=schema)


def either(*types: type) -> Meta:
    """Of a field that holds one of these objects, which msgspec's types have no words for."""
    references = [{"$ref": _REFERENCE + one.__name__} for one in types]
    return Meta(extra_json_schema={"anyOf": references}, extra={_EITHER: types})


class NameTaken(Exception):
    """A defect of ours: two types of one name would have one schema; rename one of them."""


@runtime_checkable
class ValidatorRule(Protocol):
    """What a pydantic validator may be, to say in the schema what it checks. `settings` are the gateway's bounds."""

    def shown(self, schema: JsonSchemaValue, settings: Any) -> JsonSchemaValue:
        """The schema of what it lets through, from that of what it is given or gives."""
        ...


class Schemas:
    """The schemas of one document: of each type that it is asked for, and of those that these refer to."""

    def __init__(self, settings: Any) -> None:
        self.components: dict[str, Any] = {}
        self._generator = type("_BodySchema", (_BodySchema,), {"settings": settings})

    def of(self, what: Any) -> Any:
        """The schema of a type; or of a schema, in which types may stand for theirs. Raises NameTaken."""
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
    """The types that fields of `either` have, anywhere in what msgspec knows of a type."""
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
    """pydantic's, with what our validators say."""

    settings: ClassVar[Any]

    def function_after_schema(self, schema: core_schema.AfterValidatorFunctionSchema) -> JsonSchemaValue:
        return self._ruled(super().function_after_schema(schema), schema["function"]["function"])

    def function_before_schema(self, schema: core_schema.BeforeValidatorFunctionSchema) -> JsonSchemaValue:
        return self._ruled(super().function_before_schema(schema), schema["function"]["function"])

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def _ruled(self, schema: JsonSchemaValue, rule: Any) -> JsonSchemaValue:
        return rule.shown(schema, self.settings) if isinstance(rule, ValidatorRule) else schema
