"""Strings with limits of their length that are written without quotes, up to a tag.

The lexer of the grammar library counts with some states for each character, and has 20,000 of them. So it counts to
1,024 at most. Where a token ends the string, a longer one is chunks of 256 characters and a rest. Where text ends it,
the tag could begin in one chunk and end in the next, so longer limits are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moiety_engine.structured_outputs.argument_rules import ADVICE
from moiety_engine.structured_outputs.errors import GrammarRefused
from moiety_engine.structured_outputs.lark_text import lark_string
from moiety_engine.structured_outputs.string_expressions import (
    characters,
    excluding_early,
    length_limits,
    string_expressions,
)

MAX_COUNTED_CHARS = 1024
_CHUNK_CHARS = 256  # fewer states, since the lexer has some for each place of a chunk in the string


def limited_string(name: str, part: Mapping[str, Any], padding: str, end: str, head: str | None) -> list[str]:
    """Return the rules of the strings of a schema with the text after them up to the first token of their tag.

    `end` is the tag, and `head` its text before its first token; None where it has no token. `padding` stands before
    the tag. Raises GrammarRefused.
    """
    least, most = length_limits(part)
    is_plain = "pattern" not in part and "format" not in part
    after = padding + (end if head is None else head)
    if max(least, most or 0) > MAX_COUNTED_CHARS:
        if after or not is_plain:
            keyword = "minLength" if least > MAX_COUNTED_CHARS else "maxLength"
            place = "beside a pattern or a format" if not is_plain else "where text ends a value"
            raise GrammarRefused(
                f"/{keyword}: in the model's format of tool calls it may be at most {MAX_COUNTED_CHARS:,} {place}; "
                f"{ADVICE}"
            )
        return _chunked(name, least, most)
    lexeme = name.upper()
    if head is not None:  # a token ends the lexeme, so the text before it must be in the lexeme
        body = " & ".join(string_expressions(part, ""))
        tag = f"{lexeme}_TAG: {lexeme} {lark_string(after)}"
        return [f"{lexeme}: {body}", tag, f"{name}: {lexeme}_TAG"]
    if not is_plain:
        body = " & ".join(string_expressions(part, end))
        return [f"{lexeme}: {body}", f"{name}[lazy]: {lexeme} {lark_string(after)}"]
    # the padding may be missing before the tag, which ends the value all the same
    rules = [f"{lexeme}_STRING: {characters(least, most)}"]
    rules.append(f"{lexeme}_END: {f'{lark_string(padding)}? ' if padding else ''}{lark_string(end)}")
    early = f" & {excluding_early(least, padding, end)}" if least else ""
    rules.append(f"{lexeme}: ({lexeme}_STRING {lexeme}_END){early}")
    return [*rules, f"{name}[lazy]: {lexeme}"]


def _chunked(name: str, least: int, most: int | None) -> list[str]:
    """Return the rules of strings that a token ends, by their number of characters."""
    lexeme, chunk = name.upper(), f"{name}_chunk"
    rules = [f"{lexeme}_CHUNK: {characters(_CHUNK_CHARS, _CHUNK_CHARS)}", f"{chunk}: {lexeme}_CHUNK"]
    num_least, first = divmod(least, _CHUNK_CHARS)
    begun = f"{chunk}{{{num_least}}} " if num_least else ""
    if most is None:
        rules.append(f"{lexeme}_FIRST: {characters(first, None)}")
        return [*rules, f"{name}: {begun}{lexeme}_FIRST"]
    num_most, last = divmod(most, _CHUNK_CHARS)
    between = num_most - num_least
    if between < 0 or (between == 0 and first > last):
        raise GrammarRefused(f"/minLength: {least:,} is more than 'maxLength', {most:,}")
    if between == 0:
        rules.append(f"{lexeme}_LAST: {characters(first, last)}")
        return [*rules, f"{name}: {begun}{lexeme}_LAST"]
    rules.append(f"{lexeme}_FIRST: {characters(first, _CHUNK_CHARS - 1)}")
    rules.append(f"{lexeme}_LAST: {characters(0, last)}")
    ways = [f"{lexeme}_FIRST", f"{chunk}{{{between}}} {lexeme}_LAST"]
    if between > 1:
        rules.append(f"{lexeme}_MIDDLE: {characters(0, _CHUNK_CHARS - 1)}")
        ways.append(f"{chunk}{{1,{between - 1}}} {lexeme}_MIDDLE")
    return [*rules, f"{name}: {begun}({' | '.join(ways)})"]
