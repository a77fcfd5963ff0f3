"""Answers of a real llama.cpp server, as `benchmarks/external_engines.py --record` recorded them.

A streamed answer must equal the whole one, and a request that differs from the recorded one has no answer here."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import moiety_demo
from moiety_platform.clock import SystemClock
from moiety_platform.engine_addresses import ExternalAddress
from moiety_platform.errors import ContextTooLong
from moiety_platform.external_engines.client import ExternalEngineClient
from moiety_platform.routing.replicas import Replicas
from moiety_wire.classes import STANDARD
from moiety_wire.messages import FinishReason, Sampling, Stopping, Submit, Tokens

from .conftest import Until

LINES = (Path(__file__).parent / "recorded" / "llama_cpp.jsonl").read_text().splitlines()
RECORDED, *ASKED = map(json.loads, LINES)
REQUESTS = {one["name"]: one for one in ASKED}
ANSWERED = [one for one in ASKED if one["status"] == 200]
REASONS = {"eos": FinishReason.STOP, "word": FinishReason.STOP, "limit": FinishReason.LENGTH}


async def _replay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    path = head.split(" ")[1]
    size = next((line.split(": ")[1] for line in head.split("\r\n") if line.lower().startswith("content-length")), "0")
    body = await reader.readexactly(int(size))
    status, text = 404, f"nothing was recorded for {path} with this body"
    if body:
        asked = json.loads(body)
        found = [(one["status"], one["answer"]) for one in REQUESTS.values() if one["body"] == asked]
        status, text = found[0] if found else (status, text)
    elif path in RECORDED["told"]:
        status, text = 200, RECORDED["told"][path]
    data = text.encode()
    writer.write(b"HTTP/1.1 %d Told\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % (status, len(data)) + data)
    await writer.drain()
    writer.close()


@pytest.fixture
async def engine(until: Until) -> AsyncIterator[ExternalEngineClient]:
    server = await asyncio.start_server(_replay, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    tokenizer = moiety_demo.checkpoint_path()
    address = f"openai+http://127.0.0.1:{port}/v1?model=qwen3-moe&kind=llama.cpp&tokenizer={tokenizer}"
    client = ExternalEngineClient(ExternalAddress.parse(address), SystemClock())
    async with server, Replicas([client]):
        await until(lambda: client.state.healthy)
        yield client


async def _answer(engine: ExternalEngineClient, name: str) -> Any:
    one = REQUESTS[name]
    sampling = msgspec.convert(one["sampling"], Sampling, strict=False)
    stopping = msgspec.convert(one["stopping"], Stopping)
    most = stopping.max_tokens
    submit = Submit("r", 0, "qwen3-moe", "t", STANDARD, one["body"]["prompt"], sampling, stopping, most, b"", 0)
    async with engine.open(submit) as stream:
        return [message async for message in stream.messages()]


@pytest.mark.parametrize("name", [one["name"] for one in ANSWERED])
async def test_streamed_and_whole_answers_of_llama_cpp_are_equal(engine: ExternalEngineClient, name: Any) -> None:
    whole = REQUESTS[name]["whole"]
    *pieces, finished = await _answer(engine, name)
    text = "".join(piece.text for piece in pieces if isinstance(piece, Tokens)) + finished.text
    assert text == whole["content"].rstrip("\N{REPLACEMENT CHARACTER}")  # it streams no part of a character
    assert finished.num_output_tokens == whole["tokens_predicted"]
    assert finished.reason is REASONS[whole["stop_type"]]


async def test_a_prompt_too_long_for_llama_cpp_is_reported_as_such(engine: ExternalEngineClient) -> None:
    with pytest.raises(ContextTooLong, match=r"prompt is too long: .* maximum context length of [0-9]+ tokens"):
        await _answer(engine, "a prompt that is too long")


async def test_model_properties_of_llama_cpp_are_parsed(engine: ExternalEngineClient) -> None:
    state = engine.state
    assert state.card.max_context_tokens == RECORDED["context_tokens"]
    assert (state.load.num_running, state.load.num_waiting) == (0, 0)
    times = 2  # streamed and whole
    assert state.load.prompt_tokens_total == times * sum(len(one["body"]["prompt"]) for one in ANSWERED)
    assert state.load.output_tokens_total == times * sum(one["whole"]["tokens_predicted"] for one in ANSWERED)
