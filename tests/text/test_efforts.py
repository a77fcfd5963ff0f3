"""Levels of effort that a template knows, and the nearest one to each level that a client may ask for."""

from __future__ import annotations

import pytest

from moiety_text.chat import ChatTemplate
from moiety_text.efforts import EFFORT, LEVELS, levels_of, nearest_level

TURNS = "{% for message in messages %}{{ message.content }}{% endfor %}"
TEMPLATES = {
    TURNS: (),
    TURNS + "{% if enable_thinking %}high{% endif %}": (),
    TURNS + "Reasoning: {{ reasoning_effort or 'medium' }}": ("low", "medium", "high"),
    TURNS + "{% if reasoning_effort == 'max' %}Think hard.{% elif reasoning_effort == 'high' %}Think.{% endif %}": (
        "high",
        "max",
    ),
    TURNS
    + "{% if reasoning_effort not in ['none', 'low', 'high'] %}{{ raise_exception('no such effort') }}{% endif %}": (
        "low",
        "high",
    ),
    TURNS + "{% if reasoning_effort is defined %}<think>{% endif %}": (),
}


@pytest.mark.parametrize("source", TEMPLATES)
def test_a_template_shows_the_levels_that_it_knows(source: str) -> None:
    assert levels_of(ChatTemplate(source, {})) == TEMPLATES[source]


@pytest.mark.parametrize("source", [source for source, levels in TEMPLATES.items() if levels])
def test_every_level_is_rendered_as_one_that_the_template_knows(source: str) -> None:
    template = ChatTemplate(source, {})
    for wanted in LEVELS:
        level = nearest_level(wanted, levels_of(template))
        assert level in TEMPLATES[source]
        template.render([{"role": "user", "content": "Hi"}], extra={EFFORT: level})


def test_the_nearest_level_is_taken_and_the_lower_one_of_two() -> None:
    assert [nearest_level(wanted, ("low", "medium", "high")) for wanted in LEVELS] == [
        "low", "low", "medium", "high", "high", "high",
    ]  # fmt: skip
    assert [nearest_level(wanted, ("low", "high")) for wanted in LEVELS] == [
        "low", "low", "low", "high", "high", "high",
    ]  # fmt: skip
    assert all(nearest_level(wanted, LEVELS) == wanted for wanted in LEVELS)
