"""Grammar of arguments that have a tag for each parameter, in which text is written as it is.

A value of text ends at the first tag after it, so it can be any text; a value that is no string is JSON of its schema.
A schema in which a text could be read as a value of another type, which it does not allow, is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from moiety_engine.structured_outputs.errors import GrammarRefused
from moiety_engine.structured_outputs.exact_numbers import decode_exactly, pointer_part
from moiety_engine.structured_outputs.exact_schemas import ExactSchema, exact_schema
from moiety_engine.structured_outputs.lark_text import lark_string, quoted_with_tokens, split_at_token
from moiety_engine.structured_outputs.string_expressions import string_expressions
from moiety_text.tools.argument_types import STRING, ArgumentSchema, resolve_reference, typed_argument, types_of_value
from moiety_wire.grammars import ParameterTagsGrammar, ToolCallGrammar

_ADVICE = "leave it out, or leave 'strict' out"
_NOTES = ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "nullable")
_OF_TOOLS = (
    *_NOTES,
    "type",
    "properties",
    "required",
    "additionalProperties",
    "$defs",
    "definitions",
    "$schema",
    "$id",
)
_DEFINITIONS = ("$defs", "definitions")
_LIMITS = frozenset(["pattern", "format", "minLength", "maxLength"])
_PARAMETER_NAME = r"/[A-Za-z_][A-Za-z0-9_.-]*/"
_MAX_REFERENCES = 16  # one after another
_MAX_ALTERNATIVES = 4096


class TaggedArguments:
    """Rules of the arguments of some tools. `json_schemas` are those of the rules `json_0`, `json_1` …"""

    def __init__(self, tags: ParameterTagsGrammar, special: Mapping[str, int]) -> None:
        self._tags = tags
        self._special = special
        self.json_schemas: list[ExactSchema] = []
        self._places: list[tuple[str, str]] = []  # of these schemas, and their texts
        self._limited: list[str] = []  # rules of strings with limits
        self._num_limited = 0

    def add_tool(self, number: int, tool: ToolCallGrammar) -> str:
        """Return the rule of a tool's arguments. Raises GrammarRefused, ValueError and RecursionError."""
        root = decode_exactly(tool.schema)
        if not isinstance(root, Mapping):
            raise GrammarRefused("a JSON schema of a tool's parameters must be an object")
        where = f"in the parameters of the tool {tool.name!r}, "
        for keyword in root:
            if keyword not in _OF_TOOLS:
                raise GrammarRefused(f"{where}/{pointer_part(keyword)}: {self._unsupported(keyword)}")
        properties, required = root.get("properties", {}), root.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            raise GrammarRefused(f"{where}'properties' must be an object and 'required' a list")
        for name in required:
            if name not in properties:
                raise GrammarRefused(f"{where}/required: {name!r} is not among the properties; add it there")
        if not properties:
            is_free = root.get("additionalProperties") is not False
            return f"arguments_{number}: {self._any_parameters() if is_free else ''}"
        schema = ArgumentSchema(root)
        parts = []
        for name, part in properties.items():
            pointer = f"/properties/{pointer_part(name)}"
            try:
                rule = f"({self._parameter(tool, schema, name, part)})"
            except GrammarRefused as exc:
                raise GrammarRefused(f"{where}{pointer[:200]}{exc}") from exc
            parts.append(rule if name in required else f"{rule}?")
        return f"arguments_{number}: {' '.join(parts)}"

    def place_of(self, number: int) -> tuple[str, str]:
        """Return where the schema of a rule `json_…` stands, as words, and the schema as text."""
        return self._places[number]

    def value_rules(self) -> list[str]:
        """Return the rules of values of text, with the tag after them."""
        end, head = self._tags.end, split_at_token(self._tags.end, self._special)
        between = self._quoted(self._tags.between)
        if head is None:
            return [*self._limited, f"value_end[lazy]: ANY {lark_string(end)}", f"text_value: value_end {between}"]
        if not head:
            return [*self._limited, f"text_value: TEXT? {self._quoted(end)} {between}"]
        rest = self._quoted(end[len(head) :])
        return [
            *self._limited,
            f"value_head[lazy]: ANY {lark_string(head)}",
            f"text_value: value_head+ {rest} {between}",
        ]

    def _parameter(self, tool: ToolCallGrammar, schema: ArgumentSchema, name: str, part: Any) -> str:
        tags = self._tags
        if tags.to_value.strip()[:1] in name:
            raise GrammarRefused(f": the name cannot be written in the model's format of tool calls; {_ADVICE}")
        if STRING not in schema.types(part):
            found = self._json_schema(schema.root, part)
            self.json_schemas.append(exact_schema(found))
            place = f"in the parameter {name!r} of the tool {tool.name!r}"
            self._places.append((place, msgspec.json.encode(found).decode()))
            value = f"{lark_string(tags.padding)} json_{len(self.json_schemas) - 1} {lark_string(tags.padding)}"
            return f"{self._quoted(tags.to_name + name + tags.to_json)} {value} {self._quoted(tags.end + tags.between)}"
        opened = self._quoted(tags.to_name + name + tags.to_value)
        if isinstance(part, Mapping) and not _LIMITS.isdisjoint(part):
            return f"{opened} {self._limited_text(part, schema.types(part))}"
        values = self._listed_values(schema, part)
        if values is None:
            return f"{opened} {lark_string(tags.padding)} text_value"
        if len(values) > _MAX_ALTERNATIVES:
            raise GrammarRefused(f"/enum: there are more than {_MAX_ALTERNATIVES:,} values; {_ADVICE}")
        strings = [one for one in values if isinstance(one, str)]
        others = [one for one in values if not isinstance(one, str)]
        if tags.to_json == tags.to_value:
            strings, others = values, []
        rules = [self._one_of(opened, strings), self._one_of(self._quoted(tags.to_name + name + tags.to_json), others)]
        return " | ".join(rule for rule in rules if rule)

    def _one_of(self, opened: str, values: Sequence[Any]) -> str:
        """Return the rule of a parameter with one of these values; "" for none of them."""
        tags = self._tags
        texts = [lark_string(tags.padding + _text_of(value) + tags.padding) or '""' for value in values]
        return f"{opened} ({' | '.join(texts)}) {self._quoted(tags.end + tags.between)}" if texts else ""

    def _limited_text(self, part: Mapping[str, Any], types: frozenset[str]) -> str:
        """Return the rule of a string with a pattern, a format or a length. Raises GrammarRefused."""
        self._check_keywords(part, (*_NOTES, "type", *_LIMITS))
        if types - {STRING, "null"}:
            raise GrammarRefused(f": some strings beside values of other types cannot be told apart; {_ADVICE}")
        tags, number = self._tags, self._num_limited
        self._num_limited += 1
        excluded = "" if split_at_token(tags.end, self._special) == "" else tags.end[0]
        body = " & ".join(f"/{one}/" for one in string_expressions(part, excluded))
        self._limited.append(f"LIMITED_{number}: {body}")
        if split_at_token(tags.end, self._special) is not None:
            return f"LIMITED_{number} {self._quoted(tags.end + tags.between)}"
        end = lark_string(tags.padding + tags.end)
        self._limited.append(f"limited_{number}[lazy]: LIMITED_{number} {end}")
        return f"{lark_string(tags.padding)} limited_{number} {self._quoted(tags.between)}"

    def _any_parameters(self) -> str:
        tags = self._tags
        opened = f"{self._quoted(tags.to_name)} {_PARAMETER_NAME} {self._quoted(tags.to_value)}"
        return f"({opened} {lark_string(tags.padding)} text_value)*"

    def _listed_values(self, schema: ArgumentSchema, part: Any) -> list[Any] | None:
        """Return all values of a parameter that may be a string; None where it may be any text.

        Raises GrammarRefused.
        """
        free: set[str] = set()
        listed: list[Any] = []
        self._collect(schema, part, free, listed, 0)
        types = schema.types(part)
        is_told = self._tags.to_json != self._tags.to_value  # the tag tells strings from other values
        if STRING in free:
            if types - free - {"null"} and not is_told:
                raise GrammarRefused(
                    f": a value that is either any string or one of some other values cannot be told apart; {_ADVICE}"
                )
            return None
        if "null" in free:
            listed.append(None)
        if free - {"null"}:
            raise GrammarRefused(f": some strings beside values of other types cannot be told apart; {_ADVICE}")
        for value in listed:
            text = _text_of(value)
            if self._tags.end in text:
                raise GrammarRefused(f"/enum: {text[:64]!r} contains the tag that ends a value; {_ADVICE}")
            if not is_told and typed_argument(text, types) != _json_of(value):
                raise GrammarRefused(f"/enum: {text[:64]!r} cannot be told from a value of another type; {_ADVICE}")
        return listed

    def _collect(self, schema: ArgumentSchema, part: Any, free: set[str], listed: list[Any], depth: int) -> None:
        """Collect the types of which every value is allowed, and the values that are listed."""
        if not isinstance(part, Mapping):
            free |= schema.types(part)
            return
        allowed = (*_NOTES, "type")
        if "enum" in part or "const" in part:
            self._check_keywords(part, (*allowed, "enum", "const"))
            values = [part["const"]] if "const" in part else part["enum"]
            allowed_types = schema.types(part)
            listed += [one for one in values if allowed_types & set(types_of_value(one))]
            return
        for keyword in ("anyOf", "oneOf"):
            if isinstance(parts := part.get(keyword), Sequence) and depth < _MAX_REFERENCES:
                self._check_keywords(part, (*_NOTES, keyword))
                for one in parts:
                    self._collect(schema, one, free, listed, depth + 1)
                return
        if isinstance(reference := part.get("$ref"), str) and depth < _MAX_REFERENCES:
            self._check_keywords(part, (*_NOTES, "$ref"))
            self._collect(schema, resolve_reference(schema.root, reference), free, listed, depth + 1)
            return
        self._check_keywords(part, allowed)
        free |= schema.types(part)

    def _check_keywords(self, part: Mapping[str, Any], allowed: Sequence[str]) -> None:
        for keyword in part:
            if keyword not in allowed:
                raise GrammarRefused(f"/{pointer_part(keyword)}: {self._unsupported(keyword)}")

    def _json_schema(self, root: Mapping[str, Any], part: Any) -> Any:
        """Return a part of the schema with the definitions that it refers to. Raises GrammarRefused."""
        references = list(_references(part))
        for one in references:
            if not one.startswith(("#/$defs/", "#/definitions/")):
                raise GrammarRefused(f": the reference {one[:64]!r} must point into '$defs'; move its target there")
        if not references:
            return part
        return {**{key: root[key] for key in _DEFINITIONS if key in root}, **part}

    def _unsupported(self, keyword: str) -> str:
        return f"the keyword {keyword!r} is not supported here in the model's format of tool calls; {_ADVICE}"

    def _quoted(self, text: str) -> str:
        return quoted_with_tokens(text, self._special)


def _json_of(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _text_of(value: Any) -> str:
    return value if isinstance(value, str) else _json_of(value)


def _references(part: Any) -> list[str]:
    found, waiting = [], [part]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Mapping):
            if isinstance(reference := one.get("$ref"), str):
                found.append(reference)
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
    return found
