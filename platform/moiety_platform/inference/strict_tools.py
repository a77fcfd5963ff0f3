"""Grammar of answers with strict tools, whose calls follow their schemas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from moiety_platform.inference.custom_tools import INPUT
from moiety_text.tools.formats import NotedArguments, ToolFormat
from moiety_text.tools.offer import ToolOffer
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
        tools=tool_grammars(offer, with_inputs=way.parameters is None),
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


def may_read_like_call(answer: GrammarSpec, way: ToolFormat, special: Mapping[str, int]) -> bool:
    """Return whether an answer of a grammar could be read as a call: it is not JSON, and no token marks calls."""
    is_json = answer.kind in (GrammarKind.JSON_OBJECT, GrammarKind.JSON_SCHEMA)
    return not is_json and not any(marker in way.opener for marker in special)


def tool_grammars(offer: ToolOffer, *, with_inputs: bool = False) -> list[ToolCallGrammar]:
    """Return the callable tools with the schemas of their arguments. Tools that are not strict accept any object.

    `with_inputs`: arguments are JSON, in which the input of a custom tool can follow the tool's grammar.
    """
    found = []
    for tool in offer.tools:
        if tool.name in offer.names:
            schema = msgspec.json.encode(tool.parameters if tool.strict else ANY_OBJECT).decode()
            has_input = with_inputs and bool(tool.input_grammar)
            inputs = (INPUT, tool.input_grammar) if has_input else ("", "")
            found.append(ToolCallGrammar(tool.name, schema, *inputs))
    return found
