"""Expressions with large counts, and which of them the lexer of the grammar library cannot hold.

The lexer has a state for each byte of a counted repetition that an answer reaches, and many for the places that a mask
looks at. A repetition of one character that is a whole answer is counted by the parser, in chunks, which costs least.
Other repetitions are counted by the lexer, whose states grow with the answer (`state`); those that are larger than it
can grow are refused before the answer begins.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from moiety_engine.structured_outputs.chunked_strings import levels
from moiety_engine.structured_outputs.errors import GrammarRefused

MAX_COUNTED_BYTES = 250_000  # the lexer of an answer has up to 320,000 states
MAX_CHAR_BYTES = 4
MAX_LEAST_CHARS = 1800  # beside a pattern or a format: the lexer looks for a string of this length at each step
_CHUNKED_STATES = 18_000  # more, in one character that is repeated, are counted in chunks
_CHUNK_CHARS = 128
_COUNT = re.compile(r"\{\d{1,9}(?:,\d{0,9})?\}")
_GROUP = re.compile(r"\((?:\?P?<[^>=!][^>]*>|\?[A-Za-z-]*:)?")
_ATOM = re.compile(
    rf"\\[pP]\{{[^}}]*\}}|\\x\{{[0-9A-Fa-f]+\}}|\\.|\(\?[A-Za-z-]+\)|{_GROUP.pattern}|{_COUNT.pattern}|.", re.DOTALL
)
_ASCII_CLASS = re.compile(r"\[(?!\^)(?:[0-9A-Za-z_-]|\\x\{[0-7]?[0-9A-F]\})+\]")
_ONE_CLASS = re.compile(rf"\^{_ASCII_CLASS.pattern}[*+]\$")
_NAMED = (r"\p", r"\w", r"\d", r"\s")
_STATES_OF_NEGATED, _STATES_OF_NAMED = 8, 48  # of a character beyond ASCII: `[^…]`, and `\p{…}`


def counted_states(expression: str, most: int = _STATES_OF_NAMED) -> int:
    """Return about how many states the counted repetitions of an expression have, at `most` for one character.

    Groups of any kind are read, and a brace that begins no count is a character.
    """
    sums, last, counted = [0], [0], [0]  # by open group: states, those of the last atom, and those that are counted
    before = 0  # counted states of the last atom
    for atom, states in _atoms(expression):
        if _GROUP.fullmatch(atom):
            sums.append(0)
            last.append(0)
            counted.append(0)
        elif atom == ")" and len(sums) > 1:
            inner, before = sums.pop(), counted.pop()
            last.pop()
            sums[-1], last[-1], counted[-1] = sums[-1] + inner, inner, counted[-1] + before
        elif _COUNT.fullmatch(atom):
            count = max(int(one) for one in re.findall(r"\d+", atom))
            sums[-1] += last[-1] * (count - 1)
            counted[-1] += last[-1] * count - before
        else:
            sums[-1], last[-1], before = sums[-1] + min(states, most), min(states, most), 0
    return counted[-1]


def _atoms(expression: str) -> list[tuple[str, int]]:
    """Return the parts of an expression, each with the states of one character."""
    found, at = [], 0
    while at < len(expression):
        if expression[at] == "[":
            end = _end_of_class(expression, at)
            text = expression[at:end]
            found.append((text, _states_of_class(text)))
        else:
            match = _ATOM.match(expression, at)
            assert match is not None
            text, end = match[0], match.end()
            is_operator = text in "^$|*+?)" or text.startswith("(") or _COUNT.fullmatch(text) is not None
            found.append((text, 0 if is_operator else _states_of_character(text)))
        at = end
    return [one for one in found if one[0] not in "^$|*+?"]


def _states_of_character(text: str) -> int:
    if text[:2].lower() in _NAMED:
        return _STATES_OF_NAMED
    return _STATES_OF_NEGATED if text == "." else len(text[:1].encode())


def _states_of_class(text: str) -> int:
    if _ASCII_CLASS.fullmatch(text):
        return 1
    return _STATES_OF_NAMED if any(name in text.lower() for name in _NAMED) else _STATES_OF_NEGATED


def _end_of_class(expression: str, begin: int) -> int:
    depth, at = 0, begin
    while at < len(expression):
        depth += (expression[at] == "[") - (expression[at] == "]")
        at += 2 if expression[at] == "\\" else 1
        if depth == 0:
            return at
    return at


def check_repetitions(expression: str, written: str) -> None:
    """Refuse an exact expression with too large counts. `written` is the client's. Raises GrammarRefused."""
    if (num_bytes := counted_states(expression, MAX_CHAR_BYTES)) > MAX_COUNTED_BYTES:
        shown = written if len(written) <= 64 else f"{written[:64]}…"
        raise GrammarRefused(
            f"the repetitions of {shown!r} count up to {num_bytes:,} bytes, of at most {MAX_COUNTED_BYTES:,}; use "
            "smaller counts, or '*' and '+' without a count"
        )


def counting_rules(expression: str) -> str | None:
    """Return the grammar of an exact expression that is one character, many times; None for other expressions."""
    atoms = _atoms(expression.removeprefix("^").removesuffix("$"))
    if len(atoms) != 2 or not _COUNT.fullmatch(atoms[1][0]) or counted_states(expression) <= _CHUNKED_STATES:
        return None
    character, repetition = atoms[0][0], atoms[1][0]
    if "".join((character, repetition)) != expression.removeprefix("^").removesuffix("$"):
        return None  # with a lazy quantifier or alternatives
    counts = [int(one) if one else None for one in repetition[1:-1].split(",")]
    chunk_chars = _CHUNK_CHARS if atoms[0][1] <= _STATES_OF_NEGATED else _CHUNK_CHARS // 4
    rules = ["chunk: CHUNK", f"CHUNK: /{character}{{{chunk_chars}}}/"]
    ways = []
    for first, last, low, high in levels(counts[0] or 0, counts[-1], chunk_chars):
        name = f"REST_{len(rules)}" if high else ""
        chunks = "" if last == 0 else f"chunk{{{first},{'' if last is None else last}}}"
        ways.append(f"{chunks} {name}")
        if name:
            rules.append(f"{name}: /{character}{{{low},{high}}}/")
    return "\n".join(["%llguidance {}", f"start: {' | '.join(ways)}", *rules])


def check_lengths(schema: Mapping[str, Any], pointer: str) -> None:
    """Refuse a least length beside an exact pattern, or a format, that no answer can have. Raises GrammarRefused.

    A large `maxLength` is not refused: the lexer makes states as an answer needs them, and few answers are so long.
    """
    pattern, name, least = schema.get("pattern"), schema.get("format"), schema.get("minLength")
    if not isinstance(pattern, str) and name is None:
        return  # counted by the parser
    is_ascii = isinstance(pattern, str) and name is None and _ONE_CLASS.fullmatch(pattern) is not None
    most = MAX_COUNTED_BYTES if is_ascii else MAX_LEAST_CHARS
    if isinstance(least, int) and least > most:
        beside = "pattern" if isinstance(pattern, str) else "format"
        raise GrammarRefused(
            f"{pointer}/minLength: beside this {beside} it may be at most {most:,}; use a smaller one, or leave "
            f"out the {beside}"
        )
