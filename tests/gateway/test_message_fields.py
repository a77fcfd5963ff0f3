"""Fields of Anthropic's Messages API, as the real `anthropic` package sends them."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import Any

import anthropic
import msgspec
import openai
import pytest

from moiety_platform.anthropic_api.rate_limit_headers import anthropic_rate_limits
from moiety_platform.engine_client.fake import FakeEngineClient, FakeVerdict
from moiety_wire.grammars import GrammarKind
from moiety_wire.messages import ModelCard

from .conftest import RunningGateway, StartGateway
from .message_requests import ADJUSTED, ASKED, HELLO, IGNORED, SCHEMA, Number, last_prompt, plain, raw, says

__all__ = ["plain"]  # fixtures


async def test_max_tokens_beyond_the_context_are_lowered_and_the_answer_says_so(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    engine = FakeEngineClient(card, says("x" * 2000))
    async with start_gateway([engine]) as gateway, gateway.anthropic:
        message, headers = await raw(gateway, model="tiny", max_tokens=32_000)
        left = card.max_context_tokens - gateway.prompt_tokens("hello")
        assert headers[ADJUSTED] == f"max_tokens={left}"
        assert (message.stop_reason, message.usage.output_tokens) == ("model_context_window_exceeded", left)
        async with gateway.anthropic.messages.stream(model="tiny", messages=HELLO, max_tokens=32_000) as stream:
            assert (await stream.get_final_message()).stop_reason == "model_context_window_exceeded"
        message, headers = await raw(gateway, model="tiny", max_tokens=3)
        assert (message.stop_reason, ADJUSTED in headers) == ("max_tokens", False)
        message, headers = await raw(gateway, model="tiny", max_tokens=0)
        assert (headers[ADJUSTED], message.stop_reason, message.usage.output_tokens) == (
            "max_tokens=1",
            "max_tokens",
            1,
        )
        assert [(block.type, block.text) for block in message.content] == [("text", "")]
        async with gateway.anthropic.messages.stream(model="tiny", messages=HELLO, max_tokens=0) as stream:
            streamed = await stream.get_final_message()
        assert [(block.type, block.text) for block in streamed.content] == [("text", "")]
        assert streamed.stop_reason == "max_tokens"


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/chat/completions", "max_tokens"),
        ("/v1/chat/completions", "max_completion_tokens"),
        ("/v1/completions", "max_tokens"),
        ("/v1/responses", "max_output_tokens"),
    ],
)
async def test_the_other_apis_lower_it_where_the_operator_says_so(
    start_gateway: StartGateway, card: ModelCard, path: str, field: str
) -> None:
    prompt = {"input": "hello"} if path == "/v1/responses" else {"prompt": "hello", "messages": HELLO}
    asked: dict[str, Any] = {"model": "tiny", field: 32_000, **prompt}
    for clamps, expected in ((False, 400), (True, 200)):
        async with start_gateway([FakeEngineClient(card)], clamp_max_tokens=clamps) as gateway:
            status, headers, answer = await gateway.post(path, asked)
            assert status == expected, answer
            if clamps:
                num_prompt_tokens = len(gateway.engine.submits[0].prompt_ids)
                assert headers[ADJUSTED] == f"{field}={card.max_context_tokens - num_prompt_tokens}"
            else:
                assert f"lower {field}" in json.loads(answer)["error"]["message"]


async def test_rate_limits_have_anthropics_headers_too(start_gateway: StartGateway, card: ModelCard) -> None:
    async with start_gateway([FakeEngineClient(card)], stores_usage=True) as gateway, gateway.anthropic:
        tenants = json.loads((await gateway.request("GET", "/admin/v1/tenants", key=gateway.admin_key))[2])["data"]
        limit = {"level": "tenant", "scope_id": tenants[0]["id"], "kind": "requests_per_minute", "cap": 1}
        await gateway.request("PUT", "/admin/v1/quotas", json.dumps(limit).encode(), gateway.admin_key)
        _, headers = await raw(gateway, model="tiny", max_tokens=1)
        assert headers["anthropic-ratelimit-requests-limit"] == headers["x-ratelimit-limit-requests"] == "1"
        assert headers["anthropic-ratelimit-requests-remaining"] == "0"
        assert headers["anthropic-ratelimit-requests-reset"].endswith("Z")
        with pytest.raises(anthropic.RateLimitError) as refused:
            await raw(gateway, model="tiny", max_tokens=1)
        assert refused.value.response.headers["anthropic-ratelimit-requests-remaining"] == "0"
        assert int(refused.value.response.headers["retry-after"]) >= 1
        status, headers, _ = await gateway.post("/v1/chat/completions", {"model": "tiny", "messages": HELLO})
        assert (status, "anthropic-ratelimit-requests-limit" in headers) == (429, False)


async def test_a_schema_reaches_the_engine_by_either_name(plain: RunningGateway) -> None:
    plain.engine.script = says('{"n": 7}')
    form: dict[str, Any] = {"type": "json_schema", "schema": SCHEMA}
    await raw(plain, output_config={"format": form, "effort": "high"})
    await raw(plain, extra_body={"output_format": form})
    for submit in plain.engine.submits:
        assert submit.grammar.kind is GrammarKind.JSON_SCHEMA and json.loads(submit.grammar.text) == SCHEMA
    parsed = await plain.anthropic.messages.parse(**ASKED, output_format=Number)
    assert parsed.parsed_output == Number(n=7)
    async with plain.anthropic.messages.stream(**ASKED, output_format=Number) as stream:
        assert (await stream.get_final_message()).parsed_output == Number(n=7)
    beta = await plain.anthropic.beta.messages.parse(**ASKED, output_format=Number)
    assert beta.parsed_output == Number(n=7)


async def test_anthropics_client_tools_become_functions_and_hosted_ones_are_skipped(
    tool_gateway: RunningGateway,
) -> None:
    tools: list[Any] = [
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 9},
        {"type": "memory_20250818", "name": "memory"},
        {"type": "web_search_20260318", "name": "web_search", "max_uses": 2},
        {"type": "computer_toolset_20260801"},
        {"type": "mcp_toolset", "mcp_server_name": "m"},
        {
            "name": "own.tool",
            "input_schema": SCHEMA,
            "input_examples": [{"n": 1}],
            "defer_loading": False,
            "eager_input_streaming": True,
        },
    ]
    tool_gateway.engine.script = says('<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>')
    message, headers = await raw(tool_gateway, tools=tools, max_tokens=500)
    (call,) = message.content
    assert (call.name, call.input, message.stop_reason) == ("bash", {"command": "ls"}, "tool_use")
    prompt = last_prompt(tool_gateway)
    for told in ("insert_text", "/memories", '"restart"', 'Examples of its input:\\n{\\"n\\":1}'):
        assert told in prompt
    assert "web_search" not in prompt and "max_characters" not in prompt
    expected = "tools.*.eager_input_streaming, tools.3, tools.4, tools.5"
    assert headers[IGNORED] == expected
    counted = await tool_gateway.anthropic.beta.messages.count_tokens(model="hermes", messages=HELLO, tools=tools)
    assert counted.input_tokens == len(tool_gateway.engine.submits[-1].prompt_ids)


async def test_a_system_message_withdraws_a_tool_and_brings_it_back(tool_gateway: RunningGateway) -> None:
    tools = [{"name": name, "input_schema": SCHEMA} for name in ("first", "second")]

    def change(kind: str) -> Any:
        return {"role": "system", "content": [{"type": kind, "tool": {"type": "tool_reference", "name": "first"}}]}

    await raw(tool_gateway, tools=tools, messages=[*HELLO, change("tool_removal")])
    assert '"first"' not in last_prompt(tool_gateway) and '"second"' in last_prompt(tool_gateway)
    await raw(tool_gateway, tools=tools, messages=[*HELLO, change("tool_removal"), change("tool_addition")])
    assert '"first"' in last_prompt(tool_gateway)


async def test_agents_are_told_of_a_prompt_that_is_too_long_in_the_words_that_they_look_for(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    """So that they shorten the conversation: Anthropic's words and numbers, and OpenAI's words and code."""
    most = card.max_context_tokens
    async with start_gateway([FakeEngineClient(card)]) as gateway, gateway.anthropic:
        for num_more in (0, 1000):
            text = "x" * (most - gateway.prompt_tokens("") + num_more)
            with pytest.raises(anthropic.BadRequestError) as refused:
                await raw(gateway, model="tiny", messages=[{"role": "user", "content": text}])
            body: Any = refused.value.body
            told = re.match(r"prompt is too long: (\d+) tokens > (\d+) maximum\.", body["error"]["message"])
            assert told is not None and (int(told[1]), int(told[2])) == (most + num_more, most - 1), body
            assert body["error"]["details"]["error_code"] == "context_length_exceeded"
            with pytest.raises(openai.BadRequestError, match=f"maximum context length is {most} tokens") as same:
                await gateway.client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": text}])
            assert same.value.code == "context_length_exceeded"


def names_in_prompt(gateway: RunningGateway, tools: list[dict[str, Any]]) -> list[str]:
    return [tool["name"] for tool in tools if f'"name": "{tool["name"]}"' in last_prompt(gateway)]


async def test_a_deferred_tool_is_shown_once_it_is_found(tool_gateway: RunningGateway) -> None:
    tools: list[dict[str, Any]] = [
        {"name": name, "input_schema": SCHEMA, "defer_loading": name != "ToolSearch"}
        for name in ("ToolSearch", "first", "second")
    ]
    _, headers = await raw(tool_gateway, tools=tools, messages=HELLO)
    assert names_in_prompt(tool_gateway, tools) == ["ToolSearch"] and IGNORED not in headers
    call = {"type": "tool_use", "id": "a", "name": "ToolSearch", "input": {}}
    references = [{"type": "tool_reference", "tool_name": "second"}]
    result = {"type": "tool_result", "tool_use_id": "a", "content": references}
    loop = [*HELLO, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    await raw(tool_gateway, tools=tools, messages=loop)
    assert "Tool found: second" in last_prompt(tool_gateway)
    assert names_in_prompt(tool_gateway, tools) == ["ToolSearch", "second"]

    def change(kind: str, name: str) -> Any:
        return {"role": "system", "content": [{"type": kind, "tool": {"type": "tool_reference", "name": name}}]}

    await raw(tool_gateway, tools=tools, messages=[*HELLO, change("tool_addition", "first")])
    assert names_in_prompt(tool_gateway, tools) == ["ToolSearch", "first"]
    await raw(tool_gateway, tools=tools, messages=[*loop, change("tool_removal", "second")])
    assert names_in_prompt(tool_gateway, tools) == ["ToolSearch"]


async def test_a_tool_that_a_message_defines_is_offered(tool_gateway: RunningGateway) -> None:
    definition = {"name": "second", "description": "Told later.", "input_schema": SCHEMA}
    tools: list[dict[str, Any]] = [{"name": "first", "input_schema": SCHEMA}, definition]

    def add(tool: dict[str, Any]) -> Any:
        return {"role": "system", "content": [{"type": "tool_addition", "tool": tool}]}

    messages = [*HELLO, add({"type": "tool_definition", "definition": definition})]
    for offered in (tools[:1], [tools[0], {"name": "second", "input_schema": {"type": "object"}}]):
        await raw(tool_gateway, tools=offered, messages=messages)
        assert names_in_prompt(tool_gateway, tools) == ["first", "second"] and "Told later." in last_prompt(
            tool_gateway
        )
    await raw(tool_gateway, messages=messages, tool_choice={"type": "tool", "name": "second"})
    assert names_in_prompt(tool_gateway, tools) == ["second"]
    removal = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "second"}}
    await raw(tool_gateway, tools=tools[:1], messages=[*messages, {"role": "system", "content": [removal]}])
    assert names_in_prompt(tool_gateway, tools) == ["first"]
    foreign: list[dict[str, Any]] = [{"type": "mcp_toolset_reference", "server_name": "m"}]
    foreign += [{"type": "tool_definition", "definition": {"type": "mcp_toolset", "mcp_server_name": "m"}}]
    _, headers = await raw(tool_gateway, tools=tools[:1], messages=[*HELLO, *map(add, foreign)])
    assert headers[IGNORED] == "messages.1.content.0, messages.2.content.0"
    with pytest.raises(anthropic.BadRequestError, match="input_schema"):
        bad = {"type": "tool_definition", "definition": {"name": "second"}}
        await raw(tool_gateway, messages=[*HELLO, add(bad)])


async def test_deferred_tools_that_nothing_can_find_are_shown(tool_gateway: RunningGateway) -> None:
    tools: list[dict[str, Any]] = [{"name": "first", "input_schema": SCHEMA, "defer_loading": True}]
    hosted = {"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"}
    _, headers = await raw(tool_gateway, tools=[*tools, hosted], messages=HELLO)
    assert names_in_prompt(tool_gateway, tools) == ["first"] and headers[IGNORED] == "tools.1"
    choice = {"type": "tool", "name": "first"}
    await raw(tool_gateway, tools=tools, messages=HELLO, tool_choice=choice)
    assert names_in_prompt(tool_gateway, tools) == ["first"]


async def test_fields_without_effect_are_named(plain: RunningGateway) -> None:
    fields: dict[str, Any] = {
        "inference_geo": "us",
        "speed": "fast",
        "diagnostics": {"previous_message_id": None},
        "output_config": {"task_budget": {"type": "tokens", "total": 9}},
        "mcp_servers": [],
        "container": None,
    }
    _, headers = await raw(plain, extra_body=fields)
    assert headers[IGNORED] == "diagnostics, inference_geo, output_config.task_budget, speed"


async def test_cached_tokens_are_reported_as_by_anthropic(start_gateway: StartGateway, card: ModelCard) -> None:
    engine = FakeEngineClient(card, verdict=lambda submit: FakeVerdict("standard", num_cached_tokens=16))
    async with start_gateway([engine]) as gateway, gateway.anthropic:
        total = gateway.prompt_tokens("hello")
        for more, expected in (
            ({}, (total - 16, 0, 16)),
            ({"cache_control": {"type": "ephemeral"}}, (0, total - 16, 16)),
        ):
            message, _ = await raw(gateway, model="tiny", **more)
            async with gateway.anthropic.messages.stream(**{**ASKED, "model": "tiny", **more}) as stream:
                streamed = await stream.get_final_message()
            for usage in (message.usage, streamed.usage):
                found = (usage.input_tokens, usage.cache_creation_input_tokens, usage.cache_read_input_tokens)
                assert found == expected


async def test_models_are_listed_in_anthropics_shape_page_by_page(start_gateway: StartGateway, card: ModelCard) -> None:
    names = ["a", "org/b", "c"]
    cards = [msgspec.structs.replace(card, engine_id=name, model=name) for name in names]
    async with start_gateway([FakeEngineClient(one) for one in cards]) as gateway, gateway.anthropic:
        models = gateway.anthropic.models
        listed = [model async for model in models.list(limit=1)]
        assert [model.id for model in listed] == sorted(names)
        assert (listed[0].type, listed[0].display_name, listed[0].created_at.year) == ("model", "a", 2023)
        assert listed[0].max_input_tokens == card.max_context_tokens
        page = await models.list(before_id="org/b", limit=1)
        assert ([model.id for model in page.data], page.has_more, page.first_id) == (["c"], True, "c")
        assert (await models.retrieve("org/b")).id == "org/b"
        for states, found in ((["active", "retired"], sorted(names)), (["retired"], [])):
            assert [model.id async for model in models.list(lifecycle=states)] == found
        with pytest.raises(anthropic.NotFoundError) as unknown:
            await models.retrieve("none")
        assert unknown.value.type == "not_found_error"
        for bad in ({"after_id": "none"}, {"limit": 0}, {"after_id": "a", "before_id": "c"}):
            with pytest.raises(anthropic.BadRequestError):
                await models.list(**bad)
        status, _, answer = await gateway.request(
            "GET", "/v1/models", headers={"Authorization": None, "x-api-key": gateway.key}
        )
        assert (status, json.loads(answer)["object"]) == (200, "list")
        assert [model.id async for model in gateway.client.models.list()] == sorted(names)


async def test_thinking_is_harmless_where_the_model_does_not_think(plain: RunningGateway) -> None:
    for option in ({"type": "adaptive"}, {"type": "enabled", "budget_tokens": 1024}, {"type": "between_tools"}):
        message, headers = await raw(plain, thinking=option, output_config={"effort": "max"}, max_tokens=2000)
        assert message.content[0].type == "text"
        assert headers[ADJUSTED] == "output_config.effort=off, thinking.type=off"
    _, headers = await raw(plain, thinking={"type": "disabled"})
    assert ADJUSTED not in headers


AGENTS_BETAS = (
    "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27,"
    "mid-conversation-system-2026-04-07,effort-2025-11-24,structured-outputs-2025-12-15"
)


async def test_a_coding_agents_turn_is_served_as_it_is_sent(tool_gateway: RunningGateway) -> None:
    """A request has all the fields that Claude Code sends."""
    call = {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}}
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "c2ln"}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "a.txt", "is_error": False}
    mark = {"cache_control": {"type": "ephemeral"}}
    body = {
        "model": "hermes",
        "max_tokens": 32_000,
        "stream": True,
        "metadata": {"user_id": json.dumps({"session_id": "s"})},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "max"},
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2;"},
            {"type": "text", "text": "You help.", **mark},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "List the files"}]},
            {"role": "system", "content": "There are agents."},
            {"role": "assistant", "content": [thought, {"type": "text", "text": "I look."}, call]},
            {"role": "user", "content": [{**result, **mark}]},
        ],
        "tools": [{"name": "Bash", "description": "Runs.", "input_schema": {"type": "object", "properties": {}}}],
    }
    fields = {"anthropic-version": "2023-06-01", "anthropic-beta": AGENTS_BETAS}
    status, headers, answer = await tool_gateway.post("/v1/messages?beta=true", body, headers=fields)
    assert (status, answer.count(b"event: message_stop")) == (200, 1)
    assert headers[IGNORED] == "system.0"
    assert headers[ADJUSTED].startswith("max_tokens=") and headers[ADJUSTED].endswith("thinking.type=off")
    prompt = last_prompt(tool_gateway)
    assert prompt.index("You help.") < prompt.index("There are agents.") < prompt.index("a.txt")
    assert b'"cache_creation_input_tokens":0' not in answer.rpartition(b"message_delta")[2]
    counted = {name: body[name] for name in ("model", "system", "messages", "tools", "thinking", "output_config")}
    status, _, answer = await tool_gateway.post("/v1/messages/count_tokens?beta=true", counted, headers=fields)
    assert (status, json.loads(answer)["input_tokens"]) == (200, len(tool_gateway.engine.submits[-1].prompt_ids))


def test_resets_of_rate_limits_are_times() -> None:
    now = datetime(2026, 11, 28, 12, tzinfo=UTC)
    for duration, reset in (("20ms", "12:00:00Z"), ("1.5s", "12:00:01Z"), ("6m5s", "12:06:05Z"), ("0ms", "12:00:00Z")):
        given = {f"x-ratelimit-{name}-tokens": "1" for name in ("limit", "remaining")}
        found = anthropic_rate_limits(given | {"x-ratelimit-reset-tokens": duration}, now)
        assert found["anthropic-ratelimit-tokens-reset"] == f"2026-11-28T{reset}"
