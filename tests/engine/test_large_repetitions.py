"""Expressions with large counts: counted exactly, or refused before the answer begins."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moiety_engine.scripted.text_model import END_ID, scripted_text_model
from moiety_engine.structured_outputs.compiler import GrammarCompiler
from moiety_engine.structured_outputs.errors import GrammarRefused
from moiety_wire.grammars import GrammarKind, GrammarSpec

TEXT = scripted_text_model()  # whose tokens are bytes
COMPILER = GrammarCompiler(TEXT.tokenizer_json, TEXT.eos_token_ids)


def can_be_answered(spec: GrammarSpec, answer: str) -> bool:
    """Return whether each token of the answer and its end are in the masks of the steps."""
    matcher = COMPILER.compile(spec).deep_copy()
    for token_id in (*answer.encode(), END_ID):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        assert not matcher.is_error(), matcher.get_error()
        if not mask >> token_id & 1:
            return False
        assert matcher.consume_token(token_id)
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
        ("(ab|c){1000,2000}", "c", 1000, 2000),
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
        (REGEX, "[a-z]{1,50000}!", "[a-z]{1,50000}!"),
        (REGEX, "(ab|c){1000,9000}", "(ab|c){1000,9000}"),
        (REGEX, r"(\w{1,100} ){1,100}", r"(\w{1,100} ){1,100}"),
        (LARK, 'start: A "!"\nA: /[a-z]{1,50000}/', "/[a-z]{1,50000}/"),
        (LARK, 'start: A "!"\nA: /\\w/{1,5000}', "/\\w/{1,5000}"),
        (LARK, 'start: A "!"\nA: /(ab|c){10000}/', "/(ab|c){10000}/"),
        (LARK, 'start: A "!"\nA: /(?P<x>(ab){3}){4000}/', "/(?P<x>(ab){3}){4000}/"),
    ],
)
def test_an_expression_that_the_lexer_cannot_hold_is_refused_by_its_name(
    kind: GrammarKind, text: str, named: str
) -> None:
    with pytest.raises(GrammarRefused) as refused:
        COMPILER.compile(GrammarSpec(kind, text))
    assert repr(named) in str(refused.value) and "use smaller counts" in str(refused.value)


@pytest.mark.parametrize(
    ("part", "longest", "limit"),
    [
        ({"pattern": "^[a-z]+$"}, "a" * 17_999, 18_000),
        ({"pattern": "a"}, "b" * 1799, 1800),
        ({"pattern": "^.*$"}, "é中" * 899, 1800),
        ({"format": "uri"}, "http://a.b/" + "c" * 4080, 4096),
    ],
)
def test_lengths_beside_a_pattern_or_a_format_are_kept(part: dict[str, Any], longest: str, limit: int) -> None:
    def schema(**lengths: int) -> GrammarSpec:
        string = {"type": "string", **part, **lengths}
        return GrammarSpec(
            GrammarKind.JSON_SCHEMA, json.dumps({"type": "object", "properties": {"x": string}, "required": ["x"]})
        )

    assert can_be_answered(schema(maxLength=limit), json.dumps({"x": longest + "a"}, ensure_ascii=False))
    assert can_be_answered(schema(maxLength=10 * limit), json.dumps({"x": longest + "a"}, ensure_ascii=False))
    with pytest.raises(GrammarRefused, match=f"/properties/x/minLength: beside this .* at most {limit:,}"):
        COMPILER.compile(schema(minLength=limit + 1))


def test_a_pattern_with_a_large_count_is_refused_with_its_place() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "string", "pattern": "^[a-z]{1,50000}$"}}}
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
