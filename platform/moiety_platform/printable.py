"""Escaping of untrusted text for terminals and logs. Pure.

The result does not move the cursor, set a colour, forge a line or change the direction of adjacent text.
"""

from __future__ import annotations

import unicodedata

_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})  # controls, directions, invisible ones, surrogates, separators
_JOINERS = "\u200c\u200d"  # join letters in Persian and Indic scripts, and emoji
_FILLERS = "\u115f\u1160\u3164\uffa0"  # letters without a visible shape


def printable(text: str, keep: str = "") -> str:
    """Return the text with each invisible character escaped as in JSON; characters in `keep` stay."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(one if one in keep or not is_unseen(one) else _escaped(one) for one in text)


def printable_lines(text: str) -> str:
    """Return the escaped text of several lines, whose line ends are our own."""
    return printable(text, "\n\t")


def is_unseen(character: str) -> bool:
    """Return whether a character is invisible, or changes how others are drawn."""
    if character in _JOINERS:
        return False
    return character in _FILLERS or unicodedata.category(character) in _UNSEEN


def _escaped(character: str) -> str:
    r"""Return the `\uXXXX` of a character, two of them beyond the basic plane, so that JSON reads it back."""
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))
