"""Grammar of answers that may call tools: free text, and calls whose arguments match their schemas."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from moiety_engine.structured_outputs.errors import GrammarRefused
from moiety_engine.structured_outputs.exact_schemas import exact_schema_of
from moiety_wire.grammars import GrammarSpec, ToolCallGrammar, ToolCallsGrammar

_ONE_SPACE = r"\x20"


def calls_grammar(text: str) -> str:
    """Return the grammar in Lark's syntax. Raises GrammarRefused."""
    try:
        form = msgspec.json.decode(text, type=ToolCallsGrammar)
        arguments = [_arguments_of(tool, number) for number, tool in enumerate(form.tools)]
    except (ValueError, RecursionError) as exc:
        raise GrammarRefused(f"the grammar of the tool calls cannot be decoded: {exc}") from exc

    def quoted(text: str) -> str:
        return _quoted(text, form.special)

    rules = ["%llguidance {}", f"start: {_start(form)}"]
    rules += [f"arguments_{i}: {schema}" for i, schema in enumerate(arguments)]
    inner = [f"{quoted(tool.name + form.between)} {_with_arguments(i)}" for i, tool in enumerate(form.tools)]
    rules += [f"rest: ({_rest(form, inner)}) {quoted(form.after)} more"]
    rules += [f"call: {quoted(form.before)} ({' | '.join(inner)}) {quoted(form.after)}"]
    again = f"({quoted(form.separator)} call)*" if form.separator and form.may_repeat else ""
    rules += [f"more: {again} {quoted(form.closer)}", "calls: call more"]
    if form.answer is not None and not form.must_call:
        rules += [f"called: {quoted(form.opener)} calls"]
        return "\n".join(rules)
    rules += [*_free_text(form.free_ids), f"tail: {'text' if form.opener else 'plain'}"]
    if form.opener in form.special:
        rules += [f"opened: text {quoted(form.opener)} calls"]
    elif form.opener:
        others = "(TEXT? other)* " if form.free_ids else ""
        rules += [f"mark[lazy]: ANY {quoted(form.opener)}", f"opened: {others}mark calls"]
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
        f"other: <[{','.join(_ranges(free_ids))}]>",
        "text: TEXT? (other TEXT?)*",
        "plain: (FIRST | other TEXT?) (other TEXT?)*",
    ]


def _ranges(token_ids: Sequence[int]) -> Iterator[str]:
    """Yield ascending token ids in grammar syntax, consecutive ones as a range."""
    for _, row in itertools.groupby(enumerate(sorted(set(token_ids))), lambda one: one[1] - one[0]):
        found = [token_id for _, token_id in row]
        yield f"{found[0]}-{found[-1]}"


def _start(form: ToolCallsGrammar) -> str:
    repeats = form.opener and form.may_repeat
    if form.must_call:
        return "rest opened* tail" if repeats else "rest"
    if form.answer is not None:
        return "called+ | @answer" if repeats else "called | @answer"
    if not form.opener:
        return "calls | tail"
    return "opened* tail" if repeats else "opened | tail"


def _rest(form: ToolCallsGrammar, inner: list[str]) -> str:
    """Return the rule for the part of the first call that the prompt does not contain."""
    return _with_arguments(0) if form.is_named else " | ".join(inner)


def _with_arguments(number: int) -> str:
    return f'" "? arguments_{number}'


def answer_of(text: str) -> GrammarSpec | None:
    """Return the grammar of an answer without calls, which `calls_grammar` refers to as `answer`."""
    return msgspec.json.decode(text, type=ToolCallsGrammar).answer


def input_grammars(text: str) -> dict[str, str]:
    """Return the grammars of tools' inputs by the names that `calls_grammar` refers to them by."""
    form = msgspec.json.decode(text, type=ToolCallsGrammar)
    return {f"input_{number}": tool.input_grammar for number, tool in enumerate(form.tools) if tool.input_grammar}


def _arguments_of(tool: ToolCallGrammar, number: int) -> str:
    if not tool.input_grammar:
        return _arguments(tool.schema)
    name, quote = _string(msgspec.json.encode(tool.input_name).decode()), _string('"')
    return f'"{{" " "? {name} " "? ":" " "? {quote} @input_{number} {quote} " "? "}}"'


def _arguments(schema: str) -> str:
    exact = exact_schema_of(schema)
    return f"%json {exact.encode(**exact.options(whitespace_pattern=_ONE_SPACE))}"


def _quoted(text: str, special: Mapping[str, int]) -> str:
    """Return text in grammar syntax, with its added tokens by their ids."""
    if not special:
        return _string(text)
    parts = re.split("(" + "|".join(re.escape(marker) for marker in special) + ")", text)
    return " ".join(f"<[{special[part]}]>" if part in special else _string(part) for part in parts if part)


def _string(text: str) -> str:
    return msgspec.json.encode(text).decode() if text else ""
