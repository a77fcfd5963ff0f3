"""What the text of an answer must be: a guide travels with its request, and the engine lets no other token through."""

from __future__ import annotations

from enum import StrEnum

import msgspec

MAX_GUIDE_BYTES = 256 * 1024  # of its text; gateways allow less


class GrammarKind(StrEnum):
    """What the text of a guide is."""

    JSON_OBJECT = "json_object"  # nothing: any JSON object will do
    JSON_SCHEMA = "json_schema"  # a JSON schema
    REGEX = "regex"  # a regular expression that the whole answer matches
    CHOICE = "choice"  # a JSON list of strings, one of which the answer is
    GRAMMAR = "grammar"  # a grammar in Lark's form
    CALLS = "calls"  # a ToolCallsGrammar as JSON


class GrammarSpec(msgspec.Struct, frozen=True, array_like=True):
    """The same guide is compiled once an engine, however many requests have it."""

    kind: GrammarKind
    text: str = ""


class ToolCallGrammar(msgspec.Struct, frozen=True, array_like=True):
    """A tool that may be called. Its arguments keep to `schema`, a JSON schema as text."""

    name: str
    schema: str


class ToolCallsGrammar(msgspec.Struct, frozen=True):
    """How one model writes calls of tools, for GrammarKind.CALLS: `opener` once, then `before` name `between` arguments
    `after`, and further calls after `separator` or, where there is none, after another opener; at last `closer`. Free
    text stands around what an opener marks; where there is none, a call can only be the whole answer."""

    tools: list[ToolCallGrammar]
    opener: str
    before: str
    between: str
    after: str
    separator: str
    closer: str
    special: dict[str, int]  # of these texts the parts that are added tokens, by their ids
    must_call: bool  # the prompt ends with all that stands before the name
    is_named: bool  # and with what stands before the arguments, since there is one tool only
    may_repeat: bool
    free_ids: list[int] = []  # added tokens that may stand in free text
