"""Numbers of JSON schemas are kept exactly, or refused with their place."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moiety_demo import checkpoint_path
from moiety_engine.structured_outputs.compiler import GrammarCompiler
from moiety_engine.structured_outputs.errors import GrammarRefused
from moiety_engine.structured_outputs.exact_numbers import MAX_EXACT, decode_exactly, with_exact_numbers
from moiety_text.folder import read_text_model
from moiety_text.tokenizer import Tokenizer
from moiety_wire.grammars import GrammarKind, GrammarSpec

TEXT = read_text_model(checkpoint_path())
TOKENIZER = Tokenizer.from_json(TEXT.tokenizer_json)
COMPILER = GrammarCompiler.read(checkpoint_path())
INT64 = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}


def allows(schema: dict[str, Any], document: str) -> bool:
    """Return whether the schema's grammar accepts the whole document."""
    matcher = COMPILER.compile(GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
    tokens = [*TOKENIZER.encode(document), TEXT.eos_token_ids[0]]
    return matcher.validate_tokens(tokens) == len(tokens)


def rewritten(schema: Any) -> Any:
    return with_exact_numbers(decode_exactly(json.dumps(schema)))


@pytest.mark.parametrize("document", ["0", "-1", "42", str(MAX_EXACT), str(-MAX_EXACT)])
def test_bounds_of_64_bits_are_taken(document: str) -> None:
    assert allows(INT64, document)
    assert allows({"type": "array", "items": INT64}, f"[{document}]")


@pytest.mark.parametrize("document", [str(2**63), str(-(2**63) - 1), str(10**19)])
def test_no_number_outside_of_the_bounds_is_let_through(document: str) -> None:
    assert not allows(INT64, document)


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"const": 1234567890123456789}, "/const"),
        ({"enum": ["a", {"n": [2**53]}]}, "/enum/1/n/0"),
        ({"type": "integer", "minimum": -(2**63), "maximum": -(2**63)}, "/maximum"),
        ({"type": "integer", "minimum": 10**19}, "/minimum"),
        ({"type": "number", "exclusiveMaximum": -(10**19)}, "/exclusiveMaximum"),
        ({"type": "integer", "multipleOf": 2**60}, "/multipleOf"),
        ({"properties": {"a/b": {"anyOf": [{}, {"const": -(10**30)}]}}}, "/properties/a~1b/anyOf/1/const"),
        ({"properties": {"default": {"const": 2**60}}}, "/properties/default/const"),
    ],
)
def test_number_bounds_that_cannot_be_enforced_are_refused_with_their_path(
    schema: dict[str, Any], pointer: str
) -> None:
    with pytest.raises(GrammarRefused, match=rf"^{pointer}: the (number|bound) "):
        COMPILER.compile(GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema)))


@pytest.mark.parametrize("document", ["0", "-7", str(MAX_EXACT)])
def test_schemas_within_a_grammar_are_rewritten_alike(document: str) -> None:
    lark = f'start: "n=" %json {json.dumps(INT64)} "!"\n'
    matcher = COMPILER.compile(GrammarSpec(GrammarKind.GRAMMAR, lark))
    tokens = TOKENIZER.encode(f"n={document}!")
    assert matcher.validate_tokens(tokens) == len(tokens)
    with pytest.raises(GrammarRefused, match=r"^/maximum: the bound "):
        COMPILER.compile(GrammarSpec(GrammarKind.GRAMMAR, lark.replace(str(2**63 - 1), str(-(2**63)))))


def test_a_fraction_with_more_digits_than_a_float_keeps_is_refused() -> None:
    with pytest.raises(GrammarRefused, match=r"^/const: the number 0\.1000000000000000000001 has too many digits"):
        COMPILER.compile(GrammarSpec(GrammarKind.JSON_SCHEMA, '{"const": 0.1000000000000000000001}'))


def test_examples_and_defaults_hold_no_answer_to_anything() -> None:
    assert allows({"type": "integer", "default": 2**60, "examples": [10**30]}, "7")


def test_a_default_that_is_written_out_is_no_demand() -> None:
    assert allows({"type": "array", "items": {"type": "integer"}, "uniqueItems": False}, "[1, 1]")
    with pytest.raises(GrammarRefused, match="uniqueItems"):
        COMPILER.compile(GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type": "array", "uniqueItems": true}'))


def test_an_exclusive_bound_beyond_leaves_the_other_bound_in_force() -> None:
    for schema in (
        {"minimum": 5, "exclusiveMinimum": -(2**63), "type": "integer"},
        {"exclusiveMinimum": -(2**63), "minimum": 5, "type": "integer"},
    ):
        assert rewritten(schema)["minimum"] == 5


@given(st.integers(-(2**70), 2**70), st.integers(-(2**70), 2**70))
def test_rewritten_bounds_lie_within_the_bounds_that_were_asked_for(lower: int, upper: int) -> None:
    try:
        found = rewritten({"type": "integer", "minimum": lower, "maximum": upper})
    except GrammarRefused:
        assert lower > MAX_EXACT or upper < -MAX_EXACT
        return
    assert lower <= found["minimum"]
    assert found["maximum"] <= upper
    assert max(abs(found["minimum"]), abs(found["maximum"])) <= MAX_EXACT


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "/exclusiveMinimum"),
        ({"type": "number", "exclusiveMinimum": 1.0, "exclusiveMaximum": 1.1}, "/exclusiveMinimum"),
        ({"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}, "/exclusiveMaximum"),
        ({"type": "number", "allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]}, "/allOf/0/exclusiveMinimum"),
        ({"properties": {"a": {"exclusiveMaximum": -1, "minimum": -1.5}}}, "/properties/a/exclusiveMaximum"),
    ],
)
def test_an_exclusive_bound_near_the_opposite_bound_is_refused_by_its_place(
    schema: dict[str, Any], pointer: str
) -> None:
    with pytest.raises(GrammarRefused, match=f"^{re.escape(pointer)}: "):
        COMPILER.compile(GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema)))


@pytest.mark.parametrize(
    ("schema", "number", "wanted"),
    [
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, "0", False),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, "0.5", True),
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, "1", False),
        ({"type": "number", "minimum": -1, "exclusiveMaximum": 0}, "-0", False),
        ({"type": "number", "minimum": 0, "exclusiveMinimum": 0}, "0", False),
        ({"type": "number", "exclusiveMinimum": 0.5, "maximum": 0.75}, "0.5", False),
        ({"type": "number", "exclusiveMinimum": 0.5, "maximum": 0.75}, "0.75", True),
    ],
)
def test_other_exclusive_bounds_hold(schema: dict[str, Any], number: str, *, wanted: bool) -> None:
    assert allows(schema, number) == wanted
