"""Grammar of answers that may call tools: free text, and calls whose arguments match their schemas."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from moiety_engine.structured_outputs.errors import GrammarRefused
from moiety_engine.structured_outputs.lark_syntax import id_ranges, json_rule, quoted
from moiety_wire.grammars import ToolCallsGrammar


def calls_grammar(text: str) -> str:
    """Return the grammar in Lark's syntax. Raises GrammarRefused."""
    try:
        form = msgspec.json.decode(text, type=ToolCallsGrammar)
        arguments = [json_rule(tool.schema) for tool in form.tools]
    except (ValueError, RecursionError) as exc:
        raise GrammarRefused(f"the grammar of the tool calls cannot be decoded: {exc}") from exc

    def text_of(text: str) -> str:
        return quoted(text, form.special)

    rules = ["%llguidance {}", f"start: {_start(form)}"]
    rules += [f"arguments_{i}: {schema}" for i, schema in enumerate(arguments)]
    inner = [f"{text_of(tool.name + form.between)} {_with_arguments(i)}" for i, tool in enumerate(form.tools)]
    rules += [f"rest: ({_rest(form, inner)}) {text_of(form.after)} more"]
    rules += [f"call: {text_of(form.before)} ({' | '.join(inner)}) {text_of(form.after)}"]
    again = f"({text_of(form.separator)} call)*" if form.separator and form.may_repeat else ""
    rules += [f"more: {again} {text_of(form.closer)}", "calls: call more"]
    rules += [*_free_text(form.free_ids), f"tail: {'text' if form.opener else 'plain'}"]
    if form.opener in form.special:
        rules += [f"opened: text {text_of(form.opener)} calls"]
    elif form.opener:
        others = "(TEXT? other)* " if form.free_ids else ""
        rules += [f"mark[lazy]: ANY {text_of(form.opener)}", f"opened: {others}mark calls"]
    return "\n".join(rules)


def _free_text(free_ids: Sequence[int]) -> list[str]:
    """Return the rules of `text`, which may be empty, and of `plain`, which cannot begin like a call without a marker.

    A grammar does not count added tokens as text, so those that free text may contain are named.
    """
    rules = ["ANY: /(.|\\n)*/", "TEXT: /(.|\\n)+/", "FIRST: /[^{\\s](.|\\n)*/"]
    if not free_ids:
        return [*rules, "text: TEXT?", "plain: FIRST"]
    return [
        *rules,
        f"other: <[{','.join(id_ranges(free_ids))}]>",
        "text: TEXT? (other TEXT?)*",
        "plain: (FIRST | other TEXT?) (other TEXT?)*",
    ]


def _start(form: ToolCallsGrammar) -> str:
    repeats = form.opener and form.may_repeat
    if form.must_call:
        return "rest opened* tail" if repeats else "rest"
    if not form.opener:
        return "calls | tail"
    return "opened* tail" if repeats else "opened | tail"


def _rest(form: ToolCallsGrammar, inner: list[str]) -> str:
    """Return the rule for the part of the first call that the prompt does not contain."""
    return _with_arguments(0) if form.is_named else " | ".join(inner)


def _with_arguments(number: int) -> str:
    return f'" "? arguments_{number}'
