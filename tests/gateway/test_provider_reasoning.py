"""Fields for reasoning of providers of open models have an effect in chats, by whatever name the template has."""

from __future__ import annotations

from typing import Any

import pytest

from moiety_platform.inference.body_fields import INT32_MAX
from moiety_platform.openai_api.schemas import ChatBody

from .conftest import RunningGateway
from .test_reasoning import DEEPSEEK, HEADER, Thinking, chat, raw, thinking, writes  # noqa: F401  a fixture
from .test_tool_loops import prompt_of

ON: list[dict[str, Any]] = [
    {"thinking": {"type": "enabled"}},
    {"thinking": {"type": "adaptive", "clear_thinking": False}},
    {"enable_thinking": True},
    {"reasoning": {"enabled": True}},
    {"reasoning": {"effort": "low"}},
]
OFF: list[dict[str, Any]] = [
    {"thinking": {"type": "disabled"}},
    {"enable_thinking": False},
    {"reasoning": {"enabled": False}},
    {"reasoning": {"effort": "none"}},
    {"thinking": {"type": "enabled"}, "reasoning_effort": "none"},
    {"thinking": {"type": "enabled"}, "chat_template_kwargs": {"thinking": False}},
]
OF_NO_FORM: list[dict[str, Any]] = [
    {"thinking": True},
    {"thinking": {"type": ["enabled"]}},
    {"thinking": {"type": 1, "budget_tokens": "7"}},
    {"enable_thinking": "yes"},
    {"thinking_budget": -1},
    {"reasoning": [1]},
    {"reasoning": {"effort": {}, "enabled": None, "max_tokens": True}},
]


async def opens_reasoning(gateway: RunningGateway, more: dict[str, Any]) -> bool:
    await chat(gateway, stream=False, extra_body=more)
    return prompt_of(gateway.engine.submits[-1], gateway.engine).endswith("<think>")


async def test_providers_switches_turn_reasoning_on_and_off(thinking: Thinking) -> None:  # noqa: F811
    async with thinking(template=DEEPSEEK) as gateway:
        writes(gateway, "Yes.")
        assert [one for one in ON if not await opens_reasoning(gateway, one)] == []
        assert [one for one in [*OFF, *OF_NO_FORM] if await opens_reasoning(gateway, one)] == []


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_excluded_from_an_answer(thinking: Thinking, stream: bool) -> None:  # noqa: F811
    async with thinking(template=DEEPSEEK) as gateway:
        writes(gateway, "Hm.</think>Yes.")
        asked = {"reasoning": {"enabled": True, "exclude": True}}
        content, thought, usage, _ = await chat(gateway, stream=stream, extra_body=asked)
        assert (content, thought or None) == ("Yes.", None)
        assert usage.completion_tokens_details.reasoning_tokens > 0


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking=9"),
        ({"thinking_budget": 9}, "thinking_budget=9"),
        ({"reasoning": {"max_tokens": 9}}, "reasoning=9"),
        ({"max_thinking_tokens": 9, "thinking_budget": 5}, "max_thinking_tokens=9"),
        ({"thinking_token_budget": 9, "thinking_budget": 5}, "thinking_token_budget=9"),
        ({"thinking_token_budget": 12, "max_thinking_tokens": 9}, "max_thinking_tokens=9"),
    ],
)
def test_a_budget_has_the_name_of_its_field(more: dict[str, Any], told: str) -> None:
    asked = {"model": "m", "messages": [{"role": "user", "content": "x"}], **more}
    (conversation,) = ChatBody.model_validate(asked).generation().prompts
    assert f"{conversation.reasoning_fields.budget}={conversation.thought_budget}" == told


@pytest.mark.parametrize(
    "more",
    [
        {"thinking": {"type": "enabled", "budget_tokens": 10**30}},
        {"thinking_budget": 10**30},
        {"reasoning": {"max_tokens": 10**30}},
    ],
)
def test_a_budget_is_at_most_what_an_engine_can_take(more: dict[str, Any]) -> None:
    asked = {"model": "m", "messages": [{"role": "user", "content": "x"}], **more}
    (conversation,) = ChatBody.model_validate(asked).generation().prompts
    assert conversation.thought_budget == INT32_MAX


async def test_a_switch_that_the_model_does_not_have_is_named(tool_gateway: RunningGateway) -> None:
    for more, told in (
        ({"thinking": {"type": "enabled"}}, "thinking=off"),
        ({"enable_thinking": True}, "enable_thinking=off"),
        ({"reasoning": {"effort": "high"}}, "reasoning=off"),
    ):
        assert (await raw(tool_gateway, extra_body=more)).headers[HEADER] == told
