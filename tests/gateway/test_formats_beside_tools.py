"""Response formats beside tools, and grammars of custom tools' inputs, in all APIs alike."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_wire.grammars import GrammarKind, ToolCallsGrammar
from moiety_wire.messages import ModelCard

from .conftest import RunningGateway, StartGateway
from .test_response_tools import TEMPLATE

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
NOW = {"name": "now", "description": "The time"}
PARAMETERS = {"type": "object", "properties": {}}
MESSAGES = [{"role": "user", "content": "go"}]
CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
ADJUSTED = "x-moiety-adjusted-fields"

Asked = tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]
APIS: dict[str, Asked] = {  # the path, the body, the choice that demands a call, and the choice that forbids calls
    "chat": (
        "/v1/chat/completions",
        {
            "messages": MESSAGES,
            "tools": [{"type": "function", "function": {**NOW, "parameters": PARAMETERS}}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
        },
        {"tool_choice": "required"},
        {"tool_choice": "none"},
    ),
    "functions": (
        "/v1/chat/completions",
        {
            "messages": MESSAGES,
            "functions": [{**NOW, "parameters": PARAMETERS}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
        },
        {"function_call": {"name": "now"}},
        {"function_call": "none"},
    ),
    "messages": (
        "/v1/messages",
        {
            "messages": MESSAGES,
            "max_tokens": 50,
            "tools": [{**NOW, "input_schema": PARAMETERS}],
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        },
        {"tool_choice": {"type": "any"}},
        {"tool_choice": {"type": "none"}},
    ),
    "responses": (
        "/v1/responses",
        {
            "input": "go",
            "tools": [{"type": "function", **NOW, "parameters": PARAMETERS}],
            "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
        },
        {"tool_choice": "required"},
        {"tool_choice": "none"},
    ),
}


def content_and_call(answer: dict[str, Any]) -> tuple[str, str]:
    """The text of an answer of any of the APIs, and the name of the tool that it calls."""
    if "choices" in answer:
        message = answer["choices"][0]["message"]
        called = [call["function"] for call in message.get("tool_calls") or ()] + [message.get("function_call")]
        return message["content"] or "", next((call["name"] for call in called if call), "")
    text = name = ""
    for item in answer.get("content") or answer["output"]:
        if item["type"] == "text":
            text += item["text"]
        elif item["type"] == "message":
            text += item["content"][0]["text"]
        elif item["type"] in ("tool_use", "function_call"):
            name = item["name"]
    return text, name


def writes(gateway: RunningGateway, text: str) -> None:
    gateway.engine.script = lambda submit: [(65, text)]


def with_tools(card: ModelCard, *, follows_grammars: bool) -> ModelCard:
    return msgspec.structs.replace(
        card, chat_template=TEMPLATE, max_context_tokens=4096, follows_grammars=follows_grammars
    )


async def ask(gateway: RunningGateway, api: str, more: dict[str, Any]) -> tuple[int, Any]:
    path, body, _, _ = APIS[api]
    status, _, answer = await gateway.post(path, {"model": "tiny", **body, **more})
    return status, json.loads(answer)


@pytest.mark.parametrize("api", APIS)
async def test_an_answer_is_a_call_or_follows_the_response_format(
    start_gateway: StartGateway, card: ModelCard, api: str
) -> None:
    async with start_gateway([FakeEngineClient(with_tools(card, follows_grammars=True))]) as gateway:
        _, _, demands, forbids = APIS[api]
        writes(gateway, '{"a": 5}')
        status, answer = await ask(gateway, api, {})
        assert status == 200 and content_and_call(answer) == ('{"a": 5}', "")
        held = gateway.engine.submits[-1].grammar
        assert held is not None and held.kind is GrammarKind.CALLS
        form = msgspec.json.decode(held.text, type=ToolCallsGrammar)
        assert form.answer is not None and json.loads(form.answer.text) == SCHEMA and not form.must_call
        writes(gateway, CALL)
        assert content_and_call((await ask(gateway, api, {}))[1]) == ("", "now")
        assert (await ask(gateway, api, forbids))[0] == 200
        alone = gateway.engine.submits[-1].grammar
        assert alone is not None and alone.kind is GrammarKind.JSON_SCHEMA
        writes(gateway, " {}}</tool_call>")
        assert content_and_call((await ask(gateway, api, demands))[1]) == ("", "now")
        begun = gateway.engine.submits[-1].grammar
        assert begun is not None and begun.kind is GrammarKind.CALLS
        assert msgspec.json.decode(begun.text, type=ToolCallsGrammar).must_call


@pytest.mark.parametrize("api", APIS)
async def test_a_response_format_with_tools_is_refused_by_engines_without_grammars(
    start_gateway: StartGateway, card: ModelCard, api: str
) -> None:
    async with start_gateway([FakeEngineClient(with_tools(card, follows_grammars=False))]) as gateway:
        status, answer = await ask(gateway, api, {})
        assert status == 400 and "together with tools; leave one of the two out" in answer["error"]["message"]
        assert gateway.engine.submits == []


async def test_a_constraint_that_may_read_like_a_call_is_refused_where_no_token_marks_calls(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    knowing = with_tools(card, follows_grammars=True)
    spec = json.loads(card.tokenizer_json)
    token_id = max(token["id"] for token in spec["added_tokens"]) + 1
    spec["added_tokens"].append(spec["added_tokens"][0] | {"id": token_id, "content": "<tool_call>"})
    marked = msgspec.structs.replace(knowing, tokenizer_json=json.dumps(spec), vocab_size=card.vocab_size + 1)
    for served, expected in ((knowing, 400), (marked, 200)):
        async with start_gateway([FakeEngineClient(served)]) as gateway:
            status, answer = await ask(gateway, "chat", {"response_format": None, "guided_regex": ".*"})
            assert status == expected, answer


@pytest.mark.parametrize(
    ("follows", "syntax", "definition", "is_held"),
    [
        (True, "lark", 'start: "a"+', True),
        (True, "regex", "a+", True),
        (False, "lark", "start: @x", False),
        (False, "regex", "a+", False),
    ],
)
@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_an_engine_without_grammars_is_reported_in_the_answer_to_a_tool_with_one(
    start_gateway: StartGateway, card: ModelCard, api: str, follows: bool, syntax: str, definition: str, is_held: bool
) -> None:
    knowing = with_tools(card, follows_grammars=follows)
    grammar = {"syntax": syntax, "definition": definition}
    if api == "chat":
        custom = {"name": "write", "format": {"type": "grammar", "grammar": grammar}}
        body: dict[str, Any] = {"messages": MESSAGES, "tools": [{"type": "custom", "custom": custom}]}
    else:
        body = {"input": "go", "tools": [{"type": "custom", "name": "write", "format": {"type": "grammar", **grammar}}]}
    async with start_gateway([FakeEngineClient(knowing)]) as gateway:
        writes(gateway, '<tool_call>{"name": "write", "arguments": {"input": "aa"}}</tool_call>')
        status, headers, answer = await gateway.post(APIS[api][0], {"model": "tiny", **body})
        assert status == 200 and b'"input":"aa"' in answer
        assert headers.get(ADJUSTED) == (None if is_held else "tools.write.format=text")
        held = gateway.engine.submits[-1].grammar
        assert (held is not None) is is_held
        if held is not None:
            (tool,) = msgspec.json.decode(held.text, type=ToolCallsGrammar).tools
            assert (tool.name, tool.input_name) == ("write", "input") and "a" in tool.input_grammar
