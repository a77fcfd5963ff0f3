"""Preferred schemas of tools that are not strict: enforced as far as the compiler supports them.

A grammar with preferred schemas is replaced by one without them, in which each tool has one schema that is enforced.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec

from moiety_wire.grammars import (
    GrammarKind,
    GrammarSpec,
    HarmonyGrammar,
    ReasonedGrammar,
    ToolCallGrammar,
    ToolCallsGrammar,
)

_TOOL_FORMS = {GrammarKind.CALLS: ToolCallsGrammar, GrammarKind.HARMONY: HarmonyGrammar}


def tools_with_preference(spec: GrammarSpec) -> list[int]:
    """Return the indices of the tools that have a preferred schema; none for a grammar that cannot be decoded."""
    try:
        return [i for i, tool in enumerate(callable_tools(spec)) if tool.preferred_schema]
    except (ValueError, RecursionError):
        return []  # the compiler refuses it with the reason


def prefer_schemas(spec: GrammarSpec, indices: Collection[int]) -> GrammarSpec:
    """Return the grammar that enforces the preferred schemas of the tools at `indices`, and of no other tool."""

    def choose(tools: list[ToolCallGrammar]) -> list[ToolCallGrammar]:
        return [_with_one_schema(tool, is_preferred=i in indices) for i, tool in enumerate(tools)]

    return _change_tools(spec, choose)


def prefer_schema_alone(spec: GrammarSpec, index: int) -> GrammarSpec:
    """Return the grammar with only the tool at `index`, whose preferred schema it enforces."""
    return _change_tools(spec, lambda tools: [_with_one_schema(tools[index], is_preferred=True)])


def num_unsupported(spec: GrammarSpec, chosen: GrammarSpec) -> int:
    """Return the number of tools whose preferred schemas in `spec` are not enforced by `chosen`, made of it."""
    pairs = zip(callable_tools(spec), callable_tools(chosen), strict=True)
    return sum(bool(one.preferred_schema) and one.preferred_schema != two.schema for one, two in pairs)


def _with_one_schema(tool: ToolCallGrammar, *, is_preferred: bool) -> ToolCallGrammar:
    schema = tool.preferred_schema if is_preferred and tool.preferred_schema else tool.schema
    return msgspec.structs.replace(tool, schema=schema, preferred_schema="")


def callable_tools(spec: GrammarSpec) -> list[ToolCallGrammar]:
    """Return the tools of a grammar with calls, and none of another. Raises ValueError if it cannot be decoded."""
    found: list[ToolCallGrammar] = []

    def note(tools: list[ToolCallGrammar]) -> list[ToolCallGrammar]:
        found.extend(tools)
        return tools

    _change_tools(spec, note)
    return found


def _change_tools(spec: GrammarSpec, change: Callable[[list[ToolCallGrammar]], list[ToolCallGrammar]]) -> GrammarSpec:
    """Return the grammar with changed tools. Raises ValueError and RecursionError if its text cannot be decoded."""
    if spec.kind is GrammarKind.REASONED:
        reasoned = msgspec.json.decode(spec.text, type=ReasonedGrammar)
        if reasoned.answer.kind not in _TOOL_FORMS:
            return spec
        return _with_form(spec, msgspec.structs.replace(reasoned, answer=_change_tools(reasoned.answer, change)))
    if spec.kind not in _TOOL_FORMS:
        return spec
    form = msgspec.json.decode(spec.text, type=_TOOL_FORMS[spec.kind])
    return _with_form(spec, msgspec.structs.replace(form, tools=change(form.tools)))


def _with_form(spec: GrammarSpec, form: ReasonedGrammar | ToolCallsGrammar | HarmonyGrammar) -> GrammarSpec:
    return GrammarSpec(spec.kind, msgspec.json.encode(form).decode())
