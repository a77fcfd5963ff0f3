"""Regular expressions of strings of a JSON schema, where a string is written without quotes and escapes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from moiety_engine.structured_outputs.errors import GrammarRefused
from moiety_engine.structured_outputs.formats import TEXT_PATTERNS
from moiety_engine.structured_outputs.patterns import exact_pattern

_ANYTHING = r"(.|\n)*"
_ANCHORED_END = re.compile(r"(?<!\\)(?:\\\\)*\$\Z")  # an even number of backslashes before it escape each other
_OPERATOR, _BACKSLASHED = re.compile(r"[\\.+*?()|\[\]{}^$]"), r"\\\g<0>"
_SLASH = re.compile(r"(\\.)|/", re.DOTALL)


def string_expressions(schema: Mapping[str, Any], excluded: str) -> Iterator[str]:
    """Yield expressions in grammar syntax, with their slashes, that the whole string matches, all of them.

    `excluded` is a text that the string does not contain, since it ends it; "" for none. Raises GrammarRefused.
    """
    yield characters(*length_limits(schema))
    if excluded:
        yield excluding(excluded)
    if isinstance(pattern := schema.get("pattern"), str):
        try:
            yield f"/{_whole(exact_pattern(pattern))}/"
        except GrammarRefused as exc:
            raise GrammarRefused(f"/pattern: {exc}") from exc
    if (name := schema.get("format")) is not None:
        if name not in TEXT_PATTERNS:
            known = ", ".join(sorted(TEXT_PATTERNS))
            raise GrammarRefused(f"/format: the format {str(name)[:64]!r} is not supported here; supported are {known}")
        yield f"/{_escaped(TEXT_PATTERNS[name][1:-1])}/"


def length_limits(schema: Mapping[str, Any]) -> tuple[int, int | None]:
    """Return `minLength` and `maxLength`; None without a `maxLength`. Raises GrammarRefused."""
    limits = schema.get("minLength", 0), schema.get("maxLength")
    for keyword, count in zip(("minLength", "maxLength"), limits, strict=True):
        if keyword in schema and not (isinstance(count, int | float) and count == int(count) and count >= 0):
            raise GrammarRefused(f"/{keyword}: it must be an integer of at least 0")
    least, most = limits
    return int(least), None if most is None else int(most)


def characters(least: int, most: int | None) -> str:
    """Return the expression, in grammar syntax, of all strings with that many characters."""
    return rf"/(.|\n){{{least},{'' if most is None else most}}}/"


def excluding_early(num_chars: int, padding: str, end: str) -> str:
    """Return the expression, in grammar syntax, of strings without a tag after fewer characters than these.

    Padding before the tag is none of the characters.
    """
    tag = literal_expression(end)
    padded = f"({_escaped(padding)})?" if padding else ""
    return rf"~/(.|\n){{0,{num_chars - 1}}}{padded}{tag}{_ANYTHING}/"


def excluding(text: str) -> str:
    """Return the expression, in grammar syntax, of all strings that do not contain a text."""
    return f"~/{_ANYTHING}{literal_expression(text)}{_ANYTHING}/"


def literal_expression(text: str) -> str:
    """Return the expression that only a text matches, as between slashes."""
    return _escaped(_OPERATOR.sub(_BACKSLASHED, text))


def _whole(pattern: str) -> str:
    """Return an expression of whole strings for a pattern that is searched in them. Raises GrammarRefused."""
    begins, ends = pattern.startswith("^"), _ANCHORED_END.search(pattern) is not None
    if (begins or ends) and _has_alternatives(pattern):
        raise GrammarRefused("'|' together with '^' or '$' is not supported here; put the alternatives in a group")
    inner = pattern[begins : len(pattern) - ends]
    return f"{'' if begins else _ANYTHING}({_escaped(inner)}){'' if ends else _ANYTHING}"


def _has_alternatives(pattern: str) -> bool:
    """Return whether an exact pattern, in which literal operators are escaped, has alternatives in no group."""
    depth = 0
    for character in pattern:
        depth += (character == "(") - (character == ")")
        if character == "|" and depth == 0:
            return True
    return False


def _escaped(expression: str) -> str:
    """Return an expression with escaped slashes and line breaks, as between slashes."""
    return _SLASH.sub(lambda found: found[1] or r"\/", expression).replace("\n", r"\n")
