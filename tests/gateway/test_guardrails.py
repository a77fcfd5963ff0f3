"""Guardrails through a running gateway: built-in detectors and HTTP endpoints, before and after, open and closed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest

from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_platform.guardrails.detectors import find, has_check_digit
from moiety_platform.guardrails.terms import Detector
from moiety_platform.inference.guarded_run import PIECE_CHARS
from moiety_wire.messages import ModelCard, Submit

from .closing_server import ClosingServer
from .conftest import RunningGateway, StartGateway, ToolCard
from .test_tool_formats import AROUND, TEMPLATES

CHAT = "/v1/chat/completions"
CARD = "4111 1111 1111 1111"
KEY = "AKIA" + "ABCDEFGHIJKLMNOP"


def asked(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 4, **more}


def saying(*pieces: str) -> Callable[[Submit], Any]:
    return lambda submit: [(65, piece) for piece in pieces]


async def set_guardrail(gateway: RunningGateway, stage: str, **fields: Any) -> None:
    fields = {"detectors": ["secrets", "card_numbers"], **fields} if "url" not in fields else fields
    await gateway.admin("PUT", "/guardrails", {"name": "g", "stage": stage, **fields})


def checks(gateway: RunningGateway, stage: str, outcome: str) -> float:
    name = f'moiety_guardrail_checks_total{{guardrail="g",outcome="{outcome}",stage="{stage}"}} '
    lines = generate_latest(gateway.metrics.registry).decode().splitlines()
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


@pytest.mark.parametrize(
    "text",
    [KEY, f"x {KEY}.", "-----BEGIN RSA PRIVATE KEY-----", "ghp_" + "a" * 36, "sk-" + "A1b2" * 6, "xoxb-1234567890-ab"],
)
def test_secrets_are_found(text: str) -> None:
    assert find(text, [Detector.SECRETS]) is Detector.SECRETS
    assert find(text, [Detector.CARD_NUMBERS]) is None


@pytest.mark.parametrize(
    "text",
    [
        *("4111111111111111", CARD, "paid by 5500-0000-0000-0004.", "378282246310005", f"{CARD} 12/27"),
        *(f"2026-11-29 {CARD}", "card 4111111111111111 123", "1 4111111111111111"),
    ],
)
def test_card_numbers_are_found(text: str) -> None:
    assert find(text, [Detector.SECRETS, Detector.CARD_NUMBERS]) is Detector.CARD_NUMBERS


@pytest.mark.parametrize("text", ["4111111111111112", "0000000000000000", "1" * 40, "call 0049 30 1234567", "AKIA"])
def test_other_numbers_and_words_are_not_found(text: str) -> None:
    assert find(text, list(Detector)) is None


@given(st.text("0123456789", min_size=12, max_size=18))
def test_exactly_one_last_digit_is_the_check_digit(digits: str) -> None:
    right = [last for last in "0123456789" if has_check_digit(digits + last)]
    assert len(right) == (0 if set(digits) == {"0"} else 1)


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses", "/v1/completions"])
async def test_a_blocked_request_reaches_no_engine_and_is_not_billed(
    start_gateway: StartGateway, card: ModelCard, path: str
) -> None:
    bodies: dict[str, dict[str, Any]] = {"/v1/responses": {"model": "tiny", "input": f"pay with {CARD}"}}
    engine = FakeEngineClient(card)
    async with start_gateway([engine]) as gateway:
        tokens = json.loads((await gateway.post("/tokenize", {"prompt": f"pay with {CARD}"}))[2])["tokens"]
        bodies["/v1/completions"] = {"model": "tiny", "prompt": tokens}
        await set_guardrail(gateway, "input")
        status, _, answer = await gateway.post(path, bodies.get(path, asked(f"pay with {CARD}")))
        assert status == 400 and b"card numbers" in answer and CARD.encode() not in answer
        assert (await gateway.post(CHAT, asked("hello")))[0] == 200
        blocked, passed = await gateway.rows.wait_for(2)
        assert (blocked.outcome, blocked.error_code, blocked.prompt_tokens) == ("rejected", "guardrail_blocked", 0)
        assert (passed.outcome, len(engine.submits)) == ("length", 1)
        assert (checks(gateway, "input", "blocked"), checks(gateway, "input", "passed")) == (1, 1)


async def test_an_observing_guardrail_lets_texts_pass(start_gateway: StartGateway, card: ModelCard) -> None:
    engine = FakeEngineClient(card, saying("a ", KEY))
    async with start_gateway([engine]) as gateway:
        await set_guardrail(gateway, "output", action="observe")
        status, _, answer = await gateway.post(CHAT, asked("hello", stream=True))
        assert status == 200 and KEY.encode() in answer
        assert checks(gateway, "output", "observed") == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_no_part_of_a_secret_leaves_in_a_blocked_answer(
    start_gateway: StartGateway, card: ModelCard, stream: bool
) -> None:
    before = ["word "] * (2 * PIECE_CHARS // 5)
    engine = FakeEngineClient(card, saying(*before, *KEY, " and more"))
    async with start_gateway([engine]) as gateway:
        await set_guardrail(gateway, "output")
        status, _, answer = await gateway.post(CHAT, asked("hello", stream=stream, max_tokens=480))
        assert b"guardrail_blocked" in answer and b"AKIA" not in answer and b'"A"' not in answer
        assert (status, b"word" in answer) == ((200, True) if stream else (400, False))
        (row,) = await gateway.rows.wait_for(1)
        assert (row.outcome, row.error_code) == ("failed", "guardrail_blocked")
        assert row.output_tokens > 0, "the engine has generated them"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_passes_is_the_same_as_without_a_guardrail(
    start_gateway: StartGateway, card: ModelCard, stream: bool
) -> None:
    pieces = [f"{number} words, " for number in range(400)]
    engine = FakeEngineClient(card, saying(*pieces))
    async with start_gateway([engine], credit_window_tokens=16) as gateway:
        body = asked("hello", stream=stream, max_tokens=400)
        texts = []
        for _ in range(2):
            _, _, answer = await gateway.post(CHAT, body)
            texts.append(text_of(answer, stream=stream))
            await set_guardrail(gateway, "output")
        assert texts[0] == texts[1] == "".join(pieces)


def text_of(answer: bytes, *, stream: bool) -> str:
    if not stream:
        content: str = json.loads(answer)["choices"][0]["message"]["content"]
        return content
    events = [event.removeprefix(b"data: ") for event in answer.strip().split(b"\n\n")]
    chunks = [json.loads(event) for event in events if event != b"[DONE]"]
    return "".join(one["choices"][0]["delta"].get("content") or "" for one in chunks if one["choices"])


async def test_a_guardrail_can_be_for_one_tenant(start_gateway: StartGateway, card: ModelCard) -> None:
    async with start_gateway([FakeEngineClient(card)]) as gateway:
        other = await gateway.admin("POST", "/tenants", {"name": "other"}, expect=201)
        await set_guardrail(gateway, "input", tenant_id=other["id"])
        assert (await gateway.post(CHAT, asked(CARD)))[0] == 200
        (tenant,) = (one for one in (await gateway.admin("GET", "/tenants"))["data"] if one["id"] != other["id"])
        await set_guardrail(gateway, "input", tenant_id=tenant["id"])
        assert (await gateway.post(CHAT, asked(CARD)))[0] == 400


class Endpoint:
    """An HTTP endpoint that answers checks with these bytes, or never without them."""

    def __init__(self, answer: bytes | None) -> None:
        self.answer = answer
        self.bodies: list[dict[str, Any]] = []
        self._server = ClosingServer(self._serve)

    async def __aenter__(self) -> Endpoint:
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.port}/check"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        (length,) = (line.split(":")[1] for line in head.split("\r\n") if line.startswith("content-length:"))
        self.bodies.append(json.loads(await reader.readexactly(int(length))))
        if self.answer is None:
            await reader.read()
            return
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(self.answer), self.answer))
        await writer.drain()


async def test_an_endpoint_sees_the_text_and_decides(start_gateway: StartGateway, card: ModelCard) -> None:
    networks = ("127.0.0.0/8",)
    async with (
        Endpoint(b'{"allow": false}') as endpoint,
        start_gateway([FakeEngineClient(card)], webhook_networks=networks) as gateway,
    ):
        await set_guardrail(gateway, "input", url=endpoint.url)
        status, _, answer = await gateway.post(CHAT, asked("how are you"))
        assert (status, json.loads(answer)["error"]["code"]) == (400, "guardrail_blocked")
        endpoint.answer = b'{"allow": true}'
        assert (await gateway.post(CHAT, asked("how are you")))[0] == 200
        seen = endpoint.bodies[0]
        assert (seen["text"], seen["stage"], seen["model"], seen["is_last"]) == (
            "user\nhow are you\n",
            "input",
            "tiny",
            True,
        )
        await set_guardrail(gateway, "output", url=endpoint.url)
        assert (await gateway.post(CHAT, asked("how are you")))[0] == 200
        assert endpoint.bodies[-1]["text"] == "1 2 3 4"


@pytest.mark.parametrize("answer", [None, b"yes", b'{"allow": "no"}', b"x" * 5000])
async def test_a_check_without_result_fails_open_or_closed_as_it_is_set(
    start_gateway: StartGateway, card: ModelCard, answer: bytes | None
) -> None:
    networks = ("127.0.0.0/8",)
    async with (
        Endpoint(answer) as endpoint,
        start_gateway([FakeEngineClient(card)], webhook_networks=networks) as gateway,
    ):
        await set_guardrail(gateway, "input", url=endpoint.url, on_failure="open", timeout_ms=200)
        assert (await gateway.post(CHAT, asked("hello")))[0] == 200
        await set_guardrail(gateway, "input", url=endpoint.url, on_failure="closed", timeout_ms=200)
        status, headers, body = await gateway.post(CHAT, asked("hello"))
        assert (status, json.loads(body)["error"]["code"]) == (503, "guardrail_unavailable")
        assert headers["retry-after"] == "1"
        assert (checks(gateway, "input", "failed_open"), checks(gateway, "input", "failed_closed")) == (1, 1)


async def test_an_endpoint_in_a_network_that_is_not_allowed_cannot_be_set(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    async with start_gateway([FakeEngineClient(card)]) as gateway:
        for url in ("https://127.0.0.1/check", "http://example.com/check"):
            body = {"name": "g", "stage": "input", "url": url}
            await gateway.admin("PUT", "/guardrails", body, expect=400)
        wrong_fields: list[dict[str, Any]] = [
            {"detectors": []},
            {"detectors": ["secrets"], "url": "https://example.com"},
            {"detectors": ["x"]},
        ]
        for wrong in wrong_fields:
            await gateway.admin("PUT", "/guardrails", {"name": "g", "stage": "input", **wrong}, expect=400)
        assert (await gateway.admin("GET", "/guardrails"))["data"] == []


async def test_an_input_guardrail_reads_the_tools_that_the_model_reads(
    start_gateway: StartGateway, tool_card: ToolCard
) -> None:
    card = tool_card("qwen3_coder", template=AROUND.replace("CALLS", (TEMPLATES / "qwen3_coder.jinja").read_text()))
    engine = FakeEngineClient(card)
    async with start_gateway([engine]) as gateway:
        await set_guardrail(gateway, "input")
        function = {"name": "f", "description": f"use {KEY}", "parameters": {"type": "object", "properties": {}}}
        body = asked("hello", tools=[{"type": "function", "function": function}]) | {"model": "qwen3_coder"}
        status, _, answer = await gateway.post(CHAT, body)
        assert (status, json.loads(answer)["error"]["code"]) == (400, "guardrail_blocked")
        assert engine.submits == []


@pytest.mark.parametrize("arguments", [{"card": 4111111111111111}, {KEY: 1}, {"a": [{"b": 4111111111111111}]}])
async def test_an_input_guardrail_reads_names_and_numbers_of_a_call(
    start_gateway: StartGateway, tool_card: ToolCard, arguments: dict[str, Any]
) -> None:
    engine = FakeEngineClient(tool_card("hermes"))
    async with start_gateway([engine]) as gateway:
        await set_guardrail(gateway, "input", detectors=["secrets", "card_numbers"])
        function = {"name": "f", "arguments": json.dumps(arguments)}
        call = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]}
        result = {"role": "tool", "tool_call_id": "c", "content": "x"}
        messages = [{"role": "user", "content": "x"}, call, result]
        status, _, answer = await gateway.post(CHAT, {"model": "hermes", "messages": messages, "max_tokens": 4})
        assert (status, json.loads(answer)["error"]["code"]) == (400, "guardrail_blocked")
        assert engine.submits == []
