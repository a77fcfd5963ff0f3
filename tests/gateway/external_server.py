"""An external OpenAI-compatible server on loopback.

It answers as vLLM, llama.cpp's server and a plain server do, in the formats that were recorded from them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from moiety_platform.clock import SystemClock
from moiety_platform.engine_addresses import ExternalAddress
from moiety_platform.external_engines.client import ExternalEngineClient, Heartbeat
from moiety_wire.messages import ModelCard

from .closing_server import ClosingServer
from .conftest import write_tokenizer

MODEL = "tiny"
HELLO = [{"role": "user", "content": "hello"}]
ASK: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 40}
WHOLE = " ".join(str(1 + i) for i in range(400))
PATIENT = Heartbeat(
    interval_s=0.05, timeout_s=30, silence_s=60
)  # a server in this process may be slow without being lost
HASTY = Heartbeat(interval_s=0.05, timeout_s=2, silence_s=3)
CHAT = "/v1/chat/completions"
METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="tiny"}} {running}.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0",model_name="tiny"}} {waiting}.0
vllm:kv_cache_usage_perc{{engine="0",model_name="tiny"}} 0.25
vllm:cache_config_info{{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="200"}} 1.0
vllm:prompt_tokens_total{{engine="0",model_name="tiny"}} 1234.0
vllm:generation_tokens_total{{engine="0",model_name="tiny"}} 567.0
vllm:request_success_total{{engine="0",finished_reason="stop",model_name="tiny"}} 3.0
vllm:request_success_total{{engine="0",finished_reason="length",model_name="tiny"}} 4.0
vllm:time_to_first_token_seconds_bucket{{engine="0",le="0.001",model_name="tiny"}} NaN
"""


class Server:
    """A server that continues WHOLE from the end of the prompt, one token an event, in the format of its `kind`."""

    def __init__(self, kind: str, tokenizer: tokenizers.Tokenizer) -> None:
        self.kind = kind
        self.tokenizer = tokenizer
        self.text = WHOLE
        self.token_s = 0.0
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, Any]] = []
        self.usages: list[dict[str, Any]] = []
        self.probes: list[str] = []  # paths
        self.running = self.waiting = 0
        self.stop_at: int | None = None  # tokens, after which it ends by its end-of-sequence token
        self.dies_at: int | None = None  # tokens, after which the connection is cut
        self.raw: bytes | None = None  # an answer to every completion, sent unchanged
        self.num_to_drop = 0  # requests on kept connections that are not answered: the connection is closed, or cut
        self.cuts = False  # connections are cut instead of closed, also after `raw`
        self.drop_after_s = 0.0
        self.drops_with = b""  # sent before
        self.num_dropped = 0
        self.is_silent = False
        self.ended = asyncio.Event()
        self._server = ClosingServer(self._serve)
        self._answering: set[asyncio.StreamWriter] = set()

    async def start(self, port: int = 0) -> None:
        await self._server.start(port)
        self.port = self._server.port

    def stop_listening(self) -> None:
        """Accept no more connections, as a server that drains; running requests continue."""
        self._server.stop_listening()
        for writer in self._server.writers - self._answering:
            writer.close()

    async def kill(self) -> None:
        await self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        num_answered = 0
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                top, *lines = head.decode().split("\r\n")
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines) if name}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                method, path, _ = top.split(" ")
                if method == "GET":
                    if not self.is_silent:
                        await self._tell(writer, path)
                    continue
                if num_answered and self.num_to_drop:
                    self.num_to_drop -= 1
                    self.num_dropped += 1
                    await asyncio.sleep(self.drop_after_s)
                    writer.write(self.drops_with)
                    await writer.drain()
                    if self.cuts:
                        writer.transport.abort()
                    return
                self.bodies.append(json.loads(body))
                self.headers.append({"path": path, **headers})
                if self.raw is not None:
                    writer.write(self.raw)
                    await writer.drain()
                    if self.cuts:
                        writer.transport.abort()
                    return
                await self._answer(reader, writer, self.bodies[-1])
                num_answered += 1
                if self.kind == "llama.cpp":  # it closes after every stream, although it offers keep-alive
                    await reader.read(1)
                    return
        except (ConnectionError, asyncio.IncompleteReadError):
            return

    async def _tell(self, writer: asyncio.StreamWriter, path: str) -> None:
        self.probes.append(path)
        model: dict[str, Any] = {"id": MODEL, "object": "model", "created": 1_700_000_000, "owned_by": "them"}
        match self.kind, path:
            case _, "/health":
                answer: Any = ""
            case "vllm" | "sglang", "/v1/models":
                answer = {"object": "list", "data": [{**model, "max_model_len": 512}]}
            case "llama.cpp", "/v1/models":
                answer = {"object": "list", "data": [{**model, "id": "/models/tiny.gguf", "meta": {"n_ctx_train": 9}}]}
            case "generic", "/v1/models":
                answer = {"object": "list", "data": [model]}
            case "vllm", "/metrics":
                answer = METRICS.format(running=self.running, waiting=self.waiting)
            case "llama.cpp", "/props":
                answer = {"default_generation_settings": {"n_ctx": 512}, "total_slots": 4}
            case "llama.cpp", "/slots":
                answer = [{"id": i, "n_ctx": 512, "is_processing": i < self.running} for i in range(4)]
            case _:
                writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n{}")
                return
        data = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data) + data)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        self.running += 1
        self._answering.add(writer)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        gone = asyncio.create_task(reader.read(1))
        try:
            events = self._native(body) if self.kind == "llama.cpp" else self._completion(body)
            for number, event in enumerate(events):
                if number == self.dies_at:
                    writer.transport.abort()
                    return
                data = b"data: " + (event if isinstance(event, bytes) else json.dumps(event).encode()) + b"\n\n"
                writer.write(b"%x\r\n%s\r\n" % (len(data), data))
                await writer.drain()
                await asyncio.wait({gone}, timeout=60 if self.is_silent else self.token_s)
                if gone.done():
                    return
            writer.write(b"0\r\n\r\n")
        finally:
            gone.cancel()
            with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                await gone
            self.running -= 1
            self._answering.discard(writer)
            self.ended.set()

    def _ids(self, prompt_ids: list[int], max_tokens: int) -> tuple[list[int], str]:
        """Return the tokens after the prompt, with the end-of-sequence token, and the finish reason."""
        whole = self.tokenizer.encode(self.text).ids
        if self.stop_at is not None:
            whole = [*whole[: self.stop_at], 256]
        tails = (n for n in range(min(len(whole), len(prompt_ids)), 0, -1) if prompt_ids[-n:] == whole[:n])
        num_had = next(tails, 0)
        ids = whole[num_had : num_had + max_tokens]
        return ids, "stop" if ids and ids[-1] == 256 else "length"

    def _completion(self, body: dict[str, Any]) -> Iterator[Any]:
        ids, reason = self._ids(body["prompt"], body["max_tokens"])
        head: dict[str, Any] = {"id": "cmpl-1", "object": "text_completion", "created": 1_700_000_000, "model": MODEL}
        num_prompt, is_vllm = len(body["prompt"]), self.kind in ("vllm", "sglang")
        text = ""
        for i, token_id in enumerate(ids):
            piece = self.tokenizer.decode([token_id], skip_special_tokens=True)
            text += piece
            stopped = next((stop for stop in body.get("stop", []) if text.endswith(stop)), None)
            if stopped:
                ids, reason = ids[: i + 1], "stop"
            is_last = i + 1 == len(ids)
            choice: dict[str, Any] = {
                "index": 0,
                "text": piece,
                "logprobs": None,
                "finish_reason": reason if is_last else None,
            }
            if "logprobs" in body:
                token = f"token_id:{token_id}" if body.get("return_tokens_as_token_ids") else piece
                top = {token: -0.25, f"token_id:{(token_id + 1) % 256}": -1.5} if is_vllm else {token: -0.25}
                choice["logprobs"] = {
                    "text_offset": [i],
                    "token_logprobs": [-0.25],
                    "tokens": [token],
                    "top_logprobs": [top],
                }
            event: dict[str, Any] = {**head, "choices": [choice]}
            usage: dict[str, Any] = {
                "prompt_tokens": num_prompt,
                "total_tokens": num_prompt + i + 1,
                "completion_tokens": i + 1,
            }
            if is_vllm:
                matched = stopped or (256 if token_id == 256 and self.kind == "sglang" else None)
                choice |= {"stop_reason" if self.kind == "vllm" else "matched_stop": matched, "token_ids": [token_id]}
                event["usage"] = usage
            yield event
            if is_last:
                break
        self.usages.append(usage)
        if body["stream_options"]["include_usage"]:
            details = {"prompt_tokens_details": {"cached_tokens": 7}} if is_vllm else {}
            yield {**head, "choices": [], "usage": {**usage, **details}}
        yield b"[DONE]"

    def _native(self, body: dict[str, Any]) -> Iterator[Any]:
        ids, reason = self._ids(body["prompt"], body["n_predict"])
        num_prompt, held, kind, word = len(body["prompt"]), [], "limit", ""
        for i, token_id in enumerate(ids):
            held.append(token_id)
            piece = self.tokenizer.decode(held, skip_special_tokens=True)
            if "\N{REPLACEMENT CHARACTER}" in piece:
                continue
            text = self.tokenizer.decode(ids[: i + 1], skip_special_tokens=True)
            word = next((stop for stop in body["stop"] if text.endswith(stop)), "")
            may_stop = token_id != 256 and any(
                text.endswith(stop[:n]) for stop in body["stop"] for n in range(1, len(stop) + 1)
            )
            held = held if may_stop else []
            yield {
                "index": 0,
                "content": "" if may_stop else piece,
                "tokens": [token_id],
                "stop": False,
                "id_slot": -1,
                "tokens_predicted": i + 1,
                "tokens_evaluated": num_prompt,
            }
            if word:
                ids, kind = ids[: i + 1], "word"
                break
        if kind == "limit" and reason == "stop":
            kind = "eos"
        self.usages.append({"prompt_tokens": num_prompt, "completion_tokens": len(ids)})
        last: dict[str, Any] = {
            "content": "",
            "tokens_predicted": len(ids),
            "stop": True,
            "stop_type": kind,
            "stopping_word": word,
            "timings": {"cache_n": 5, "prompt_n": num_prompt - 5, "predicted_n": len(ids)},
        }
        yield {name: last[name] for name in body["response_fields"]}


StartServer = Callable[..., Awaitable[Server]]
ClientOf = Callable[..., ExternalEngineClient]


@pytest.fixture
def folder(tmp_path: Path, card: ModelCard) -> Path:
    """Return a checkpoint's folder with the tokenizer and template of the other tests."""
    path = tmp_path / "checkpoint"
    path.mkdir()
    write_tokenizer(path, card)
    return path


@pytest.fixture
async def start_server(card: ModelCard) -> AsyncIterator[StartServer]:
    """`await start_server(kind)`: a server that listens."""
    servers = []

    async def start(kind: str = "vllm", port: int = 0) -> Any:
        servers.append(Server(kind, tokenizers.Tokenizer.from_str(card.tokenizer_json)))
        await servers[-1].start(port)
        return servers[-1]

    yield start
    for server in servers:
        await server.kill()


@pytest.fixture
def client_of(folder: Path) -> ClientOf:
    """Return a function that makes the client of a server; `more` is appended to its address."""

    def make(server: Server, more: str = "", api_key: Any = None, heartbeat: Any = PATIENT) -> Any:
        address = f"openai+http://127.0.0.1:{server.port}/v1?model={MODEL}&kind={server.kind}&tokenizer={folder}{more}"
        return ExternalEngineClient(ExternalAddress.parse(address), SystemClock(), api_key, heartbeat)

    return make


async def text_of(stream: Any) -> str:
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
