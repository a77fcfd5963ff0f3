"""The real `anthropic` package against a gateway on loopback."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import anthropic
import pytest

from moiety_platform.engine_client.fake import FakeEngineClient, FakeVerdict
from moiety_text.tokenizer import Tokenizer
from moiety_wire.messages import ModelCard, Submit

from .anthropic_clients import BODY, HELLO, HELLO_TOKENS, MODEL, PATH, client, open_client
from .conftest import RunningGateway, StartGateway

__all__ = ["client", "open_client"]  # fixtures


@pytest.fixture
def prompt_of(card: ModelCard) -> Callable[[Submit], str]:
    """The text that an engine was given."""
    tokenizer = Tokenizer.from_json(card.tokenizer_json)
    return lambda submit: tokenizer.decode(submit.prompt_ids, skip_special_tokens=False)


def ends_after(*texts: Any) -> Any:
    return lambda submit: [(65, text) for text in texts]


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


async def test_a_key_comes_in_either_header_and_anthropics_own_goes_first(
    gateway: RunningGateway, open_client: Callable[..., anthropic.AsyncAnthropic]
) -> None:
    for options in ({"api_key": gateway.key}, {"api_key": None, "auth_token": gateway.key}):
        async with open_client(gateway, **options) as client:
            assert (await client.messages.create(**BODY)).usage.output_tokens == 2
            assert (await client.messages.count_tokens(model=MODEL, messages=HELLO)).input_tokens == HELLO_TOKENS
    for own, bearer, status in ((gateway.key, "mty_other.key", 200), ("mty_other.key", gateway.key, 401)):
        assert (await gateway.post(PATH, BODY, key=bearer, headers={"x-api-key": own}))[0] == status
