"""Targets of the gateway: requests of clients, answers of external engines, and spans."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
from tests.fuzz.mutations import of_json, of_json_lines
from tests.fuzz.target import Take, Target, cut, finished, split

GATEWAY = ("moiety_platform",)
MAX_DEPTH = 64


def bodies_of(*names: str) -> Take:
    """The bodies of these APIs, by the first byte, and what they ask an engine for."""
    from moiety_platform.anthropic_api.schemas import MessagesBody
    from moiety_platform.embeddings.schemas import EmbeddingBody
    from moiety_platform.errors import PlatformError
    from moiety_platform.inference.request_body import decode_body
    from moiety_platform.inference.shape_limits import DEFAULT_SHAPE
    from moiety_platform.openai_api.schemas import ChatBody, CompletionBody
    from moiety_platform.responses_api.schemas import ResponsesBody

    bodies: dict[str, type[ChatBody | CompletionBody | EmbeddingBody | MessagesBody | ResponsesBody]] = {
        "chat": ChatBody,
        "completions": CompletionBody,
        "embeddings": EmbeddingBody,
        "messages": MessagesBody,
        "responses": ResponsesBody,
    }
    chosen = [bodies[name] for name in names]

    def take(data: bytes) -> None:
        way, data = split(data, len(chosen))
        try:
            generation = decode_body(chosen[way], data, MAX_DEPTH, DEFAULT_SHAPE).generation()
        except PlatformError as refused:
            assert refused.status in (400, 422), refused
            json.dumps(refused.message).encode()
        else:
            assert generation.num_choices >= 1, generation

    return take


def open_batch_lines() -> Take:
    from moiety_platform.batches.endpoints import ENDPOINTS
    from moiety_platform.batches.input_lines import Checker, Splitter
    from moiety_platform.batches.line_limits import BatchLineLimits
    from moiety_platform.inference.shape_limits import DEFAULT_SHAPE

    limits = BatchLineLimits(max_lines=50, max_line_bytes=1024, max_json_depth=MAX_DEPTH, shape=DEFAULT_SHAPE)
    endpoints = list(ENDPOINTS.values())

    def lines_of(pieces: list[bytes]) -> list[Any]:
        splitter = Splitter(limits.max_line_bytes)
        return [*(line for piece in pieces for line in splitter.take(piece)), *splitter.finish()]

    def take(data: bytes) -> None:
        way, data = split(data, len(endpoints))
        lines = lines_of([data])
        assert lines == lines_of(cut(data, 7)), "lines are the same however the file comes"
        checker = Checker(endpoints[way], limits)
        for line in lines:
            assert line.text is None or data[line.start : line.start + line.num_bytes] == line.text
            if checker.has_too_many_errors:
                break
            checker.check(line)
        checker.finish()
        json.dumps(checker.errors).encode()

    return take


def open_external_streams() -> Take:
    """The whole way from a server's bytes to the messages that the rest of a gateway goes by."""
    from tests.fuzz.words import SUBMIT, tokenizer

    from moiety_platform.clock import SystemClock
    from moiety_platform.engine_addresses import ExternalAddress
    from moiety_platform.engine_client.stream import EngineStream
    from moiety_platform.external_engines.answer import ExternalAnswer
    from moiety_platform.external_engines.completions import Completions
    from moiety_platform.external_engines.external_request import ExternalRequest
    from moiety_platform.external_engines.llama_cpp import LlamaCpp
    from moiety_wire.codec import decode_to_gateway, encode
    from moiety_wire.messages import Finished

    words, clock = tokenizer(), SystemClock()
    kinds = ("generic", "vllm", "sglang", "llama.cpp")
    address = "openai+http://127.0.0.1:1/v1?model=m&kind={}&tokenizer=t"
    addresses = [ExternalAddress.parse(address.format(kind)) for kind in kinds]
    dialects = [*(Completions(one) for one in addresses[:3]), LlamaCpp(addresses[3])]
    submits = [
        SUBMIT,
        msgspec.structs.replace(SUBMIT, stopping=msgspec.structs.replace(SUBMIT.stopping, stop=("</s", "ab"))),
    ]

    class Http:
        def __init__(self, data: bytes, size: int) -> None:
            self.data, self.size = data, size
            self.headers: dict[str, str] = {}

        @asynccontextmanager
        async def stream(self, *args: object, **options: object) -> AsyncIterator[Any]:
            async def pieces() -> AsyncIterator[Any]:
                for piece in cut(self.data, self.size):
                    yield piece

            yield SimpleNamespace(status_code=200, headers={}, aiter_raw=pieces)

    def take(data: bytes) -> None:
        way, data = split(data, len(dialects) * len(submits) * 2)
        submit, dialect = submits[way // len(dialects) % 2], dialects[way % len(dialects)]
        stream = EngineStream(submit, None, lambda message: None)
        answer = ExternalAnswer(submit, words, [2], clock)
        http = Http(data, 5 if way >= 2 * len(dialects) else len(data) + 1)
        asyncio.run(
            ExternalRequest(
                http, "http://u", dialect, submit, answer, stream, clock, lambda: None, lambda why: None
            ).run()
        )
        assert stream.ended
        message = None
        while not isinstance(message, (Finished, Exception)):
            _, message = finished(stream.inbox.get_any())
            if isinstance(message, Exception):
                assert "could not be read" not in str(message), "told as a defect of ours"
            else:
                assert decode_to_gateway(encode(message)), "of the types that it is said to have"

    return take


def open_adapter_heads() -> Take:
    from moiety_platform.adapters.tensors import check_config, check_head, head_bytes
    from moiety_platform.errors import BadRequest

    def take(data: bytes) -> None:
        way, data = split(data, 2)
        try:
            if way:
                check_config(data.decode(errors="replace"))
            else:
                num_bytes = head_bytes(data[:8])
                check_head(data[:num_bytes], len(data))
        except BadRequest as refused:
            json.dumps(refused.message).encode()

    return take


def open_spans() -> Take:
    from prometheus_client import CollectorRegistry

    from moiety_platform.trace_receiver.app import PROTOBUF, TraceApp, TraceTokens
    from moiety_platform.trace_store.rows import Rows

    class Writer:
        max_spans = 100

        def put(self, rows: Rows) -> bool:
            for span in rows.spans:
                json.dumps(span, allow_nan=False).encode()
            for trace in rows.traces:
                msgspec.json.encode(trace)
            return True

    app = TraceApp(TraceTokens("o" * 16, "g" * 16), Writer(), None, CollectorRegistry(), 64 * 1024)
    ours, theirs = b"Bearer " + b"o" * 16, b"Bearer " + b"g" * 16

    def take(data: bytes) -> None:
        way, data = split(data, 4)
        headers = [(b"authorization", theirs if way & 1 else ours), (b"content-type", PROTOBUF.encode())]
        if way & 2:
            headers.append((b"content-encoding", b"gzip"))
            data = data if data[:2] == b"\x1f\x8b" else gzip.compress(data, 1)
        waiting, statuses = cut(data, 1000) or [b""], []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": waiting.pop(0), "more_body": bool(waiting)}

        async def send(message: dict[str, Any]) -> None:
            statuses.append(message.get("status"))

        finished(app({"method": "POST", "path": "/v1/traces", "headers": headers}, receive, send))
        assert statuses[0] in (200, 400, 413), statuses

    return take


class _Socket:
    """What a connection writes to: a transport that has already gone as far as it goes."""

    def __init__(self) -> None:
        self.written, self.closed = bytearray(), False

    def write(self, data: bytes) -> None:
        assert not self.closed, "nothing is written to what is closed"
        self.written += data

    def writelines(self, parts: list[bytes]) -> None:
        self.write(b"".join(parts))

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def get_extra_info(self, name: str, default: object = None) -> object:
        return default

    def get_write_buffer_size(self) -> int:
        return 0

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def set_write_buffer_limits(self, **limits: object) -> None: ...


def open_connections() -> Take:
    """Bytes of a client's connection, before there is a request and while one is read."""
    from uvicorn.server import ServerState

    from moiety_platform.connections import ClientConnection, ConnectionLimits, ServerConfig

    limits = ConnectionLimits(
        max_header_bytes=512, max_headers=12, header_timeout_s=60, body_timeout_s=60, send_timeout_s=60, keep_alive_s=60
    )  # fmt: skip
    failures: list[dict[str, Any]] = []

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        more = True
        while more:
            message = await receive()
            more = message.get("more_body", False)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok", "more_body": False})

    config = ServerConfig(app, limits, ws="none", lifespan="off", log_config=None, access_log=False)
    config.load()

    async def feed(pieces: list[bytes]) -> _Socket:
        socket, loop = _Socket(), asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: failures.append(context))
        connection = ClientConnection(config, ServerState(), {}, loop)
        connection.connection_made(socket)
        for piece in pieces:
            if socket.closed:
                break
            connection.data_received(piece)
            await asyncio.sleep(0)
        for _ in range(8):
            await asyncio.sleep(0)
        connection.connection_lost(None)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0)
        return socket

    def take(data: bytes) -> None:
        way, data = split(data, 2)
        socket = asyncio.run(feed(cut(data, 9) if way else [data]))
        assert not failures, failures.pop()
        assert not socket.written or socket.written.startswith(b"HTTP/1.1 "), bytes(socket.written[:40])

    return take


def open_templates() -> Take:
    """A template that comes with a checkpoint; and what clients write, rendered by templates that are in use."""
    from tests.fuzz.words import tokenizer_json

    from moiety_platform.errors import PlatformError
    from moiety_platform.inference.request_body import decode_body
    from moiety_platform.openai_api.schemas import ChatBody
    from moiety_text.chat import ChatTemplate
    from moiety_text.conversation import ConversationEncoder
    from moiety_text.errors import TextError
    from moiety_text.tokenizer import Tokenizer

    specials = {"bos_token": "<s>", "eos_token": "</s>"}
    folder = Path(__file__).parents[1] / "gateway" / "templates"
    words = Tokenizer.from_json(tokenizer_json())
    encoders = [
        ConversationEncoder(words, tokenizer_json(), ChatTemplate(path.read_text(), specials))
        for path in sorted(folder.glob("*.jinja"))
    ]
    said = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}]

    def of_checkpoint(source: str) -> None:
        ChatTemplate(source, specials).render(said, tools=[{"type": "function", "function": {"name": "f"}}])

    def of_client(encoder: ConversationEncoder, data: bytes) -> None:
        conversation = decode_body(ChatBody, data, MAX_DEPTH).generation().prompts[0]
        tools = [] if conversation.tools is None else [tool.for_template() for tool in conversation.tools.tools]
        plain = not encoder.spells_control_token(conversation.messages, tools=tools)
        token_ids = encoder.encode(conversation.messages, tools=tools)
        if plain:
            assert token_ids == encoder.encode_guarded(conversation.messages, tools=tools), "both ways are equal"

    def take(data: bytes) -> None:
        way, data = split(data, 1 + len(encoders))
        try:
            if way == 0:
                of_checkpoint(data.decode(errors="replace"))
            else:
                of_client(encoders[way - 1], data)
        except (TextError, PlatformError) as refused:
            assert str(refused)

    return take


TARGETS = (
    Target("chat", "bodies of /v1/chat/completions", lambda: bodies_of("chat"), GATEWAY, of_json),
    Target(
        "completions",
        "of /v1/completions and /v1/embeddings",
        lambda: bodies_of("completions", "embeddings"),
        GATEWAY,
        of_json,
    ),
    Target("messages", "bodies of /v1/messages", lambda: bodies_of("messages"), GATEWAY, of_json),
    Target("responses", "bodies of /v1/responses", lambda: bodies_of("responses"), GATEWAY, of_json),
    Target("http", "a client's connection", open_connections, ("moiety_platform", "uvicorn")),
    Target("batches", "files of requests, line by line", open_batch_lines, GATEWAY, of_json_lines),
    Target(
        "external_engines",
        "streams of external engines",
        open_external_streams,
        (*GATEWAY, "moiety_text"),
        of_json_lines,
    ),
    Target("adapters", "heads of uploaded adapters", open_adapter_heads, GATEWAY),
    Target("spans", "OTLP, packed and not", open_spans, GATEWAY),
    Target("templates", "chat templates, and what clients write in them", open_templates, ("moiety_text", "jinja2")),
)
