# ruff: noqa: F811  fixtures are imported
"""Calls of earlier answers whose arguments are no JSON object, in all APIs and with every template's arguments."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_text.harmony.reader import CONTROL_TOKENS
from moiety_text.tokenizer import Tokenizer

from .conftest import StartGateway, StartOver, ToolCard
from .scripted_provider import ANTHROPIC, MODEL, PROTOCOLS, ScriptedProvider, client_of, provider  # noqa: F401  a fixture
from .test_tool_formats import ASKED, template_of

CUT = '{"city": "Zürich", "days": [1, 2'
BROKEN = (CUT, "[17]", "null", "now, please", '"{}"')
IN_TEMPLATES = {  # as the template of each kind renders the cut arguments
    "hermes": '"arguments": "{\\"city\\": \\"Zürich\\", \\"days\\": [1, 2"',
    "deepseek_v31": f"<｜tool▁sep｜>{CUT}<｜tool▁call▁end｜>",
    "glm45": f"<arg_key>arguments</arg_key>\n<arg_value>{CUT}</arg_value>",
    "harmony": 'json<|message|>"{\\"city\\": \\"Zürich\\", \\"days\\": [1, 2"<|call|>',
}


def chat(arguments: str) -> list[Any]:
    call = {"id": "call_1", "type": "function", "function": {"name": "forecast", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "invalid arguments"}
    return [*ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}, result]


def items(arguments: str) -> list[Any]:
    call = {"type": "function_call", "call_id": "call_1", "name": "forecast", "arguments": arguments}
    return [*ASKED, call, {"type": "function_call_output", "call_id": "call_1", "output": "invalid arguments"}]


def older(arguments: str) -> list[Any]:
    called = {"role": "assistant", "content": None, "function_call": {"name": "forecast", "arguments": arguments}}
    return [*ASKED, called, {"role": "function", "name": "forecast", "content": "invalid arguments"}]


def bodies(model: str, arguments: str) -> list[tuple[str, dict[str, Any]]]:
    return [
        ("/v1/chat/completions", {"model": model, "messages": chat(arguments)}),
        ("/v1/chat/completions", {"model": model, "messages": older(arguments)}),
        ("/v1/chat/completions", {"model": model, "input": items(arguments)}),
        ("/v1/responses", {"model": model, "input": items(arguments)}),
    ]


@pytest.mark.parametrize("name", IN_TEMPLATES)
async def test_the_model_reads_arguments_that_are_no_object_as_its_template_renders_them(
    start_gateway: StartGateway, tool_card: ToolCard, name: str
) -> None:
    source = None if name == "harmony" else template_of(name)
    card = tool_card(name, template=source or "", special=CONTROL_TOKENS if source is None else ())
    engine = FakeEngineClient(card, lambda submit: [(65, "ok")])
    async with start_gateway([engine]) as gateway:
        for path, body in bodies(name, CUT):
            status, _, answer = await gateway.post(path, body)
            assert status == 200, answer
            told = Tokenizer.from_json(card.tokenizer_json).decode(
                engine.submits[-1].prompt_ids, skip_special_tokens=False
            )
            assert IN_TEMPLATES[name] in told and "invalid arguments" in told, (path, told)
        for broken in BROKEN:
            for path, body in bodies(name, broken):
                status, _, answer = await gateway.post(path, body)
                assert status == 200, (path, broken, answer)


async def test_an_item_keeps_its_arguments_as_they_were_sent(start_gateway: StartGateway, tool_card: ToolCard) -> None:
    async with start_gateway([FakeEngineClient(tool_card("hermes"), lambda submit: [(65, "ok")])]) as gateway:
        for broken in BROKEN:
            kept = await gateway.client.responses.create(model="hermes", input=items(broken), store=True)
            listed = [item async for item in gateway.client.responses.input_items.list(kept.id, order="asc")]
            assert [item.arguments for item in listed if item.type == "function_call"] == [broken]
            again = await gateway.client.responses.create(
                model="hermes", input="Go on.", previous_response_id=kept.id, store=True
            )
            assert again.status == "completed"
            compacted = await gateway.post("/v1/responses/compact", {"model": "hermes", "input": items(broken)})
            assert compacted[0] == 200, compacted


async def test_the_input_of_a_tool_use_block_is_an_object(start_gateway: StartGateway, tool_card: ToolCard) -> None:
    async with start_gateway([FakeEngineClient(tool_card("hermes"), lambda submit: [(65, "ok")])]) as gateway:
        for given, expected in ((CUT, 400), (["x"], 400), (None, 400), ({}, 200), ({"city": "Zür"}, 200)):
            use = {"type": "tool_use", "id": "toolu_1", "name": "forecast", "input": given}
            result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "x"}
            turns = [*ASKED, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
            status, _, answer = await gateway.post(
                "/v1/messages", {"model": "hermes", "max_tokens": 100, "messages": turns}
            )
            assert status == expected, answer
            assert status == 200 or "input" in json.loads(answer)["error"]["message"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_provider_gets_them_as_its_api_takes_them(
    provider: ScriptedProvider, start_over: StartOver, protocol: str
) -> None:
    async with start_over(client_of(provider)) as gateway:
        tools = [{"type": "function", "function": {"name": "forecast"}}]
        body = {"model": MODEL, "messages": chat(CUT), "tools": tools, "max_tokens": 100}
        status, _, answer = await gateway.post("/v1/chat/completions", body)
        assert status == 200, answer
    called = provider.bodies[0]["messages"][1]
    if protocol == ANTHROPIC:
        assert called["content"][0]["input"] == {"arguments": CUT}
    else:
        assert called["tool_calls"][0]["function"]["arguments"] == CUT
