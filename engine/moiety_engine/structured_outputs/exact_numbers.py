"""Exact numbers in JSON schemas: llguidance computes with 64-bit floats, which round whole numbers beyond 2**53.

Bounds beyond it move inwards, so every generated document satisfies the schema. Constants, multiples and bounds that
cannot be kept are refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import msgspec

from moiety_engine.structured_outputs.errors import GrammarRefused

MAX_EXACT = 2**53 - 1  # largest whole number up to which floats represent every whole number
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_ENCODER = msgspec.json.Encoder(decimal_format="number")
_UNREAD = ("default", "examples")  # values that do not constrain the answer


def decode_exactly(text: str) -> Any:
    """Return a JSON document whose fractions are Decimals and whose whole numbers are ints of any size.

    Raises ValueError, and RecursionError where it is nested too deeply.
    """
    return json.loads(text, parse_float=Decimal, parse_constant=refuse_constant)


def encode_exactly(value: Any) -> str:
    """Return a value that `decode_exactly` may have returned, as JSON in which Decimals are numbers."""
    return _ENCODER.encode(value).decode()


def with_exact_numbers(schema: Any, pointer: str = "") -> Any:
    """Return a schema, decoded by `decode_exactly`, in which no number changes when it is read as a 64-bit float.

    Raises GrammarRefused with the JSON pointer of a number that cannot be kept.
    """
    if isinstance(schema, list):
        return [with_exact_numbers(one, f"{pointer}/{at}") for at, one in enumerate(schema)]
    if not isinstance(schema, Mapping):
        return _exact(schema, pointer)
    found: dict[str, Any] = {}
    for key, value in schema.items():
        at = f"{pointer}/{pointer_part(key)}"
        if key in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
            found[key] = {name: with_exact_numbers(one, f"{at}/{pointer_part(name)}") for name, one in value.items()}
        elif key in ("const", "enum"):
            found[key] = _exact_data(value, at)
        elif key in _UNREAD:
            continue
        elif key in (*_LOWER, *_UPPER) and _is_number(value) and abs(value) > MAX_EXACT:
            _add_inner_bound(found, key, value, at)
        elif key in ("minimum", "maximum") and key in found and _is_number(value):
            found[key] = max(found[key], _exact(value, at)) if key == "minimum" else min(found[key], _exact(value, at))
        else:
            found[key] = with_exact_numbers(value, at)
    return found


def _add_inner_bound(found: dict[str, Any], key: str, value: int | Decimal, pointer: str) -> None:
    """Replace a bound beyond the exact range by the last number that floats keep.

    This excludes numbers and admits none that the original bound excludes.
    """
    is_lower = key in _LOWER
    if (value > 0) == is_lower:
        raise GrammarRefused(
            f"{pointer[:200]}: the bound {_shown(value)} is beyond ±(2**53 - 1), where numbers are not "
            "exact; use a smaller bound, or a string with a pattern"
        )
    name, bound = ("minimum", -MAX_EXACT) if is_lower else ("maximum", MAX_EXACT)
    found.setdefault(name, bound)


def _exact_data(value: Any, pointer: str) -> Any:
    if isinstance(value, Mapping):
        return {key: _exact_data(one, f"{pointer}/{pointer_part(key)}") for key, one in value.items()}
    if isinstance(value, list):
        return [_exact_data(one, f"{pointer}/{at}") for at, one in enumerate(value)]
    return _exact(value, pointer)


def _exact(value: Any, pointer: str) -> Any:
    if not _is_number(value):
        return value
    if abs(value) > MAX_EXACT:
        raise GrammarRefused(
            f"{pointer[:200]}: the number {_shown(value)} is beyond ±(2**53 - 1), where numbers are not "
            "exact; use a string instead"
        )
    if isinstance(value, int):
        return value
    narrowed = float(value)
    if Decimal(repr(narrowed)) != value:
        raise GrammarRefused(
            f"{pointer[:200]}: the number {_shown(value)} has too many digits to be exact; the nearest "
            f"exact number is {narrowed}"
        )
    return narrowed


def _is_number(value: Any) -> bool:
    return isinstance(value, int | Decimal) and not isinstance(value, bool)


def pointer_part(key: str) -> str:
    """Return a key in the syntax of JSON pointers."""
    return key.replace("~", "~0").replace("/", "~1")


def _shown(value: int | Decimal) -> str:
    return text if len(text := str(value)) <= 40 else f"{text[:40]}…"


def refuse_constant(name: str) -> None:
    """Refuse `NaN` and `Infinity`. Raises ValueError."""
    raise ValueError(f"{name} is not JSON")
