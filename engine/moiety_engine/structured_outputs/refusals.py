"""Errors of the grammar library about JSON schemas, as sentences for clients: place, reason, advice."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from moiety_engine.structured_outputs.calls import schema_at
from moiety_engine.structured_outputs.errors import GrammarRefused
from moiety_engine.structured_outputs.exact_numbers import decode_exactly, pointer_part
from moiety_engine.structured_outputs.expression_errors import ENDLESS, MAX_MESSAGE_CHARS, explain_error
from moiety_engine.structured_outputs.formats import PATTERNS
from moiety_engine.structured_outputs.harmony import tool_at_line
from moiety_engine.structured_outputs.patterns import exact_name_pattern, exact_pattern
from moiety_wire.grammars import GrammarKind, ToolCallsGrammar

FORMATS = (*PATTERNS, "duration", "ipv4", "ipv6", "uri", "uuid")

_COUNTED = ("minProperties", "maxProperties")
_IN_GRAMMAR = re.compile(r"at (\d+)\(\d+\): failed to compile JSON schema: ", re.DOTALL)
_UNIMPLEMENTED = re.compile(r'Unimplemented keys: \["([^"]+)"')
_UNKNOWN_FORMAT = re.compile(r"Unknown format: (.*)")
_UNKNOWN_TYPE = re.compile(r"Invalid type: (.*)")
_NO_COUNT = re.compile(r"Expected positive integer for '(\w+)'")
_NO_TARGET = re.compile(r"Pointer '([^']*)' does not exist")
_ANCHORED = re.compile(r"lookarounds not supported yet; \w+ in regex /(.*)/")
_OVERLAPPING = re.compile(r"patternProperty regexes /(.*)/ and /(.*)/ are not disjoint")

Finding = Callable[[Mapping[str, Any]], str | None]  # returns the keyword of a schema that the error is about, or None


def explain_refusal(kind: GrammarKind, text: str, error: str) -> str:
    """Return one sentence about a grammar or schema that the library refused.

    `text` is the client's, `error` the library's.
    """
    error = error.replace("<non-verbose/>", "").strip()
    in_grammar = _IN_GRAMMAR.match(error)
    if error.startswith("NoExtension"):
        return ENDLESS
    if kind is GrammarKind.JSON_SCHEMA:
        message: str | None = _explain_schema(text, error)
    elif kind is GrammarKind.CALLS and in_grammar is not None:
        place, schema = schema_at(msgspec.json.decode(text, type=ToolCallsGrammar), int(in_grammar[1]))
        message = f"{place}, {_explain_schema(schema, error[in_grammar.end() :])}"
    elif kind is GrammarKind.HARMONY and in_grammar is not None:
        name, schema = tool_at_line(text, int(in_grammar[1]))
        message = f"in the parameters of the tool {name!r}, {_explain_schema(schema, error[in_grammar.end() :])}"
    else:
        message = None
    return (message or explain_error(kind, text, error))[:MAX_MESSAGE_CHARS]


def _explain_schema(text: str, error: str) -> str:
    schema, error = decode_exactly(text), error.split("\n  while processing", maxsplit=1)[0].strip()
    for pattern, explain in _EXPLANATIONS:
        if match := pattern.search(error):
            finding, why = explain(match)
            pointer = next(_pointers(schema, finding), None)
            return why if pointer is None else f"{pointer[:200]}: {why}"
    if error.startswith("Unsatisfiable schema: "):
        why = error.removeprefix("Unsatisfiable schema: ").splitlines()[0]
        if why.startswith("Regex is empty"):
            why = "no string satisfies its constants, patterns, formats and lengths together"
        return f"no document satisfies it: {why}"
    return explain_error(GrammarKind.JSON_SCHEMA, text, error)


def _pointers(schema: Any, finding: Finding, pointer: str = "") -> Iterator[str]:
    """Yield the JSON pointers of the matching keywords."""
    if isinstance(schema, list):
        for at, one in enumerate(schema):
            yield from _pointers(one, finding, f"{pointer}/{at}")
    if not isinstance(schema, Mapping):
        return
    if (keyword := finding(schema)) is not None:
        yield f"{pointer}/{pointer_part(keyword)}"
    for key, value in schema.items():
        yield from _pointers(value, finding, f"{pointer}/{pointer_part(key)}")


def _with_keyword(keyword: str) -> Finding:
    return lambda schema: keyword if keyword in schema else None


def _with_value(keyword: str, value: str) -> Finding:
    return lambda schema: keyword if schema.get(keyword) == value else None


def _explain_keyword(match: re.Match[str]) -> tuple[Finding, str]:
    why = f"the keyword {match[1]!r} is not supported; leave it out, or use other keywords"
    return _with_keyword(match[1]), why


def _explain_format(match: re.Match[str]) -> tuple[Finding, str]:
    why = f"the format {match[1]!r} is not supported; supported are {', '.join(sorted(FORMATS))}; or use a pattern"
    return _with_value("format", match[1]), why


def _explain_type(match: re.Match[str]) -> tuple[Finding, str]:
    def finding(schema: Mapping[str, Any]) -> str | None:
        found = schema.get("type")
        return "type" if found == match[1] or (isinstance(found, list) and match[1] in found) else None

    return finding, f"the type {match[1]!r} does not exist"


def _explain_count(match: re.Match[str]) -> tuple[Finding, str]:
    def finding(schema: Mapping[str, Any]) -> str | None:
        value = schema.get(match[1])
        return match[1] if match[1] in schema and not (isinstance(value, int) and value >= 0) else None

    return finding, "it must be an integer of at least 0"


def _explain_reference(match: re.Match[str]) -> tuple[Finding, str]:
    def finding(schema: Mapping[str, Any]) -> str | None:
        reference = schema.get("$ref")
        return "$ref" if isinstance(reference, str) and reference.endswith(match[1]) else None

    return finding, f"{match[1]!r} does not exist in the schema; references must point within the schema"


def _explain_choice(_: re.Match[str]) -> tuple[Finding, str]:
    why = (
        "its alternatives may overlap; use 'anyOf', or let them differ in type, in constant strings, or "
        "in constant strings of a required property"
    )
    return _with_keyword("oneOf"), why


def _explain_properties(_: re.Match[str]) -> tuple[Finding, str]:
    why = "it is supported only if 'required' lists all of 'properties'; complete 'required', or leave it out"
    return lambda schema: next((key for key in _COUNTED if key in schema), None), why


def _explain_anchor(match: re.Match[str]) -> tuple[Finding, str]:
    def finding(schema: Mapping[str, Any]) -> str | None:
        pattern = schema.get("pattern")
        return "pattern" if isinstance(pattern, str) and _is_rewritten(pattern, match[1]) else None

    return finding, "an anchor is within the pattern; '^' is allowed at its beginning, and '$' at its end"


def _explain_overlap(match: re.Match[str]) -> tuple[Finding, str]:
    def finding(schema: Mapping[str, Any]) -> str | None:
        found = schema.get("patternProperties")
        is_meant = isinstance(found, Mapping) and any(_is_rewritten(name, match[1], names=True) for name in found)
        return "patternProperties" if is_meant else None

    return finding, "two of the patterns may match the same name; change them so that they cannot"


def _explain_length(_: re.Match[str]) -> tuple[Finding, str]:
    def finding(schema: Mapping[str, Any]) -> str | None:
        return "minLength" if "minLength" in schema and ("pattern" in schema or "format" in schema) else None

    why = (
        "whether a string of this length satisfies the pattern or format cannot be determined; use a smaller length, "
        "or write it into the pattern as a count"
    )
    return finding, why


def _is_rewritten(pattern: str, rewritten: str, *, names: bool = False) -> bool:
    try:
        return (exact_name_pattern(pattern) if names else exact_pattern(pattern)) == rewritten
    except GrammarRefused:
        return False


_EXPLANATIONS: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], tuple[Finding, str]]], ...] = (
    (_UNIMPLEMENTED, _explain_keyword),
    (_UNKNOWN_FORMAT, _explain_format),
    (_UNKNOWN_TYPE, _explain_type),
    (_NO_COUNT, _explain_count),
    (_NO_TARGET, _explain_reference),
    (re.compile("^oneOf constraints are not supported"), _explain_choice),
    (re.compile("^min/maxProperties only supported"), _explain_properties),
    (_ANCHORED, _explain_anchor),
    (re.compile("^Unable to determine if regex is empty"), _explain_length),
    (_OVERLAPPING, _explain_overlap),
)
