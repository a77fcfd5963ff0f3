"""A tool call that breaks is text, and the streamed answer equals the whole one, in all three APIs."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .conftest import RunningGateway
from .test_tool_loops import ASKED, BOTH, OPENAI_TOOLS, WRITERS, ask_anthropic, ask_openai, says

RESPONSE_TOOLS = [{"type": "function", **tool["function"]} for tool in OPENAI_TOOLS]
GOOD = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n'
START = '<tool_call>\n{"name": "forecast", "arguments": {"city": '
BREAKS = ["True}}", '"a",}}', "NaN}}", '"\\ud800"}}', '"a', '"a"}', "01}}", '"a"}, "dry_run": True}']
BREAKS += ['"a"}}}', '"a"}}}\n</tool_call>', '"a"}}\n]', '"a", "dry_run": true}}}']
SURPLUS = {  # a whole call, and a bracket too many behind it
    "hermes": ['<tool_call>\n{"name": "now", "arguments": {}}}\n</tool_call>'],
    "llama": ['{"name": "now", "parameters": {}}}', '<|python_tag|>{"name": "now", "parameters": {}}]'],
    "mistral": [
        '[TOOL_CALLS] [{"name": "now", "arguments": {}}}]',
        '[TOOL_CALLS] [{"name": "now", "arguments": {}}]]',
        "[TOOL_CALLS]now[ARGS]{}}",
    ],
}


def told_by_chat(choice: Any) -> tuple[Any, ...]:
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
    return choice.message.content or "", calls, choice.finish_reason


def told_by_messages(message: Any) -> tuple[Any, ...]:
    return [
        (block.type, block.text if block.type == "text" else (block.name, block.input)) for block in message.content
    ], message.stop_reason


def told_by_responses(response: Any) -> tuple[Any, ...]:
    return [
        (item.type, item.status, item.content[0].text if item.type == "message" else (item.name, item.arguments))
        for item in response.output
    ], response.status


async def ask_responses(gateway: RunningGateway, family: str, *, stream: Any, **asked: Any) -> Any:
    body: dict[str, Any] = {"model": family, "input": ASKED, "tools": RESPONSE_TOOLS, **asked}
    if not stream:
        return await gateway.client.responses.create(**body)
    async with gateway.client.responses.stream(**body) as events:
        async for event in events:
            if event.type in ("response.completed", "response.incomplete"):
                return event.response
    raise AssertionError("the stream has no last event")


async def told_by_all(
    gateway: RunningGateway, family: str, *, stream: Any, limit: int = 400, stop: Any = None
) -> tuple[Any, ...]:
    stops = {} if stop is None else {"stop": [stop]}
    theirs = {} if stop is None else {"stop_sequences": [stop]}
    return (
        told_by_chat(await ask_openai(gateway, family, stream=stream, max_tokens=limit, **stops)),
        told_by_messages(await ask_anthropic(gateway, family, stream=stream, max_tokens=limit, **theirs)),
        told_by_responses(await ask_responses(gateway, family, stream=stream, max_output_tokens=limit)),
    )


SCRAPS = ["", "}", "]", ",", "NaN", "True", '"', "\\ud800", "\n", "{", "é"]
MUTATIONS = st.tuples(st.integers(0, 400), st.integers(0, 3), st.sampled_from(SCRAPS))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    family=st.sampled_from(sorted(WRITERS)),
    mutations=st.lists(MUTATIONS, max_size=2),
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=20),
    limit=st.sampled_from([5, 20, 60, 400]),
    stop=st.sampled_from([None, "days", "}}", '"']),
)
async def test_streamed_and_whole_answers_are_the_same(
    tool_gateway: RunningGateway, family: Any, mutations: Any, sizes: Any, limit: Any, stop: Any
) -> None:
    text = WRITERS[family](*BOTH)
    for at, length, more in mutations:
        text = text[:at] + more + text[at + length :]
    tool_gateway.of[family].script = says(text, sizes=sizes)
    whole = await told_by_all(tool_gateway, family, stream=False, limit=limit, stop=stop)
    assert await told_by_all(tool_gateway, family, stream=True, limit=limit, stop=stop) == whole
    (_, calls, reason), (blocks, stop_reason), (items, _) = whole
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)
    assert calls or reason != "tool_calls"
    assert any(kind == "tool_use" for kind, _ in blocks) or stop_reason != "tool_use"
    assert all(status == "completed" for kind, status, _ in items if kind == "function_call")


@pytest.mark.parametrize("before", ["", GOOD])
@pytest.mark.parametrize("rest", BREAKS)
async def test_a_broken_call_is_text_and_can_be_sent_back(tool_gateway: RunningGateway, rest: Any, before: Any) -> None:
    engine, text = tool_gateway.of["hermes"], before + START + rest
    num_good = 1 if before else 0
    for stream in (False, True):
        engine.script = says(text)
        choice = await ask_openai(tool_gateway, stream=stream)
        calls = choice.message.tool_calls or []
        assert [call.function.name for call in calls] == ["now"] * num_good
        assert choice.finish_reason == ("tool_calls" if num_good else "stop")
        assert choice.message.content.endswith(START + rest)
        results = [{"role": "tool", "tool_call_id": call.id, "content": "noon"} for call in calls]
        turns = [*ASKED, choice.message.model_dump(exclude_none=True), *results, *ASKED]
        engine.script = says("Yes.")
        assert (await ask_openai(tool_gateway, messages=turns)).message.content == "Yes."
        engine.script = says(text)
        response = await ask_responses(tool_gateway, "hermes", stream=stream)
        items = [item.model_dump(exclude_none=True) for item in response.output]
        results = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "noon"}
            for item in items
            if item["type"] == "function_call"
        ]
        assert len(results) == num_good
        engine.script = says("Yes.")
        await ask_responses(tool_gateway, "hermes", stream=False, input=[*ASKED, *items, *results, *ASKED])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("family", sorted(SURPLUS))
async def test_a_bracket_too_many_behind_a_call_makes_all_of_it_text_in_every_format(
    tool_gateway: RunningGateway, family: Any, stream: bool
) -> None:
    for text in SURPLUS[family]:
        tool_gateway.of[family].script = says(text)
        chat, messages, responses = await told_by_all(tool_gateway, family, stream=stream)
        assert chat == (text, [], "stop")
        assert messages == ([("text", text)], "end_turn")
        assert responses == ([("message", "completed", text)], "completed")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("rest", BREAKS)
async def test_anthropics_tool_runner_does_not_run_a_broken_call(
    tool_gateway: RunningGateway, rest: Any, stream: bool
) -> None:
    called = []

    @anthropic.beta_async_tool
    async def forecast(city: str) -> str:
        called.append(city)
        return "17 degrees"

    tool_gateway.of["hermes"].script = says(START + rest, "never asked for")
    runner = tool_gateway.anthropic.beta.messages.tool_runner(
        model="hermes", max_tokens=500, messages=ASKED, tools=[forecast], stream=stream
    )
    final = await runner.until_done()
    assert not called
    assert [(block.type, block.text) for block in final.content] == [("text", START + rest)]
    assert final.stop_reason == "end_turn"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("family", sorted(WRITERS))
async def test_hundreds_of_parallel_calls_are_all_returned_in_order(
    tool_gateway: RunningGateway, family: Any, stream: bool
) -> None:
    calls = [("forecast", {"city": f"n{number}"}) for number in range(300)]
    written = [(name, json.dumps(arguments)) for name, arguments in calls]
    tool_gateway.of[family].script = says(WRITERS[family](*written), sizes=(100,))
    (_, chat, reason), (blocks, stop_reason), (items, _) = await told_by_all(tool_gateway, family, stream=stream)
    assert [(name, json.loads(arguments)) for name, arguments in chat] == calls and reason == "tool_calls"
    assert [told for kind, told in blocks if kind == "tool_use"] == calls and stop_reason == "tool_use"
    found = [told for kind, _, told in items if kind == "function_call"]
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls
