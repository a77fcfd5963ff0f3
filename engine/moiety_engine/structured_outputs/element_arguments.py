"""Grammar of arguments that are written as nested elements, with a mark before each tag: `<mark><a>1<mark></a>`.

An object has an element for each member, and a list an element `item` for each of its items. What elements cannot tell
apart, such as a list or null, is JSON within its element, which readers take as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moiety_engine.structured_outputs.argument_rules import ADVICE, NOTES, ArgumentRules, follow_references
from moiety_engine.structured_outputs.errors import GrammarRefused
from moiety_engine.structured_outputs.exact_numbers import pointer_part
from moiety_engine.structured_outputs.lark_text import lark_literal, lark_string, split_at_token
from moiety_engine.structured_outputs.schema_parts import at_place, properties_of, repeated
from moiety_engine.structured_outputs.text_values import TextRules, text_of
from moiety_text.tools.argument_types import STRING, ArgumentSchema
from moiety_wire.grammars import ToolCallGrammar

ITEM = "item"
_NAME = re.compile(r"[^<>/\s][^<>]*")
_Maker = Callable[[ToolCallGrammar, ArgumentSchema, Mapping[str, Any]], str]
_OF_LISTS = (*NOTES, "type", "items", "minItems", "maxItems")
_OF_OBJECTS = (*NOTES, "type", "properties", "required", "additionalProperties")


class ElementArguments(ArgumentRules):
    """Rules of nested elements. `mark` precedes each tag."""

    def __init__(self, mark: str, special: Mapping[str, int]) -> None:
        super().__init__(special)
        self._mark = mark
        self._texts = TextRules(mark, special)
        self._rules: list[str] = []
        self._names: dict[int, str] = {}  # rules of the contents of lists and objects by the identity of their schemas

    def value_rules(self) -> list[str]:
        tag = r"LOOSE_TAG: /<(.|\n)*/ & ~/<\/invoke>(.|\n)*/"
        return [*self._texts.rules(), *self._rules, tag]

    def _any_parameters(self) -> str:
        """Return a rule of any tags up to the end of the call: a grammar cannot repeat a tag's name in its end."""
        if split_at_token(self._mark, self._special) != "":
            raise GrammarRefused("the tokenizer has no token for the mark of tags; set 'strict' for all tools or none")
        return f"({self._quoted(self._mark)} LOOSE_TAG)*"

    def input_grammar(self, tool: ToolCallGrammar) -> str:
        return self._texts.input_grammar(tool)

    def _input(self, tool: ToolCallGrammar, written: str) -> str:
        opened, ended = self._quoted(f"{self._mark}<{tool.input_name}>"), lark_string(f"</{tool.input_name}>")
        return f"{opened} {self._texts.input(written)} {ended}"

    def _parameter(self, tool: ToolCallGrammar, schema: ArgumentSchema, name: str, part: Any) -> str:
        return self._element(tool, schema, name, part)

    def _element(self, tool: ToolCallGrammar, schema: ArgumentSchema, name: str, part: Any) -> str:
        if _NAME.fullmatch(name) is None or self._mark in name:
            raise GrammarRefused(f": the name cannot be written in the model's format of tool calls; {ADVICE}")
        opened, mark, ended = self._quoted(f"{self._mark}<{name}>"), self._quoted(self._mark), lark_string(f"</{name}>")
        types, followed = schema.types(part), follow_references(schema, part)
        if STRING in types:
            return f"{opened} {self._text(schema, followed)} {ended}"
        if types == {"object"} and _has_only(followed, _OF_OBJECTS) and followed.get("properties"):
            content = self._content(tool, schema, followed, self._members)
        elif types == {"array"} and _has_only(followed, _OF_LISTS):
            content = self._content(tool, schema, followed, self._items)
        else:
            content = self._json_rule(tool, name, schema.root, part)
        return f"{opened} {content} {mark} {ended}"

    def _text(self, schema: ArgumentSchema, part: Any) -> str:
        """Return the rule of a value that may be a string, with the mark after it."""
        texts, values = self._texts.value(schema, part)
        mark = self._quoted(self._mark)
        return f"({' | '.join([*texts, *(f'{lark_literal(text_of(value))} {mark}' for value in values)])})"

    def _content(self, tool: ToolCallGrammar, schema: ArgumentSchema, part: Mapping[str, Any], make: _Maker) -> str:
        """Return the name of the rule of the elements in a list or an object."""
        if id(part) not in self._names:
            self._names[id(part)] = name = f"content_{len(self._names)}"
            self._rules.append(f"{name}: {make(tool, schema, part)}")
        return self._names[id(part)]

    def _items(self, tool: ToolCallGrammar, schema: ArgumentSchema, part: Mapping[str, Any]) -> str:
        item = at_place("/items", self._element, tool, schema, ITEM, part.get("items", {}))
        return repeated(f"({item})", part, "")

    def _members(self, tool: ToolCallGrammar, schema: ArgumentSchema, part: Mapping[str, Any]) -> str:
        properties, _ = properties_of(part)
        parts = []
        for name, one in properties.items():
            element = at_place(f"/properties/{pointer_part(name)}", self._element, tool, schema, name, one)
            parts.append((f"({element})", name in part.get("required", [])))
        return self._joined(0, parts)


def _has_only(part: Any, keywords: Sequence[str]) -> bool:
    return isinstance(part, Mapping) and all(key in keywords for key in part)
