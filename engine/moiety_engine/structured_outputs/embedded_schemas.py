"""JSON schemas embedded in Lark grammars by `%json`, kept as exactly as standalone schemas."""

from __future__ import annotations

import json
import re
from decimal import Decimal

from moiety_engine.structured_outputs.errors import GrammarRefused
from moiety_engine.structured_outputs.exact_numbers import refuse_constant
from moiety_engine.structured_outputs.exact_schemas import exact_schema

_EMBEDDED = re.compile(r'%json\s*(?=[{\["a-z0-9-])')
_PASSED_OVER = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*|#[^\n]*')


def with_exact_embedded_schemas(lark: str) -> str:
    """Return a Lark grammar whose schemas are exact, with the same number of lines.

    Raises GrammarRefused with the line and the JSON pointer of the unsupported part. Invalid JSON is left for the
    compiler to refuse.
    """
    parts, end = [], 0
    decoder = json.JSONDecoder(parse_float=Decimal, parse_constant=refuse_constant)
    while found := next_schema(lark, end):
        try:
            schema, stop = decoder.raw_decode(lark, found.end())
        except ValueError:
            break  # the end of the schema is unknown
        try:
            exact = exact_schema(schema)
        except GrammarRefused as exc:
            line = lark.count("\n", 0, found.start()) + 1
            raise GrammarRefused(f"in the schema of line {line}, {exc}" if line > 1 else str(exc)) from exc
        text = exact.encode(**exact.options())
        lines = lark[found.end() : stop].split("\n")
        filled = "\n" * (len(lines) - 1) + " " * (len(lines[-1]) - 1) if len(lines) > 1 else ""
        parts += [lark[end : found.end()], text[:-1], filled, text[-1]]  # the text after the schema keeps its place
        end = stop
    return "".join([*parts, lark[end:]])


def next_schema(lark: str, begin: int) -> re.Match[str] | None:
    """Return the next `%json` outside of strings, expressions and comments."""
    while found := _EMBEDDED.search(lark, begin):
        passed = _PASSED_OVER.search(lark, begin)
        if passed is None or passed.start() > found.start():
            return found
        begin = passed.end()
    return None
