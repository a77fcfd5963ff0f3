"""Custom tools are functions with one string, and their input is that string whatever a model makes of it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moiety_platform.inference.custom_tools import CustomGrammar, arguments_of, custom_tool_of, input_of


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_an_input_survives_the_way_to_arguments_and_back(text: str) -> None:
    for ascii_only in (True, False):
        assert input_of(json.dumps(arguments_of(text), ensure_ascii=ascii_only)) == text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"input": "a", "other": 1}', "a"),
        ('{"patch": "a"}', "a"),
        ('{"patch": "a", "other": "b"}', '{"patch": "a", "other": "b"}'),
        ('{"input": 5}', '{"input": 5}'),
        ('{"input": ["a"]}', '{"input": ["a"]}'),
        ("{}", "{}"),
        ('{"input": 1e999}', '{"input": 1e999}'),
        ('{"input": "\\ud800"}', '{"input": "\\ud800"}'),
        ("[" * 5000, "[" * 5000),
    ],
)
def test_arguments_without_an_input_are_the_input(arguments: str, expected: str) -> None:
    assert input_of(arguments) == expected


def test_the_model_reads_the_grammar_of_an_input_in_the_description() -> None:
    grammar = CustomGrammar("regex", "a+")
    tool = custom_tool_of("f", "Write a.", grammar)
    assert tool.description == "Write a.\n\nThe input must match this regular expression:\na+"
    assert custom_tool_of("f", None, grammar).description == "The input must match this regular expression:\na+"
    assert custom_tool_of("f", "Write a.").description == "Write a."
    assert tool.parameters["required"] == list(tool.parameters["properties"]) == ["input"]
