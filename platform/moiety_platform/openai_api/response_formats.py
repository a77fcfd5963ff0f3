"""Response formats in OpenAI's and vLLM's fields, converted to a grammar for the engine.

The engine decides whether it supports a schema, regular expression or grammar. This module checks only that one is
given and that it is within the operator's size limit.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

import msgspec
from pydantic import AfterValidator, ConfigDict, Field, ValidationInfo, model_validator

from moiety_platform.errors import UNSUPPORTED_RESPONSE_FORMAT
from moiety_platform.inference.body_fields import StrictBody, refuse, shape_of, shows
from moiety_platform.inference.field_support import ignored, mapped, refused
from moiety_text.tools.offer import ToolOffer
from moiety_wire.grammars import GrammarKind, GrammarSpec

MAX_CHOICES = 4096
KINDS = ("text", "json_object", "json_schema")


def _check_size(value: Any, info: ValidationInfo) -> Any:
    data = value.encode(errors="replace") if isinstance(value, str) else msgspec.json.encode(value)
    most = shape_of(info).max_grammar_bytes
    if len(data) > most:
        raise refuse(f"it has {len(data):,} bytes; it may have {most:,}", UNSUPPORTED_RESPONSE_FORMAT)
    return value


def _check_kind(value: str) -> str:
    if value not in KINDS:
        raise refuse(f"{value[:64]!r} is not supported; use 'text', 'json_object' or 'json_schema'")
    return value


def _check_choices(value: list[str]) -> list[str]:
    if not all(value):
        raise refuse("a choice is empty; each must have at least one character")
    return value


FORMS = MappingProxyType(dict.fromkeys(("json", "guided_json"), "must be a JSON schema, as an object or as its text"))

_Kind = Annotated[str, AfterValidator(_check_kind), shows(enum=list(KINDS))]
_Name = Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,64}$")]
GrammarSchema = Annotated[dict[str, Any], AfterValidator(_check_size)]
_Text = Annotated[str, Field(min_length=1), AfterValidator(_check_size)]
_SchemaOrText = Annotated[dict[str, Any] | str, AfterValidator(_check_size)]
_Choices = Annotated[
    list[Annotated[str, shows(minLength=1)]],
    Field(fail_fast=True, min_length=1, max_length=MAX_CHOICES),
    AfterValidator(_check_choices),
    AfterValidator(_check_size),
]
_NEEDS: dict[str, Any] = {"if": {"properties": {"type": {"const": "json_schema"}}}}


class NamedSchema(StrictBody):
    """A named JSON schema. Answers follow the schema with and without `strict`."""

    model_config = ConfigDict(serialize_by_alias=True)

    name: _Name
    json_schema: Annotated[GrammarSchema | None, Field(alias="schema")] = None  # None: any JSON object
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(StrictBody):
    """`response_format` of chat completions and completions."""

    model_config = ConfigDict(
        json_schema_extra={**_NEEDS, "then": {"anyOf": [{"required": ["json_schema"]}, {"required": ["schema"]}]}}
    )

    type: _Kind
    json_schema: NamedSchema | None = None
    bare_schema: Annotated[
        GrammarSchema | None, Field(alias="schema"), mapped("Schema without a name, as in llama.cpp and Fireworks.")
    ] = None

    @model_validator(mode="after")
    def _has_schema(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None and self.bare_schema is None:
            raise refuse('\'json_schema\' is missing; send {"name": …, "schema": {…}}')
        return self

    def grammar(self) -> GrammarSpec | None:
        with_name = self.json_schema if self.type == "json_schema" else None
        named = None if with_name is None else with_name.json_schema
        return _json_grammar(self.type, self.bare_schema if named is None else named)


class TextFormat(StrictBody):
    """`text.format` of responses, which has the schema beside the type."""

    model_config = ConfigDict(
        serialize_by_alias=True, json_schema_extra={**_NEEDS, "then": {"required": ["name", "schema"]}}
    )

    type: _Kind
    name: _Name | None = None
    json_schema: Annotated[GrammarSchema | None, Field(alias="schema")] = None
    description: str | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> Self:
        if self.type == "json_schema" and (self.json_schema is None or self.name is None):
            raise refuse("'name' and 'schema' are needed for the type 'json_schema'")
        return self

    def grammar(self) -> GrammarSpec | None:
        return _json_grammar(self.type, self.json_schema)


class StructuredOutputs(StrictBody):
    """vLLM's `structured_outputs` field, which names exactly one kind of grammar."""

    json_schema: Annotated[_SchemaOrText | None, Field(alias="json")] = None
    regex: _Text | None = None
    choice: _Choices | None = None
    grammar: _Text | None = None
    json_object: Annotated[Literal[True], shows(const=True)] | None = None
    structural_tag: Annotated[Any, refused("send 'tools' with 'strict', or one of the other grammars", [])] = None
    disable_any_whitespace: Annotated[bool | None, ignored("JSON may have white space between its parts.")] = None
    disable_additional_properties: Annotated[
        bool | None, refused("set it in the schema: 'additionalProperties': false", [False])
    ] = None
    whitespace_pattern: Annotated[str | None, ignored("JSON may have white space between its parts.")] = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if not self.grammars():
            raise refuse("it needs one of json, regex, choice, grammar and json_object", UNSUPPORTED_RESPONSE_FORMAT)
        return self

    def grammars(self) -> list[GrammarSpec]:
        found = grammars_of(self.json_schema, self.regex, self.choice, self.grammar)
        return [*found, GrammarSpec(GrammarKind.JSON_OBJECT)] if self.json_object else found


class StructuredOutputBody(StrictBody):
    """Fields of a request body that set the response format.

    `guided_…` are the older names in vLLM, `regex` and `ebnf` the names in SGLang.
    """

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: _SchemaOrText | None = None
    guided_regex: _Text | None = None
    guided_choice: _Choices | None = None
    guided_grammar: _Text | None = None
    regex: _Text | None = None
    ebnf: _Text | None = None
    guided_decoding_backend: Annotated[str | None, ignored("The engine has one backend.")] = None
    guided_whitespace_pattern: Annotated[str | None, ignored("JSON may have white space between its parts.")] = None

    def grammar(self) -> GrammarSpec | None:
        """Return the grammar of the answer, or None for free text. Raises a validator's error for several grammars."""
        guided = (self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)
        others = (self.regex, self.ebnf, self.structured_outputs, self.response_format)
        if (*guided, *others).count(None) == len(guided) + len(others):
            return None
        found = grammars_of(*guided) + grammars_of(None, self.regex, None, self.ebnf)
        if self.structured_outputs is not None:
            found += self.structured_outputs.grammars()
        if self.response_format is not None and (one := self.response_format.grammar()) is not None:
            found.append(one)
        if len(found) > 1:
            message = (
                "an answer has one format; send only one of 'response_format', 'structured_outputs', 'guided_…', "
                "'regex' and 'ebnf'"
            )
            raise refuse(message, UNSUPPORTED_RESPONSE_FORMAT)
        return found[0] if found else None


def format_beside(offer: ToolOffer | None, grammar: GrammarSpec | None) -> GrammarSpec | None:
    """Return the response format of answers beside tools; None where the answer is a call and has no text."""
    return None if offer is not None and offer.must_call else grammar


def grammars_of(
    schema: dict[str, Any] | str | None, regex: str | None, choices: list[str] | None, grammar: str | None
) -> list[GrammarSpec]:
    """Return one grammar for each argument that is not None."""
    found = []
    if schema is not None:
        text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
        found.append(GrammarSpec(GrammarKind.JSON_SCHEMA, text))
    if regex is not None:
        found.append(GrammarSpec(GrammarKind.REGEX, regex))
    if choices is not None:
        found.append(GrammarSpec(GrammarKind.CHOICE, msgspec.json.encode(choices).decode()))
    if grammar is not None:
        found.append(GrammarSpec(GrammarKind.GRAMMAR, grammar))
    return found


def _json_grammar(kind: str, schema: dict[str, Any] | None) -> GrammarSpec | None:
    """Return the grammar of a kind in KINDS. JSON without a schema is any object."""
    if kind == "text":
        return None
    return GrammarSpec(GrammarKind.JSON_OBJECT) if schema is None else grammars_of(schema, None, None, None)[0]
