"""Errors of the Messages API as the real `anthropic` package raises them, and streams that end early."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import anthropic
import pytest

from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_wire.messages import Failed, FailureCode, ModelCard
from moiety_wire.trace_events import Reason

from .anthropic_clients import BODY, COUNT, HELLO, MODEL, PATH, client, open_client
from .conftest import NewCard, RunningGateway, StartGateway, Until, always

__all__ = ["client", "open_client"]  # fixtures


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
    (
        message(role="system", content=[{"type": "thinking", "thinking": "x"}]),
        "messages.0.content",
        "which the role 'system' cannot send",
    ),
    (message(role="tool", content="x"), "messages.0.role", "'tool' is not a role"),
    (message(role="assistant", content="x"), "messages", "must be a user's"),
    (message(role="user"), "messages.0.content", "missing"),
    (message(role="user", content=None), "messages.0.content", "a string or a list of text blocks"),
    (message(role="user", content=7), "messages.0.content", "a string or a list of text blocks"),
    (message(role="user", content=[7]), "messages.0.content.0", "object"),
    (message(role="user", content=[{"type": "text"}]), "messages.0.content.0.text", "missing"),
    (
        message(role="user", content=[{"type": "redacted_thinking", "source": SOURCE}]),
        "messages.0.content",
        "the role 'user' cannot send",
    ),
    (
        message(role="user", content=[{"type": "document", "source": {**SOURCE, "data": "//8="}}]),
        "messages",
        "neither a PDF file nor plain text",
    ),
    (message(role="user", content=[{"type": "image", "source": SOURCE}]), "messages", "reads text only"),
    (message(role="user", content=[{"type": "video"}]), "messages.0.content", "'video', which is not supported here"),
    (message(role="user", content=[{"type": "image", "source": {"type": "x"}}]), "messages.0.content.0.source", "'x'"),
    ({"system": {"text": "x"}}, "system", "a string or a list of text blocks"),
    ({"system": [{"type": "image"}]}, "system.0.type", "'text'"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers", "connects to no MCP servers"),
    ({"container": "c"}, "container", "runs no code"),
    ({"compaction": {"type": "auto"}}, "compaction", "does not summarize"),
    ({"thread": {"type": "create"}}, "thread", "are not stored"),
    ({"billing_policy": {"type": "billing_policy", "bill_to": "user_profile"}}, "billing_policy.bill_to", "tenant"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema", "missing"),
    ({"output_config": {"format": FORMAT}, "output_format": FORMAT}, None, "send only one of the two"),
    ({"output_format": {"type": "text", "schema": {}}}, "output_format.type", "'json_schema'"),
    ({"output_config": {"effort": "none"}}, "output_config.effort", "'max'"),
    ({"context_management": {"edits": [{}]}}, "context_management.edits.0.type", "missing"),
    ({"speed": "slow"}, "speed", "'fast'"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens", "greater than or equal to 1"),
    ({"temperature": 1.5}, "temperature", "less than or equal to 1"),
    ({"top_p": -1}, "top_p", "greater than or equal to 0"),
    ({"top_k": -1}, "top_k", "greater than or equal to 0"),
    ({"stop_sequences": [""]}, "stop_sequences.0", "at least 1 character"),
    ({"stop_sequences": ["a"] * 33}, "stop_sequences", "may have 32 entries"),
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
