"""Errors of the grammar library about expressions and grammars, as sentences for clients: place, reason, advice.

The library reports the place within a text that it has rewritten. This module reports it within the client's text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from moiety_wire.grammars import GrammarKind

MAX_MESSAGE_CHARS = 500
EXCERPT_CHARS = 24  # on each side of the place
ENDLESS = "no output can satisfy it, for example because it refers to itself without end"

_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
_PARSE_ERROR = re.compile(r"regex parse error:\n    (?P<text>.*)\n    (?P<marks>[ ^]*\^)[ ^]*\nerror: (?P<why>.*)")
_UNSUPPORTED = re.compile(r"lookarounds not supported yet; (?P<what>\w+) in regex")
_INVALID_REGEX = re.compile(r'invalid regex "(?P<text>(?:\\.|[^"\\])*)"')
_UNKNOWN_NAME = re.compile(r'unknown name: "(?P<name>[^"]*)"')
_BAD_ESCAPE = re.compile(r'"(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2})|[^"\\\n])*(?P<escape>\\[^\n]?)')
_STRING = re.compile(r'"(?:\\.|[^"\\\n])*"i?|/(?:\\.|[^/\\\n])+/[a-z]*|//.*')
_PROPERTY = re.compile(r"\\[pP]\{[^}]*\}")
_EMBEDDED_SCHEMA = re.compile(r"%json\s*")
_QUOTED_SINGLY = re.compile(r"'[^'\n]*'")

# the library's message, the reason for the client, and the advice
_EXPRESSION_FAULTS = (
    ("unclosed group", "the group is not closed", "add ')', or write '\\(' for the character"),
    ("unopened group", "no group is open", "remove ')', or write '\\)' for the character"),
    ("unclosed character class", "the character class is not closed", "add ']', or write '\\[' for the character"),
    ("unrecognized escape sequence", "the escape sequence is not known", "write '\\\\' for a backslash"),
    ("look-around", "look-ahead and look-behind are not supported", "list the possible outputs instead"),
    ("backreferences", "back-references are not supported", "write the group's expression again"),
    ("repetition operator missing", "there is nothing to repeat", "put '\\' before it for the character"),
    ("invalid repetition count range", "the repetition's minimum is above its maximum", "exchange the two"),
    ("repetition quantifier expects", "the repetition has no minimum", "write {0,n}, or '\\{' for the character"),
    ("repetition quantifier", "the repetition is not closed", "write {n} or {n,m}, or '\\{' for the character"),
    ("decimal literal invalid", "the repetition's count is too large", "use a smaller one"),
    ("Unicode property not found", "the Unicode property is not known", "use one of Unicode's own, such as \\p{L}"),
    ("invalid character class range", "the range begins after its end", "exchange its ends"),
    ("invalid range boundary", "a range of characters cannot end in a class", "put '-' first or last, or write '\\-'"),
    ("duplicate capture group name", "two groups have the same name", "leave one out"),
    ("unrecognized flag", "the kind of group is not known", "use (?:…) for a group without a name"),
    ("pattern can match invalid UTF-8", "it matches bytes that are not UTF-8", "leave (?-u) out"),
)
_ASSERTIONS = {  # the library's names of assertions, with the expression to search for
    "Start": r"\^|\\A",
    "End": r"\$|\\z",
    "StartLF": r"\^",
    "EndLF": r"\$",
    "StartCRLF": r"\^",
    "EndCRLF": r"\$",
    "WordUnicode": r"\\b",
    "WordAscii": r"\\b",
    "WordUnicodeNegate": r"\\B",
    "WordAsciiNegate": r"\\B",
}
_ANCHOR_ADVICE = "leave it out: the whole output must match"
_BOUNDARY_ADVICE = "list the characters that are allowed there"


def explain_error(kind: GrammarKind, text: str, error: str) -> str:
    """Return one sentence about a refused grammar. `text` is the client's."""
    error = error.replace("<non-verbose/>", "").strip()
    if error.startswith("NoExtension"):
        return ENDLESS
    if kind is GrammarKind.REGEX:
        message = _explain_expression(text, error, "")
    elif kind is GrammarKind.GRAMMAR:
        message = _explain_grammar(text, error)
    elif match := _PARSE_ERROR.search(error):
        message = _explain_expression(match["text"], error, "")
    else:
        message = None
    return (message or error.split("\n")[0])[:MAX_MESSAGE_CHARS]


def excerpt(text: str, index: int) -> str:
    """Return the text around a place on its line, with a mark before it."""
    begin = text.rfind("\n", 0, index) + 1
    end = text.find("\n", index)
    end = len(text) if end < 0 else end
    first, last = max(begin, index - EXCERPT_CHARS), min(end, index + EXCERPT_CHARS)
    before = ("…" if first > begin else "") + text[first:index]
    return f"{before}⟶{text[index:last]}{'…' if last < end else ''}"


def _explain_expression(expression: str, error: str, where: str) -> str | None:
    """Return the error of an expression. `where`: place of the expression if it is part of a grammar."""
    found = _place_in_expression(expression, error)
    if found is None:
        return None
    index, why, advice = found
    place = f"at character {index + 1} of the expression" if where else f"at character {index + 1}"
    return f"{where}{place} ({excerpt(expression, index)}): {why}; {advice}"


def _place_in_expression(expression: str, error: str) -> tuple[int, str, str] | None:
    """Return (index, reason, advice)."""
    if match := _PARSE_ERROR.search(error):
        column = match["marks"].index("^")
        index = min(_original_index(expression, match["text"], column), max(0, len(expression) - 1))
        for words, why, advice in _EXPRESSION_FAULTS:
            if words in match["why"]:
                return index, why, advice
        return index, match["why"], "write it otherwise"
    if match := _UNSUPPORTED.search(error):
        advice = _BOUNDARY_ADVICE if match["what"].startswith("Word") else _ANCHOR_ADVICE
        why = (
            "word boundaries are not supported" if match["what"].startswith("Word") else "an anchor is not allowed here"
        )
        wanted = _ASSERTIONS.get(match["what"], r"\\[<>bB]")
        for index, piece in _pieces(expression):
            may_stand = index == 0 if match["what"] == "Start" else index + len(piece) == len(expression)
            if re.fullmatch(wanted, piece) and not (may_stand and match["what"] in ("Start", "End")):
                return index, why, advice
        return 0, why, advice
    return None


def _pieces(expression: str) -> Iterator[tuple[int, str]]:
    """Yield characters and escape sequences outside of character classes, with their places."""
    is_class = False
    for match in re.finditer(r"\\.|.", expression, re.DOTALL):
        if match[0] == "[":
            is_class = True
        elif match[0] == "]":
            is_class = False
        elif not is_class:
            yield match.start(), match[0]


def _original_index(expression: str, rewritten: str, column: int) -> int:
    """Return the place in the client's expression for a column in the library's.

    The library escapes slashes and line ends.
    """
    if rewritten == expression:
        return column
    if (named := _PROPERTY.match(rewritten, column)) and named[0] in expression:
        return expression.index(named[0])
    index = 0
    for match in re.finditer(r"\\.|.", rewritten, re.DOTALL):
        if match.end() > column or index >= len(expression):
            break
        is_kept = expression.startswith(match[0], index)
        index += len(match[0]) if is_kept else 1
    return index


def _explain_grammar(text: str, error: str) -> str | None:
    match = _PLACE.match(error)
    if match is None:
        return _explain_whole_grammar(text, error)
    line, column, why = int(match[1]), int(match[2]), error[match.end() :]
    lines = text.rstrip("\n").split("\n")
    line = min(line, len(lines))  # the library adds a line
    begin = sum(len(one) + 1 for one in lines[: line - 1])
    index = min(begin + column - 1, len(text))
    if invalid := _INVALID_REGEX.search(why):
        return _explain_expression_in_grammar(text, begin, invalid, why)
    advice = ""
    if unknown := _UNKNOWN_NAME.search(why):
        index = _find_name(text, unknown["name"], index)
        why, advice = f"no rule or terminal has the name {unknown['name']!r}", "define it on a line of its own"
    elif why.startswith("lexer error"):
        index, why, advice = _unreadable(text, begin, lines[line - 1], index)
    else:
        index = min(begin + len(lines[line - 1]), index)
        if "'TOKEN_NAME'" in why or "'rule_name'" in why:
            advice = "rule names are lowercase, terminal names uppercase"
        why = re.sub(r" \(at .*$", "", why.split("\n")[0]).replace("found '\\n'", "found the end of the line")
    return f"{_place(text, index)}: {why}{'; ' + advice if advice else ''}"


def _explain_whole_grammar(text: str, error: str) -> str | None:
    if error.startswith("no start rule"):
        return "there is no rule 'start', with which every output begins; define it, as in `start: …`"
    if not error.startswith('failed to parse "%json"'):
        return None
    for found in _EMBEDDED_SCHEMA.finditer(text):
        try:
            json.JSONDecoder().raw_decode(text, found.end())
        except ValueError as exc:
            index = min(exc.pos, len(text)) if isinstance(exc, json.JSONDecodeError) else found.end()
            return f"{_place(text, index)}: the text after %json is not JSON; write a JSON schema there"
    return None


def _explain_expression_in_grammar(text: str, begin: int, invalid: re.Match[str], why: str) -> str | None:
    expression = _unescaped(invalid["text"])
    if parsed := _PARSE_ERROR.search(why):
        expression = parsed["text"]
    at = text.find(f"/{expression}/", begin)
    index = begin if at < 0 else at
    return _explain_expression(expression, why, f"{_line_and_column(text, index)}, ")


def _unescaped(text: str) -> str:
    """Return a string without Rust's escapes."""
    return re.sub(r"\\(.)", lambda one: {"n": "\n", "t": "\t", "r": "\r"}.get(one[1], one[1]), text)


def _find_name(text: str, name: str, index: int) -> int:
    """Return the first place of a name from `index` on, outside of strings, expressions and comments."""
    blanked = _STRING.sub(lambda one: " " * len(one[0]), text)
    match = re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])").search(blanked, index)
    return index if match is None else match.start()


def _unreadable(text: str, begin: int, line: str, index: int) -> tuple[int, str, str]:
    """Return (index, reason, advice) for a text that the lexer cannot read."""
    rest = _STRING.sub(lambda one: " " * len(one[0]), line)
    if (match := _BAD_ESCAPE.search(line)) and (match["escape"] != "\\" or line.endswith("\\")):
        at, why = begin + match.start("escape"), f"the escape sequence {match['escape']} is not known in a string"
        return at, why, "write '\\\\' for a backslash"
    if '"' in rest:
        at = begin + rest.index('"')
        return at, "the string is not closed on its line", "add '\"', or write '\\n' for a new line"
    if match := _QUOTED_SINGLY.search(rest):
        return begin + match.start(), "strings need double quotes", f'write "{match[0][1:-1]}"'
    if "/" in rest:
        return begin + rest.index("/"), "the expression is not closed on its line", "add '/'"
    index = min(index, len(text) - 1)
    return index, f"{text[index]!r} is not allowed here", "put text between double quotes"


def _place(text: str, index: int) -> str:
    return f"{_line_and_column(text, index)} ({excerpt(text, index)})"


def _line_and_column(text: str, index: int) -> str:
    before = text[:index]
    return f"line {before.count(chr(10)) + 1}, column {index - before.rfind(chr(10))}"
