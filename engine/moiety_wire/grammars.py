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
    REASONED = "reasoned"  # a ReasonedGrammar as JSON
    HARMONY = "harmony"  # a HarmonyGrammar as JSON


class GrammarSpec(msgspec.Struct, frozen=True, array_like=True):
    """Grammar of an output. An engine compiles equal grammars once, however many requests use them."""

    kind: GrammarKind
    text: str = ""


class ToolCallGrammar(msgspec.Struct, frozen=True, array_like=True):
    """Tool that may be called.

    Its arguments conform to `schema`, a JSON schema as text. They conform to `preferred_schema` instead where the
    engine supports it. With an `input_grammar`, a grammar in Lark syntax, its
    only argument is the string `input_name`, whose text follows the grammar as the format of calls writes it: escaped
    within the quotes of JSON, or as it is. With an `input_terminal`, the grammar has only terminals, and this one is
    the text. `client_definition` is the grammar as the client wrote it, for messages about its errors, and
    `client_syntax` is "lark" or "regex".
    """

    name: str
    schema: str
    input_name: str = ""
    input_grammar: str = ""
    input_terminal: str = ""
    preferred_schema: str = ""  # best effort, of a tool that is not strict
    client_syntax: str = ""
    client_definition: str = ""


class ParameterTagsGrammar(msgspec.Struct, frozen=True, tag="tags"):
    """Tags around the parameters of calls whose arguments are not a JSON object.

    A parameter is `to_name` name `to_value` `padding` value `padding` `end` `between`. Text is written as it is; before
    other values `to_json` stands in place of `to_value`.
    """

    to_name: str
    to_value: str
    to_json: str
    end: str
    between: str
    padding: str


class ArgumentNotation(StrEnum):
    """Notation of arguments that are neither a JSON object nor parameters with tags."""

    KEYWORDS = "keywords"  # Python's keyword arguments: `a=1, b="x"`
    MEMBERS = "members"  # members without quotes, and a mark around each text: `a:1,b:<mark>x<mark>`
    ELEMENTS = "elements"  # nested elements with a mark before each tag: `<mark><a>1<mark></a>`


class NotedArgumentsGrammar(msgspec.Struct, frozen=True, tag="noted"):
    """Arguments in a notation of their own, with its mark."""

    notation: ArgumentNotation
    mark: str = ""


class CallIdGrammar(msgspec.Struct, frozen=True):
    """Id that a model writes between the name and the arguments of a call; `pattern` is a regular expression."""

    opener: str
    pattern: str


class ToolCallsGrammar(msgspec.Struct, frozen=True):
    """Format of a model's tool calls, for GrammarKind.CALLS.

    The calls are `opener` once, then `before` name `name_end` `between` arguments `after`, then further calls, each
    with `separator` in place of `before`, and finally `closer`. Free text may surround the part that an opener marks;
    without an opener, a call must be the whole output.
    """

    tools: list[ToolCallGrammar]
    opener: str
    before: str
    between: str
    after: str
    separator: str | None  # None: each call has an opener of its own
    closer: str
    special: dict[str, int]  # parts of these texts that are added tokens, with their ids
    must_call: bool  # the prompt already ends with everything before the name
    is_named: bool  # and with everything before the arguments, since there is only one tool
    may_repeat: bool
    name_end: str = ""  # regular expression of what follows the name
    call_id: CallIdGrammar | None = None  # before `between`, also where the prompt ends with the name
    parameters: ParameterTagsGrammar | NotedArgumentsGrammar | None = None  # None: the arguments are a JSON object
    free_ids: list[int] = []  # added tokens that are allowed in free text
    answer: GrammarSpec | None = None  # grammar of an answer without calls, in place of free text


class ReasonedGrammar(msgspec.Struct, frozen=True):
    """Grammar of an output that may begin with reasoning between two markers, for GrammarKind.REASONED.

    The reasoning is free text. White space may follow it, and then comes an output of the grammar `answer`.
    """

    answer: GrammarSpec
    opener: str
    closer: str
    is_open: bool  # the prompt ends with the opener, so that the output begins within the reasoning
    special: dict[str, int]  # those of the two markers that are added tokens, with their ids
    banned_ids: list[int] = []  # tokens that the reasoning must not contain: those that end an output, and the like


class HarmonyGrammar(msgspec.Struct, frozen=True):
    """Grammar of an output in the Harmony format, for GrammarKind.HARMONY.

    The output is any number of messages in the channel `analysis`, then a call of one of the tools in the channel
    `commentary`, or a message in the channel `final`. Without `answer`, the final message is free text, and
    messages for the user may come before it in the channel `commentary`.
    """

    special: dict[str, int]  # the format's control tokens, with their ids
    tools: list[ToolCallGrammar] = []
    answer: GrammarSpec | None = None  # grammar of the final message
    must_call: bool = False  # the output ends with a call
    banned_ids: list[int] = []  # other tokens that no free text may contain: those that end an output, and the like
