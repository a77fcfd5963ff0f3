"""Whether a document satisfies a JSON schema, exactly: numbers as decimals, patterns in two dialects."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from functools import cache
from typing import Any

import jsonschema_rs
from jsonschema import Draft202012Validator, ValidationError, validators

MAX_EXPONENT = 999  # beyond which numbers compare alike, and have the same multiples, here


def complaint(schema: str, document: str) -> str:
    """Why a document is invalid; "" if it is valid, whichever of two members with the same name a reader takes."""
    for take in (dict, _first_of_each_name):
        try:
            found = json.loads(document, parse_float=read_decimal, object_pairs_hook=take)
        except ValueError as exc:
            return f"no JSON: {exc}"
        validator = _Validator(json.loads(schema, parse_float=Decimal))
        try:
            error = next(validator.iter_errors(found), None)
        except RecursionError:  # a schema that refers to itself for the same value has no meaning
            return ""
        if error is not None:
            return f"{error.message} at {list(error.absolute_path)}"
    return ""


def read_decimal(text: str) -> Decimal:
    """Return a number of a document; one with an exponent beyond reason has the largest that counts here."""
    mantissa, _, exponent = text.lower().partition("e")
    return Decimal(f"{mantissa}e{max(-MAX_EXPONENT, min(MAX_EXPONENT, int(exponent or 0)))}")


def write_json(value: Any) -> str:
    """Return JSON whose decimals keep their digits."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {write_json(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(write_json, value)) + "]"
    return str(value) if isinstance(value, Decimal) else json.dumps(value)


def _first_of_each_name(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return dict(reversed(pairs))


def _is_integer(_: Any, value: Any) -> bool:
    if isinstance(value, Decimal):
        return value == value.to_integral_value()
    return isinstance(value, int) and not isinstance(value, bool)


def _check_multiple(validator: Any, multiple: Any, value: Any, _: Any) -> Iterator[ValidationError]:
    if validator.is_type(value, "number") and (Fraction(value) / Fraction(multiple)).denominator != 1:
        yield ValidationError(f"{value} is no multiple of {multiple}")


def _check_pattern(_: Any, pattern: str, value: Any, __: Any) -> Iterator[ValidationError]:
    if isinstance(value, str) and not (_matches_in_rust(pattern, value) and _matches_in_python(pattern, value)):
        yield ValidationError(f"{value!r} does not match {pattern!r}")


def _check_format(_: Any, name: str, value: Any, __: Any) -> Iterator[ValidationError]:
    if isinstance(value, str) and not _by_format(name).is_valid(value):
        yield ValidationError(f"{value!r} has not the format {name!r}")


@cache
def _by_pattern(pattern: str) -> Any:
    return jsonschema_rs.validator_for({"pattern": pattern})


def _matches_in_rust(pattern: str, value: str) -> bool:
    try:
        return bool(_by_pattern(pattern).is_valid(value))
    except jsonschema_rs.ValidationError:
        return True  # it is none of that dialect


@cache
def _by_format(name: str) -> Any:
    return jsonschema_rs.validator_for({"format": name}, validate_formats=True)


def _matches_in_python(pattern: str, value: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # `&&` in a class may mean something else some day
            return re.search(pattern, value) is not None
    except re.error:
        return True  # it is none of Python's


_Validator: Any = validators.extend(
    Draft202012Validator,
    {"multipleOf": _check_multiple, "pattern": _check_pattern, "format": _check_format},
    type_checker=Draft202012Validator.TYPE_CHECKER.redefine("integer", _is_integer),
)
