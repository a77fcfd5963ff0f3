"""Strings with limits of their length, as arguments that are written without quotes up to a tag."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests.tool_call_grammars import GrammarText, format_named, with_added_tokens

from moiety_engine.structured_outputs.errors import GrammarRefused
from moiety_text.tools.formats import ParameterTags
from moiety_text.tools.offer import Tool, ToolOffer

QUOTE, MARK = '<|"|>', "]<]minimax[>["
BY_TEXT = ("qwen3_coder", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("mimo", "minimax_m2", "step3")))
BY_TOKEN = ("gemma4", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("glm45", "minimax_m3")))
PIECES = ("a", "<", "</", "</par", "é", "\n", "]<]mini", "\ufeff", "x y", "😀", "<｜", ">", '<|"')


@pytest.fixture(scope="module")
def text() -> GrammarText:
    return GrammarText(with_added_tokens(special=True))


def of_length(num_chars: int) -> str:
    draw = random.Random(num_chars)
    return "".join(draw.choices(PIECES, k=num_chars)).replace("</par>", "")[:num_chars]


def is_allowed(text: GrammarText, name: str, value: str, limits: dict[str, Any]) -> bool:
    """Return whether a strict call accepts the value; each token is masked as in an answer."""
    properties = {"a": {"type": "string", **limits}}
    schema = {"type": "object", "properties": properties, "required": ["a"], "additionalProperties": False}
    way, tool = format_named(name), Tool("f", "", schema, strict=True)
    if isinstance(tags := way.parameters, ParameterTags):
        inner = f"{tags.to_name}a{tags.to_value}{tags.padding}{value}{tags.padding}{tags.end}{tags.between}"
    else:
        inner = f"a:{QUOTE}{value}{QUOTE}" if name == "gemma4" else f"{MARK}<a>{value}{MARK}</a>"
    told = f"{way.to_name}f{way.to_arguments}{inner}{way.to_end}{way.closer}"
    matcher = text.compiler.compile(text.grammar(name, ToolOffer((tool,))))
    for token_id in text.spell(told, way):
        matcher.compute_bitmask()
        assert not matcher.is_error(), matcher.get_error()
        if matcher.validate_tokens([token_id]) != 1:
            return False
        assert matcher.consume_token(token_id)
    return bool(matcher.is_accepting())


@pytest.mark.parametrize("name", [*BY_TEXT, *BY_TOKEN, "deepseek_v32"])
def test_lengths_are_counted_in_characters_of_any_kind(text: GrammarText, name: str) -> None:
    for limits, allowed, refused in (
        ({"maxLength": 3}, ("", "a<é", "</p", "\n\n\n"), ("abcd", "</pa")),
        ({"minLength": 2, "maxLength": 4}, ("a\n", "<<", "</pa"), ("", "a", "😀", "<<<<<")),
        ({"minLength": 2}, ("ab", of_length(300)), ("", "\n")),
        ({"maxLength": 5, "pattern": "^a.*$"}, ("a</p", "a"), ("b", "a</par")),
    ):
        for value in allowed:
            assert is_allowed(text, name, value, limits), (limits, value)
        for value in refused:
            assert not is_allowed(text, name, value, limits), (limits, value)


@pytest.mark.parametrize("name", BY_TEXT)
def test_any_text_has_up_to_1024_characters_where_text_ends_it_and_more_is_refused(
    text: GrammarText, name: str
) -> None:
    for value in (of_length(1024), "</parameter " * 85, "😀" * 1024):
        assert is_allowed(text, name, value[:1024], {"maxLength": 1024})
    assert not is_allowed(text, name, "x" * 1025, {"maxLength": 1024})
    for limits, keyword in (
        ({"maxLength": 1025}, "maxLength"),
        ({"minLength": 1025}, "minLength"),
        ({"maxLength": 1025, "format": "uuid"}, "maxLength"),
    ):
        with pytest.raises(GrammarRefused, match=f"/properties/a/{keyword}: .* at most 1,024"):
            is_allowed(text, name, "", limits)


@pytest.mark.parametrize("name", BY_TOKEN)
def test_long_limits_are_exact_where_a_token_ends_the_text(text: GrammarText, name: str) -> None:
    for limits, allowed, refused in (
        ({"maxLength": 5000}, (0, 255, 256, 257, 4863, 4864, 5000), (5001,)),
        ({"minLength": 1500}, (1500, 3000), (1499, 255, 1280)),
        ({"minLength": 1500, "maxLength": 1600}, (1500, 1536, 1600), (1499, 1601)),
        ({"minLength": 1500, "maxLength": 1510}, (1500, 1510), (1499, 1511)),
        ({"minLength": 1500, "maxLength": 9000}, (1500, 1792, 9000), (1280, 9001)),
    ):
        for num_chars in allowed:
            assert is_allowed(text, name, of_length(num_chars), limits), (limits, num_chars)
        for num_chars in refused:
            assert not is_allowed(text, name, of_length(num_chars), limits), (limits, num_chars)
    with pytest.raises(GrammarRefused, match="/properties/a/minLength: 3,000 is more than 'maxLength'"):
        is_allowed(text, name, "", {"minLength": 3000, "maxLength": 2000})
    with pytest.raises(GrammarRefused, match="at most 1,024 beside a pattern"):
        is_allowed(text, name, "", {"maxLength": 2000, "pattern": "a"})
