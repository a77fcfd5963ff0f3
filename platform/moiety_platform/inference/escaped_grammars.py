"""Grammars of text rewritten for the same text inside of a JSON string.

Models write the input of a custom tool as a JSON string, in which quotes, backslashes and control characters are
escaped. A Lark grammar or regular expression of the input becomes a Lark grammar of the escaped text, which engines
follow like any other. Every escape has its shortest form.

An engine's lexer does not look ahead, so an escape must be a lexeme of its own: expressions with escaped characters
become rules, and terminals become rules with them. What cannot be rewritten with certainty is not: case-insensitive
terminals, look-around, references to tokens and grammars, `%ignore`, and imports beyond the common ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

import msgspec

MAX_DEFINITION_CHARS = 16 * 1024
MAX_CLASSES = 128  # of characters, each of which is compiled
MAX_ESCAPED_BYTES = 128 * 1024  # together with other tools it must not exceed the engine's limit

_SHORT = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}
_ESCAPES: Mapping[str, str] = MappingProxyType({chr(one): f"\\u{one:04x}" for one in range(32)} | _SHORT)
_SAFE = r'[^"\\\x00-\x1F]'
_COMMON: Mapping[str, str] = MappingProxyType(
    {"LF": r"\n", "CR": r"\r", "NEWLINE": r"(\r?\n)+", "WS": r"[ \t\f\r\n]+", "WS_INLINE": r"[ \t]+"}
)  # imported terminals with characters that are escaped
_UNESCAPED = re.compile(
    "(HEX)?DIGIT|(SIGNED_)?(INT|FLOAT|NUMBER)|DECIMAL|([LU]CASE_)?LETTER|WORD|CNAME"
)  # other imported terminals
_ANCHORED_END = re.compile(r"(?<!\\)((?:\\\\)*)\$\Z")  # an even number of backslashes before it escape each other
PART = re.compile(
    r"""(?P<comment>//[^\n]*|\#[^\n]*)
    |"(?P<first>\\.|[^"\\\n])"\s*\.\.\s*"(?P<last>\\.|[^"\\\n])"
    |(?P<text>"(?:\\.|[^"\\\n])*")(?P<text_flags>[a-z]*)
    |/(?P<regex>(?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^/\\\n\[])+)/(?P<regex_flags>[a-z]*)
    |%import[ \t]+common\.(?P<imported>\w+)(?:[ \t]*->[ \t]*(?P<alias>\w+))?
    |(?P<terminal>\b_?[A-Z][A-Z0-9_]*\b)(?:\.-?\d+(?=\s*:))?
    |(?P<unknown>[@<%"/])""",
    re.VERBOSE,
)
_ATOM = re.compile(
    r"""(?P<class>\[\^?\]?(?:\\.|[^\]\\])*\])
    |\\x(?P<hex>[0-9A-Fa-f]{2})|\\u(?P<unicode>[0-9A-Fa-f]{4})
    |\\(?P<escaped>.)
    |(?P<open>\((?:\?:|\?P?<[A-Za-z_]\w*>)?)
    |(?P<operator>[)|])
    |(?P<quantifier>[*+?]|\{\d{1,4}(?:,\d{0,4})?\})\??
    |(?P<dot>\.)
    |(?P<refused>[\^$\[{\\])
    |(?P<plain>.)""",
    re.VERBOSE | re.DOTALL,
)
_NAMED: Mapping[str, str] = MappingProxyType({"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"})
_CLASSES = "dDwWsS"
_START = re.compile(r"^[ \t]*[?!]?start\b", re.MULTILINE)
_SHOWN_CHARS = 24  # of a part, in a message
_LOOK_AROUND = "look-ahead and look-behind are not supported; list the possible texts instead"
_GROUP = "this kind of group, or flags within an expression, are not supported here; use (?:…)"


class NotRewritable(Exception):
    """The grammar has a part that cannot be rewritten. The message has the place, the reason and advice."""


class MalformedGrammar(NotRewritable):
    """The grammar is not a valid one in its syntax."""


_ANCHOR = "an anchor can only be at the beginning or the end of the whole expression; leave it out"
_REFUSED_ATOMS: Mapping[str, tuple[type[NotRewritable], str]] = MappingProxyType(
    {
        "^": (NotRewritable, _ANCHOR),
        "$": (NotRewritable, _ANCHOR),
        "[": (MalformedGrammar, "the character class is not closed; add ']', or write '\\[' for the character"),
        "{": (MalformedGrammar, "the repetition cannot be read; write {n} or {n,m}, or '\\{' for the character"),
        "\\": (MalformedGrammar, "nothing follows the backslash; write '\\\\' for the character"),
    }
)
_UNKNOWN_PARTS: Mapping[str, tuple[type[NotRewritable], str]] = MappingProxyType(
    {
        '"': (MalformedGrammar, "the string is not closed on its line; add '\"'"),
        "/": (MalformedGrammar, "the expression is not closed on its line; add '/'"),
        "@": (NotRewritable, "references to other grammars are not supported"),
        "<": (NotRewritable, "references to tokens of the model are not supported; write their text"),
        "%": (
            NotRewritable,
            "only `%import common.NAME` is supported, one on a line; write ignored text into the rules",
        ),
    }
)


@lru_cache(64)  # the same tools come with each turn, and are asked for several times in one
def escaped_grammar(syntax: str, definition: str) -> str:
    """Return the Lark grammar of the escaped text.

    `syntax` is "lark" or "regex". Linear in the length of the definition. Raises NotRewritable.
    """
    check_length(definition)
    escaped = _escaped_regex_grammar(definition) if syntax == "regex" else _escaped_lark_grammar(definition)
    if len(escaped.encode()) > MAX_ESCAPED_BYTES:
        raise NotRewritable(
            f"as the text of a JSON string it has more than {MAX_ESCAPED_BYTES:,} bytes; make it shorter"
        )
    return escaped


def check_length(definition: str) -> None:
    """Raise NotRewritable for a definition that is too long to be rewritten."""
    if len(definition) > MAX_DEFINITION_CHARS:
        raise NotRewritable(f"it has more than {MAX_DEFINITION_CHARS:,} characters; make it shorter")
    if definition.count("[") > MAX_CLASSES:
        raise NotRewritable(
            f"it has more than {MAX_CLASSES} character classes; define terminals and repeat their names"
        )


def check_start(definition: str) -> None:
    """Raise MalformedGrammar for a Lark grammar without the rule of the whole text."""
    if _START.search(definition) is None:
        raise MalformedGrammar("there is no rule 'start', with which every input begins; define it, as in `start: …`")


def fault_of_part(found: re.Match[str]) -> NotRewritable:
    """Return the fault of a part of a Lark grammar that is none of its known parts."""
    begins = found["unknown"]
    kind, why = _UNKNOWN_PARTS[begins]
    line_end = found.string.find("\n", found.start())
    told = found.string[found.start() : line_end if line_end >= 0 else None][:_SHOWN_CHARS]
    return kind(f"{_line_of(found)}, at {told!r}: {why}")


def _line_of(found: re.Match[str]) -> str:
    return f"line {found.string.count(chr(10), 0, found.start()) + 1}"


def _escaped_regex_grammar(definition: str) -> str:
    return f"start: {rewritten_regex(definition, _ESCAPES)}"


def _escaped_lark_grammar(definition: str) -> str:
    check_start(definition)
    kept = {found["alias"] or found["imported"] for found in PART.finditer(definition) if _is_kept(found)}
    return PART.sub(lambda found: _placed_part(found, kept), definition)


def _placed_part(found: re.Match[str], kept: set[str]) -> str:
    """Return the rewritten part. Raises NotRewritable with the line of the part."""
    if found["unknown"] is not None:
        raise fault_of_part(found)
    try:
        return _escaped_part(found, kept)
    except NotRewritable as exc:
        raise type(exc)(f"{_line_of(found)}, {exc}") from exc


def _is_kept(found: re.Match[str]) -> bool:
    """Return whether a part imports a terminal that stays as it is."""
    return found["imported"] is not None and found["imported"] not in _COMMON


def _escaped_part(found: re.Match[str], kept: set[str]) -> str:
    part = found.groupdict()
    if part["first"] is not None:
        first, last = _in_class(part["first"]), _in_class(part["last"])
        return _escaped_class(f"[{first}-{last}]")
    if part["text"] is not None:
        return _escaped_text(part["text"], part["text_flags"])
    if part["regex"] is not None:
        if part["regex_flags"] not in ("", "s"):
            flags = part["regex_flags"]
            raise NotRewritable(f"the flag {flags!r} of the expression is not supported here; list both cases instead")
        return f"({_escaped_regex(part['regex'], dot_all=part['regex_flags'] == 's')})"
    if part["imported"] is not None:
        return _imported(part["imported"], part["alias"], found[0])
    name = part["terminal"]
    return found[0] if name is None or name in kept else _rule_of(name)


def _rule_of(terminal: str) -> str:
    return f"terminal_{terminal.lower()}"


def _escaped_text(literal: str, flags: str) -> str:
    try:
        text = msgspec.json.decode(literal, type=str)
    except msgspec.DecodeError as exc:
        raise NotRewritable(f"the string {literal[:_SHOWN_CHARS]} has an escape sequence that is not known") from exc
    escaped = "".join(_ESCAPES.get(character, character) for character in text)
    if flags not in ("", "i") or (flags and escaped != text):
        raise NotRewritable(
            f"the flag {flags!r} is not supported here for {literal[:_SHOWN_CHARS]}; write the flag 'i' only after "
            "strings without quotes, backslashes and control characters"
        )
    return _string(escaped) + flags


def _imported(name: str, alias: str | None, statement: str) -> str:
    if name in _COMMON:
        return f"{_rule_of(alias or name)}: {_escaped_regex(_COMMON[name])}"
    if _UNESCAPED.fullmatch(name) is None:
        raise NotRewritable(
            f"the import of common.{name[:64]} is not supported here; define the terminal in the grammar"
        )
    return statement


def rewritten_regex(definition: str, escapes: Mapping[str, str]) -> str:
    """Return a rule's expression of the texts that a client's expression matches, with escapes for some characters.

    Raises NotRewritable.
    """
    body = _ANCHORED_END.sub(r"\1", definition.removeprefix("^"))
    return _escaped_regex(body, escapes)


def _escaped_regex(body: str, escapes: Mapping[str, str] = _ESCAPES, *, dot_all: bool = False) -> str:
    """Return a rule's expression of the escaped text. Raises NotRewritable."""
    parts: list[str] = []
    num_open = 0
    for found in _ATOM.finditer(body):
        part = found.groupdict()
        if part["refused"] is not None:
            raise _fault_at(found, *_REFUSED_ATOMS[part["refused"]])
        if part["open"] == "(" and body.startswith("(?", found.start()):
            is_look_around = body.startswith(("(?=", "(?!", "(?<=", "(?<!"), found.start())
            raise _fault_at(found, NotRewritable, _LOOK_AROUND if is_look_around else _GROUP)
        if part["quantifier"] is not None:
            if not parts or parts[-1] in ("(", "|"):
                raise _fault_at(
                    found, MalformedGrammar, "there is nothing to repeat; put '\\' before it for the character"
                )
            parts[-1] += part["quantifier"]
        elif part["open"] is not None:
            num_open += 1
            parts.append("(")
        elif part["operator"] is not None:
            if part["operator"] == ")" and num_open == 0:
                raise _fault_at(
                    found, MalformedGrammar, "no group is open; remove ')', or write '\\)' for the character"
                )
            num_open -= part["operator"] == ")"
            if not parts or parts[-1] in ("(", "|"):
                parts.append('""')
            parts.append(part["operator"])
        else:
            parts.append(_escaped_atom(found, escapes, dot_all))
    if num_open:
        raise MalformedGrammar(f"at the end of {body[-_SHOWN_CHARS:]!r}: a group is not closed; add ')'")
    return " ".join(parts) or '""'


def _fault_at(found: re.Match[str], kind: type[NotRewritable], why: str) -> NotRewritable:
    """Return the fault of an expression at one of its characters."""
    return kind(f"at {found.string[found.start() :][:_SHOWN_CHARS]!r}: {why}")


def _escaped_atom(found: re.Match[str], escapes: Mapping[str, str], dot_all: bool) -> str:
    """Return the expression of one character."""
    part: Mapping[str, str | None] = found.groupdict()
    if part["class"] is not None:
        return _escaped_class(part["class"], escapes)
    if part["dot"] is not None:
        return _escaped_class(r"[\s\S]" if dot_all else r"[^\n]", escapes)
    escaped, code = part["escaped"], part["hex"] or part["unicode"]
    if escaped is not None and escaped in _CLASSES:
        return _escaped_class(f"[\\{escaped}]", escapes)
    if escaped is not None and escaped.isalnum() and escaped not in _NAMED:
        raise _fault_at(found, NotRewritable, "the escape sequence is not supported here; list the characters instead")
    character = chr(int(code, 16)) if code else part["plain"] or _NAMED.get(escaped or "", escaped or "")
    return _string(escapes.get(character, character))


def _escaped_class(text: str, escapes: Mapping[str, str] = _ESCAPES) -> str:
    """Return an expression for one character of a class, escaped where a JSON string needs it."""
    # of a nested set, which `[`, `--`, `&&`, `~~` and `||` will begin in later Pythons, `re` warns
    if "[" in text[1:].replace("\\[", "") or re.search(r"&&|--|~~|\|\||\\[pPbB]", text):
        raise NotRewritable(
            f"at {text[:_SHOWN_CHARS]!r}: nested classes, operations of sets, \\p and \\b are not supported here; "
            "list the characters instead"
        )
    try:
        matches = re.compile(text).fullmatch
    except re.error as exc:
        kind = MalformedGrammar if exc.msg.startswith("bad character range") else NotRewritable
        raise kind(f"at {text[:_SHOWN_CHARS]!r}: the class cannot be read: {exc.msg}") from exc
    safe = f"&&{_SAFE}" if escapes else ""
    plain = "/[" + text.replace("\\/", "/").replace("/", "\\/") + f"{safe}]/"
    found = [_string(escape) for character, escape in escapes.items() if matches(character)]
    return f"({' | '.join([plain, *found])})"


def _in_class(character: str) -> str:
    return character if character.startswith("\\") else re.escape(character)


def _string(text: str) -> str:
    return msgspec.json.encode(text).decode()
