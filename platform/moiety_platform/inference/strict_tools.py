"""Strict tools: the form of an answer whose calls keep to their schemas, for the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from moiety_text.tools.formats import ToolFormat
from moiety_text.tools.offer import ToolOffer
from moiety_wire.grammars import GrammarKind, GrammarSpec, ToolCallGrammar, ToolCallsGrammar

ANY_OBJECT: Mapping[str, str] = {"type": "object"}


def guide_of_calls(
    way: ToolFormat, offer: ToolOffer, special: Mapping[str, int], free_ids: Sequence[int] = ()
) -> GrammarSpec | None:
    """For a model that writes calls in this way; None where what stands within its calls is more than can be said.
    `special`: the markers that are added tokens, with their ids; `free_ids`: the added tokens that may stand in the
    text beside calls. Tools that are not strict take any object."""
    if way.to_end is None:
        return None
    opener = way.markers[0] if way.marks_calls else ""
    name = offer.first_call
    tools = [
        ToolCallGrammar(tool.name, msgspec.json.encode(tool.parameters if tool.strict else ANY_OBJECT).decode())
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
    )
    return GrammarSpec(GrammarKind.CALLS, msgspec.json.encode(form).decode())
