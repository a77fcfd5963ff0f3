"""Custom tools of OpenAI's APIs, whose input is free text.

The model is offered a function with one string parameter. Its calls are answered with that string as the input.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from moiety_platform.inference.input_grammars import input_grammar_of
from moiety_text.tools.offer import Tool

INPUT = "input"  # the function's only parameter
GRAMMAR_NAMES = {"lark": "Lark grammar", "regex": "regular expression"}


@dataclass(frozen=True, slots=True)
class CustomGrammar:
    """Grammar of a custom tool's input. `syntax` is one of GRAMMAR_NAMES."""

    syntax: str
    definition: str


def custom_tool_of(name: str, description: str | None, grammar: CustomGrammar | None = None) -> Tool:
    """Return the function that a custom tool is offered as. The model reads the grammar in the description."""
    told, describes = description or "", "The whole input of the tool, as plain text."
    if grammar is not None:
        told += f"\n\nThe input must match this {GRAMMAR_NAMES[grammar.syntax]}:\n{grammar.definition}"
    parameters = {
        "type": "object",
        "properties": {INPUT: {"type": "string", "description": describes}},
        "required": [INPUT],
        "additionalProperties": False,
    }
    found = None if grammar is None else input_grammar_of(grammar.syntax, grammar.definition)
    return Tool(name, told.lstrip("\n"), parameters, input_grammar=found)


def text_format_of(tool: Tool) -> str:
    """Return the field of a custom tool's grammar, as a header names it where the input is free text."""
    return f"tools.{tool.name}.format"


def arguments_of(text: str) -> dict[str, Any]:
    """Return the function's arguments for a custom tool's input, for the calls of earlier answers."""
    return {INPUT: text}


def input_of(arguments: str) -> str:
    """Return the custom tool's input from the function's arguments, a JSON object as text.

    A model may give the parameter another name. Arguments without a single string, or with a number or an escape that
    has no value here, are returned as they are.
    """
    try:
        found = msgspec.json.decode(arguments)
    except (msgspec.MsgspecError, RecursionError):
        return arguments
    if isinstance(found, dict):
        named = found.get(INPUT)
        if isinstance(named, str):
            return named
        if len(found) == 1 and isinstance(only := next(iter(found.values())), str):
            return only
    return arguments
