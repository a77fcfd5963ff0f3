"""Query parameters that lists share, and strict parsing of those that are not text.

The framework would accept `null` for None, and a number for a moment.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated

import msgspec
from litestar.params import QueryParameter

from moiety_platform.errors import BadRequest

_WHOLE = re.compile(r"-?[0-9]{1,24}", re.ASCII)
_MOMENT = {"format": "date-time"}

Cursor = Annotated[str | None, QueryParameter(description="`next_cursor` of the previous page.")]
Since = Annotated[str | None, QueryParameter(description="Earliest time of the entries.", schema_extra=_MOMENT)]
Until = Annotated[
    str | None, QueryParameter(description="Time before which the entries lie; now if not given.", schema_extra=_MOMENT)
]


MAX_FILTER_LENGTH = 256

Filter = Annotated[str | None, QueryParameter(schema_extra={"maxLength": MAX_FILTER_LENGTH, "format": "printable"})]


def whole(description: str, low: int, high: int) -> QueryParameter:
    """Return a parameter for a whole number, which `parse_whole` reads."""
    return QueryParameter(description=description, schema_extra={"type": "integer", "minimum": low, "maximum": high})


def one_of(description: str, *choices: str) -> QueryParameter:
    """Return a parameter for one of these words."""
    return QueryParameter(description=description, schema_extra={"enum": list(choices)})


def some_of(description: str, choices: Sequence[str], pattern: str | None = None) -> QueryParameter:
    """Return a parameter for some of these words, or of a pattern, each once, separated by commas."""
    words: dict[str, object] = {"enum": list(choices)}
    entry = words if pattern is None else {"anyOf": [words, {"type": "string", "pattern": pattern}]}
    items = {"type": "array", "items": entry, "minItems": 1, "uniqueItems": True}
    return QueryParameter(description=description, schema_extra=items)


def parse_whole(text: str, param: str) -> int:
    """Return the whole number. Raises BadRequest."""
    if not _WHOLE.fullmatch(text):
        raise BadRequest(f"'{param}' must be a whole number, not {text[:64]!r}.", param=param)
    return int(text)


def parse_text(text: str | None, param: str) -> str | None:
    """Return the text of a Filter. Raises BadRequest."""
    if text is not None and not (text.isprintable() and len(text) <= MAX_FILTER_LENGTH):
        raise BadRequest(f"'{param}' must have at most {MAX_FILTER_LENGTH} printable characters.", param=param)
    return text


def parse_moment(text: str | None, param: str) -> datetime | None:
    """Return the moment. Raises BadRequest."""
    if text is None:
        return None
    try:
        return msgspec.convert(text, datetime)
    except msgspec.ValidationError as exc:
        message = f"'{param}' must be a time such as 2026-01-31T12:00:00Z, not {text[:64]!r}."
        raise BadRequest(message, param=param) from exc
