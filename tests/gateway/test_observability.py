"""Traces, metrics, logs and the small endpoints: what they tell, and what they never tell."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from opentelemetry.trace import SpanKind

from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_wire.messages import ModelCard

from .conftest import NewCard, RunningGateway, SpanList, StartGateway

CHAT = "/v1/chat/completions"
SECRET = "the prompt that nobody may see"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": SECRET}], "max_tokens": 2, "temperature": 0.5}
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


async def test_a_request_is_one_span_in_the_clients_trace_that_reaches_the_engine(
    start_gateway: StartGateway, card: ModelCard, spans: SpanList
) -> None:
    async with start_gateway([FakeEngineClient(card)], spans) as gateway:
        await gateway.post(CHAT, BODY, headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
        await gateway.rows.wait_for(1)
    (server,) = spans.named("chat tiny")
    assert server.kind is SpanKind.SERVER
    assert (server.trace_id, server.parent_id) == (TRACE, PARENT)
    assert {span.parent_id for span in spans.spans if span is not server} == {server.span_id}
    assert gateway.engine.submits[0].traceparent == f"00-{TRACE}-{server.span_id}-01"
    attributes = server.attributes
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.usage.output_tokens"] == 2
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert attributes["gen_ai.request.temperature"] == 0.5
    assert SECRET not in str(spans.spans)


async def test_a_failed_request_has_an_error_span_and_a_bad_traceparent_is_ignored(
    start_gateway: StartGateway, card: ModelCard, spans: SpanList
) -> None:
    async with start_gateway([FakeEngineClient(card)], spans) as gateway:
        await gateway.post(CHAT, BODY | {"model": "nope"}, headers={"traceparent": "zz-!"})
        await gateway.rows.wait_for(1)
    (server,) = spans.named("chat unknown")
    assert (server.parent_id, server.error, server.attributes["error.type"]) == (None, *["model_not_found"] * 2)
    assert "nope" not in str(spans.spans)


async def test_without_an_exporter_the_clients_context_still_reaches_the_engine(gateway: RunningGateway) -> None:
    await gateway.post(CHAT, BODY, headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
    assert gateway.engine.submits[0].traceparent == f"00-{TRACE}-{PARENT}-01"


async def test_metrics_count_requests_tokens_and_times_with_bounded_labels(gateway: RunningGateway) -> None:
    await gateway.post(CHAT, BODY)
    for number in range(5):
        await gateway.post(CHAT, BODY | {"model": f"made-up-{number}"})
    await gateway.rows.wait_for(6)
    status, headers, answer = await gateway.request("GET", "/metrics")
    text = answer.decode()
    assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    ok = 'moiety_requests_total{model="tiny",outcome="length",service_class="standard",status="200"} 1.0'
    refused = 'moiety_requests_total{model="unknown",outcome="rejected",service_class="standard",status="404"} 5.0'
    assert ok in text and refused in text
    assert 'moiety_tokens_total{kind="output",model="tiny",service_class="standard"} 2.0' in text
    chat = 'operation="chat",service_class="standard"'
    assert f'gen_ai_server_time_to_first_token_seconds_count{{model="tiny",{chat}}} 1.0' in text
    assert f'gen_ai_server_time_per_output_token_seconds_count{{model="tiny",{chat}}} 1.0' in text
    assert 'moiety_good_tokens_total{model="tiny",service_class="standard"} 2.0' in text
    assert 'moiety_request_errors_total{code="model_not_found",service_class="standard"} 5.0' in text
    assert 'moiety_engine_up{engine="fake://engine-1"} 1.0' in text
    assert 'moiety_engine_output_tokens_total{engine="fake://engine-1"} 2.0' in text
    assert "made-up" not in text


async def test_a_request_is_one_line_of_json_in_the_log_without_prompt_or_key(
    gateway: RunningGateway, logged: io.StringIO
) -> None:
    await gateway.post(CHAT, BODY, headers={"X-Request-Id": "mine-1"})
    (row,) = await gateway.rows.wait_for(1)
    lines = [json.loads(line) for line in logged.getvalue().splitlines()]
    (line,) = [line for line in lines if line["event"] == "request"]
    assert (line["request_id"], line["client_request_id"]) == (row.request_id, "mine-1")
    assert (line["outcome"], line["status"], line["output_tokens"]) == ("length", 200, 2)
    assert line["tenant_id"] == row.tenant_id
    assert SECRET not in logged.getvalue()
    assert gateway.key not in logged.getvalue()


@pytest.mark.parametrize(("offered", "echoed"), [("abc-1.2:3", True), ("x" * 200, False), ("a b", False), ("", False)])
async def test_a_reasonable_request_id_is_echoed_and_any_other_replaced(
    gateway: RunningGateway, offered: str, echoed: bool
) -> None:
    for path in (CHAT, f"{CHAT}/", "/nowhere"):
        _, headers, _ = await gateway.post(path, BODY, headers={"X-Request-Id": offered})
        assert (headers["x-request-id"] == offered) is echoed
        assert headers["x-request-id"]


@pytest.mark.parametrize(
    ("path", "plain_body"), [(CHAT, BODY), ("/v1/completions", {"model": "tiny", "prompt": SECRET, "max_tokens": 4})]
)
async def test_headers_that_claim_a_tenant_a_class_or_a_cache_salt_change_nothing(
    gateway: RunningGateway, path: Any, plain_body: Any
) -> None:
    claims = {
        "X-Tenant-Id": "other",
        "X-Moiety-Tenant": "other",
        "X-Service-Class": "priority",
        "X-Priority": "0",
        "X-Cache-Salt": "AAAA",
        "X-Forwarded-User": "root",
    }
    body = plain_body | {"priority": 0, "tenant_id": "other", "service_class": "priority"}
    await gateway.post(path, plain_body)
    await gateway.post(path, body, headers=claims)
    plain, claimed = gateway.engine.submits
    for field in ("tenant_id", "service", "fallback", "cache_salt", "tenant_weight"):
        assert getattr(plain, field) == getattr(claimed, field)
    first, second = await gateway.rows.wait_for(2)
    assert (first.tenant_id, first.service_class) == (second.tenant_id, second.service_class)
    assert len({submit.request_id for submit in gateway.engine.submits}) == 2


async def test_a_usage_row_has_times_and_counts(gateway: RunningGateway) -> None:
    await gateway.post(CHAT, BODY | {"n": 2})
    (row,) = await gateway.rows.wait_for(1)
    assert (row.endpoint, row.model, row.num_choices) == (CHAT, "tiny", 2)
    assert (row.prompt_tokens, row.output_tokens, row.error_code) == (gateway.prompt_tokens(SECRET), 4, None)
    assert 0 <= row.ttft_ms <= row.duration_ms
    assert row.queue_ms == 0
    assert row.started_at.tzinfo is not None


async def test_usage_names_a_model_that_is_away_and_none_that_there_never_was(gateway: RunningGateway) -> None:
    await gateway.post(CHAT, BODY | {"model": "what a client calls it"})
    gateway.engine.die()
    assert (await gateway.post(CHAT, BODY))[0] == 503
    rows = await gateway.rows.wait_for(2)
    assert [(row.model, row.http_status) for row in rows] == [("unknown", 404), ("tiny", 503)]


async def test_text_and_messages_are_tokenized_as_generation_does(gateway: RunningGateway) -> None:
    status, _, answer = await gateway.post("/tokenize", {"model": "tiny", "prompt": "abc"})
    tokens = json.loads(answer)
    assert (status, tokens["count"], tokens["max_model_len"]) == (200, 3, 512)
    _, _, answer = await gateway.post("/detokenize", {"tokens": tokens["tokens"]})
    assert json.loads(answer)["prompt"] == "abc"
    _, _, answer = await gateway.post("/tokenize", {"messages": BODY["messages"]})
    await gateway.post(CHAT, BODY)
    assert json.loads(answer)["tokens"] == gateway.engine.submits[0].prompt_ids


async def test_the_schema_of_the_api_is_served(gateway: RunningGateway) -> None:
    status, _, answer = await gateway.request("GET", "/schema/openapi.json")
    assert status == 200
    assert CHAT in json.loads(answer)["paths"]


async def test_a_prompt_beyond_the_inline_limit_is_tokenized_to_the_same_ids(
    start_gateway: StartGateway, new_card: NewCard
) -> None:
    card = new_card(max_context_tokens=100_000)
    async with start_gateway([FakeEngineClient(card)], inline_tokenize_bytes=64) as gateway:
        for prompt in ("é" * 31, "é" * 5000):
            answer = await gateway.client.completions.create(model="tiny", prompt=prompt, max_tokens=1)
            assert answer.usage.prompt_tokens == 2 * len(prompt)


async def test_probes_may_ask_by_head(gateway: RunningGateway) -> None:
    for path in ("/healthz", "/readyz"):
        status, _, answer = await gateway.request("HEAD", path)
        assert (status, answer) == (200, b"")
    gateway.engine.die()
    assert (await gateway.request("HEAD", "/healthz"))[0] == 200
    assert (await gateway.request("HEAD", "/readyz"))[0] == 503


async def test_refused_requests_are_not_metered(gateway: RunningGateway) -> None:
    await gateway.post(CHAT, BODY | {"max_tokens": 10_000})
    await gateway.post(CHAT, BODY)
    refused, served = await gateway.rows.wait_for(2)
    assert (refused.outcome, refused.error_code, refused.prompt_tokens) == ("rejected", "context_length_exceeded", 0)
    assert served.prompt_tokens == gateway.prompt_tokens(SECRET)
