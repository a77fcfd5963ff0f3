# ruff: noqa: F811  fixtures are imported
"""Images for external engines that see: what they are sent, what clients get, and what is billed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moiety_platform.engine_addresses import ExternalAddress
from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_platform.external_engines.chat import ChatCompletions
from moiety_platform.external_engines.dialect import AnswerDelta, MalformedAnswer
from moiety_platform.inference import image_preparation
from moiety_platform.inference.prompt_images import data_url_as_json
from moiety_text.marker_guards import GUARD
from moiety_wire.messages import ModelCard

from .conftest import ToolCard, write_tokenizer
from .external_server import MODEL, client_of, start_server  # noqa: F401  fixtures
from .test_image_links import file_server, sends
from .test_images import BODIES, CHAT, GIF, LINKED, MESSAGES, RESPONSES, RESULTS, TALL, WIDE, data_url, png, refusal

ALLOWANCE = 40
SEES = f"&image_tokens={ALLOWANCE}&context=512"
COUNTED = 123  # prompt tokens by the server
SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}}}
TOOLS: dict[str, dict[str, Any]] = {
    CHAT: {"type": "function", "function": {"name": "look", "parameters": SCHEMA}},
    MESSAGES: {"name": "look", "input_schema": SCHEMA},
    RESPONSES: {"type": "function", "name": "look", "parameters": SCHEMA},
}


@pytest.fixture
def folder(tmp_path: Path, tool_card: ToolCard) -> Path:
    """A checkpoint's folder whose template knows tools."""
    card = tool_card("hermes")
    path = tmp_path / "checkpoint"
    path.mkdir()
    write_tokenizer(path, card)
    return path


def stream_of(*deltas: dict[str, Any], finish: str = "stop") -> bytes:
    """An answer of `/v1/chat/completions` as it is on the wire."""
    choices: list[Any] = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    events: list[Any] = [{"choices": [choice]} for choice in choices]
    events += [{"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]}]
    usage = {"prompt_tokens": COUNTED, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 100}}
    events += [{"choices": [], "usage": usage}]
    body = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n" % len(body)
    return head + body


@pytest.mark.parametrize("kind", ["vllm", "sglang", "llama.cpp", "generic"])
@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_a_server_that_sees_gets_images_as_data_and_its_count_is_billed(
    start_server: Any, client_of: Any, start_over: Any, path: str, kind: str
) -> None:
    server = await start_server(kind)
    server.raw = stream_of({"role": "assistant", "content": "A cat"}, {"content": "."})
    async with start_over(client_of(server, SEES)) as gateway:
        status, _, answer = await gateway.post(path, BODIES[path](WIDE, TALL))
        assert status == 200, answer
        assert "A cat." in answer.decode()
        (row,) = await gateway.rows.wait_for(1)
        assert (row.prompt_tokens, row.cached_tokens, row.output_tokens) == (COUNTED, 100, 3)
    assert server.headers[-1]["path"] == CHAT
    (message,) = server.bodies[-1]["messages"]
    images = [{"type": "image_url", "image_url": {"url": data_url(data)}} for data in (WIDE, TALL)]
    assert message["content"] == [{"type": "text", "text": "What is\nthis?"}, *images]
    assert server.bodies[-1]["max_tokens"] == BODIES[path](WIDE).get("max_tokens", 16)
    assert "prompt" not in server.bodies[-1]


async def test_a_gif_file_has_its_media_type(start_server: Any, client_of: Any, start_over: Any) -> None:
    server = await start_server("vllm")
    server.raw = stream_of({"role": "assistant", "content": "A cat."})
    async with start_over(client_of(server, SEES)) as gateway:
        status, _, answer = await gateway.post(CHAT, BODIES[CHAT](GIF))
        assert status == 200, answer
    (message,) = server.bodies[-1]["messages"]
    assert message["content"][1]["image_url"]["url"] == data_url(GIF).replace("image/png", "image/gif")


async def test_files_are_encoded_once_for_all_choices(
    start_server: Any, client_of: Any, start_over: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[bytes] = []

    def encode(data: bytes) -> bytes:
        encoded.append(data)
        return data_url_as_json(data)

    monkeypatch.setattr(image_preparation, "data_url_as_json", encode)
    server = await start_server("vllm")
    server.raw = stream_of({"role": "assistant", "content": "A cat"})
    async with start_over(client_of(server, SEES)) as gateway:
        status, _, answer = await gateway.post(CHAT, BODIES[CHAT](WIDE) | {"n": 3})
        assert status == 200, answer
    assert len(server.bodies) == 3
    assert encoded == [WIDE]


async def test_text_goes_to_such_a_server_as_token_ids(start_server: Any, client_of: Any, start_over: Any) -> None:
    server = await start_server("vllm")
    async with start_over(client_of(server, SEES)) as gateway:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        status, _, answer = await gateway.post(CHAT, body)
        assert status == 200, answer
    assert isinstance(server.bodies[-1]["prompt"], list)


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_a_servers_calls_and_reasoning_are_answered_in_every_api(
    start_server: Any, client_of: Any, start_over: Any, path: str
) -> None:
    server = await start_server("generic")
    pieces = [
        {"index": 0, "id": "x", "function": {"name": "look", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"place": "<tool'}},
        {"index": 0, "function": {"arguments": '_call> \\"in\\""}'}},
    ]
    server.raw = stream_of(
        {"reasoning_content": "Hm </think>"},
        {"content": "I spell <tool_call>."},
        *({"tool_calls": [piece]} for piece in pieces),
        finish="tool_calls",
    )
    body = BODIES[path](WIDE)
    body["tools"] = [TOOLS[path]]
    body["max_output_tokens" if path == RESPONSES else "max_tokens"] = 200
    async with start_over(client_of(server, SEES)) as gateway:
        status, _, answer = await gateway.post(path, body)
        assert status == 200, answer
    found = json.loads(answer)
    if path == CHAT:
        message = found["choices"][0]["message"]
        thought, text, call = message["reasoning_content"], message["content"], message["tool_calls"][0]["function"]
        name, arguments = call["name"], json.loads(call["arguments"])
        assert found["choices"][0]["finish_reason"] == "tool_calls"
    elif path == MESSAGES:
        thinking, content, call = found["content"]
        thought, text, name, arguments = thinking["thinking"], content["text"], call["name"], call["input"]
    else:
        thinking, content, call = found["output"]
        thought, text = thinking["content"][0]["text"], content["content"][0]["text"]
        name, arguments = call["name"], json.loads(call["arguments"])
    assert (thought, text) == ("Hm </think>", "I spell <tool_call>.")
    assert (name, arguments) == ("look", {"place": '<tool_call> "in"'})
    sent = server.bodies[-1]
    assert sent["tools"][0]["function"]["name"] == "look" and sent["tool_choice"] == "auto"


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_a_results_image_is_sent_after_the_results(
    start_server: Any, client_of: Any, start_over: Any, path: str
) -> None:
    server = await start_server("vllm")
    server.raw = stream_of({"content": "ok"})
    async with start_over(client_of(server, SEES)) as gateway:
        status, _, answer = await gateway.post(path, RESULTS[path](WIDE))
        assert status == 200, answer
    _, asked, result, shown = server.bodies[-1]["messages"]
    assert asked["tool_calls"][0]["function"] == {"name": "look", "arguments": "{}"}
    assert result["content"].startswith("seen\n") and result["tool_call_id"] == asked["tool_calls"][0]["id"]
    assert shown == {"role": "user", "content": [{"type": "image_url", "image_url": {"url": data_url(WIDE)}}]}


async def test_a_link_is_fetched_here_and_never_passed_on(start_server: Any, client_of: Any, start_over: Any) -> None:
    server = await start_server("vllm")
    server.raw = stream_of({"content": "ok"})
    limits = {"max_image_links": 1, "image_link_networks": ("127.0.0.0/8",)}
    async with file_server(sends(TALL)) as (url, _), start_over(client_of(server, SEES), **limits) as gateway:
        status, _, answer = await gateway.post(CHAT, LINKED[CHAT](url))
        assert status == 200, answer
    assert server.bodies[-1]["messages"][0]["content"][0]["image_url"]["url"] == data_url(TALL)


async def test_the_allowance_is_reserved_and_limits_apply(start_server: Any, client_of: Any, start_over: Any) -> None:
    server = await start_server("vllm")
    async with start_over(client_of(server, "&image_tokens=300")) as gateway:
        assert "maximum context length is 512 tokens" in await refusal(gateway, CHAT, BODIES[CHAT](WIDE, TALL))
        assert "scale it down" in await refusal(gateway, CHAT, BODIES[CHAT](png(8000, 8000)))
        assert "a request may have 16" in await refusal(gateway, CHAT, BODIES[CHAT](*[WIDE] * 17))
    assert not server.bodies


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_a_server_not_configured_for_images_refuses_them(
    start_server: Any, client_of: Any, start_over: Any, path: str
) -> None:
    server = await start_server("vllm")
    async with start_over(client_of(server)) as gateway:
        assert "reads text only" in await refusal(gateway, path, BODIES[path](WIDE))
    assert not server.bodies


async def test_images_go_to_those_engines_of_a_model_that_see(
    start_server: Any, client_of: Any, start_over: Any, card: ModelCard, seeing: ModelCard
) -> None:
    server = await start_server("vllm")
    server.raw = stream_of({"content": "ok"})
    texts = FakeEngineClient(msgspec.structs.replace(card, max_context_tokens=4096))
    async with start_over(client_of(server, SEES), texts) as gateway:
        for _ in range(4):
            status, _, answer = await gateway.post(CHAT, BODIES[CHAT](WIDE))
            assert status == 200, answer
    assert len(server.bodies) == 4 and not texts.submits
    server.raw = None
    sees = FakeEngineClient(seeing)
    async with start_over(client_of(server), sees) as gateway:
        for _ in range(4):
            status, _, answer = await gateway.post(CHAT, BODIES[CHAT](WIDE))
            assert status == 200, answer
    assert len(sees.submits) == 4 and len(server.bodies) == 4


async def test_a_response_format_is_sent_in_the_servers_field(
    start_server: Any, client_of: Any, start_over: Any
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
    for kind in ("generic", "vllm"):
        server = await start_server(kind)
        server.raw = stream_of({"content": '{"place": "x"}'})
        async with start_over(client_of(server, SEES)) as gateway:
            status, _, answer = await gateway.post(CHAT, {**BODIES[CHAT](WIDE), "response_format": form})
            assert status == 200, answer
        assert server.bodies[-1]["response_format"]["json_schema"]["schema"]["properties"] == SCHEMA["properties"]


def new_dialect() -> ChatCompletions:
    address = f"openai+http://127.0.0.1:1/v1?model={MODEL}&kind=generic&tokenizer=/t{SEES}"
    return ChatCompletions(ExternalAddress.parse(address))


def test_a_marker_that_content_spells_over_two_events_is_guarded() -> None:
    dialect = new_dialect()
    pieces = [dialect.read({"choices": [{"delta": {"content": text}}]}) for text in ("a <tool", "_call>", " b")]
    text = "".join(piece.text or "" for piece in pieces if isinstance(piece, AnswerDelta))
    assert text.replace(GUARD, "") == "a <tool_call> b"
    assert "<tool_call>" not in text


@pytest.mark.parametrize(
    "delta",
    [7, {"content": 7}, {"tool_calls": {"index": 0}}, {"tool_calls": [7]}, {"tool_calls": [{"function": {"name": 7}}]}],
)
def test_a_delta_of_an_unknown_format_is_refused(delta: Any) -> None:
    with pytest.raises(MalformedAnswer):
        new_dialect().read({"choices": [{"delta": delta}]})


def test_the_calls_of_an_answer_are_bounded() -> None:
    dialect = new_dialect()
    with pytest.raises(MalformedAnswer, match="too many or too long"):
        for number in range(300):
            call = {"index": number, "function": {"name": "f", "arguments": "{}"}}
            dialect.read({"choices": [{"delta": {"tool_calls": [call]}}]})
