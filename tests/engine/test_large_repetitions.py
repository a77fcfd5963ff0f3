"""Expressions with large counts: counted exactly, or refused before the answer begins."""

from __future__ import annotations

import ctypes
import json
from typing import Any

import pytest

from moiety_engine.scripted.text_model import END_ID, scripted_text_model
from moiety_engine.structured_outputs.compiler import GrammarCompiler
from moiety_engine.structured_outputs.costly_parts import costliest_part
from moiety_engine.structured_outputs.errors import GrammarRefused
from moiety_engine.structured_outputs.state import TOO_COSTLY
from moiety_wire.grammars import GrammarKind, GrammarSpec

TEXT = scripted_text_model()  # whose tokens are bytes
COMPILER = GrammarCompiler(TEXT.tokenizer_json, TEXT.eos_token_ids)


def can_be_answered(spec: GrammarSpec, answer: str) -> bool:
    """Return whether each token of the answer and its end are in the masks of the steps."""
    state = COMPILER.open(spec)
    mask = ctypes.create_string_buffer(4 * COMPILER.num_words)
    for token_id in (*answer.encode(), END_ID):
        state.write(ctypes.addressof(mask), len(mask))
        assert not state.problem, state.problem
        if not mask.raw[token_id >> 3] >> (token_id & 7) & 1:
            return False
        state.take([token_id])
    assert not state.problem, state.problem
    return True


@pytest.mark.parametrize(
    ("expression", "piece", "least", "most"),
    [
        ("[a-z]{1,50000}", "ab", 1, 50_000),
        ("^[a-z]{20000}$", "ab", 20_000, 20_000),
        (r"\w{300,5000}", "aé中", 300, 5000),
        (".{0,5000}", "a😀", 0, 5000),
        ("[^x]{2560,}", "a\né", 2560, None),
        ("a{127,18433}", "a", 127, 18_433),
        ("(ab|c){1000,9000}", "c", 1000, 9000),
        ("[^x]{1,3000}!?", "a\né", 1, 3000),
        (r"(\w{1,100} ){1,12}", "é" * 100 + " ", 101, 1212),
    ],
)
def test_an_expression_is_counted_exactly(expression: str, piece: str, least: int, most: int | None) -> None:
    spec = GrammarSpec(GrammarKind.REGEX, expression)

    def is_answer(num_chars: int) -> bool:
        return can_be_answered(spec, (piece * (num_chars // len(piece) + 1))[:num_chars])

    assert is_answer(least)
    assert not (least and is_answer(least - 1))
    assert is_answer(least + 3000 if most is None else most)
    assert most is None or not is_answer(most + 1)


REGEX, LARK = GrammarKind.REGEX, GrammarKind.GRAMMAR


@pytest.mark.parametrize(
    ("kind", "text", "named"),
    [
        (REGEX, "[a-z]{1,500000}!", "[a-z]{1,500000}!"),
        (REGEX, "(ab|c){1000,90000}", "(ab|c){1000,90000}"),
        (REGEX, r"(\w{1,1000} ){1,1000}", r"(\w{1,1000} ){1,1000}"),
        (LARK, 'start: A "!"\nA: /[a-z]{1,500000}/', "/[a-z]{1,500000}/"),
        (LARK, 'start: A "!"\nA: /\\w/{1,70000}', "/\\w/{1,70000}"),
        (LARK, 'start: A "!"\nA: /(ab|c){100000}/', "/(ab|c){100000}/"),
        (LARK, 'start: A "!"\nA: /(?P<x>(ab){3}){50000}/', "/(?P<x>(ab){3}){50000}/"),
    ],
)
def test_an_expression_that_the_lexer_cannot_hold_is_refused_by_its_name(
    kind: GrammarKind, text: str, named: str
) -> None:
    with pytest.raises(GrammarRefused) as refused:
        COMPILER.compile(GrammarSpec(kind, text))
    assert repr(named) in str(refused.value) and "use smaller counts" in str(refused.value)


@pytest.mark.parametrize(
    ("part", "longest", "least"),
    [
        ({"pattern": "^[a-z]+$"}, "a" * 3000, 3000),
        ({"pattern": "^.*$"}, "é中" * 900, 1800),
        ({"pattern": "a"}, "b" * 4000 + "a", None),
        ({"pattern": "^.*$"}, "é中" * 2000, None),
        ({"format": "uri"}, "http://a.b/" + "c" * 5000, None),
    ],
)
def test_lengths_beside_a_pattern_or_a_format_are_exact(part: dict[str, Any], longest: str, least: int | None) -> None:
    string = {"type": "string", **part, "maxLength": len(longest), **({} if least is None else {"minLength": least})}
    schema = {"type": "object", "properties": {"x": string}, "required": ["x"], "additionalProperties": False}
    spec = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    assert can_be_answered(spec, json.dumps({"x": longest}, ensure_ascii=False))
    assert not can_be_answered(spec, json.dumps({"x": longest + "a"}, ensure_ascii=False))
    if least is not None:
        assert not can_be_answered(spec, json.dumps({"x": longest[: least - 1]}, ensure_ascii=False))


@pytest.mark.parametrize(
    ("part", "complaint"),
    [
        ({"pattern": "^[a-z]+$", "minLength": 250_001}, "beside this pattern it may be at most 250,000"),
        ({"pattern": "^(ab|c)*$", "minLength": 1801}, "beside this pattern it may be at most 1,800"),
        ({"format": "uri", "minLength": 5000}, "beside this format it may be at most 1,800"),
        ({"pattern": "a", "minLength": 1800}, "whether a string of this length satisfies the pattern"),
    ],
)
def test_a_least_length_that_cannot_be_kept_is_refused_with_its_place(part: dict[str, Any], complaint: str) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "string", **part}}, "required": ["x"]}
    with pytest.raises(GrammarRefused, match=f"/properties/x/minLength: {complaint}"):
        COMPILER.compile(GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema)))


LONG = {"type": "string", "pattern": "^[^x]*$", "maxLength": 3000}
CLOSED = {"type": "object", "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "document"),
    [
        (  # several strings with patterns
            CLOSED
            | {
                "properties": {name: LONG | {"pattern": f"^[^x{name}]*$"} for name in "abc"},
                "required": list("abc"),
            },
            dict.fromkeys("abc", "é" * 1500),
        ),
        (CLOSED | {"patternProperties": {"^[a-z]+$": {"type": "string", "maxLength": 4000}}}, {"ab": "中" * 4000}),
        (
            {
                "allOf": [
                    {"type": "object", "properties": {"a": {"type": "string", "maxLength": 4000}}},
                    {"type": "object"},
                ]
            },
            {"a": "é" * 4000},
        ),
        ({"allOf": [LONG, {"type": "string", "pattern": "z$"}]}, "a" * 2999 + "z"),
    ],
)
def test_long_strings_that_the_lexer_counts_end_no_answer(schema: Any, document: Any) -> None:
    spec = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    assert can_be_answered(spec, json.dumps(document, ensure_ascii=False))


AMBIGUOUS = "([a-z]+ ?){1,9000}"


@pytest.mark.parametrize(
    ("spec", "place"),
    [
        (GrammarSpec(REGEX, AMBIGUOUS), AMBIGUOUS),
        (GrammarSpec(LARK, f'start: "a" | WORDS\nWORDS: /{AMBIGUOUS}/'), f"/{AMBIGUOUS}/"),
    ],
)
def test_a_grammar_that_a_long_answer_is_too_much_for_is_refused_at_its_trial(spec: GrammarSpec, place: str) -> None:
    with pytest.raises(GrammarRefused) as refused:
        COMPILER.try_grammar(spec)
    assert str(refused.value) == f"the requested grammar is too complex, most of all {place!r}; simplify it"


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec(REGEX, "([a-z]+ ?){1,100}"),
        GrammarSpec(REGEX, "([a-z]+ ){1,9000}"),
        GrammarSpec(REGEX, r"(\w{1,100} ){1,100}"),
        GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(LONG)),
        GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps({"type": "array", "items": LONG, "maxItems": 500})),
    ],
)
def test_a_grammar_that_a_long_answer_is_possible_in_passes_its_trial(spec: GrammarSpec) -> None:
    assert COMPILER.try_grammar(spec) == spec


def test_an_answer_that_is_read_again_continues_as_before() -> None:
    spec = GrammarSpec(REGEX, "[a-z]{1,60000}!")
    answer = b"ab" * 10_000
    state = COMPILER.open(spec)
    state.take(list(answer))
    mask = ctypes.create_string_buffer(4 * COMPILER.num_words)
    state.write(ctypes.addressof(mask), len(mask))
    assert not state.problem
    state.take([ord("!"), END_ID])
    assert not state.problem


def test_an_answer_that_reaches_the_largest_lexer_fails_with_the_name_of_its_expression() -> None:
    assert costliest_part(GrammarSpec(REGEX, AMBIGUOUS)) == repr(AMBIGUOUS)
    parts = {"a": {"type": "string", "maxLength": 5}, "b/c": {"type": "string", "pattern": "^.{7,500}$"}}
    schema = json.dumps({"type": "object", "properties": parts})
    assert costliest_part(GrammarSpec(GrammarKind.JSON_SCHEMA, schema)) == "'/properties/b~1c/pattern'"
    state = COMPILER.open(GrammarSpec(REGEX, AMBIGUOUS))
    state.take(list(b"ab" * 5000))
    assert state.problem == TOO_COSTLY


def test_a_pattern_with_a_large_count_is_refused_with_its_place() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "string", "pattern": "^[a-z]{1,500000}$"}}}
    with pytest.raises(GrammarRefused, match="/properties/x/pattern: the repetitions of"):
        COMPILER.compile(GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema)))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("// path: /users/{id}/posts and /a{,5}/\nstart: /[^\\n]/{1,3000}", "ab"),
        ("start: /\\w/{2} // two", "ab"),
        ('start: "//" /[a-z]+/', "//ab"),
    ],
)
def test_counts_of_rules_and_texts_of_comments_need_no_states(text: str, answer: str) -> None:
    assert can_be_answered(GrammarSpec(LARK, text), answer)


@pytest.mark.parametrize("expression", ["a{,5}", "{x}", "a{b", "a{99999999999}"])
def test_a_brace_that_is_no_count_is_compiled_or_refused_with_the_reason(expression: str) -> None:
    for spec in (GrammarSpec(REGEX, expression), GrammarSpec(LARK, f"start: /{expression}/")):
        try:
            COMPILER.compile(spec)
        except GrammarRefused as refused:
            assert str(refused)
