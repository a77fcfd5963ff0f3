"""A scripted hosted provider on loopback, with OpenAI's chats or Anthropic's messages."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from moiety_platform.clock import SystemClock
from moiety_platform.engine_addresses import ExternalAddress
from moiety_platform.external_engines.client import ExternalEngineClient

from .closing_server import ClosingServer
from .external_server import PATIENT

OPENAI, ANTHROPIC = "openai", "anthropic"
PROTOCOLS = (OPENAI, ANTHROPIC)
MODEL = "remote"
KEY = "sk-provider-secret-0123456789"
PROMPT_TOKENS, CACHED_TOKENS, OUTPUT_TOKENS = 11, 4, 3
_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}


@dataclass
class Reply:
    """What the provider answers to one request."""

    texts: tuple[str, ...] = ("Hello", " there")
    thought: str = ""
    call: tuple[str, str] | None = None  # name and arguments
    finish: str = "stop"  # OpenAI's word
    status: int = 200
    error: dict[str, Any] = field(default_factory=dict)
    headers: str = ""
    breaks_after: int | None = None  # events, after which the connection is cut
    hangs_after: int | None = None  # events, after which nothing comes
    error_event: bool = False  # the stream ends with `error`
    is_missing: bool = False  # the connection is cut before the head


class ScriptedProvider:
    """Answers requests with `replies` in their order, then with a plain Reply."""

    def __init__(self, protocol: str) -> None:
        self.protocol = protocol
        self.replies: deque[Reply] = deque()
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.num_hung = 0
        self.disconnected = asyncio.Event()
        self._server = ClosingServer(self._serve)

    async def start(self) -> None:
        await self._server.start()
        self.port = self._server.port

    async def close(self) -> None:
        await self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                lengths = [
                    line.split(":")[1] for line in head.split("\r\n") if line.lower().startswith("content-length:")
                ]
                body = await reader.readexactly(int(lengths[0]) if lengths else 0)
                self.heads.append(head)
                self.bodies.append(json.loads(body))
                await self._answer(reader, writer, self.replies.popleft() if self.replies else Reply())
        except (ConnectionError, asyncio.IncompleteReadError):
            return

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, reply: Reply) -> None:
        if reply.is_missing:
            writer.transport.abort()
            return
        if reply.status != 200:
            data = json.dumps({"type": "error", "error": reply.error}).encode()
            head = f"HTTP/1.1 {reply.status} X\r\n{reply.headers}Content-Length: {len(data)}\r\n\r\n"
            writer.write(head.encode() + data)
            await writer.drain()
            return
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        events = self._chat(reply) if self.protocol == OPENAI else self._messages(reply)
        for number, event in enumerate(events):
            if number == reply.breaks_after:
                await writer.drain()
                writer.transport.abort()
                return
            if number == reply.hangs_after:
                self.num_hung += 1
                await reader.read(1)
                self.disconnected.set()
                return
            kind = b"event: %s\n" % event["type"].encode() if self.protocol == ANTHROPIC else b""
            data = kind + b"data: " + json.dumps(event).encode() + b"\n\n"
            writer.write(b"%x\r\n%s\r\n" % (len(data), data))
            await writer.drain()
        if self.protocol == OPENAI:
            writer.write(b"e\r\ndata: [DONE]\n\n\r\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    def _chat(self, reply: Reply) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        if reply.thought:
            deltas.append({"reasoning_content": reply.thought})
        deltas += [{"content": text} for text in reply.texts]
        if reply.call is not None:
            name, arguments = reply.call
            deltas.append({"tool_calls": [{"index": 0, "id": "c1", "function": {"name": name, "arguments": ""}}]})
            halves = arguments[: len(arguments) // 2], arguments[len(arguments) // 2 :]
            deltas += [{"tool_calls": [{"index": 0, "function": {"arguments": half}}]} for half in halves]
        events: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": d, "finish_reason": None}]} for d in deltas]
        if reply.error_event:
            return [*events, {"error": reply.error}]
        events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": reply.finish}]})
        details = {"cached_tokens": CACHED_TOKENS}
        usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": OUTPUT_TOKENS, "prompt_tokens_details": details}
        return [*events, {"choices": [], "usage": usage}]

    def _messages(self, reply: Reply) -> list[dict[str, Any]]:
        usage = {"input_tokens": PROMPT_TOKENS - CACHED_TOKENS - 2, "cache_read_input_tokens": CACHED_TOKENS}
        usage |= {"cache_creation_input_tokens": 2, "output_tokens": 1}
        events: list[dict[str, Any]] = [{"type": "message_start", "message": {"id": "m", "usage": usage}}]
        events.append({"type": "ping"})
        blocks: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
        if reply.thought:
            thought = [
                {"type": "thinking_delta", "thinking": reply.thought},
                {"type": "signature_delta", "signature": "x"},
            ]
            blocks.append(({"type": "thinking", "thinking": ""}, thought))
        if reply.texts:
            blocks.append(
                ({"type": "text", "text": ""}, [{"type": "text_delta", "text": text} for text in reply.texts])
            )
        if reply.call is not None:
            name, arguments = reply.call
            halves = arguments[: len(arguments) // 2], arguments[len(arguments) // 2 :]
            parts: list[dict[str, Any]] = [{"type": "input_json_delta", "partial_json": half} for half in halves]
            blocks.append(({"type": "tool_use", "id": "toolu_1", "name": name, "input": {}}, parts))
        for index, (block, parts) in enumerate(blocks):
            events.append({"type": "content_block_start", "index": index, "content_block": block})
            events += [{"type": "content_block_delta", "index": index, "delta": part} for part in parts]
            events.append({"type": "content_block_stop", "index": index})
        if reply.error_event:
            return [*events, {"type": "error", "error": reply.error}]
        delta = {"stop_reason": _STOPS[reply.finish], "stop_sequence": None}
        events.append({"type": "message_delta", "delta": delta, "usage": {"output_tokens": OUTPUT_TOKENS}})
        return [*events, {"type": "message_stop"}]


StartProvider = Callable[[str], Awaitable[ScriptedProvider]]


@pytest.fixture
async def start_provider() -> AsyncIterator[StartProvider]:
    """`await start_provider(protocol)`: a provider that listens."""
    providers: list[ScriptedProvider] = []

    async def start(protocol: str) -> ScriptedProvider:
        providers.append(ScriptedProvider(protocol))
        await providers[-1].start()
        return providers[-1]

    yield start
    for provider in providers:
        await provider.close()


@pytest.fixture
async def provider(protocol: str) -> AsyncIterator[ScriptedProvider]:
    """A provider that listens, with the API that the test's parameter `protocol` names."""
    listening = ScriptedProvider(protocol)
    await listening.start()
    yield listening
    await listening.close()


def client_of(provider: ScriptedProvider, more: str = "", model: str = MODEL) -> ExternalEngineClient:
    """Return the client of a provider; `more` is appended to its address."""
    url = f"{provider.protocol}+http://127.0.0.1:{provider.port}/v1"
    address = f"{url}?model={model}&kind=hosted&context=100000{more}"
    return ExternalEngineClient(ExternalAddress.parse(address), SystemClock(), KEY, PATIENT)
