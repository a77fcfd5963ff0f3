"""Grammar of arguments that have a tag for each parameter, in which text is written as it is.

A value of text ends at the first tag after it, so it can be any text; any other value is JSON of its schema.
A schema in which a text could be read as a value of another type, which it does not allow, is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moiety_engine.structured_outputs.argument_rules import ADVICE, ArgumentRules
from moiety_engine.structured_outputs.errors import GrammarRefused
from moiety_engine.structured_outputs.lark_text import lark_literal, lark_string
from moiety_engine.structured_outputs.text_values import TextRules, text_of
from moiety_text.tools.argument_types import STRING, ArgumentSchema
from moiety_wire.grammars import ParameterTagsGrammar, ToolCallGrammar

_PARAMETER_NAME = r"/[A-Za-z_][A-Za-z0-9_.-]*/"


class TaggedArguments(ArgumentRules):
    """Rules of arguments with a tag for each parameter."""

    def __init__(self, tags: ParameterTagsGrammar, special: Mapping[str, int]) -> None:
        super().__init__(special)
        self._tags = tags
        self._texts = TextRules(tags.end, special, tags.between, tags.padding)

    def value_rules(self) -> list[str]:
        return self._texts.rules()

    def input_grammar(self, tool: ToolCallGrammar) -> str:
        return self._texts.input_grammar(tool)

    def _input(self, tool: ToolCallGrammar, written: str) -> str:
        tags = self._tags
        opened = self._quoted(tags.to_name + tool.input_name + tags.to_value)
        return f"{opened} {lark_string(tags.padding)} {self._texts.input(written)}"

    def _parameter(self, tool: ToolCallGrammar, schema: ArgumentSchema, name: str, part: Any) -> str:
        tags = self._tags
        if tags.to_value.strip()[:1] in name:
            raise GrammarRefused(f": the name cannot be written in the model's format of tool calls; {ADVICE}")
        if STRING not in schema.types(part):
            value = self._json_rule(tool, name, schema.root, part)
            padded = f"{lark_string(tags.padding)} {value} {lark_string(tags.padding)}"
            return (
                f"{self._quoted(tags.to_name + name + tags.to_json)} {padded} {self._quoted(tags.end + tags.between)}"
            )
        opened = self._quoted(tags.to_name + name + tags.to_value)
        is_told = tags.to_json != tags.to_value  # the tag tells strings from other values
        texts, values = self._texts.value(schema, part, is_told=is_told)
        strings = [one for one in values if isinstance(one, str) or not is_told]
        others = [one for one in values if is_told and not isinstance(one, str)]
        rules = [self._one_of(opened, strings), self._one_of(self._quoted(tags.to_name + name + tags.to_json), others)]
        return " | ".join([*(f"{opened} {text}" for text in texts), *(rule for rule in rules if rule)])

    def _one_of(self, opened: str, values: Sequence[Any]) -> str:
        """Return the rule of a parameter with one of these values; "" for none of them."""
        tags = self._tags
        texts = [lark_literal(tags.padding + text_of(value) + tags.padding) for value in values]
        return f"{opened} ({' | '.join(texts)}) {self._quoted(tags.end + tags.between)}" if texts else ""

    def _any_parameters(self) -> str:
        tags = self._tags
        opened = f"{self._quoted(tags.to_name)} {_PARAMETER_NAME} {self._quoted(tags.to_value)}"
        return f"({opened} {lark_string(tags.padding)} text_value)*"
