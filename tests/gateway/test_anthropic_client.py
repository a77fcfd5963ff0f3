"""The real `anthropic` package against a gateway on loopback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import anthropic
import pytest

from moiety_platform.engine_client.fake import FakeEngineClient, FakeVerdict
from moiety_text.tokenizer import Tokenizer
from moiety_wire.messages import Failed, FailureCode, ModelCard, Submit
from moiety_wire.notes import Reason

from .conftest import NewCard, RunningGateway, StartGateway, Until, always

MODEL = "tiny"
PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
BODY: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 2}
HELLO_TOKENS = len("<|user|>hello\n<|assistant|>")


@pytest.fixture
def open_client() -> Callable[..., anthropic.AsyncAnthropic]:
    """`async with open_client(gateway) as client`."""

    def make(gateway: RunningGateway, **options: Any) -> Any:
        return anthropic.AsyncAnthropic(
            **{"base_url": gateway.url, "api_key": gateway.key, "max_retries": 0, "timeout": 10.0, **options}
        )

    return make


@pytest.fixture
async def client(
    gateway: RunningGateway, open_client: Callable[..., anthropic.AsyncAnthropic]
) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with open_client(gateway) as opened:
        yield opened


@pytest.fixture
def prompt_of(card: ModelCard) -> Callable[[Submit], str]:
    """The text that an engine was given."""
    tokenizer = Tokenizer.from_json(card.tokenizer_json)
    return lambda submit: tokenizer.decode(submit.prompt_ids, skip_special_tokens=False)


def ends_after(*texts: Any) -> Any:
    return lambda submit: [(65, text) for text in texts]


# ── answers ──


async def test_a_message_has_text_usage_and_identity(gateway: RunningGateway, client: anthropic.AsyncAnthropic) -> None:
    message = await client.messages.create(**BODY)
    assert [(block.type, block.text) for block in message.content] == [("text", "1 2")]
    assert (message.type, message.role, message.model) == ("message", "assistant", MODEL)
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    assert (message.usage.input_tokens, message.usage.output_tokens) == (HELLO_TOKENS, 2)
    assert (message.usage.cache_read_input_tokens, message.usage.cache_creation_input_tokens) == (0, 0)
    assert message.usage.service_tier == "standard"
    assert message.id.startswith("msg_")
    (row,) = await gateway.rows.wait_for(1)
    assert (row.request_id, row.endpoint, row.outcome, row.http_status) == (message.id, PATH, "length", 200)
    assert (row.prompt_tokens, row.output_tokens) == (HELLO_TOKENS, 2)


async def test_a_stream_has_the_vendors_events_in_their_order(gateway: RunningGateway) -> None:
    status, headers, answer = await gateway.post(PATH, BODY | {"stream": True})
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    events = []
    for event in answer.decode().strip().split("\n\n"):
        name, data = event.split("\n")
        fields = json.loads(data.removeprefix("data: "))
        assert name == f"event: {fields['type']}"
        events.append(fields)
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        "ping",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[0]["message"]["content"] == [] and events[0]["message"]["stop_reason"] is None
    assert events[0]["message"]["usage"]["input_tokens"] == HELLO_TOKENS
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 2


async def test_a_streamed_message_comes_to_the_same_as_a_whole_one(
    start_gateway: StartGateway, card: ModelCard, open_client: Callable[..., anthropic.AsyncAnthropic]
) -> None:
    engine = FakeEngineClient(card, verdict=lambda submit: FakeVerdict("standard", num_cached_tokens=16))
    async with start_gateway([engine]) as gateway, open_client(gateway) as client:
        whole = await client.messages.create(**BODY)
        async with client.messages.stream(**BODY) as stream:
            pieces = [text async for text in stream.text_stream]
            streamed = await stream.get_final_message()
        assert pieces == ["1", " 2"]
        assert streamed.content[0].text == whole.content[0].text == "1 2"
        for name in ("role", "model", "stop_reason", "stop_sequence"):
            assert getattr(streamed, name) == getattr(whole, name)
        for name in ("input_tokens", "output_tokens", "cache_read_input_tokens", "service_tier"):
            assert getattr(streamed.usage, name) == getattr(whole.usage, name)
        assert (whole.usage.cache_read_input_tokens, whole.usage.input_tokens) == (16, HELLO_TOKENS - 16)
        rows = await gateway.rows.wait_for(2)
        assert {row.request_id for row in rows} == {whole.id, streamed.id}
        assert {(row.prompt_tokens, row.cached_tokens, row.output_tokens) for row in rows} == {(HELLO_TOKENS, 16, 2)}


ENDS = [
    # what the engine says, where it is to stop; why it stopped, at which sequence, with which text
    (["a", "b"], ["X"], "end_turn", None, "ab"),
    (["a", "b"], [], "end_turn", None, "ab"),
    (["a", "bST", "OPc", "d"], ["never", "STOP"], "stop_sequence", "STOP", "ab"),
    (["a", "ST"], ["STOP"], "end_turn", None, "aST"),  # what was held back comes after all
    (["a"] * 9, ["X"], "max_tokens", None, "aaaa"),
    ([], [], "end_turn", None, ""),
]


async def test_a_message_says_why_it_ended_streamed_and_not(
    gateway: RunningGateway, client: anthropic.AsyncAnthropic
) -> None:
    for texts, stops, *expected in ENDS:
        gateway.engine.script = ends_after(*texts)
        asked = BODY | {"max_tokens": 4, "stop_sequences": stops}
        async with client.messages.stream(**asked) as stream:
            streamed = await stream.get_final_message()
        for message in (streamed, await client.messages.create(**asked)):
            assert [message.stop_reason, message.stop_sequence, message.content[0].text] == expected


async def test_a_limit_that_ends_a_message_counts_as_max_tokens(
    start_gateway: StartGateway, card: ModelCard, open_client: Callable[..., anthropic.AsyncAnthropic]
) -> None:
    engine = FakeEngineClient(card)
    async with start_gateway([engine], stores_usage=True, credit_window_tokens=8) as gateway:
        (tenant,) = (await gateway.admin("GET", "/tenants"))["data"]
        limit: dict[str, Any] = {
            "level": "tenant",
            "scope_id": tenant["id"],
            "kind": "tokens_per_day",
            "cap": HELLO_TOKENS + 20,
        }
        await gateway.admin("PUT", "/quotas", limit)
        async with open_client(gateway) as client:
            async with client.messages.stream(**BODY | {"max_tokens": 100}) as stream:
                message = await stream.get_final_message()
            assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 20)
            with pytest.raises(anthropic.RateLimitError) as refused:
                await client.messages.create(**BODY)
        assert (refused.value.type, refused.value.error_code) == ("rate_limit_error", "quota_exceeded")
        assert 0 < int(refused.value.response.headers["retry-after"]) <= 86_400
        await gateway.stored_usage.flush()
        rows = (await gateway.admin("GET", "/usage/requests"))["data"]
        assert [(row["outcome"], row["http_status"], row["error_code"]) for row in rows] == [
            ("rejected", 429, "quota_exceeded"),
            ("length", 200, "quota_exceeded"),
        ]


# ── what is asked ──


async def test_system_turns_and_blocks_reach_the_template(
    gateway: RunningGateway, client: anthropic.AsyncAnthropic, prompt_of: Callable[[Submit], str]
) -> None:
    messages: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]},
        {"role": "user", "content": "e"},
    ]
    await client.messages.create(**BODY | {"messages": messages, "system": [{"type": "text", "text": "be brief"}]})
    await client.messages.create(**BODY | {"system": "be kind"})
    first, second = map(prompt_of, gateway.engine.submits)
    assert first == "<|system|>be brief\n<|user|>a\nb\n<|assistant|>c\nd\n<|user|>e\n<|assistant|>"
    assert second == "<|system|>be kind\n<|user|>hello\n<|assistant|>"


async def test_an_assistants_message_at_the_end_is_continued(
    gateway: RunningGateway, client: anthropic.AsyncAnthropic, prompt_of: Callable[[Submit], str]
) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "The answer is <|end|>"}]
    counted = await client.messages.count_tokens(model=MODEL, messages=messages)
    message = await client.messages.create(**BODY | {"messages": messages})
    assert message.content[0].text == "1 2"  # the continuation alone
    (submit,) = gateway.engine.submits
    assert prompt_of(submit) == "<|user|>hello\n<|assistant|>The answer is <|end|>"
    assert 256 not in submit.prompt_ids  # what a client wrote is no control token
    assert message.usage.input_tokens == counted.input_tokens == len(submit.prompt_ids)


async def test_every_parameter_reaches_the_engine(gateway: RunningGateway, client: anthropic.AsyncAnthropic) -> None:
    sampling: dict[str, Any] = {
        "temperature": 0.25,
        "top_p": 0.5,
        "top_k": 4,
    }  # no longer arguments of the newest clients
    metadata: dict[str, Any] = {"user_id": "someone"}
    await client.messages.create(**BODY, stop_sequences=["X", "YY"], metadata=metadata, extra_body=sampling)
    await client.messages.create(**BODY, thinking={"type": "disabled"}, tools=[])
    given, default = gateway.engine.submits
    assert (given.sampling.temperature, given.sampling.top_p, given.sampling.top_k) == (0.25, 0.5, 4)
    assert (given.stopping.max_tokens, given.stopping.stop) == (2, ("X", "YY"))
    assert (default.sampling.temperature, default.sampling.top_p, default.sampling.top_k) == (1.0, 1.0, 0)
    assert default.stopping.stop == ()


TIERS = [
    # the tenant's class, the tier that is asked for; the class that serves, the tier that is stated
    ("standard", "auto", "standard", "standard"),
    ("priority", "auto", "priority", "priority"),
    ("priority", "standard_only", "standard", "standard"),
    ("flex", "standard_only", "flex", "batch"),
    ("batch", "auto", "batch", "batch"),
]


async def test_a_tier_chooses_below_the_tenants_class_and_usage_states_what_served(
    gateway: RunningGateway, client: anthropic.AsyncAnthropic
) -> None:
    (tenant,) = (await gateway.admin("GET", "/tenants"))["data"]
    for cap, tier, served, stated in TIERS:
        await gateway.admin("PATCH", f"/tenants/{tenant['id']}", {"service_class": cap})
        gateway.forget_keys()
        raw = await client.messages.with_raw_response.create(**BODY, service_tier=tier)
        message = await raw.parse()
        assert (raw.headers["x-moiety-class"], message.usage.service_tier) == (served, stated)
        assert gateway.engine.submits[-1].service.name == served


async def test_counted_tokens_are_the_input_tokens_of_the_message_and_cost_nothing(
    start_gateway: StartGateway, card: ModelCard, open_client: Callable[..., anthropic.AsyncAnthropic]
) -> None:
    engine = FakeEngineClient(card, verdict=lambda submit: FakeVerdict("standard", num_cached_tokens=7))
    plain: dict[str, Any] = {"model": MODEL, "messages": HELLO}
    asked: dict[str, Any] = {
        **plain,
        "system": "be brief",
        "messages": [*HELLO, {"role": "assistant", "content": "é"}, *HELLO],
    }
    async with start_gateway([engine]) as gateway, open_client(gateway) as client:
        for each in (plain, asked):
            counted = await client.messages.count_tokens(**each)
            usage = (await client.messages.create(**each, max_tokens=1)).usage
            assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
        rows = await gateway.rows.wait_for(2)
        assert [row.endpoint for row in rows] == [PATH, PATH]
        assert len(engine.submits) == 2


# ── keys ──


async def test_a_key_comes_in_either_header_and_anthropics_own_goes_first(
    gateway: RunningGateway, open_client: Callable[..., anthropic.AsyncAnthropic]
) -> None:
    for options in ({"api_key": gateway.key}, {"api_key": None, "auth_token": gateway.key}):
        async with open_client(gateway, **options) as client:
            assert (await client.messages.create(**BODY)).usage.output_tokens == 2
            assert (await client.messages.count_tokens(model=MODEL, messages=HELLO)).input_tokens == HELLO_TOKENS
    for own, bearer, status in ((gateway.key, "mty_other.key", 200), ("mty_other.key", gateway.key, 401)):
        assert (await gateway.post(PATH, BODY, key=bearer, headers={"x-api-key": own}))[0] == status


async def test_a_bad_key_is_an_authentication_error(
    gateway: RunningGateway, open_client: Callable[..., anthropic.AsyncAnthropic]
) -> None:
    async with open_client(gateway, api_key="mty_no.such") as client:
        for call in (client.messages.create(**BODY), client.messages.count_tokens(model=MODEL, messages=HELLO)):
            with pytest.raises(anthropic.AuthenticationError) as caught:
                await call
            assert (caught.value.type, caught.value.error_code) == ("authentication_error", "invalid_api_key")
            assert caught.value.request_id == caught.value.body["request_id"]
    async with open_client(gateway, api_key=gateway.admin_key) as client:
        with pytest.raises(anthropic.PermissionDeniedError) as denied:
            await client.messages.create(**BODY)
        assert (denied.value.type, denied.value.error_code) == ("permission_error", "missing_scope")


# ── refusals ──


async def test_an_unknown_model_is_a_not_found_error_that_lists_the_known(
    gateway: RunningGateway, client: anthropic.AsyncAnthropic
) -> None:
    asked: dict[str, Any] = {"model": "claude-0", "messages": HELLO}
    for call in (client.messages.create(**asked, max_tokens=1), client.messages.count_tokens(**asked)):
        with pytest.raises(anthropic.NotFoundError, match=r"'claude-0'.*available: tiny") as caught:
            await call
        assert (caught.value.type, caught.value.error_code) == ("not_found_error", "model_not_found")


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [fields]}


SOURCE = {"type": "base64", "media_type": "image/png", "data": "aGk="}
FORMAT = {"type": "json_schema", "schema": {"type": "object"}}
BAD = [
    ({"max_tokens": None}, "max_tokens", "valid integer"),
    ({"max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
    ({"messages": [{"role": "user", "content": "x" * 600}]}, None, "Shorten the prompt"),
    ({"model": 7}, "model", "valid string"),
    ({"messages": []}, "messages", "is empty"),
    ({"messages": HELLO * 2049}, "messages", "may have 2,048 entries"),
    (message(role="system", content="x"), "messages", "must be a user's"),
    (message(role="system", content=[{"type": "image"}]), "messages.0.content.0.source", "missing"),
    (message(role="system", content=[{"type": "thinking", "thinking": "x"}]), "messages.0.content", "not the system's"),
    (message(role="tool", content="x"), "messages.0.role", "'tool' is not a role"),
    (message(role="assistant", content="x"), "messages", "must be a user's"),
    (message(role="user"), "messages.0.content", "missing"),
    (message(role="user", content=None), "messages.0.content", "a string or a list of text blocks"),
    (message(role="user", content=7), "messages.0.content", "a string or a list of text blocks"),
    (message(role="user", content=[7]), "messages.0.content.0", "object"),
    (message(role="user", content=[{"type": "text"}]), "messages.0.content.0.text", "missing"),
    *(
        (message(role="user", content=[{"type": kind, "source": SOURCE}]), "messages.0.content", words)
        for kind, words in (("document", "not plain text"), ("redacted_thinking", "user's"))
    ),
    (message(role="user", content=[{"type": "image", "source": SOURCE}]), "messages", "reads text only"),
    (message(role="user", content=[{"type": "video"}]), "messages.0.content", "'video', which is not known"),
    (message(role="user", content=[{"type": "image", "source": {"type": "x"}}]), "messages.0.content.0.source", "'x'"),
    ({"system": {"text": "x"}}, "system", "a string or a list of text blocks"),
    ({"system": [{"type": "image"}]}, "system.0.type", "'text'"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers", "connects to no MCP servers"),
    ({"container": "c"}, "container", "runs no code"),
    ({"compaction": {"type": "auto"}}, "compaction", "does not summarize"),
    ({"thread": {"type": "create"}}, "thread", "are not kept"),
    ({"billing_policy": {"type": "billing_policy", "bill_to": "user_profile"}}, "billing_policy.bill_to", "tenant"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema", "missing"),
    ({"output_config": {"format": FORMAT}, "output_format": FORMAT}, None, "send one of both"),
    ({"output_format": {"type": "text", "schema": {}}}, "output_format.type", "'json_schema'"),
    ({"output_config": {"effort": "none"}}, "output_config.effort", "'max'"),
    ({"context_management": {"edits": [{}]}}, "context_management.edits.0.type", "missing"),
    ({"speed": "slow"}, "speed", "'fast'"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens", "greater than or equal to 1"),
    ({"temperature": 1.5}, "temperature", "less than or equal to 1"),
    ({"top_p": -1}, "top_p", "greater than or equal to 0"),
    ({"top_k": -1}, "top_k", "greater than or equal to 0"),
    ({"stop_sequences": [""]}, "stop_sequences.0", "at least 1 character"),
    ({"stop_sequences": ["a"] * 17}, "stop_sequences", "may have 16 entries"),
    ({"metadata": {"user_id": 7}}, "metadata.user_id", "valid string"),
    ({"service_tier": "flex"}, "service_tier", "'standard_only'"),
    ({"stream": "yes"}, "stream", "valid boolean"),
]


async def test_bad_requests_get_400_that_names_the_field_and_leave_one_row_each(gateway: RunningGateway) -> None:
    for number, (changes, param, words) in enumerate(BAD, 1):
        status, headers, answer = await gateway.post(PATH, BODY | changes)
        fields = json.loads(answer)
        assert (status, fields["type"], fields["request_id"]) == (400, "error", headers["request-id"]), changes
        error = fields["error"]
        assert error["type"] == "invalid_request_error" and error["details"]["error_code"], changes
        assert error["details"].get("param") == param, (changes, error)
        assert words in error["message"], (changes, error)
        rows = await gateway.rows.wait_for(number)
        assert (rows[-1].outcome, rows[-1].http_status, rows[-1].output_tokens) == ("rejected", 400, 0)
    assert gateway.engine.submits == []


async def test_invalid_json_and_missing_max_tokens_give_anthropics_error_format(
    gateway: RunningGateway, client: anthropic.AsyncAnthropic
) -> None:
    for path, body in ((PATH, b"{"), (COUNT, b"{"), (COUNT, b'{"messages": []}')):
        status, _, answer = await gateway.post(path, body)
        assert (status, json.loads(answer)["error"]["type"]) == (400, "invalid_request_error")
    with pytest.raises(anthropic.BadRequestError, match="'max_tokens' is missing"):
        await client.post(PATH, body={"model": MODEL, "messages": HELLO}, cast_to=object)
    with pytest.raises(anthropic.BadRequestError, match="connects to no MCP servers"):
        await client.messages.count_tokens(model=MODEL, messages=HELLO, extra_body={"mcp_servers": [{"type": "url"}]})


async def test_a_body_that_is_too_large_gives_request_too_large(
    start_gateway: StartGateway, card: ModelCard, open_client: Callable[..., anthropic.AsyncAnthropic]
) -> None:
    async with start_gateway([FakeEngineClient(card)], max_body_bytes=2000) as gateway, open_client(gateway) as client:
        long: list[Any] = [{"role": "user", "content": "x" * 3000}]
        for call in (
            client.messages.create(model=MODEL, max_tokens=1, messages=long),
            client.messages.count_tokens(model=MODEL, messages=long),
        ):
            with pytest.raises(anthropic.ContentTooLargeError) as caught:
                await call
            assert caught.value.body["error"]["type"] == "request_too_large"


REFUSALS = [
    (FailureCode.OVERLOADED, Reason.PREDICTED_LATE, anthropic.OverloadedError, "overloaded_error", 529),
    (FailureCode.OVERLOADED, Reason.TENANT_QUEUE_FULL, anthropic.RateLimitError, "rate_limit_error", 429),
    (FailureCode.DRAINING, None, anthropic.ServiceUnavailableError, "api_error", 503),
    (FailureCode.ENGINE_FAILED, None, anthropic.InternalServerError, "api_error", 502),
    (FailureCode.CONTEXT_LENGTH_EXCEEDED, None, anthropic.BadRequestError, "invalid_request_error", 400),
]


async def test_a_refusal_of_the_engine_has_its_status_even_if_a_stream_was_asked_for(
    gateway: RunningGateway, client: anthropic.AsyncAnthropic
) -> None:
    for code, reason, error, kind, status in REFUSALS:
        failed = Failed("", 0, code, "no, because", 0, reason, 2.1)
        gateway.engine.script = always(failed)
        for stream in (False, True):
            with pytest.raises(error, match="no, because") as caught:
                await client.messages.create(**BODY, stream=stream)
            assert (caught.value.status_code, caught.value.type) == (status, kind)
            assert ("retry-after" in caught.value.response.headers) == (status in (429, 503, 529))
            assert caught.value.request_id
    rows = await gateway.rows.wait_for(2 * len(REFUSALS))
    assert [row.http_status for row in rows] == [case[-1] for case in REFUSALS for _ in range(2)]
    assert not any(row.output_tokens for row in rows)


# ── streams that break off ──


async def test_an_engine_lost_during_a_stream_gives_an_error_event(
    start_gateway: StartGateway, card: ModelCard, open_client: Callable[..., anthropic.AsyncAnthropic]
) -> None:
    engine = FakeEngineClient(card, lambda submit: ((65, "x") for _ in range(10_000)))
    async with start_gateway([engine], credit_window_tokens=8) as gateway, open_client(gateway) as client:
        stream = await client.messages.create(**BODY | {"max_tokens": 400}, stream=True)
        seen = []
        with pytest.raises(anthropic.APIStatusError) as caught:
            async for event in stream:
                seen.append(event.type)
                if event.type == "content_block_delta":
                    engine.die()
        assert seen[-1] == "content_block_delta"
        assert (caught.value.type, caught.value.error_code) == ("api_error", "engine_failed")
        assert caught.value.body["request_id"] == stream.response.headers["request-id"]
        (row,) = await gateway.rows.wait_for(1)
        assert (row.outcome, row.http_status, row.error_code) == ("failed", 200, "engine_failed")
        assert row.output_tokens > 0


async def test_a_client_that_leaves_in_mid_stream_ends_its_request_and_pays_for_what_was_generated(
    start_gateway: StartGateway, new_card: NewCard, open_client: Callable[..., anthropic.AsyncAnthropic], until: Until
) -> None:
    card = new_card(max_context_tokens=10_000_000)
    endless = FakeEngineClient(card, lambda submit: ((65, "x" * 50) for _ in range(10**6)))
    async with start_gateway([endless]) as gateway, open_client(gateway) as client:
        async with client.messages.stream(**BODY | {"max_tokens": 1_000_000}) as stream:
            async for text in stream.text_stream:
                assert text == "x" * 50
                break
        (row,) = await gateway.rows.wait_for(1)
        assert (row.outcome, row.http_status, row.error_code) == ("disconnected", 499, "client_disconnected")
        assert row.output_tokens == endless.state.load.output_tokens_total > 0
        assert endless.state.num_inflight == 0
        task = asyncio.create_task(client.messages.create(**BODY | {"max_tokens": 20_000}))
        await until(lambda: endless.state.num_inflight == 1)
        task.cancel()
        rows = await gateway.rows.wait_for(2)
        assert rows[1].outcome == "disconnected"
        assert sum(row.output_tokens for row in rows) == endless.state.load.output_tokens_total
