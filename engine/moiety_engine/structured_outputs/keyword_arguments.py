"""Grammar of arguments that are written as Python's keyword arguments: `a=1, b="x"`.

Values are JSON of their schemas with escapes that Python reads alike. `True`, `False` and `None` are allowed in place
of JSON's words where a parameter may have them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from moiety_engine.structured_outputs.argument_rules import ADVICE, NOTES, ArgumentRules
from moiety_engine.structured_outputs.errors import GrammarRefused
from moiety_engine.structured_outputs.exact_schemas import ExactSchema, exact_schema
from moiety_engine.structured_outputs.lark_text import lark_string
from moiety_engine.structured_outputs.schema_parts import joined_members
from moiety_text.tools.argument_types import ArgumentSchema, resolve_reference
from moiety_wire.grammars import ToolCallGrammar

_ESCAPES = 'nrbtf\\"'  # letters after a backslash; Python has no escape of a slash
_NAME = re.compile(r"[^\s=(),'\"\[\]{}]+")
_ANY_NAME = r"/[A-Za-z_][A-Za-z0-9_]*/"
_COMBINING = frozenset(["not", "if", "allOf", "oneOf", "anyOf", "$ref"])
_MAX_DEPTH = 16  # of references and alternatives


class KeywordArguments(ArgumentRules):
    """Rules of Python's keyword arguments."""

    def __init__(self, special: Mapping[str, int]) -> None:
        super().__init__(special)
        self._rows: list[str] = []  # rules of parameters after each other

    def value_rules(self) -> list[str]:
        return self._rows

    def _any_parameters(self) -> str:
        if not any(rule.startswith("any_keyword:") for rule in self._rows):
            anything = exact_schema({})
            options = ExactSchema(anything.schema, _ESCAPES).options(whitespace_pattern=r"\x20")
            self._rows.append(f'any_keyword: {_ANY_NAME} "=" (any_json | "True" | "False" | "None")')
            self._rows.append(f"any_json: %json {anything.encode(**options)}")
        return '(any_keyword (", " any_keyword)*)?'

    def _input(self, tool: ToolCallGrammar, written: str) -> str:
        return f"{lark_string(f'{tool.input_name}=')} {lark_string(chr(34))} {written} {lark_string(chr(34))}"

    def _parameter(self, tool: ToolCallGrammar, schema: ArgumentSchema, name: str, part: Any) -> str:
        if _NAME.fullmatch(name) is None:
            raise GrammarRefused(f": the name cannot be written in the model's format of tool calls; {ADVICE}")
        value = self._json_rule(tool, name, schema.root, part)
        self.json_schemas[-1] = ExactSchema(self.json_schemas[-1].schema, _ESCAPES)
        words = sorted(_python_words(schema, part, 0))
        return f"{lark_string(f'{name}=')} ({' | '.join([value, *map(lark_string, words)])})"

    def _joined(self, number: int, parts: Sequence[tuple[str, bool]]) -> str:
        rules, text = joined_members(f"{number}", parts, '", "')
        self._rows += rules
        return text


def _python_words(schema: ArgumentSchema, part: Any, depth: int) -> set[str]:
    """Return those of True, False and None that a part of the schema certainly allows."""
    if not isinstance(part, Mapping) or depth > _MAX_DEPTH:
        return {"True", "False", "None"} if part is True else set()
    keywords = set(part).difference(NOTES)
    if keywords == {"$ref"}:
        return _python_words(schema, resolve_reference(schema.root, str(part["$ref"])), depth + 1)
    if keywords == {"anyOf"} and isinstance(part["anyOf"], list):
        return set().union(*(_python_words(schema, one, depth + 1) for one in part["anyOf"]))
    if keywords & _COMBINING or {"const", "enum"} <= keywords:
        return set()
    types, values = schema.types(part), [part["const"]] if "const" in part else part.get("enum")
    found = {"True", "False"} if "boolean" in types else set()
    found |= {"None"} if "null" in types else set()
    return found if values is None else found & {str(value) for value in values if value in (True, False, None)}
