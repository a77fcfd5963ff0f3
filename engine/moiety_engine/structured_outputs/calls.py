"""A grammar of answers that may call tools: free text, and calls whose arguments keep to their schemas."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from moiety_engine.structured_outputs.errors import GuideRefused
from moiety_engine.structured_outputs.exact_numbers import decode_exactly, with_exact_numbers
from moiety_engine.structured_outputs.formats import with_patterns
from moiety_wire.guides import CallsForm

_ONE_SPACE = {"whitespace_pattern": r"\x20", "lenient": False, "coerce_one_of": False}


def calls_grammar(text: str) -> str:
    """In Lark's form. Raises GuideRefused."""
    try:
        form = msgspec.json.decode(text, type=CallsForm)
        arguments = [_arguments(tool.schema) for tool in form.tools]
    except (ValueError, RecursionError) as exc:
        raise GuideRefused(f"the form of calls cannot be read: {exc}") from exc

    def quoted(told: str) -> str:
        return _quoted(told, form.special)

    rules = ["%llguidance {}", f"start: {_start(form)}"]
    rules += [f"arguments_{i}: {schema}" for i, schema in enumerate(arguments)]
    inner = [f"{quoted(tool.name + form.between)} {_with_arguments(i)}" for i, tool in enumerate(form.tools)]
    rules += [f"rest: ({_rest(form, inner)}) {quoted(form.after)} more"]
    rules += [f"call: {quoted(form.before)} ({' | '.join(inner)}) {quoted(form.after)}"]
    again = f"({quoted(form.separator)} call)*" if form.separator and form.may_repeat else ""
    rules += [f"more: {again} {quoted(form.closer)}", "calls: call more"]
    if form.opener:
        rules += ["TEXT: /(.|\\n)*/", "tail: TEXT"]
        if form.opener in form.special:
            rules += [f"opened: TEXT {quoted(form.opener)} calls"]
        else:
            rules += [f"mark[lazy]: TEXT {quoted(form.opener)}", "opened: mark calls"]
    else:
        rules += ["TEXT: /[^{\\s](.|\\n)*/", "tail: TEXT"]
    return "\n".join(rules)


def _start(form: CallsForm) -> str:
    repeats = form.opener and form.may_repeat
    if form.must_call:
        return "rest opened* tail" if repeats else "rest"
    if not form.opener:
        return "calls | tail"
    return "opened* tail" if repeats else "opened | tail"


def _rest(form: CallsForm, inner: list[str]) -> str:
    """Of the first call, what the prompt has not."""
    return _with_arguments(0) if form.is_named else " | ".join(inner)


def _with_arguments(number: int) -> str:
    return f'" "? arguments_{number}'


def _arguments(schema: str) -> str:
    found = with_exact_numbers(decode_exactly(schema))
    if not isinstance(found, dict):
        raise GuideRefused("the parameters of a tool are a JSON schema, an object")
    told = with_patterns(found) | {"x-guidance": _ONE_SPACE}
    return f"%json {msgspec.json.encode(told).decode()}"


def _quoted(text: str, special: Mapping[str, int]) -> str:
    """Text as a grammar has it, its special tokens by their ids."""
    if not special:
        return _string(text)
    parts = re.split("(" + "|".join(re.escape(marker) for marker in special) + ")", text)
    return " ".join(f"<[{special[part]}]>" if part in special else _string(part) for part in parts if part)


def _string(text: str) -> str:
    return msgspec.json.encode(text).decode() if text else ""
