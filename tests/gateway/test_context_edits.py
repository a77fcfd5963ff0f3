"""Context edits of Anthropic's API: what is cleared, when, and what an answer reports of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_platform.inference.context_edits import CLEARED_RESULT, REASONING, ReasoningClearing, ToolUseClearing

from .conftest import RunningGateway, StartGateway, ToolCard
from .test_message_batches import ended, results
from .test_tool_loops import prompt_of

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}{% endfor %}"
)
RESULT = "r" * 200


def conversation(num_uses: int, name: str = "read") -> list[Any]:
    """Return a conversation whose tool uses all have the same id."""
    turns: list[Any] = [{"role": "user", "content": "go"}]
    for number in range(num_uses):
        use = {"type": "tool_use", "id": "u", "name": name, "input": {"n": number}}
        turns.append({"role": "assistant", "content": [use]})
        turns.append(
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "u", "content": f"{number}{RESULT}"}]}
        )
    return turns


def clearing(**options: Any) -> dict[str, Any]:
    counts = {"trigger": "input_tokens", "keep": "tool_uses", "clear_at_least": "input_tokens"}
    typed = {
        name: {"type": counts[name], "value": value} if isinstance(value, int) and name in counts else value
        for name, value in options.items()
    }
    return {"edits": [{"type": "clear_tool_uses_20250919", **typed}]}


@pytest.fixture
async def gateway(start_gateway: StartGateway, tool_card: ToolCard) -> AsyncIterator[RunningGateway]:
    async with start_gateway([FakeEngineClient(tool_card("hermes", template=TEMPLATE))]) as running, running.anthropic:
        yield running


async def ask(gateway: RunningGateway, edits: dict[str, Any], turns: list[Any]) -> tuple[Any, str]:
    """Return the answer and the prompt of a conversation; its stream and its count of tokens must agree with it."""
    asked: dict[str, Any] = {"model": "hermes", "messages": turns, "context_management": edits}
    api = gateway.anthropic.beta.messages
    message = await api.create(**asked, max_tokens=5)
    prompt = prompt_of(gateway.engine.submits[-1], gateway.engine)
    async with await api.create(**asked, max_tokens=5, stream=True) as stream:
        (delta,) = [event async for event in stream if event.type == "message_delta"]
    assert delta.context_management == message.context_management
    counted = await api.count_tokens(**asked)
    plain = await api.count_tokens(model="hermes", messages=turns)
    assert plain.context_management is None
    assert counted.context_management.original_input_tokens == plain.input_tokens
    cleared = sum(one.cleared_input_tokens for one in message.context_management.applied_edits)
    assert counted.input_tokens == message.usage.input_tokens == plain.input_tokens - cleared == len(prompt)
    return message, prompt


def applied(message: Any) -> list[tuple[int, int]]:
    edits = message.context_management.applied_edits
    return [(one.cleared_tool_uses, one.cleared_input_tokens) for one in edits]


async def test_old_results_are_cleared_above_the_trigger_and_the_answer_says_how_much(gateway: RunningGateway) -> None:
    turns, saved = conversation(5), 201 - len(CLEARED_RESULT)
    message, prompt = await ask(gateway, clearing(trigger=300), turns)
    assert applied(message) == [(2, 2 * saved)]
    assert prompt.count(CLEARED_RESULT) == 2 and prompt.index("2r") > prompt.rindex(CLEARED_RESULT)
    assert [f'{{"n": {number}}}' in prompt for number in range(6)] == [True] * 5 + [False]
    for edits in (clearing(), clearing(trigger=len(prompt) + 2 * saved), clearing(trigger=300, clear_at_least=400)):
        message, prompt = await ask(gateway, edits, turns)
        assert (applied(message), CLEARED_RESULT in prompt) == ([], False)


async def test_tool_uses_can_be_the_trigger_and_inputs_and_tools_are_chosen(gateway: RunningGateway) -> None:
    turns = [*conversation(3), *conversation(2, "grep")[1:]]
    by_uses = {"type": "tool_uses", "value": 4}
    message, prompt = await ask(gateway, clearing(trigger=by_uses, keep=1, exclude_tools=["grep"]), turns)
    assert (applied(message)[0][0], prompt.count(CLEARED_RESULT)) == (3, 3)
    message, prompt = await ask(gateway, clearing(trigger=by_uses, keep=0, clear_tool_inputs=["grep"]), turns)
    assert (prompt.count("{}"), prompt.count('{"n":'), prompt.count(CLEARED_RESULT)) == (2, 3, 5)
    message, prompt = await ask(gateway, clearing(trigger=by_uses, keep=9, clear_tool_inputs=True), turns)
    assert (applied(message), "{}" in prompt) == ([], False)
    message, prompt = await ask(gateway, clearing(trigger=by_uses | {"value": 5}), turns)
    assert applied(message) == []


async def test_a_conversation_that_does_not_fit_the_context_is_cleared_below_its_trigger(
    gateway: RunningGateway,
) -> None:
    turns = conversation(120)
    with pytest.raises(anthropic.BadRequestError, match="context"):
        await gateway.anthropic.beta.messages.create(model="hermes", messages=turns, max_tokens=5)
    message, _ = await ask(gateway, clearing(), turns)
    assert applied(message)[0][0] == 117
    with pytest.raises(anthropic.BadRequestError, match="maximum context length is 20000"):
        await gateway.anthropic.beta.messages.create(
            model="hermes", messages=turns, max_tokens=5, context_management=clearing(keep=120)
        )


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        (clearing(trigger={"type": "turns", "value": 1}), "edits.0.trigger.type"),
        (clearing(keep=-1), "edits.0.keep.value"),
        ({"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 0}}]}, "keep"),
        ({"edits": [{"type": "compact_20260112"}] * 5}, "it may have 4 entries"),
    ],
)
async def test_a_wrong_edit_is_named(gateway: RunningGateway, edits: dict[str, Any], message: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match=message):
        await gateway.anthropic.beta.messages.create(
            model="hermes", messages=conversation(1), max_tokens=5, context_management=edits
        )


async def test_a_batch_has_the_edits_of_its_requests(start_gateway: StartGateway, tool_card: ToolCard) -> None:
    engine = FakeEngineClient(tool_card("hermes", template=TEMPLATE))
    async with start_gateway([engine], stores_usage=True) as gateway, gateway.anthropic:
        asked: dict[str, Any] = {"model": "hermes", "messages": conversation(5), "max_tokens": 5}
        asked["context_management"] = clearing(trigger=300)
        batch = await gateway.anthropic.beta.messages.batches.create(requests=[{"custom_id": "r", "params": asked}])
        batch = await ended(gateway, batch)
        message = (await results(gateway, batch.id))["r"].message.to_dict()
        (edit,) = message["context_management"]["applied_edits"]
        assert edit["cleared_tool_uses"] == 2
        assert prompt_of(gateway.engine.submits[-1], gateway.engine).count(CLEARED_RESULT) == 2


uses = st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xy"), st.sampled_from([0, 300])), max_size=8)


@given(uses, st.integers(0, 9), st.sets(st.sampled_from("ab")), st.booleans(), st.integers(1, 4))
def test_an_edit_changes_only_what_is_old_and_not_excluded(
    made: list[tuple[str, str, int]], num_kept: int, excluded: set[str], clears_inputs: bool, num_thoughts: int
) -> None:
    messages: list[dict[str, Any]] = []
    for name, call_id, length in made:
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": {"k": 1}}}
        messages.append({"role": "assistant", "content": "", REASONING: "t", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call_id, "content": "z" * length})
    edit = ToolUseClearing(0, None, num_kept, excluded_tools=excluded, clears_inputs=clears_inputs)
    edited, num_cleared = edit.edit(tuple(messages))
    num_old = max(0, len(made) - num_kept)
    old = [number < num_old and name not in excluded for number, (name, _, _) in enumerate(made)]
    for number, (is_old, (_, _, length)) in enumerate(zip(old, made, strict=True)):
        call, result = edited[2 * number]["tool_calls"][0], edited[2 * number + 1]["content"]
        assert call["function"]["arguments"] == ({} if is_old and clears_inputs else {"k": 1})
        assert result == (CLEARED_RESULT if is_old and length else "z" * length)
    cleared = [is_old and (clears_inputs or length > 0) for is_old, (_, _, length) in zip(old, made, strict=True)]
    assert num_cleared == sum(cleared)
    kept, num_removed = ReasoningClearing(num_thoughts).edit(tuple(messages))
    assert [REASONING in message for message in kept[::2]] == [
        number >= len(made) - num_thoughts for number in range(len(made))
    ]
    assert num_removed == max(0, len(made) - num_thoughts)
