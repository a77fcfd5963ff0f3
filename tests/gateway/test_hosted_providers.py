# ruff: noqa: F811  fixtures are imported
"""Models of hosted providers with OpenAI's or Anthropic's API: translation, failures, and what is billed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import openai
import pytest

from moiety_platform.bootstrap.engines import api_key_of
from moiety_platform.engine_addresses import ExternalAddress
from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_platform.inference.response_headers import ESTIMATE_HEADER, MODEL_HEADER
from moiety_platform.settings import GatewaySettings

from .conftest import NewCard, RunningGateway, StartOver
from .scripted_provider import (
    ANTHROPIC,
    CACHED_TOKENS,
    KEY,
    MODEL,
    OPENAI,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    PROTOCOLS,
    Reply,
    ScriptedProvider,
    StartProvider,
    client_of,
    provider,  # noqa: F401  a fixture
    start_provider,  # noqa: F401  a fixture
)

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, "messages": HELLO, "max_tokens": 2000},
    MESSAGES: {"model": MODEL, "messages": HELLO, "max_tokens": 2000},
    RESPONSES: {"model": MODEL, "input": "hello", "max_output_tokens": 2000},
}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "Weather of a city.", "parameters": SCHEMA}
BILLED = (PROMPT_TOKENS, CACHED_TOKENS, OUTPUT_TOKENS)
FALLBACK_ERRORS = {
    "overloaded": Reply(status=529, error={"type": "overloaded_error", "message": "busy"}),
    "rate limited": Reply(
        status=429, error={"type": "rate_limit_error", "message": "slow"}, headers="Retry-After: 60\r\n"
    ),
    "failed": Reply(status=500, error={"type": "api_error", "message": "oops"}),
    "wrong key": Reply(status=401, error={"type": "authentication_error", "message": f"bad key {KEY}"}),
    "unpaid": Reply(
        status=400, error={"type": "invalid_request_error", "message": "Your credit balance is too low to access"}
    ),
    "broken": Reply(breaks_after=1),
    "error event": Reply(texts=(), error_event=True, error={"type": "overloaded_error", "message": "busy"}),
}


async def answered(gateway: RunningGateway, path: str, **more: Any) -> Any:
    status, _, answer = await gateway.post(path, BODIES[path] | more)
    assert status == 200, answer
    return json.loads(answer)


def billed(row: Any) -> tuple[int, int, int]:
    return row.prompt_tokens, row.cached_tokens, row.output_tokens


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_every_api_is_answered_by_every_protocol_and_the_providers_count_is_billed(
    provider: ScriptedProvider, start_over: StartOver, protocol: str, path: str
) -> None:
    async with start_over(client_of(provider)) as gateway:
        status, headers, answer = await gateway.post(path, BODIES[path])
        assert status == 200 and b"Hello there" in answer, answer
        (row,) = await gateway.rows.wait_for(1)
        assert (row.model, *billed(row)) == (MODEL, *BILLED)
        assert int(headers[ESTIMATE_HEADER]) >= len("hello") + PROMPT_TOKENS
    (body,), (head,) = provider.bodies, provider.heads
    if protocol == OPENAI:
        assert head.startswith("POST /v1/chat/completions") and f"authorization: bearer {KEY}" in head.lower()
        assert body["messages"] == HELLO and body["max_completion_tokens"] == 2000
        assert body.keys() == {"model", "messages", "max_completion_tokens", "stream", "stream_options"}
    else:
        assert head.startswith("POST /v1/messages") and f"x-api-key: {KEY}" in head.lower()
        assert "authorization" not in head.lower() and "anthropic-version: 2023-06-01" in head.lower()
        assert body["messages"] == [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
        assert body.keys() == {"model", "messages", "max_tokens", "stream"}


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_conversation_with_tools_is_translated_and_so_is_the_call(
    provider: ScriptedProvider, start_over: StartOver, protocol: str
) -> None:
    provider.replies.append(Reply(("Let me see.",), call=("weather", '{"city": "Rome"}'), finish="tool_calls"))
    call = {"id": "call.1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Paris"}'}}
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather in Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call.1", "content": "rain"},
        {"role": "user", "content": "And in Rome?"},
    ]
    tools: list[Any] = [{"type": "function", "function": WEATHER}]
    async with start_over(client_of(provider)) as gateway:
        answer = await gateway.client.chat.completions.create(
            model=MODEL, messages=messages, tools=tools, max_tokens=100, parallel_tool_calls=False, stop=["END"]
        )
    choice = answer.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
    assert choice.message.tool_calls is not None
    function: Any = choice.message.tool_calls[0]
    assert (function.function.name, json.loads(function.function.arguments)) == ("weather", {"city": "Rome"})
    (body,) = provider.bodies
    if protocol == OPENAI:
        assert [message["role"] for message in body["messages"]] == ["system", "user", "assistant", "tool", "user"]
        assert body["messages"][2]["tool_calls"][0]["id"] == "call.1" and body["tools"] == tools
        assert (body["tool_choice"], body["parallel_tool_calls"], body["stop"]) == ("auto", False, ["END"])
        return
    assert body["system"] == "Be brief." and body["stop_sequences"] == ["END"]
    asked, called, result = body["messages"]
    assert asked["content"] == [{"type": "text", "text": "Weather in Paris?"}]
    assert called["content"] == [{"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Paris"}}]
    assert result["content"][0] == {
        "type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "rain"}],
    }  # fmt: skip
    assert result["content"][1] == {"type": "text", "text": "And in Rome?"}
    assert body["tools"] == [{"name": "weather", "description": "Weather of a city.", "input_schema": SCHEMA}]
    assert body["tool_choice"] == {"type": "auto", "disable_parallel_tool_use": True}


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_the_real_clients_stream_text_reasoning_and_calls(
    provider: ScriptedProvider, start_over: StartOver
) -> None:
    reply = Reply(("Look: ", "<think>"), thought="Hm.", call=("weather", '{"city": "Rome"}'), finish="tool_calls")
    provider.replies += [reply, reply]
    async with start_over(client_of(provider)) as gateway:
        client: openai.AsyncOpenAI = gateway.client
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=100, stream=True, stream_options={"include_usage": True},
            tools=[{"type": "function", "function": WEATHER}],
        )  # fmt: skip
        text = arguments = ""
        usage = None
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                for one in choice.delta.tool_calls or ():
                    arguments += "" if one.function is None else one.function.arguments or ""
        assert (text, json.loads(arguments)) == ("Look: <think>", {"city": "Rome"})
        assert usage is not None and (usage.prompt_tokens, usage.completion_tokens) == (PROMPT_TOKENS, OUTPUT_TOKENS)
        async with (
            anthropic.AsyncAnthropic(base_url=gateway.url, api_key=gateway.key, max_retries=0) as messages,
            messages.messages.stream(
                model=MODEL, messages=HELLO, max_tokens=100,
                tools=[{"name": "weather", "description": "", "input_schema": SCHEMA}],
            ) as events,
        ):  # fmt: skip
            message = await events.get_final_message()
        assert message.stop_reason == "tool_use"
        kinds = [block.type for block in message.content]
        assert kinds == ["thinking", "text", "tool_use"]
        assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (
            PROMPT_TOKENS - CACHED_TOKENS,
            CACHED_TOKENS,
        )
        assert [billed(row) for row in await gateway.rows.wait_for(2)] == [BILLED, BILLED]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    ("finish", "openai_word", "anthropic_word"),
    [("length", "length", "max_tokens"), ("content_filter", "content_filter", "refusal"), ("stop", "stop", "end_turn")],
)
async def test_finish_reasons_are_the_providers(
    provider: ScriptedProvider,
    start_over: StartOver,
    finish: str,
    openai_word: str,
    anthropic_word: str,
) -> None:
    provider.replies += [Reply(finish=finish), Reply(finish=finish)]
    async with start_over(client_of(provider)) as gateway:
        assert (await answered(gateway, CHAT))["choices"][0]["finish_reason"] == openai_word
        assert (await answered(gateway, MESSAGES))["stop_reason"] == anthropic_word


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("failure", sorted(FALLBACK_ERRORS))
@pytest.mark.parametrize("stream", [False, True])
async def test_a_provider_that_fails_before_its_first_token_is_followed_by_the_next_target(
    provider: ScriptedProvider, start_over: StartOver, new_card: NewCard, failure: str, stream: bool
) -> None:
    provider.replies.append(FALLBACK_ERRORS[failure])
    own = FakeEngineClient(new_card("engine-own", "own"))
    async with start_over(client_of(provider, "&retries=0"), own) as gateway:
        route = {"name": "safe", "targets": [{"model": MODEL}], "fallbacks": ["own"]}
        await gateway.admin("PUT", "/routes", route)
        body = {"model": "safe", "messages": HELLO, "max_tokens": 4, "stream": stream}
        status, headers, answer = await gateway.post(CHAT, body)
        assert (status, headers[MODEL_HEADER]) == (200, "own"), answer
        assert ESTIMATE_HEADER not in headers and KEY.encode() not in answer
        (row,) = await gateway.rows.wait_for(1)
        assert (row.model, row.output_tokens) == ("own", 4)
    assert len(provider.bodies) == 1


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_hosted_model_answers_for_an_engine_that_is_not_there(
    provider: ScriptedProvider, start_over: StartOver
) -> None:
    async with start_over(client_of(provider)) as gateway:
        await gateway.admin("PUT", "/prices", {"model": MODEL, "input": "2", "output": "5"})
        await gateway.admin("PUT", "/routes", {"name": "safe", "targets": [{"model": "gone"}], "fallbacks": [MODEL]})
        status, headers, answer = await gateway.post(CHAT, {"model": "safe", "messages": HELLO, "max_tokens": 4})
        assert (status, headers[MODEL_HEADER]) == (200, MODEL), answer
        (row,) = await gateway.rows.wait_for(1)
        assert (row.route, row.model, *billed(row)) == ("safe", MODEL, *BILLED)


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_requests_that_the_provider_did_not_begin_are_sent_again_and_billed_once(
    provider: ScriptedProvider, start_over: StartOver
) -> None:
    provider.replies += [FALLBACK_ERRORS["overloaded"], FALLBACK_ERRORS["failed"]]
    async with start_over(client_of(provider, "&retries=2")) as gateway:
        await answered(gateway, CHAT)
        assert [billed(row) for row in await gateway.rows.wait_for(1)] == [BILLED]
    assert len(provider.bodies) == 3


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_stream_that_breaks_after_its_first_token_is_not_sent_again(
    provider: ScriptedProvider, start_over: StartOver, protocol: str
) -> None:
    provider.replies.append(Reply(("a" * 40,) * 3, breaks_after=4 if protocol == ANTHROPIC else 2))
    async with start_over(client_of(provider, "&retries=2")) as gateway:
        status, _, answer = await gateway.post(CHAT, BODIES[CHAT] | {"stream": True})
        assert status == 200 and b"engine_failed" in answer
        (row,) = await gateway.rows.wait_for(1)
        assert (row.output_tokens, row.error_code) == (10, "engine_failed")  # of 40 bytes
    assert len(provider.bodies) == 1


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_request_on_a_kept_connection_that_breaks_is_not_sent_twice_to_who_bills_it(
    provider: ScriptedProvider, start_over: StartOver
) -> None:
    async with start_over(client_of(provider, "&retries=0")) as gateway:
        await answered(gateway, CHAT)
        provider.replies.append(Reply(is_missing=True))
        status, _, answer = await gateway.post(CHAT, BODIES[CHAT])
        assert status == 502 and b"engine_failed" in answer
    assert len(provider.bodies) == 2


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_disconnect_ends_the_request_at_the_provider_and_bills_what_came(
    provider: ScriptedProvider, start_over: StartOver, protocol: str
) -> None:
    provider.replies.append(Reply(("a" * 80,) * 2, hangs_after=4 if protocol == ANTHROPIC else 2))
    async with start_over(client_of(provider)) as gateway:
        stream = await gateway.client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=100, stream=True)
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                break
        await stream.close()
        async with asyncio.timeout(10):
            await provider.disconnected.wait()
        (row,) = await gateway.rows.wait_for(1)
        known = (PROMPT_TOKENS, CACHED_TOKENS) if protocol == ANTHROPIC else (2, 0)  # "hello", without the usage
        assert billed(row) == (*known, 20)


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_silent_provider_is_given_up_after_its_timeout(
    provider: ScriptedProvider, start_over: StartOver
) -> None:
    provider.replies.append(Reply(hangs_after=0))
    async with start_over(client_of(provider, "&timeout=1&retries=0")) as gateway:
        status, _, answer = await gateway.post(CHAT, BODIES[CHAT])
        assert (status, json.loads(answer)["error"]["code"]) == (502, "engine_failed")
        (row,) = await gateway.rows.wait_for(1)
        assert billed(row) == (0, 0, 0)


REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    (ANTHROPIC, CHAT, {"seed": 7}, "seed"),
    (ANTHROPIC, CHAT, {"logprobs": True}, "logprobs"),
    (ANTHROPIC, CHAT, {"presence_penalty": 1.0}, "presence_penalty"),
    (ANTHROPIC, CHAT, {"temperature": 1.5}, "temperature"),
    (ANTHROPIC, CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
    (ANTHROPIC, CHAT, {"reasoning_effort": "low", "temperature": 0.5}, "reasoning"),
    (ANTHROPIC, CHAT, {"min_p": 0.5}, "min_p"),
    (OPENAI, CHAT, {"top_k": 5}, "top_k"),
    (OPENAI, CHAT, {"ignore_eos": True}, "ignore_eos"),
    (OPENAI, CHAT, {"bad_words": ["x"]}, "bad_words"),
    (OPENAI, CHAT, {"documents": [{"text": "a"}]}, "documents"),
    (OPENAI, MESSAGES, {"messages": [*HELLO, {"role": "assistant", "content": "I"}]}, "begun"),
]


@pytest.mark.parametrize(("protocol", "path", "more", "named"), REFUSED)
async def test_what_cannot_be_translated_is_refused_with_the_reason(
    provider: ScriptedProvider, start_over: StartOver, path: str, more: dict[str, Any], named: str
) -> None:
    async with start_over(client_of(provider)) as gateway:
        status, _, answer = await gateway.post(path, BODIES[path] | more)
        assert status == 400 and named in json.loads(answer)["error"]["message"], answer
        (row,) = await gateway.rows.wait_for(1)
        assert (row.http_status, *billed(row)) == (400, 0, 0, 0)
    assert provider.bodies == []


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("/v1/completions", {"prompt": "hello", "max_tokens": 2}, "completions_not_supported"),
        ("/v1/messages/count_tokens", {"messages": HELLO}, "invalid_request_error"),
        ("/tokenize", {"prompt": "hello"}, "tokens_not_countable"),
        ("/v1/embeddings", {"input": "hello"}, "embeddings_not_supported"),
    ],
)
async def test_endpoints_that_a_provider_lacks_are_refused(
    start_provider: StartProvider, start_over: StartOver, path: str, body: dict[str, Any], code: str
) -> None:
    provider = await start_provider(OPENAI)
    async with start_over(client_of(provider)) as gateway:
        status, _, answer = await gateway.post(path, {"model": MODEL, **body})
        error = json.loads(answer)["error"]
        assert (status, error.get("code") or error["type"]) == (400, code), answer
    assert provider.bodies == []


async def test_reasoning_is_translated_to_a_budget_or_an_effort(
    start_provider: StartProvider, start_over: StartOver
) -> None:
    openai_one, anthropic_one = await start_provider(OPENAI), await start_provider(ANTHROPIC)
    more = "&name=claude"
    async with start_over(client_of(openai_one), client_of(anthropic_one, more)) as gateway:
        await answered(gateway, CHAT, reasoning_effort="high")
        await answered(gateway, CHAT, model="claude", reasoning_effort="high")
        await answered(gateway, MESSAGES, model="claude", thinking={"type": "enabled", "budget_tokens": 1500})
        thinking = {"type": "enabled", "budget_tokens": 1500}
        _, headers, _ = await gateway.post(MESSAGES, BODIES[MESSAGES] | {"thinking": thinking})
    assert [body.get("reasoning_effort") for body in openai_one.bodies] == ["high", "low"]
    assert headers["x-moiety-adjusted-fields"] == "thinking.budget_tokens=low"
    budgets = [body["thinking"]["budget_tokens"] for body in anthropic_one.bodies]
    assert budgets == [1999, 1500]
    assert {body["model"] for body in anthropic_one.bodies} == {MODEL}


async def test_a_switch_of_a_chat_template_is_translated_to_an_effort(
    start_provider: StartProvider, start_over: StartOver
) -> None:
    openai_one, anthropic_one = await start_provider(OPENAI), await start_provider(ANTHROPIC)
    async with start_over(client_of(openai_one), client_of(anthropic_one, "&name=claude")) as gateway:
        for model in (MODEL, "claude"):
            for more in ({"chat_template_kwargs": {"enable_thinking": False}}, {"thinking": {"type": "disabled"}}):
                await answered(gateway, CHAT, model=model, **more)
            await answered(gateway, CHAT, model=model, chat_template_kwargs={"thinking": True})
            for effort, switch in (("high", False), ("none", True)):  # the switch overrides the effort
                both: Any = {"reasoning_effort": effort, "chat_template_kwargs": {"enable_thinking": switch}}
                await answered(gateway, CHAT, model=model, **both)
        body = BODIES[CHAT] | {"chat_template_kwargs": {"a": 1, "enable_thinking": False, "é": 1}}
        _, headers, _ = await gateway.post(CHAT, body)
    efforts = ["none", "none", None, "none", None, "none"]
    assert [one.get("reasoning_effort") for one in openai_one.bodies] == efforts
    assert ["thinking" in one for one in anthropic_one.bodies] == [False, False, True, False, True]
    assert headers["x-moiety-adjusted-fields"] == "chat_template_kwargs.a=unread"


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_schema_of_the_answer_is_translated(
    provider: ScriptedProvider, start_over: StartOver, protocol: str
) -> None:
    provider.replies.append(Reply(('{"city": "Rome"}',)))
    wanted = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
    async with start_over(client_of(provider)) as gateway:
        answer = await answered(gateway, CHAT, response_format=wanted)
        assert json.loads(answer["choices"][0]["message"]["content"]) == {"city": "Rome"}
    (body,) = provider.bodies
    sent = body["response_format"]["json_schema"] if protocol == OPENAI else body["output_config"]["format"]
    assert sent["schema"]["properties"] == SCHEMA["properties"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_batches_reach_a_provider(provider: ScriptedProvider, start_over: StartOver) -> None:
    async with start_over(client_of(provider)) as gateway:
        line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": BODIES[CHAT]}
        batch = await gateway.run_batch(json.dumps(line).encode())
        assert batch.output_file_id is not None, batch
        (output,) = (await gateway.client.files.content(batch.output_file_id)).text.splitlines()
        body = json.loads(output)["response"]["body"]
        assert body["choices"][0]["message"]["content"] == "Hello there"
        assert body["usage"]["prompt_tokens"] == PROMPT_TOKENS


async def test_a_quota_is_held_by_the_estimate_and_settled_by_the_providers_count(
    start_provider: StartProvider, start_over: StartOver
) -> None:
    provider = await start_provider(OPENAI)
    async with start_over(client_of(provider), stores_usage=True) as gateway:
        (tenant,) = (await gateway.admin("GET", "/tenants"))["data"]
        quota = {"level": "tenant", "scope_id": tenant["id"], "kind": "tokens_per_day", "cap": 3000}
        await gateway.admin("PUT", "/quotas", quota)
        body = BODIES[CHAT] | {"messages": [{"role": "user", "content": "x" * 2900}], "max_tokens": 50}
        assert (await gateway.post(CHAT, body))[0] == 200
        assert (await gateway.post(CHAT, body))[0] == 200  # the first one took few of the 3,000
        body["messages"] = [{"role": "user", "content": "x" * 3100}]
        status, _, answer = await gateway.post(CHAT, body)
        assert status in (400, 429), answer
    assert len(provider.bodies) == 2


def test_the_key_is_in_no_text_of_the_client() -> None:
    provider = ScriptedProvider(OPENAI)
    provider.port = 1
    client = client_of(provider)
    assert KEY not in repr(client.state) and KEY not in client.address


def test_a_provider_without_a_key_does_not_get_that_of_ones_own_servers() -> None:
    settings = GatewaySettings(external_engine_api_key="own")
    hosted = ExternalAddress.parse("openai+https://provider.test/v1?model=m&kind=hosted&context=1000")
    own = ExternalAddress.parse("openai+http://127.0.0.1:1/v1?model=m&kind=vllm&tokenizer=/t")
    assert api_key_of(hosted, settings) is None
    assert api_key_of(own, settings) == "own"
