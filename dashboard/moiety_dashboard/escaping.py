"""Escaping of strings from other people, so that they appear as literal text. Pure; knows no page.

Streamlit reads labels, captions, toasts and errors as Markdown with extensions (colours, icons, shortcodes, LaTeX), so
a name such as `![p](http://…)` would load a picture in the reader's browser. Spreadsheets read cells that begin with
`=` as formulas.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from typing import Any

import pandas as pd

_MARKDOWN = re.compile(r"[^\w\s%',?\u2060]|_", re.ASCII)  # punctuation with a meaning in Markdown or its extensions
# Streamlit and GFM match these in the parsed text: icons, shortcodes, links, arrows and dashes.
_READ_LATER = re.compile(r"(:(?=[\w+/-]+[:\[])|:(?=//)|@(?=[\w-]+\.)|[<-](?=-)|-(?=>))|(?<=www)(?=\.)", re.IGNORECASE)
_JOINER = "\u2060"  # WORD JOINER, which has no width
_SPACES = re.compile(r"[\s\x00-\x1f\x7f-\x9f\u2028\u2029]+")
_UNSEEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # controls, directions, invisible characters, surrogates, separators
_KEPT = "\t\n\u200c\u200d"  # the last two join letters of Persian, Indic scripts and emoji
_FILLERS = "\u115f\u1160\u3164\uffa0"  # letters without a visible glyph
_FORMULA = re.compile(r"^[\s\x00]*[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")  # OWASP, CSV injection; full width too
_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?", re.ASCII)


def show_unseen(text: str) -> str:
    r"""Return text with invisible and direction-changing characters written as `\u202e` and the like.

    So no name imitates another or reverses the text beside it.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(f"\\u{ord(one):04x}" if _is_unseen(one) else one for one in text)


def _is_unseen(one: str) -> bool:
    return one in _FILLERS or (unicodedata.category(one) in _UNSEEN and one not in _KEPT)


def show_unseen_in(value: Any) -> Any:
    """Return decoded JSON with `show_unseen` applied to each string, keys of objects included."""
    if isinstance(value, str):
        return show_unseen(value)
    if isinstance(value, list):
        return [show_unseen_in(one) for one in value]
    if isinstance(value, Mapping):
        return {show_unseen(name): show_unseen_in(one) for name, one in value.items()}
    return value


def as_text(text: object) -> str:
    """Return Markdown on one line that renders as this text, whatever it contains.

    Each punctuation character becomes a numeric character reference, which the parser never takes for syntax. A WORD
    JOINER breaks the patterns that are matched in parsed text (`:material/…:`, `:smile:`, `http://`, `www.`, `a@b.c`).
    """
    line = show_unseen(_SPACES.sub(" ", str(text)))
    broken = _READ_LATER.sub(lambda match: (match.group(1) or "") + _JOINER, line)
    return _MARKDOWN.sub(lambda match: f"&#{ord(match.group())};", broken)


def escape_formula(value: Any) -> Any:
    """Return a CSV cell that no spreadsheet takes for a formula: an apostrophe precedes text that begins one.

    Numbers stay numbers.
    """
    if not isinstance(value, str) or _NUMBER.fullmatch(value) or not _FORMULA.match(value):
        return value
    return "'" + value


def csv_of(frame: pd.DataFrame) -> str:
    """Return a frame as CSV, with its formulas escaped in cells and headings."""
    safe = frame.rename(columns=escape_formula)
    for at, dtype in enumerate(frame.dtypes):
        if pd.api.types.is_object_dtype(dtype) or isinstance(dtype, pd.StringDtype | pd.CategoricalDtype):
            safe.isetitem(at, [escape_formula(value) for value in frame.iloc[:, at]])
    return str(safe.to_csv(index=False, lineterminator="\r\n"))
