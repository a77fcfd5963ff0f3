"""Declarations of options as fields of a dataclass."""

from __future__ import annotations

from dataclasses import dataclass

from moiety_options.declaration import declared_options, option


@dataclass(slots=True, kw_only=True)
class SomeOptions:
    budget_tokens: int | None = option(None, "Largest number of tokens.", env="SOME_", min=1)
    fast: bool = option(False, "Use the fast way.", env="FAST_MODE")
    name: list[str] | None = option(None, "Name.")
    as_json: bool = option(False, "Print JSON.", flag="--json")
    undeclared: int = 3


def test_flag_and_variable_follow_from_the_name_of_the_field() -> None:
    found = declared_options(SomeOptions)
    assert list(found) == ["budget_tokens", "fast", "name", "as_json"]
    assert (found["budget_tokens"].flag, found["budget_tokens"].env) == ("--budget-tokens", "SOME_BUDGET_TOKENS")
    assert (found["fast"].env, found["fast"].negative_flag) == ("FAST_MODE", "--no-fast")
    assert (found["as_json"].flag, found["as_json"].negative_flag) == ("--json", None)


def test_the_type_is_that_of_a_value_which_is_given() -> None:
    found = declared_options(SomeOptions)
    assert (found["budget_tokens"].type, found["budget_tokens"].is_list) == (int, False)
    assert (found["name"].type, found["name"].is_list) == (str, True)
