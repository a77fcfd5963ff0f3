"""Text in Lark's syntax, in which added tokens of the model stand by their ids."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec


def quoted_with_tokens(text: str, special: Mapping[str, int]) -> str:
    """Return text in grammar syntax, with its added tokens by their ids."""
    if not special:
        return lark_string(text)
    parts = _tokens(special).split(text)
    return " ".join(f"<[{special[part]}]>" if part in special else lark_string(part) for part in parts if part)


def lark_string(text: str) -> str:
    return msgspec.json.encode(text).decode() if text else ""


def lark_literal(text: str) -> str:
    """Return a string in grammar syntax, which may be empty."""
    return lark_string(text) or '""'


def split_at_token(text: str, special: Mapping[str, int]) -> str | None:
    """Return the text before its first added token; None where it has none."""
    found = _tokens(special).search(text) if special else None
    return None if found is None else text[: found.start()]


def _tokens(special: Mapping[str, int]) -> re.Pattern[str]:
    """Return an expression of all added tokens, longer ones first."""
    return re.compile("(" + "|".join(map(re.escape, sorted(special, key=len, reverse=True))) + ")")
