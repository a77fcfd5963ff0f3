"""Grammar of answers with strict tools, whose calls follow their schemas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from moiety_platform.inference.custom_tools import INPUT
from moiety_text.tools.formats import NotedArguments, ToolFormat
from moiety_text.tools.offer import INPUT_TERMINAL, Tool, ToolOffer
from moiety_wire.grammars import (
    ArgumentNotation,
    CallIdGrammar,
    GrammarKind,
    GrammarSpec,
    NotedArgumentsGrammar,
    ParameterTagsGrammar,
    ToolCallGrammar,
    ToolCallsGrammar,
)

ANY_OBJECT: Mapping[str, str] = {"type": "object"}


def grammar_of_calls(
    way: ToolFormat,
    offer: ToolOffer,
    special: Mapping[str, int],
    free_ids: Sequence[int] = (),
    answer: GrammarSpec | None = None,
) -> GrammarSpec:
    """Return the grammar for a model's tool call format.

    `special` are the markers that are added tokens, with their ids. `free_ids` are the added tokens that are allowed in
    the text beside calls. Tools that are not strict accept any object. `answer` is the grammar of an answer without
    calls.
    """
    opener, call_id = way.opener, way.call_id
    name = offer.first_call
    form = ToolCallsGrammar(
        tools=tool_grammars(offer, lambda tool: written_input(tool, way, special)),
        opener=opener,
        before=way.to_name.removeprefix(opener),
        between=way.to_arguments,
        after=way.to_end,
        separator=way.between,
        closer=way.closer,
        special=dict(special),
        must_call=offer.must_call,
        is_named=offer.must_call and name is not None,
        may_repeat=offer.max_calls is None,
        free_ids=list(free_ids),
        name_end=way.name_end_pattern,
        call_id=None if call_id is None else CallIdGrammar(call_id.opener, call_id.pattern),
        parameters=_parameters_of(way),
        answer=None if offer.must_call else answer,
    )
    return GrammarSpec(GrammarKind.CALLS, msgspec.json.encode(form).decode())


def _parameters_of(way: ToolFormat) -> ParameterTagsGrammar | NotedArgumentsGrammar | None:
    tags = way.parameters
    if tags is None:
        return None
    if isinstance(tags, NotedArguments):
        return NotedArgumentsGrammar(ArgumentNotation(tags.notation), tags.mark)
    return ParameterTagsGrammar(tags.to_name, tags.to_value, tags.to_json, tags.end, tags.between, tags.padding)


def takes_any_arguments(way: ToolFormat, special: Mapping[str, int]) -> bool:
    """Return whether a grammar of calls can leave the arguments of a tool free.

    It cannot where the end of the arguments is text that names of nested elements would have to be told from.
    """
    tags = way.parameters
    if isinstance(tags, NotedArguments) and tags.notation == ArgumentNotation.ELEMENTS:
        return tags.mark in special
    return True


@dataclass(frozen=True, slots=True)
class WrittenInput:
    """Grammar of a custom tool's input in a format of tool calls. `terminal` is that of the whole input, if any is."""

    grammar: str = ""  # "": the format cannot follow the tool's grammar
    terminal: str = ""


NO_INPUT = WrittenInput()


def input_in_json(tool: Tool) -> WrittenInput:
    """Return the grammar of a tool's input as a JSON string."""
    return NO_INPUT if tool.input_grammar is None else WrittenInput(tool.input_grammar.escaped)


def written_input(tool: Tool, way: ToolFormat, special: Mapping[str, int]) -> WrittenInput:
    """Return the grammar of a tool's input in a model's format. `special` are the markers that are added tokens."""
    tags, grammar = way.parameters, tool.input_grammar
    if tags is None or (isinstance(tags, NotedArguments) and not tags.mark):
        return input_in_json(tool)
    if grammar is None:
        return NO_INPUT
    if grammar.terminals:
        return WrittenInput(grammar.terminals, INPUT_TERMINAL)
    after = tags.mark if isinstance(tags, NotedArguments) else tags.padding + tags.end
    return WrittenInput(grammar.plain) if after.startswith(tuple(special)) else NO_INPUT


def tool_grammars(offer: ToolOffer, input_of: Callable[[Tool], WrittenInput]) -> list[ToolCallGrammar]:
    """Return the callable tools with the schemas of their arguments. Tools that are not strict accept any object.

    `input_of` returns the grammar of a custom tool's input in the model's format of tool calls.
    """
    found = []
    for tool in offer.tools:
        if tool.name in offer.names:
            schema = msgspec.json.encode(tool.parameters if tool.strict else ANY_OBJECT).decode()
            written = input_of(tool)
            inputs = (INPUT, written.grammar, written.terminal) if written.grammar else ("", "", "")
            found.append(ToolCallGrammar(tool.name, schema, *inputs))
    return found
