"""Every field and block of Anthropic's Messages API, as the real `anthropic` package sends them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import Any

import anthropic
import msgspec
import pydantic
import pytest

from moiety_platform.anthropic_api.rate_limit_headers import anthropic_rate_limits
from moiety_platform.anthropic_api.thinking_signatures import omitted_signature_of
from moiety_platform.engine_client.fake import FakeEngineClient, FakeVerdict
from moiety_wire.grammars import GrammarKind
from moiety_wire.messages import ModelCard

from .conftest import RunningGateway, StartGateway, ToolCard
from .test_reasoning import thinking, writes  # noqa: F401  a fixture
from .test_tool_loops import prompt_of

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
ASKED: dict[str, Any] = {"model": "hermes", "messages": HELLO, "max_tokens": 50}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
IGNORED, ADJUSTED = "x-moiety-ignored-fields", "x-moiety-adjusted-fields"
PLAIN = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ALTERNATING = (
    "{% for message in messages %}{% if message['role'] == 'system' and loop.index0 %}"
    "{{ raise_exception('the system message must be the first') }}{% endif %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}<|assistant|>"
)


class Number(pydantic.BaseModel):
    n: int


@pytest.fixture
async def plain(start_gateway: StartGateway, tool_card: ToolCard) -> AsyncIterator[RunningGateway]:
    """A gateway whose model's prompt shows each message as it is."""
    async with start_gateway([FakeEngineClient(tool_card("hermes", template=PLAIN))]) as running, running.anthropic:
        yield running


def last_prompt(gateway: RunningGateway) -> str:
    return prompt_of(gateway.engine.submits[-1], gateway.engine)


async def raw(gateway: RunningGateway, **asked: Any) -> tuple[Any, Any]:
    """Return the message and the headers."""
    response = await gateway.anthropic.beta.messages.with_raw_response.create(**{**ASKED, **asked})
    return await response.parse(), response.headers


def applied_edits(message: Any) -> Any:
    return message.context_management.applied_edits


def says(text: str) -> Callable[[Any], Any]:
    return lambda submit: [(65, letter) for letter in text]


# ── limits ──


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


# ── structured outputs ──


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


# ── system messages ──


async def test_system_messages_may_stand_anywhere(plain: RunningGateway) -> None:
    turns: list[Any] = [
        {"role": "user", "content": "a"},
        {"role": "system", "content": "b"},
        {"role": "assistant", "content": "c"},
        {"role": "system", "content": [{"type": "text", "text": "gone"}], "clear_at": "next_user_message"},
        {"role": "user", "content": "d"},
        {"role": "system", "content": [{"type": "text", "text": "e"}], "clear_at": "next_user_message"},
    ]
    await raw(plain, messages=turns, betas=["mid-conversation-system-2026-04-07"])
    prompt = last_prompt(plain)
    assert prompt == "<|user|>a\n<|system|>b\n<|assistant|>c\n<|user|>d\n<|system|>e\n<|assistant|>"
    counted = await plain.anthropic.beta.messages.count_tokens(model="hermes", messages=turns)
    assert counted.input_tokens == len(plain.engine.submits[-1].prompt_ids)


async def test_a_template_that_wants_them_first_reads_later_ones_as_the_users(
    start_gateway: StartGateway, tool_card: ToolCard
) -> None:
    card = tool_card("hermes", template=ALTERNATING)
    async with start_gateway([FakeEngineClient(card)]) as gateway, gateway.anthropic:
        turns: list[Any] = [*HELLO, {"role": "system", "content": "b"}, {"role": "user", "content": "c"}]
        await raw(gateway, messages=turns, system="s")
        prompt = last_prompt(gateway)
        assert prompt == "<|system|>s\n<|user|>hello\n<system>\nb\n</system>\nc\n<|assistant|>"


async def test_the_system_block_for_anthropics_billing_is_left_out(plain: RunningGateway) -> None:
    blocks: list[Any] = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.7d4; cc_entrypoint=cli;"},
        {"type": "text", "text": "You help.", "cache_control": {"type": "ephemeral"}},
    ]
    _, headers = await raw(plain, system=blocks)
    assert last_prompt(plain).startswith("<|system|>You help.\n") and headers[IGNORED] == "system.0"


# ── blocks ──


BLOCKS: list[tuple[dict[str, Any], str]] = [
    (
        {"type": "document", "title": "T", "context": "C", "source": {"type": "text", "data": "D"}},
        '<document title="T">\nC\nD\n</document>',
    ),
    (
        {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "D"}]}},
        "<document>\nD\n</document>",
    ),
    (
        {"type": "search_result", "source": "u", "title": 'a"b', "content": [{"type": "text", "text": "R"}]},
        '<search_result source="u" title="a&quot;b">\nR\n</search_result>',
    ),
    ({"type": "compaction", "content": "earlier: x"}, "earlier: x"),
]


@pytest.mark.parametrize(("block", "text"), BLOCKS)
async def test_blocks_with_text_are_read_as_text(plain: RunningGateway, block: dict[str, Any], text: str) -> None:
    content = [{"type": "text", "text": "see", "citations": None}, block | {"cache_control": {"type": "ephemeral"}}]
    message, _ = await raw(plain, messages=[{"role": "user", "content": content}])
    assert last_prompt(plain) == f"<|user|>see\n{text}\n<|assistant|>"
    usage = message.usage
    assert (usage.input_tokens, usage.cache_creation_input_tokens) == (0, len(plain.engine.submits[-1].prompt_ids))


async def test_blocks_of_anthropics_own_tools_are_read_as_json_and_empty_ones_skipped(plain: RunningGateway) -> None:
    found = {"type": "web_search_result", "url": "u", "title": "t", "encrypted_content": "secret"}
    content: list[Any] = [
        {"type": "redacted_thinking", "data": "x"},
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": [found]},
        {"type": "text", "text": "So."},
        {"type": "container_upload", "file_id": "f"},
    ]
    turns = [*HELLO, {"role": "assistant", "content": content}, *HELLO]
    _, headers = await raw(plain, messages=turns)
    prompt = last_prompt(plain)
    assert '<server_tool_use>\n{"name":"web_search","input":{"query":"q"}}\n</server_tool_use>' in prompt
    assert '[{"url":"u","title":"t"}]' in prompt and "secret" not in prompt
    assert headers[IGNORED] == "messages.1.content.0, messages.1.content.4"


async def test_only_a_system_message_is_cleared(plain: RunningGateway) -> None:
    await raw(plain, messages=[{"role": "user", "content": "Hi", "clear_at": "next_user_message"}])
    assert "Hi" in last_prompt(plain)


async def test_a_tools_image_is_replaced_by_a_text_and_the_loop_continues(tool_gateway: RunningGateway) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    results: list[Any] = [
        {"type": "text", "text": "ok"},
        image,
        {"type": "tool_reference", "tool_name": "now"},
        {"type": "browser_state", "tabs": [1]},
    ]
    call = {"type": "tool_use", "id": "u", "name": "mcp.read:file", "input": {}, "caller": {"type": "direct"}}
    turns = [
        *HELLO,
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "u", "content": results}]},
    ]
    tools = [{"name": "mcp.read:file", "input_schema": {"type": "object"}}]
    _, headers = await raw(tool_gateway, messages=turns, tools=tools)
    prompt = last_prompt(tool_gateway)
    assert "ok\n[This image is not shown: the model reads text only.]\nTool found: now\n<browser_state>" in prompt
    assert headers[IGNORED] == "messages.2.content.0.content.1"
    with pytest.raises(anthropic.BadRequestError, match="reads text only"):
        await raw(tool_gateway, messages=[{"role": "user", "content": [results[0], image]}])


# ── reasoning ──


async def test_a_thinking_block_is_signed_whole_and_streamed_and_taken_back(thinking: Any) -> None:  # noqa: F811
    async with thinking() as gateway:
        writes(gateway, "<think>\nHm, 17.\n</think>\n\nYes.")
        asked = {**ASKED, "thinking": {"type": "adaptive"}, "max_tokens": 900}
        whole = await gateway.anthropic.messages.create(**asked)
        async with gateway.anthropic.messages.stream(**asked) as stream:
            streamed = await stream.get_final_message()
        assert whole.content[0].signature == streamed.content[0].signature != ""
        assert whole.usage.output_tokens_details.thinking_tokens == len("\nHm, 17.\n") + 2
        turns = [*HELLO, {"role": "assistant", "content": streamed.content}, *HELLO]
        await gateway.anthropic.messages.create(**asked | {"messages": turns})


@pytest.mark.parametrize("stream", [False, True])
async def test_omitted_reasoning_comes_back_in_its_signature(thinking: Any, stream: bool) -> None:  # noqa: F811
    async with thinking() as gateway:
        writes(gateway, "<think>\nHm, 17.\n</think>\n\nYes.")
        asked: dict[str, Any] = {**ASKED, "thinking": {"type": "adaptive", "display": "omitted"}, "max_tokens": 900}
        if stream:
            async with gateway.anthropic.messages.stream(**asked) as events:
                message = await events.get_final_message()
        else:
            message = await gateway.anthropic.messages.create(**asked)
        thought, text = message.content
        assert (thought.thinking, thought.signature, text.text) == ("", omitted_signature_of("Hm, 17."), "Yes.")


async def test_reasoning_of_earlier_answers_is_cleared_as_asked(
    start_gateway: StartGateway, tool_card: ToolCard
) -> None:
    template = "{% for m in messages %}<{{ m.reasoning_content or '' }}>{{ m.content }}{% endfor %}"
    async with start_gateway([FakeEngineClient(tool_card("hermes", template=template))]) as gateway, gateway.anthropic:
        answers = [
            [{"type": "thinking", "thinking": "t1", "signature": "s"}, {"type": "text", "text": "1"}],
            [
                {"type": "thinking", "thinking": "", "signature": omitted_signature_of("t2")},
                {"type": "text", "text": "2"},
            ],
        ]
        turns = [turn for one in answers for turn in (*HELLO, {"role": "assistant", "content": one})] + HELLO
        for keep, expected in (("all", "<t1>1"), ({"type": "thinking_turns", "value": 1}, "<>1"), (None, "<>1")):
            edit = {"type": "clear_thinking_20251015"} | ({} if keep is None else {"keep": keep})
            edits = {"edits": [edit, {"type": "compact_20260112"}]}
            message, headers = await raw(gateway, messages=turns, context_management=edits)
            assert last_prompt(gateway) == f"<>hello{expected}<>hello<t2>2<>hello"
            assert headers[IGNORED] == "context_management.edits.1"
            applied = [(one.cleared_thinking_turns, one.cleared_input_tokens) for one in applied_edits(message)]
            assert applied == ([] if keep == "all" else [(1, len("t1"))])


# ── tools ──


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
            "defer_loading": True,
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
    expected = "tools.*.defer_loading, tools.*.eager_input_streaming, tools.3, tools.4, tools.5"
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


# ── caching ──


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


# ── models ──


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
    """With all that Claude Code sends in one request."""
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
