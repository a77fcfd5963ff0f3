"""Grammar of arguments that are written as members without quotes, with a mark around each text: `a:1,b:<mark>x<mark>`.

Lists and objects are written likewise, so the schema is followed into them. A text ends at the first mark after it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from moiety_engine.structured_outputs.argument_rules import (
    ADVICE,
    NOTES,
    ArgumentRules,
    check_keywords,
    parts_of_union,
)
from moiety_engine.structured_outputs.errors import GrammarRefused
from moiety_engine.structured_outputs.exact_numbers import pointer_part
from moiety_engine.structured_outputs.lark_text import lark_literal, lark_string
from moiety_engine.structured_outputs.schema_parts import at_place, joined_members, properties_of, repeated
from moiety_engine.structured_outputs.text_values import LIMITS, MAX_ALTERNATIVES, TextRules, listed_in
from moiety_text.tools.argument_types import ArgumentSchema
from moiety_wire.grammars import ToolCallGrammar

NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
LISTS = ("items", "prefixItems", "minItems", "maxItems")
OBJECTS = ("properties", "required", "additionalProperties")
_COMMA = '","'
_BARE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_ANY_NAME = f"/{_BARE_NAME.pattern}/"


class MemberArguments(ArgumentRules):
    """Rules of members without quotes. `mark` encloses each text."""

    def __init__(self, mark: str, special: Mapping[str, int]) -> None:
        super().__init__(special)
        self._mark = mark
        self._texts = TextRules(mark, special)
        self._rules: list[str] = []
        self._names: dict[int, str] = {}  # rules of values by the identity of their schemas
        self._tool: ToolCallGrammar | None = None  # and the name of the parameter, whose rules are being made
        self._parameter_name = ""

    def value_rules(self) -> list[str]:
        mark = self._quoted(self._mark)
        values = '"null" | "true" | "false" | any_number | any_text | any_list | any_members'
        return [
            *self._texts.rules(),
            *self._rules,
            f"any_text: {mark} text_value",
            'any_number: %json {"type": "number"}',
            'any_list: "[" (any_value ("," any_value)*)? "]"',
            f'any_member: {_ANY_NAME} ":" any_value',
            'any_members: "{" (any_member ("," any_member)*)? "}"',
            f"any_value: {values}",
        ]

    def _any_parameters(self) -> str:
        return '(any_member ("," any_member)*)?'

    def input_grammar(self, tool: ToolCallGrammar) -> str:
        return self._texts.input_grammar(tool)

    def _input(self, tool: ToolCallGrammar, written: str) -> str:
        return f"{self._name_rule(tool.input_name)} {self._quoted(self._mark)} {self._texts.input(written)}"

    def _parameter(self, tool: ToolCallGrammar, schema: ArgumentSchema, name: str, part: Any) -> str:
        self._tool, self._parameter_name = tool, name
        return f"{self._name_rule(name)} {self._value(schema, part)}"

    def _joined(self, number: int, parts: Sequence[tuple[str, bool]]) -> str:
        rules, text = joined_members(f"{number}", parts, _COMMA)
        self._rules += rules
        return text

    def _name_rule(self, name: str) -> str:
        if _BARE_NAME.fullmatch(name) is not None:
            return lark_string(f"{name}:")
        if self._mark in name:
            raise GrammarRefused(f": the name cannot be written in the model's format of tool calls; {ADVICE}")
        return f'{self._quoted(self._mark)} {lark_literal(name)} {self._quoted(self._mark)} ":"'

    def _value(self, schema: ArgumentSchema, part: Any) -> str:
        """Return the name of the rule of a value. Raises GrammarRefused with the place."""
        if part is True or part == {}:
            return "any_value"
        if not isinstance(part, Mapping):
            raise GrammarRefused(": no value is allowed here; leave the property out")
        if id(part) not in self._names:
            self._names[id(part)] = name = f"value_{len(self._names)}"
            self._rules.append(f"{name}: {' | '.join(self._alternatives(schema, part))}")
        return self._names[id(part)]

    def _alternatives(self, schema: ArgumentSchema, part: Mapping[str, Any]) -> list[str]:
        if "enum" in part or "const" in part:
            return [self._literal(one) for one in _bounded(listed_in(schema, part))]
        if (parts := parts_of_union(schema, part)) is not None:
            keyword = next(one for one in ("anyOf", "oneOf", "allOf", "$ref") if one in part)
            return [
                at_place("" if keyword == "$ref" else f"/{keyword}/{at}", self._value, schema, one)
                for at, one in enumerate(parts)
            ]
        check_keywords(part, (*NOTES, "type", *LIMITS, *NUMBERS, *LISTS, *OBJECTS))
        types = schema.types(part)
        found = []
        if "null" in types:
            found.append('"null"')
        if "boolean" in types:
            found.append('"true" | "false"')
        if types & {"number", "integer"}:
            found.append(self._number(schema, part, "number" if "number" in types else "integer"))
        if "string" in types:
            limits = {key: part[key] for key in part if key in LIMITS}
            mark = self._quoted(self._mark)
            found.append(f"{mark} {self._texts.limited(limits)}" if limits else "any_text")
        if "array" in types:
            found.append(self._list(schema, part))
        if "object" in types:
            found.append(self._members(schema, part))
        if not found:
            raise GrammarRefused("/type: no value has one of these types")
        return found

    def _number(self, schema: ArgumentSchema, part: Mapping[str, Any], type_name: str) -> str:
        bounds = {key: part[key] for key in NUMBERS if key in part}
        assert self._tool is not None, "within a parameter"
        return self._json_rule(self._tool, self._parameter_name, schema.root, {"type": type_name, **bounds})

    def _list(self, schema: ArgumentSchema, part: Mapping[str, Any]) -> str:
        first, items = part.get("prefixItems", []), part.get("items", True)
        if not isinstance(first, list) or isinstance(items, list):
            raise GrammarRefused("/prefixItems: use a list of schemas, and one schema in 'items' for what follows them")
        starts = [at_place(f"/prefixItems/{at}", self._value, schema, one) for at, one in enumerate(first)]
        item = None if items is False else at_place("/items", self._value, schema, items)
        return f'"[" {repeated(item, part, _COMMA, starts)} "]"'

    def _members(self, schema: ArgumentSchema, part: Mapping[str, Any]) -> str:
        properties, more = properties_of(part)
        if not properties:
            if more is False:
                return '"{" "}"'
            value = at_place("/additionalProperties", self._value, schema, more)
            return f'"{{" ({_ANY_NAME} ":" {value} ("," {_ANY_NAME} ":" {value})*)? "}}"'
        required = part.get("required", [])
        parts = []
        for name, one in properties.items():
            value = at_place(f"/properties/{pointer_part(name)}", self._member, schema, name, one)
            parts.append((f"({value})", name in required))
        rules, text = joined_members(f"of_{self._names[id(part)]}", parts, _COMMA)
        self._rules += rules
        return f'"{{" ({text}) "}}"'

    def _member(self, schema: ArgumentSchema, name: str, part: Any) -> str:
        return f"{self._name_rule(name)} {self._value(schema, part)}"

    def _literal(self, value: Any) -> str:
        if isinstance(value, str):
            if self._mark in value:
                raise GrammarRefused(f"/enum: {value[:64]!r} contains the mark that ends a text; {ADVICE}")
            mark = self._quoted(self._mark)
            return f"{mark} {lark_string(value)} {mark}"
        if isinstance(value, Mapping | list):
            raise GrammarRefused(f"/enum: lists and objects are not supported here; {ADVICE}")
        assert self._tool is not None, "within a parameter"
        return self._json_rule(self._tool, self._parameter_name, {}, {"const": value})


def _bounded(values: Sequence[Any]) -> Sequence[Any]:
    if not values:
        raise GrammarRefused("/enum: no value has one of the types")
    if len(values) > MAX_ALTERNATIVES:
        raise GrammarRefused(f"/enum: there are more than {MAX_ALTERNATIVES:,} values; {ADVICE}")
    return values
