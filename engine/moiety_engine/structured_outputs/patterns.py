r"""Regular expressions rewritten for the grammar library so that every match is a match in each dialect in use.

JSON Schema's patterns are ECMA-262 expressions, but validators read them with their own language's engine, which
differs in `.`, `\d`, `\w` and `\s` beyond ASCII. A pattern of a value is therefore rewritten to match only what
ECMA-262, Python and Rust all match. Characters that only the library reads as operators become literals. An expression
for a whole answer is rewritten to match only what Python and Rust both match; where they differ otherwise, it is
refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from moiety_engine.structured_outputs.errors import GrammarRefused
from moiety_engine.structured_outputs.expression_errors import excerpt


class Use(StrEnum):
    """Use of an expression."""

    VALUE = "value"  # a string in a schema
    NAME = "name"  # a property name in a schema: non-matches matter as well
    ANSWER = "answer"  # a whole answer


class _Set(NamedTuple):
    """Inside of a character class, in variants.

    For schemas: the members in all dialects, in ECMA-262, and in any dialect. For answers: the members in both Python
    and Rust, and in either.
    """

    narrow: str
    ecma: str
    wide: str
    narrow_in_answers: str
    wide_in_answers: str


_SPACES = r"\t\n\x0B\x0C\r \xA0\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}"
_ECMA_SPACES = rf"{_SPACES}\x{{FEFF}}"
_ALL_SPACES = rf"{_ECMA_SPACES}\x1C-\x1F\x85\x{{180E}}"
_WORD = "0-9A-Za-z_"
_WORDS = r"\p{L}\p{Nd}\p{Nl}_"
_ALL_WORDS = r"\p{L}\p{M}\p{N}\p{Pc}\p{Alphabetic}"
_SETS: Mapping[str, _Set] = MappingProxyType(
    {
        "d": _Set("0-9", "0-9", r"\p{Nd}", r"\p{Nd}", r"\p{Nd}"),
        "D": _Set(r"\P{Nd}", "[^0-9]", "[^0-9]", r"\P{Nd}", r"\P{Nd}"),
        "w": _Set(_WORD, _WORD, _ALL_WORDS, _WORDS, _ALL_WORDS),
        "W": _Set(f"[^{_ALL_WORDS}]", f"[^{_WORD}]", f"[^{_WORD}]", f"[^{_ALL_WORDS}]", f"[^{_WORDS}]"),
        "s": _Set(_SPACES, _ECMA_SPACES, _ALL_SPACES, rf"{_SPACES}\x85", _ALL_SPACES),
        "S": _Set(f"[^{_ALL_SPACES}]", f"[^{_ECMA_SPACES}]", f"[^{_SPACES}]", f"[^{_ALL_SPACES}]", f"[^{_SPACES}]"),
    }
)
_ANY = r"[^\n\r\x{2028}\x{2029}]"
_CONTROLS = MappingProxyType({"n": 10, "r": 13, "t": 9, "v": 11, "f": 12})
_QUANTIFIER = re.compile(r"\{(\d+)(,(\d*))?\}")
_NAMED_GROUP = re.compile(r"\(\?P?<[A-Za-z_]\w*>")
_PROPERTY = re.compile(r"\\[pP]\{[^}]*\}")
_FLAGS = re.compile(r"\(\?([is]{1,2})\)")
_EVERY = r"[\x{0}-\x{10FFFF}]"
_OPERATORS = ("&&", "--", "~~", "[")  # of the library, within classes
_NUMBERED = re.compile(r"\\x([0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\[ux]\{([0-9a-fA-F]{1,6})\}")
_MAX_REPEAT = 2**31 - 1


def exact_pattern(pattern: str) -> str:
    """Return the pattern of a string, for the library. Raises GrammarRefused, with the place in it."""
    return _PatternRewrite(pattern, Use.VALUE).rewrite()


def exact_name_pattern(pattern: str) -> str:
    """Return a pattern of property names as ECMA-262 reads it, since its non-matches matter as well.

    Raises GrammarRefused.
    """
    return _PatternRewrite(pattern, Use.NAME).rewrite()


def exact_expression(expression: str) -> str:
    """Return the expression of a whole answer. Raises GrammarRefused, with the place in it."""
    return _PatternRewrite(expression, Use.ANSWER).rewrite()


class _PatternRewrite:
    """One pass over a pattern."""

    def __init__(self, pattern: str, use: Use) -> None:
        self._pattern, self._use = pattern, use
        self._any = r"[^\n]" if use is Use.ANSWER else _ANY
        self._at = 0
        self._groups: list[int] = []  # beginnings of the open groups
        self._may_repeat = False

    def rewrite(self) -> str:
        parts = []
        steps: dict[str, Callable[[], str]] = {
            "\\": self._escape,
            "[": self._class,
            "(": self._open_group,
            ")": self._close_group,
            "{": self._count,
        }
        while self._at < len(self._pattern):
            character = self._pattern[self._at]
            if character in steps:
                parts.append(steps[character]())
            elif character in "*+?":
                parts.append(self._repeat(character))
            elif character in "^$|":
                self._at, self._may_repeat = self._at + 1, False
                parts.append(character)
            else:
                self._at, self._may_repeat = self._at + 1, True
                parts.append(self._any if character == "." else _literal(ord(character)))
        if self._groups:
            raise self._refusal(
                self._groups[-1], "the group is not closed", "add ')', or write '\\(' for the character"
            )
        return "".join(parts)

    def _refusal(self, index: int, why: str, advice: str) -> GrammarRefused:
        return GrammarRefused(f"at character {index + 1} ({excerpt(self._pattern, index)}): {why}; {advice}")

    def _escape(self) -> str:
        self._may_repeat = True
        found = self._escaped(is_negated=False)
        return _literal(found) if isinstance(found, int) else f"[{found}]"

    def _escaped(self, *, is_negated: bool) -> int | str:
        """Consume an escape sequence; return a character, or the inside of a class."""
        letter = self._pattern[self._at + 1 : self._at + 2]
        if letter in _SETS:
            self._at += 2
            return self._set(_SETS[letter], is_negated=is_negated)
        if match := _PROPERTY.match(self._pattern, self._at):
            self._at = match.end()
            return match[0]
        return self._escaped_character(letter)

    def _set(self, found: _Set, *, is_negated: bool) -> str:
        if self._use is Use.NAME:
            return found.ecma
        if self._use is Use.ANSWER:
            return found.wide_in_answers if is_negated else found.narrow_in_answers
        return found.wide if is_negated else found.narrow

    def _escaped_character(self, letter: str) -> int:
        begin, after = self._at, self._pattern[self._at + 2 : self._at + 3]
        if letter in ("x", "u"):
            return self._numbered(begin, letter)
        self._at += 2
        if letter in _CONTROLS:
            code = _CONTROLS[letter]
        elif letter == "c" and after.isascii() and after.isalpha():
            self._at += 1
            code = ord(after) % 32
        elif letter == "0" and not after.isdigit():
            code = 0
        elif letter and not (letter.isascii() and letter.isalnum()):
            code = ord(letter)
        else:
            raise self._refusal(begin, *_unknown_escape(letter))
        return code

    def _numbered(self, begin: int, letter: str) -> int:
        r"""Consume `\xHH`, `\uHHHH`, also as a pair of surrogates, or `\u{H…}`."""
        text = self._pattern
        match = _NUMBERED.match(text, begin)
        if match is None:
            raise self._refusal(begin, "hexadecimal digits are missing", "write two after '\\x' or four after '\\u'")
        code, self._at = int(match[1] or match[2] or match[3], 16), match.end()
        if 0xD800 <= code < 0xDC00 and (low := re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})").match(text, self._at)):
            self._at = low.end()
            return 0x10000 + ((code - 0xD800) << 10) + int(low[1], 16) - 0xDC00
        if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
            raise self._refusal(begin, "the number is not a character's code", "write both halves of a surrogate pair")
        return code

    def _class(self) -> str:
        begin, text = self._at, self._pattern
        is_negated = text.startswith("^", begin + 1)
        self._at = begin + 1 + is_negated
        is_answer, first_at = self._use is Use.ANSWER, self._at
        if text.startswith("]", self._at) and not is_answer:
            raise self._refusal(self._at, "dialects differ in what ']' means here", "write '\\]' for the character")
        parts = []
        while self._at < len(text) and (text[self._at] != "]" or (is_answer and self._at == first_at)):
            item_at = self._at
            if is_answer and text.startswith(_OPERATORS, self._at):
                message = f"dialects differ in what {text[self._at : self._at + 2]!r} means in a class"
                raise self._refusal(item_at, message, "put '\\\\' before each of its characters")
            first = self._member(is_negated)
            is_range = text.startswith("-", self._at) and not text.startswith("-]", self._at)
            if is_range and self._at + 1 < len(text):
                self._at += 1
                last = self._member(is_negated)
                if isinstance(first, str) or isinstance(last, str):
                    raise self._refusal(
                        item_at, "a range cannot begin or end with a class", "put '-' last, or write '\\-'"
                    )
                if first > last:
                    raise self._refusal(item_at, "the range begins after its end", "exchange its ends")
                parts.append(f"{_literal(first)}-{_literal(last)}")
            else:
                parts.append(_literal(first) if isinstance(first, int) else first)
        if self._at >= len(text):
            raise self._refusal(begin, "the character class is not closed", "add ']', or write '\\[' for the character")
        self._at, self._may_repeat = self._at + 1, True
        return f"[{'^' if is_negated else ''}{''.join(parts)}]"

    def _member(self, is_negated: bool) -> int | str:
        if self._pattern.startswith("\\b", self._at):
            self._at += 2
            return 8
        if self._pattern[self._at] == "\\":
            return self._escaped(is_negated=is_negated)
        self._at += 1
        return ord(self._pattern[self._at - 1])

    def _open_group(self) -> str:
        begin, text = self._at, self._pattern
        if text.startswith(("(?=", "(?!", "(?<=", "(?<!"), begin):
            advice = "list the possible outputs instead"
            raise self._refusal(begin, "look-ahead and look-behind are not supported", advice)
        flags = _FLAGS.match(text) if begin == 0 else None
        if flags is not None and (self._use is Use.ANSWER or flags[1] == "i"):
            self._at, self._may_repeat = flags.end(), False
            if "s" in flags[1]:
                self._any = _EVERY
            return "(?i)" if "i" in flags[1] else ""
        self._groups.append(begin)
        self._may_repeat = False
        for opener in ("(?:", "(?i:"):
            if text.startswith(opener, begin):
                self._at += len(opener)
                return opener
        if match := _NAMED_GROUP.match(text, begin):
            self._at = match.end()
        elif text.startswith("(?", begin):
            raise self._refusal(begin, "the kind of group is not known", "use (?:…) for a group without a name")
        else:
            self._at += 1
        return "(?:"

    def _close_group(self) -> str:
        if not self._groups:
            raise self._refusal(self._at, "no group is open", "remove ')', or write '\\)' for the character")
        self._groups.pop()
        self._at, self._may_repeat = self._at + 1, True
        return ")"

    def _count(self) -> str:
        match = _QUANTIFIER.match(self._pattern, self._at)
        if match is None:
            if re.compile(r"\{,\d+\}").match(self._pattern, self._at):
                raise self._refusal(
                    self._at, "the repetition has no minimum", "write {0,n}, or '\\{' for the character"
                )
            self._at, self._may_repeat = self._at + 1, True
            return r"\{"
        least, most = int(match[1]), int(match[3] or match[1])
        if max(least, most) > _MAX_REPEAT:
            raise self._refusal(self._at, "the repetition's count is too large", "use a smaller one")
        if least > most:
            raise self._refusal(self._at, "the repetition's minimum is above its maximum", "exchange the two")
        return self._repeat(match[0])

    def _repeat(self, quantifier: str) -> str:
        if not self._may_repeat:
            raise self._refusal(self._at, "there is nothing to repeat", "put '\\' before it for the character")
        self._at, self._may_repeat = self._at + len(quantifier), False
        if self._pattern.startswith("?", self._at):
            self._at += 1  # lazy quantifier: the same strings match
        return quantifier


def _literal(code: int) -> str:
    """Return a character in the library's syntax, valid within a class and outside."""
    character = chr(code)
    return character if character.isalnum() or (code > 0xA0 and character.isprintable()) else f"\\x{{{code:X}}}"


def _unknown_escape(letter: str) -> tuple[str, str]:
    """Return the reason and the advice for an unknown escape sequence."""
    if not letter:
        return "a backslash escapes nothing", "write '\\\\' for a backslash"
    if letter in "bB":
        return "word boundaries are not supported", "list the characters that are allowed there"
    if letter.isdigit() or letter == "k":
        return "back-references are not supported", "write the group's expression again"
    if letter in "AzZ":
        return "dialects differ in the name of the anchor", "write '^' or '$'"
    return "the escape sequence is not known", "write '\\\\' for a backslash"
