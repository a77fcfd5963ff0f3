"""Base of the grammars of arguments that are not one JSON object."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moiety_engine.structured_outputs.errors import GrammarRefused
from moiety_engine.structured_outputs.exact_numbers import decode_exactly, encode_exactly, pointer_part
from moiety_engine.structured_outputs.exact_schemas import ExactSchema, check_references, exact_schema
from moiety_engine.structured_outputs.lark_text import quoted_with_tokens
from moiety_text.tools.argument_types import ArgumentSchema, resolve_reference
from moiety_wire.grammars import ToolCallGrammar

ADVICE = "leave it out, or leave 'strict' out"
NOTES = ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "nullable")
_DEFINITIONS = ("$defs", "definitions")
_OF_TOOLS = (*NOTES, "type", "properties", "required", "additionalProperties", *_DEFINITIONS, "$schema", "$id")
_MAX_REFERENCES = 16  # one after another


class ArgumentRules:
    """Rules of the arguments of some tools.

    `json_schemas` are those of the rules `json_0`, `json_1` and so on. Subclasses write the parameters of a format.
    Parameters come in the order of the schema's `properties`.
    """

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        self.json_schemas: list[ExactSchema] = []
        self._places: list[tuple[str, str]] = []  # of these schemas, and their texts
        self._schemas: list[ArgumentSchema] = []  # kept, since subclasses know parts of them by identity

    def add_tool(self, number: int, tool: ToolCallGrammar) -> str:
        """Return the rule of a tool's arguments. Raises GrammarRefused, ValueError and RecursionError."""
        if tool.input_grammar:
            return f"arguments_{number}: {self._input(tool, f'@input_{number}')}"
        root = decode_exactly(tool.schema)
        if not isinstance(root, Mapping):
            raise GrammarRefused("a JSON schema of a tool's parameters must be an object")
        where = f"in the parameters of the tool {tool.name!r}, "
        try:
            check_references(root)
            check_keywords(root, _OF_TOOLS)
            properties, required = root.get("properties", {}), root.get("required", [])
            if not isinstance(properties, Mapping) or not isinstance(required, list):
                raise GrammarRefused("'properties' must be an object and 'required' a list")
            for name in required:
                if not isinstance(name, str) or name not in properties:
                    raise GrammarRefused(f"/required: {name!r} is not among the properties; add it there")
            if not properties and not isinstance(root.get("additionalProperties", True), bool):
                raise GrammarRefused(f"/additionalProperties: {unsupported('additionalProperties')}")
        except GrammarRefused as exc:
            raise GrammarRefused(f"{where}{exc}") from exc
        if not properties:
            is_free = root.get("additionalProperties") is not False
            return f"arguments_{number}: {self._any_parameters() if is_free else ''}"
        schema = ArgumentSchema(root)
        self._schemas.append(schema)
        parts: list[tuple[str, bool]] = []
        for name, part in properties.items():
            pointer = f"/properties/{pointer_part(name)}"
            try:
                parts.append((f"({self._parameter(tool, schema, name, part)})", name in required))
            except GrammarRefused as exc:
                raise GrammarRefused(f"{where}{pointer[:200]}{exc}") from exc
        return f"arguments_{number}: {self._joined(number, parts)}"

    def place_of(self, number: int) -> tuple[str, str]:
        """Return the position of the schema of a rule `json_…` as a phrase, and the schema as text."""
        return self._places[number]

    def value_rules(self) -> list[str]:
        """Return the rules that those of the arguments refer to."""
        raise NotImplementedError

    def input_grammar(self, tool: ToolCallGrammar) -> str:
        """Return the grammar of a tool's input, to which the rule of its arguments refers. Raises GrammarRefused."""
        return tool.input_grammar

    def _input(self, tool: ToolCallGrammar, written: str) -> str:
        """Return the text of a rule of arguments whose only one is an input of the grammar `written`."""
        raise NotImplementedError

    def _any_parameters(self) -> str:
        """Return the text of a rule of any parameters."""
        raise NotImplementedError

    def _parameter(self, tool: ToolCallGrammar, schema: ArgumentSchema, name: str, part: Any) -> str:
        """Return the text of a rule of one parameter. Raises GrammarRefused with the rest of the place."""
        raise NotImplementedError

    def _joined(self, number: int, parts: Sequence[tuple[str, bool]]) -> str:
        """Return parameters in a row, each with whether it is required."""
        return " ".join(part if is_required else f"{part}?" for part, is_required in parts)

    def _json_rule(self, tool: ToolCallGrammar, name: str, root: Mapping[str, Any], part: Any) -> str:
        """Return the name of a new rule of JSON of a part of the schema of the parameter `name`."""
        found = _with_definitions(root, part)
        self.json_schemas.append(exact_schema(found))
        place = f"in the parameter {name!r} of the tool {tool.name!r}"
        self._places.append((place, encode_exactly(found)))
        return f"json_{len(self.json_schemas) - 1}"

    def _quoted(self, text: str) -> str:
        return quoted_with_tokens(text, self._special)


def check_keywords(part: Mapping[str, Any], allowed: Sequence[str]) -> None:
    """Raise GrammarRefused, with the place, for a keyword that is not among `allowed`."""
    for keyword in part:
        if keyword not in allowed:
            raise GrammarRefused(f"/{pointer_part(keyword)}: {unsupported(keyword)}")


def unsupported(keyword: str) -> str:
    return f"the keyword {keyword!r} is not supported here in the model's format of tool calls; {ADVICE}"


def parts_of_union(schema: ArgumentSchema, part: Mapping[str, Any]) -> Sequence[Any] | None:
    """Return the subschemas of which a value has one: of `anyOf`, `oneOf`, a reference or a single `allOf`.

    None where the schema has none of these. Raises GrammarRefused, also for alternatives that may overlap in `oneOf`.
    """
    for keyword in ("anyOf", "oneOf", "allOf"):
        if isinstance(parts := part.get(keyword), Sequence) and not isinstance(parts, str):
            check_keywords(part, (*NOTES, keyword))
            if keyword == "allOf" and len(parts) != 1:
                raise GrammarRefused(f"/allOf: {unsupported('allOf')}")
            if keyword == "oneOf" and sum(len(schema.types(one)) for one in parts) > len(schema.types(part)):
                raise GrammarRefused("/oneOf: its alternatives may overlap; use 'anyOf', or let them differ in type")
            return parts
    if isinstance(reference := part.get("$ref"), str):
        check_keywords(part, (*NOTES, "$ref"))
        target = resolve_reference(schema.root, reference)
        if target is None:
            raise GrammarRefused(f"/$ref: {reference[:64]!r} does not exist in the schema")
        return [target]
    return None


def follow_references(schema: ArgumentSchema, part: Any) -> Any:
    """Return the schema to which references alone lead from a part; the part itself where it has none."""
    for _ in range(_MAX_REFERENCES):
        parts = parts_of_union(schema, part) if isinstance(part, Mapping) else None
        if parts is None or len(parts) != 1:
            break
        part = parts[0]
    return part


def _with_definitions(root: Mapping[str, Any], part: Any) -> Any:
    """Return a part of the schema with the definitions that it refers to. Raises GrammarRefused."""
    references = list(_references(part))
    for one in references:
        if not one.startswith(("#/$defs/", "#/definitions/")):
            raise GrammarRefused(f": the reference {one[:64]!r} must point into '$defs'; move its target there")
    if not references:
        return part
    if not isinstance(part, Mapping):
        raise GrammarRefused(": a schema must be an object or a boolean")
    return {**{key: root[key] for key in _DEFINITIONS if key in root}, **part}


def _references(part: Any) -> Iterator[str]:
    waiting = [part]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Mapping):
            if isinstance(reference := one.get("$ref"), str):
                yield reference
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
