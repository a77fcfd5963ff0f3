"""Grammar of answers with calls that follow the schemas of their tools: of strict ones, and of all where forced."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from moiety_platform.errors import UNSUPPORTED_RESPONSE_FORMAT, BadRequest
from moiety_platform.inference.custom_tools import INPUT
from moiety_text.tools.formats import NotedArguments, ToolFormat
from moiety_text.tools.offer import INPUT_TERMINAL, Tool, ToolOffer
from moiety_wire.grammars import (
    MAX_GRAMMAR_BYTES,
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
MAX_PREFERRED_BYTES = MAX_GRAMMAR_BYTES // 8  # of all schemas; escapes make a grammar up to four times longer


def grammar_of_calls(
    way: ToolFormat,
    offer: ToolOffer,
    special: Mapping[str, int],
    free_ids: Sequence[int] = (),
    answer: GrammarSpec | None = None,
) -> GrammarSpec:
    """Return the grammar for a model's tool call format.

    `special` are the markers that are added tokens, with their ids. `free_ids` are the added tokens that are allowed in
    the text beside calls. `answer` is the grammar of an answer without calls.
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
    """Grammar of a custom tool's input in a format of tool calls. `terminal` is that of the whole input, if any is.

    `fault` is the reason why a tool's grammar cannot be enforced in the format, and "" for a tool without a grammar.
    """

    grammar: str = ""
    terminal: str = ""
    fault: str = ""


NO_INPUT = WrittenInput()


def input_in_json(tool: Tool) -> WrittenInput:
    """Return the grammar of a tool's input as a JSON string."""
    grammar = tool.input_grammar
    return NO_INPUT if grammar is None else WrittenInput(grammar.escaped, fault=grammar.faults.escaped)


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
    is_ended_by_token = after.startswith(tuple(special))
    return WrittenInput(grammar.plain if is_ended_by_token else "", fault=grammar.faults.terminals)


def check_inputs(offer: ToolOffer, input_of: Callable[[Tool], WrittenInput]) -> None:
    """Raise BadRequest for a callable custom tool whose grammar cannot be enforced in a model's format of tool calls.

    `input_of` returns the grammar of a tool's input in the format.
    """
    for tool in offer.tools:
        if tool.input_grammar is None or tool.name not in offer.names:
            continue
        written = input_of(tool)
        if not written.grammar:
            raise BadRequest(
                f"the grammar of the tool {tool.name!r} cannot be enforced: {written.fault}",
                code=UNSUPPORTED_RESPONSE_FORMAT,
                param="tools",
            )


def tool_grammars(offer: ToolOffer, input_of: Callable[[Tool], WrittenInput]) -> list[ToolCallGrammar]:
    """Return the callable tools with the schemas of their arguments.

    Tools that are not strict accept any object. Where a call is forced, engines prefer their schemas if they support
    them, while all schemas have at most MAX_PREFERRED_BYTES.

    `input_of` returns the grammar of a custom tool's input in the model's format of tool calls.
    """
    found: list[ToolCallGrammar] = []
    for tool in offer.tools:
        if tool.name in offer.names:
            schema = msgspec.json.encode(tool.parameters if tool.strict else ANY_OBJECT).decode()
            written = input_of(tool)
            inputs = (INPUT, written.grammar, written.terminal) if written.grammar else ("", "", "")
            preferred = _preferred_schema(tool) if offer.must_call and not tool.strict and not written.grammar else ""
            given = tool.input_grammar if written.grammar else None
            client_grammar = ("", "") if given is None else (given.syntax, given.definition)
            found.append(ToolCallGrammar(tool.name, schema, *inputs, preferred, *client_grammar))
    return _with_few_preferred(found)


def _with_few_preferred(tools: Sequence[ToolCallGrammar]) -> list[ToolCallGrammar]:
    """Return the tools without the preferred schemas that would make a grammar too long."""
    texts = [text for tool in tools for text in (tool.schema, tool.input_grammar, tool.client_definition)]
    num_bytes = sum(len(text.encode()) for text in texts)
    found = []
    for tool in tools:
        more_bytes = len(tool.preferred_schema.encode())
        is_kept = num_bytes + more_bytes <= MAX_PREFERRED_BYTES
        num_bytes += more_bytes if is_kept else 0
        found.append(tool if is_kept else msgspec.structs.replace(tool, preferred_schema=""))
    return found


def _preferred_schema(tool: Tool) -> str:
    """Return the schema of objects that a tool's parameters describe; "" where any object is valid."""
    schema = {**tool.parameters, "type": "object"}
    return "" if schema == ANY_OBJECT else msgspec.json.encode(schema).decode()
