"""Grammar of answers with strict tools, whose calls follow their schemas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from moiety_platform.inference.custom_tools import INPUT
from moiety_text.tools.formats import ToolFormat
from moiety_text.tools.offer import ToolOffer
from moiety_wire.grammars import GrammarKind, GrammarSpec, ToolCallGrammar, ToolCallsGrammar

ANY_OBJECT: Mapping[str, str] = {"type": "object"}


def grammar_of_calls(
    way: ToolFormat,
    offer: ToolOffer,
    special: Mapping[str, int],
    free_ids: Sequence[int] = (),
    answer: GrammarSpec | None = None,
) -> GrammarSpec | None:
    """Return the grammar for a model's tool call format, or None if its calls cannot be expressed as a grammar.

    `special` are the markers that are added tokens, with their ids. `free_ids` are the added tokens that are allowed in
    the text beside calls. Tools that are not strict accept any object. `answer` is the grammar of an answer without
    calls.
    """
    if way.to_end is None:
        return None
    opener = way.markers[0] if way.marks_calls else ""
    name = offer.first_call
    tools = [
        ToolCallGrammar(
            tool.name,
            msgspec.json.encode(tool.parameters if tool.strict else ANY_OBJECT).decode(),
            INPUT if tool.input_grammar else "",
            tool.input_grammar,
        )
        for tool in offer.tools
        if tool.name in offer.names
    ]
    form = ToolCallsGrammar(
        tools=tools,
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
        answer=None if offer.must_call else answer,
    )
    return GrammarSpec(GrammarKind.CALLS, msgspec.json.encode(form).decode())
