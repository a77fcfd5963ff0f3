"""Text of others on a terminal or in a log: nothing in it moves the cursor, sets a colour, forges a line or turns the
direction of what stands beside it. Pure."""

from __future__ import annotations

import unicodedata

_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})  # controls, directions, invisible ones, surrogates, separators
_JOINERS = "\u200c\u200d"  # of letters in Persian and Indic scripts, and of emoji
_FILLERS = "\u115f\u1160\u3164\uffa0"  # letters that are drawn as nothing


def printable(text: str, keep: str = "") -> str:
    """Return text with each character that is not drawn written as JSON would escape it; `keep` are left."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(one if one in keep or not is_unseen(one) else _escaped(one) for one in text)


def printable_lines(text: str) -> str:
    """Return text of several lines, of which ours end them."""
    return printable(text, "\n\t")


def is_unseen(character: str) -> bool:
    """Return whether a character is not drawn, or changes how others are."""
    if character in _JOINERS:
        return False
    return character in _FILLERS or unicodedata.category(character) in _UNSEEN


def _escaped(character: str) -> str:
    """Return the `\\uXXXX` of a character, two of them beyond the basic plane, so that JSON reads it back."""
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))
