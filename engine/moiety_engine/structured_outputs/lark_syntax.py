"""Parts of grammars in llguidance's Lark syntax: texts with added tokens, and JSON schemas."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from moiety_engine.structured_outputs.exact_schemas import exact_schema_of

_ONE_SPACE = r"\x20"


def quoted(text: str, special: Mapping[str, int]) -> str:
    """Return text in grammar syntax, with its added tokens by their ids."""
    if not special:
        return _string(text)
    parts = re.split("(" + "|".join(re.escape(marker) for marker in special) + ")", text)
    return " ".join(f"<[{special[part]}]>" if part in special else _string(part) for part in parts if part)


def json_rule(schema: str) -> str:
    """Return the body of a rule for JSON that conforms to a schema. Raises ValueError, RecursionError."""
    exact = exact_schema_of(schema)
    return f"%json {exact.encode(**exact.options(whitespace_pattern=_ONE_SPACE))}"


def id_ranges(token_ids: Sequence[int]) -> Iterator[str]:
    """Yield ascending token ids in grammar syntax, consecutive ones as a range."""
    for _, row in itertools.groupby(enumerate(sorted(set(token_ids))), lambda one: one[1] - one[0]):
        found = [token_id for _, token_id in row]
        yield f"{found[0]}-{found[-1]}"


def _string(text: str) -> str:
    return msgspec.json.encode(text).decode() if text else ""
