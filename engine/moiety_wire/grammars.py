"""Grammars of structured outputs. A request carries its grammar, and the engine masks all tokens that violate it."""

from __future__ import annotations

from enum import StrEnum

import msgspec

MAX_GRAMMAR_BYTES = 256 * 1024  # limit of the grammar's text; gateways allow less


class GrammarKind(StrEnum):
    """Language of a grammar's text."""

    JSON_OBJECT = "json_object"  # empty: any JSON object is valid
    JSON_SCHEMA = "json_schema"  # a JSON schema
    REGEX = "regex"  # a regular expression that matches the whole output
    CHOICE = "choice"  # a JSON list of strings, one of which is the output
    GRAMMAR = "grammar"  # a grammar in Lark syntax
    CALLS = "calls"  # a ToolCallsGrammar as JSON


class GrammarSpec(msgspec.Struct, frozen=True, array_like=True):
    """Grammar of an output. An engine compiles equal grammars once, however many requests use them."""

    kind: GrammarKind
    text: str = ""


class ToolCallGrammar(msgspec.Struct, frozen=True, array_like=True):
    """Tool that may be called.

    Its arguments conform to `schema`, a JSON schema as text. With an `input_grammar`, a grammar in Lark syntax, its
    only argument is the string `input_name`, whose escaped text follows the grammar.
    """

    name: str
    schema: str
    input_name: str = ""
    input_grammar: str = ""


class ToolCallsGrammar(msgspec.Struct, frozen=True):
    """Format of a model's tool calls, for GrammarKind.CALLS.

    The calls are `opener` once, then `before` name `between` arguments `after`, then further calls after `separator`
    or, if there is none, after another opener, and finally `closer`. Free text may surround the part that an opener
    marks; without an opener, a call must be the whole output.
    """

    tools: list[ToolCallGrammar]
    opener: str
    before: str
    between: str
    after: str
    separator: str
    closer: str
    special: dict[str, int]  # parts of these texts that are added tokens, with their ids
    must_call: bool  # the prompt already ends with everything before the name
    is_named: bool  # and with everything before the arguments, since there is only one tool
    may_repeat: bool
    free_ids: list[int] = []  # added tokens that are allowed in free text
    answer: GrammarSpec | None = (
        None  # grammar of an answer without calls, in place of free text; a JSON schema or object
    )
