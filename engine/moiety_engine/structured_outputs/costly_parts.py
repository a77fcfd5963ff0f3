"""Name of the part of a grammar that the lexer counts most states for, for errors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from moiety_engine.structured_outputs.exact_numbers import pointer_part
from moiety_engine.structured_outputs.large_repetitions import counted_states
from moiety_engine.structured_outputs.state import TOO_COSTLY
from moiety_wire.grammars import GrammarKind, GrammarSpec, HarmonyGrammar, ReasonedGrammar, ToolCallsGrammar

MAX_SHOWN_CHARS = 64
_EXPRESSION = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/(?:\{[\d, ]+\})?')
_DATA = ("const", "enum")


def too_costly(spec: GrammarSpec) -> str:
    """Return the error of an answer that its grammar is too complex for, with the place."""
    place = costliest_part(spec)
    return TOO_COSTLY.replace(";", f", most of all {place};" if place else ";", 1)


def costliest_part(spec: GrammarSpec) -> str:
    """Return the expression, or the JSON pointer, that a long answer costs most at; "" where nothing is counted."""
    found = max(_parts(spec), default=(0, ""), key=lambda part: part[0])
    return found[1]


def _parts(spec: GrammarSpec) -> Iterator[tuple[int, str]]:
    """Yield the estimated states of each part, and its name."""
    match spec.kind:
        case GrammarKind.REGEX:
            yield counted_states(spec.text), _shown(spec.text)
        case GrammarKind.GRAMMAR:
            yield from _parts_of_lark(spec.text)
        case GrammarKind.JSON_SCHEMA:
            yield from _parts_of_schema(msgspec.json.decode(spec.text), "")
        case GrammarKind.CALLS | GrammarKind.HARMONY:
            form: type[ToolCallsGrammar | HarmonyGrammar]
            form = ToolCallsGrammar if spec.kind is GrammarKind.CALLS else HarmonyGrammar
            calls = msgspec.json.decode(spec.text, type=form)
            for tool in calls.tools:
                for schema in filter(None, (tool.schema, tool.preferred_schema)):
                    for states, name in _parts_of_schema(msgspec.json.decode(schema), ""):
                        yield states, f"{name} of the tool {tool.name!r}"
                for states, name in _parts_of_lark(tool.input_grammar):
                    yield states, f"{name} of the tool {tool.name!r}"
            if calls.answer is not None:
                yield from _parts(calls.answer)
        case GrammarKind.REASONED:
            yield from _parts(msgspec.json.decode(spec.text, type=ReasonedGrammar).answer)


def _parts_of_lark(lark: str) -> Iterator[tuple[int, str]]:
    for found in _EXPRESSION.finditer(lark):
        if found[0].startswith("/"):
            body, _, count = found[0][1:].rpartition("/")
            yield counted_states(f"(?:{body}){count.replace(' ', '')}"), _shown(found[0])


def _parts_of_schema(schema: Any, pointer: str) -> Iterator[tuple[int, str]]:
    if isinstance(schema, list):
        for at, one in enumerate(schema):
            yield from _parts_of_schema(one, f"{pointer}/{at}")
    if not isinstance(schema, Mapping):
        return
    pattern, most = schema.get("pattern"), schema.get("maxLength", schema.get("minLength", 0))
    if isinstance(pattern, str):
        yield counted_states(f"(?:{pattern}).{{{most}}}"), _shown(f"{pointer}/pattern")
    elif isinstance(most, int) and most:
        yield (
            counted_states(f".{{{most}}}"),
            _shown(f"{pointer}/{'maxLength' if 'maxLength' in schema else 'minLength'}"),
        )
    for key, value in schema.items():
        if key not in _DATA:
            yield from _parts_of_schema(value, f"{pointer}/{pointer_part(key)}")


def _shown(text: str) -> str:
    return repr(text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}…")
