"""Servers of others behind the gateway: a small server on the loopback speaks as vLLM, llama.cpp's server and a plain
OpenAI-compatible one do, in the forms that were recorded of them, and the real client of OpenAI asks the gateway."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import tokenizers

from moiety_platform.clock import SystemClock
from moiety_platform.engine_addresses import ExternalAddress
from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_platform.external_engines.client import ExternalEngineClient, Heartbeat
from moiety_platform.external_engines.waiting import Ends, class_loads
from moiety_platform.routing.choose import are_extensible
from moiety_platform.routing.replicas import Replicas
from moiety_wire.classes import FLEX, PRIORITY, STANDARD
from moiety_wire.messages import ModelCard, Sampling, Stopping, Submit
from moiety_wire.notes import Reason

from .closing_server import ClosingServer
from .conftest import NewCard, RunningGateway, StartGateway, StartOver, ToolCard, Until, write_tokenizer

MODEL = "tiny"
HELLO = [{"role": "user", "content": "hello"}]
ASK: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 40}
WHOLE = " ".join(str(1 + i) for i in range(400))
PATIENT = Heartbeat(
    interval_s=0.05, timeout_s=30, silence_s=60
)  # a server in this process may be slow, and is not lost
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
    """Answers with WHOLE from where the prompt's end leaves it, a token an event, in the form of its `kind`."""

    def __init__(self, kind: str, tokenizer: tokenizers.Tokenizer) -> None:
        self.kind = kind
        self.tokenizer = tokenizer
        self.text = WHOLE
        self.token_s = 0.0
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, Any]] = []
        self.usages: list[dict[str, Any]] = []
        self.running = self.waiting = 0
        self.stop_at: int | None = None  # tokens, after which it ends by its end-of-sequence token
        self.dies_at: int | None = None  # tokens, after which the connection is cut
        self.raw: bytes | None = None  # an answer to every completion, as it is
        self.is_silent = False
        self.ended = asyncio.Event()
        self._server = ClosingServer(self._serve)
        self._answering: set[asyncio.StreamWriter] = set()

    async def start(self, port: int = 0) -> None:
        await self._server.start(port)
        self.port = self._server.port

    def stop_listening(self) -> None:
        """As one that drains: what runs goes on."""
        self._server.stop_listening()
        for writer in self._server.writers - self._answering:
            writer.close()

    async def kill(self) -> None:
        await self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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
                self.bodies.append(json.loads(body))
                self.headers.append({"path": path, **headers})
                if self.raw is not None:
                    writer.write(self.raw)
                    await writer.drain()
                    return
                await self._answer(reader, writer, self.bodies[-1])
                if self.kind == "llama.cpp":  # it closes after every stream, although it offers to keep alive
                    await reader.read(1)
                    return
        except (ConnectionError, asyncio.IncompleteReadError):
            return

    async def _tell(self, writer: asyncio.StreamWriter, path: str) -> None:
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
        """(what comes after the prompt, the end-of-sequence token included, and why it ends)."""
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
    """A checkpoint's folder with the tokenizer and template of the other tests."""
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
    """The client of a server; `more` goes into its address."""

    def make(server: Server, more: str = "", api_key: Any = None, heartbeat: Any = PATIENT) -> Any:
        address = f"openai+http://127.0.0.1:{server.port}/v1?model={MODEL}&kind={server.kind}&tokenizer={folder}{more}"
        return ExternalEngineClient(ExternalAddress.parse(address), SystemClock(), api_key, heartbeat)

    return make


async def text_of(stream: Any) -> str:
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])


@pytest.mark.parametrize(
    ("kind", "more", "cached"),
    [("vllm", "", 7), ("sglang", "", 7), ("llama.cpp", "", 5), ("generic", "&context=512", 0)],
)
async def test_chats_and_completions_are_answered_and_billed_as_the_server_counts(
    start_server: StartServer, client_of: ClientOf, start_over: StartOver, kind: str, more: str, cached: int
) -> None:
    server = await start_server(kind)
    server.stop_at = 23
    async with start_over(client_of(server, more)) as gateway:
        whole = await gateway.client.chat.completions.create(**ASK)
        stream = await gateway.client.chat.completions.create(
            **ASK, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        raw = await gateway.client.completions.create(model=MODEL, prompt="count: ", max_tokens=10)
        assert whole.choices[0].message.content == WHOLE[:23]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == WHOLE[:23]
        assert raw.choices[0].text == WHOLE[:10]
        assert [whole.choices[0].finish_reason, raw.choices[0].finish_reason] == ["stop", "length"]
        for answer, row, counted in zip(
            (whole, chunks[-1], raw), await gateway.rows.wait_for(3), server.usages, strict=True
        ):
            assert answer.usage.prompt_tokens == row.prompt_tokens == counted["prompt_tokens"]
            assert answer.usage.completion_tokens == row.output_tokens == counted["completion_tokens"]
            assert row.cached_tokens == cached
        assert whole.usage.completion_tokens == 24  # with the token that ends
        assert whole.usage.prompt_tokens == gateway.prompt_tokens("hello")
        assert server.headers[0]["path"] == ("/completion" if kind == "llama.cpp" else "/v1/completions")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("kind", "more"), [("vllm", ""), ("sglang", ""), ("llama.cpp", ""), ("generic", "&context=512")]
)
async def test_stop_strings_apply_only_after_reasoning(
    start_server: StartServer,
    client_of: ClientOf,
    start_over: StartOver,
    folder: Path,
    card: ModelCard,
    kind: str,
    more: str,
    stream: bool,
) -> None:
    opens = card.chat_template + "{% if add_generation_prompt %}<think>\n{% endif %}"
    (folder / "chat_template.jinja").write_text(opens)
    server = await start_server(kind)
    server.text = "Hm.\n\nSo.</think>\n\nYes.\n\nMore."
    async with start_over(client_of(server, more)) as gateway:
        answer = await gateway.client.chat.completions.create(**ASK, stop=["\n\n"], stream=stream)
        if stream:
            content: str | None = await text_of(answer)
        else:
            content = answer.choices[0].message.content
            assert answer.choices[0].message.reasoning_content == "Hm.\n\nSo."
        assert content == "Yes."
        (row,) = await gateway.rows.wait_for(1)
        assert (row.outcome, not server.bodies[0].get("stop")) == ("stop", True)
        raw = await gateway.client.completions.create(model=MODEL, prompt="a", max_tokens=40, stop=["\n\n"])
        assert raw.choices[0].text == "Hm."


async def test_tenant_and_class_sent_to_the_server_are_the_gateways_and_not_the_clients(
    start_server: StartServer, client_of: ClientOf, start_over: StartOver
) -> None:
    server = await start_server()
    async with start_over(client_of(server, "&priority=on", "a key of theirs")) as gateway:
        claims: dict[str, Any] = {"cache_salt": "mine", "priority": -100}
        await gateway.client.chat.completions.create(**ASK, service_tier="flex", extra_body=claims)
        await gateway.client.chat.completions.create(**ASK)
        await gateway.client.chat.completions.create(**ASK)
        flex, standard, again = server.bodies
        assert flex["cache_salt"] not in ("mine", standard["cache_salt"])  # the client's separates within the tenant's
        assert standard["cache_salt"] == again["cache_salt"]
        assert all(len(base64.urlsafe_b64decode(body["cache_salt"])) >= 16 for body in server.bodies)
        assert flex["priority"] > standard["priority"] >= 0
        assert flex["prompt"] == list(b"<|user|>hello\n<|assistant|>") or len(flex["prompt"]) == gateway.prompt_tokens(
            "hello"
        )
        assert server.headers[0]["authorization"] == "Bearer a key of theirs"
        assert gateway.key not in json.dumps([server.headers, server.bodies])


async def test_sampling_parameters_are_passed_on(
    start_server: StartServer, client_of: ClientOf, start_over: StartOver
) -> None:
    server, native = await start_server(), await start_server("llama.cpp")
    asked: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "presence_penalty": 0.25,
        "frequency_penalty": 0.75,
        "seed": 11,
    }
    more: dict[str, Any] = {"top_k": 40, "min_p": 0.125, "repetition_penalty": 1.5, "ignore_eos": True}
    bias: dict[str, Any] = {"logit_bias": {"65": -1.5}, "stop": ["nothing"]}
    vllm_only: dict[str, Any] = {
        "min_tokens": 3,
        "stop_token_ids": [12],
        "allowed_token_ids": [65, 66],
        "bad_words": ["AB"],
        "include_stop_str_in_output": True,
    }
    async with start_over(client_of(server)) as gateway:
        await gateway.client.chat.completions.create(**ASK, **asked, **bias, extra_body=more | vllm_only)
        (body,) = server.bodies
        expected = asked | more | bias | vllm_only | {"stop": ["nothing"], "max_tokens": 40, "stream": True}
        assert {name: body[name] for name in expected} == expected
        assert "priority" not in body
        await gateway.client.chat.completions.create(**ASK, top_p=0)
        assert (server.bodies[-1]["temperature"], server.bodies[-1]["top_p"]) == (0, 1)
    async with start_over(client_of(native)) as gateway:
        await gateway.client.chat.completions.create(**ASK, **asked, **bias, extra_body=more)
        (body,) = native.bodies
        assert (body["repeat_penalty"], body["n_predict"], body["logit_bias"]) == (1.5, 40, [[65, -1.5]])
        assert all(body[name] == value for name, value in asked.items())
        assert body["cache_prompt"] is False  # its cache knows no tenants


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("generic", {"top_k": 5, "min_tokens": 2, "stop": list("abcde"), "ignore_eos": True, "bad_words": ["a"]}),
        ("llama.cpp", {"stop_token_ids": [5], "min_tokens": 2, "include_stop_str_in_output": True}),
        ("sglang", {"allowed_token_ids": [5], "bad_words": ["a"], "prompt_logprobs": 1}),
    ],
)
async def test_features_that_the_server_lacks_are_refused_by_name_and_not_billed(
    start_server: StartServer, client_of: ClientOf, start_over: StartOver, kind: str, fields: dict[str, Any]
) -> None:
    server = await start_server(kind)
    async with start_over(client_of(server, "&context=512")) as gateway:
        for field, value in fields.items():
            with pytest.raises(openai.BadRequestError, match=field):
                await gateway.client.chat.completions.create(**ASK, extra_body={field: value})
        rows = await gateway.rows.wait_for(len(fields))
        assert {(row.outcome, row.prompt_tokens) for row in rows} == {("rejected", 0)}
        assert server.bodies == []


SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMS = {
    "json_schema": {"guided_json": SCHEMA},
    "regex": {"structured_outputs": {"regex": "[a-z]"}},
    "choice": {"guided_choice": ["a", "b"]},
    "grammar": {"guided_grammar": "start: /a/"},
    "strict": {"tools": [{"type": "function", "function": {"name": "now", "strict": True}}]},
}
PASSED_ON: dict[str, dict[str, tuple[str, Any]]] = {
    "vllm": {
        "json_schema": ("structured_outputs", {"json": json.dumps(SCHEMA, separators=(",", ":"))}),
        "regex": ("structured_outputs", {"regex": "[a-z]"}),
        "choice": ("structured_outputs", {"choice": ["a", "b"]}),
        "grammar": ("structured_outputs", {"grammar": "start: /a/"}),
    },
    "llama.cpp": {"json_schema": ("json_schema", SCHEMA)},
    "generic": {},
}


@pytest.mark.parametrize("kind", PASSED_ON)
async def test_a_response_format_is_sent_in_the_servers_field_or_refused_by_name(
    start_server: StartServer, folder: Path, client_of: ClientOf, start_over: StartOver, tool_card: ToolCard, kind: Any
) -> None:
    card = tool_card("hermes")
    (folder / "tokenizer.json").write_text(card.tokenizer_json)
    (folder / "chat_template.jinja").write_text(card.chat_template)
    server = await start_server(kind)
    async with start_over(client_of(server, "" if kind == "vllm" else "&context=512")) as gateway:
        for form, fields in FORMS.items():
            asking = gateway.client.chat.completions.create(**ASK, extra_body=fields)
            passed = PASSED_ON[kind].get(form)
            if passed is None:
                with pytest.raises(openai.BadRequestError, match=r"does not know .*(form|strict)"):
                    await asking
            else:
                await asking
                assert server.bodies[-1][passed[0]] == passed[1]
        assert len(server.bodies) == len(PASSED_ON[kind])


@pytest.mark.parametrize("kind", ["vllm", "generic", "llama.cpp"])
async def test_calls_marked_by_special_tokens_need_a_server_that_returns_token_ids(
    start_server: StartServer, folder: Path, client_of: ClientOf, start_over: StartOver, tool_card: ToolCard, kind: str
) -> None:
    card = tool_card("mistral", special=["[TOOL_CALLS]"])
    (folder / "tokenizer.json").write_text(card.tokenizer_json)
    (folder / "chat_template.jinja").write_text(card.chat_template)
    server = await start_server(kind)
    server.tokenizer = tokenizers.Tokenizer.from_str(card.tokenizer_json)
    server.text = '[TOOL_CALLS] [{"name": "now", "arguments": {}}]'
    asked: dict[str, Any] = {**ASK, "max_tokens": 100, "tools": [{"type": "function", "function": {"name": "now"}}]}
    more = "" if kind != "generic" else "&context=512"
    async with start_over(client_of(server, more)) as gateway:
        if kind != "vllm":
            with pytest.raises(openai.BadRequestError, match="does not know tools"):
                await gateway.client.chat.completions.create(**asked)
            return
        choice = (await gateway.client.chat.completions.create(**asked)).choices[0]
        assert [call.function.name for call in choice.message.tool_calls] == ["now"]
        assert server.bodies[0]["skip_special_tokens"] is False


async def test_logprobs_come_with_the_bytes_of_the_tokens(
    start_server: StartServer, client_of: ClientOf, start_over: StartOver
) -> None:
    server = await start_server()
    async with start_over(client_of(server)) as gateway:
        answer = await gateway.client.chat.completions.create(**ASK, logprobs=True, top_logprobs=2)
        content = answer.choices[0].logprobs.content
        assert "".join(one.token for one in content) == WHOLE[:40]
        assert (content[0].bytes, content[0].logprob) == ([ord("1")], -0.25)
        assert [one.logprob for one in content[0].top_logprobs] == [-0.25, -1.5]
        assert server.bodies[0]["logprobs"] == 2


@pytest.mark.parametrize("kind", ["vllm", "llama.cpp"])
async def test_a_client_that_leaves_ends_the_request_at_the_server_at_once(
    start_server: StartServer, client_of: ClientOf, start_over: StartOver, kind: str
) -> None:
    server = await start_server(kind)
    server.token_s = 0.01
    async with start_over(client_of(server)) as gateway:
        stream = await gateway.client.chat.completions.create(**{**ASK, "max_tokens": 400}, stream=True)
        async for chunk in stream:
            if "5" in (chunk.choices[0].delta.content or ""):
                break
        server.token_s = 600  # so that it ends only if it is hung up on
        await stream.close()
        async with asyncio.timeout(60):
            await server.ended.wait()
        (row,) = await gateway.rows.wait_for(1)
        assert (row.outcome, row.http_status) == ("disconnected", 499)
        assert 9 <= row.output_tokens < 400
        assert gateway.engines[0].state.num_inflight == 0


async def limit_of(gateway: RunningGateway, cap: int) -> Any:
    (tenant,) = json.loads((await gateway.request("GET", "/admin/v1/tenants", b"", gateway.admin_key))[2])["data"]
    body: dict[str, Any] = {"level": "tenant", "scope_id": tenant["id"], "kind": "tokens_per_day", "cap": cap}
    status, _, answer = await gateway.request("PUT", "/admin/v1/quotas", json.dumps(body).encode(), gateway.admin_key)
    assert status == 200, answer
    return json.loads(answer)["id"]


async def used(gateway: RunningGateway, quota_id: str) -> Any:
    await gateway.stored_usage.flush()
    answer = await gateway.request("GET", f"/admin/v1/quotas/{quota_id}", b"", gateway.admin_key)
    return json.loads(answer[2])["used"]


async def test_all_of_the_output_is_reserved_before_the_server_is_asked_and_what_it_reports_is_settled(
    start_server: StartServer, client_of: ClientOf, start_over: StartOver
) -> None:
    server = await start_server()
    server.stop_at, server.token_s = 23, 0.005
    async with start_over(client_of(server), stores_usage=True) as gateway:
        size = gateway.prompt_tokens("hello")
        quota_id = await limit_of(gateway, 2 * (size + 300) - 1)
        first = await gateway.client.chat.completions.create(**{**ASK, "max_tokens": 300}, stream=True)
        second = await gateway.client.chat.completions.create(**{**ASK, "max_tokens": 300}, stream=True)
        assert await text_of(first) == await text_of(second) == WHOLE[:23]
        assert [body["max_tokens"] for body in server.bodies] == [300, 299]  # the second finds one token less
        assert await used(gateway, quota_id) == 2 * (size + 24)


async def test_a_limit_that_has_not_so_much_left_shortens_the_answer_or_refuses_it(
    start_server: StartServer, client_of: ClientOf, start_over: StartOver
) -> None:
    server = await start_server()
    async with start_over(client_of(server), stores_usage=True) as gateway:
        size = gateway.prompt_tokens("hello")
        quota_id = await limit_of(gateway, size + 20)
        answer = await gateway.client.chat.completions.create(**ASK)  # nothing is waited for: more cannot come
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (WHOLE[:20], "length")
        assert server.bodies[0]["max_tokens"] == 20
        assert await used(gateway, quota_id) == size + 20
        with pytest.raises(openai.RateLimitError):
            await gateway.client.chat.completions.create(**ASK)
        assert len(server.bodies) == 1


async def test_a_server_that_is_not_there_is_503_until_it_comes(
    start_server: StartServer, client_of: ClientOf, start_gateway: StartGateway, until: Until
) -> None:
    server = await start_server()
    engine = client_of(server)
    await server.kill()
    async with start_gateway([engine]) as gateway:
        await until(lambda: "cannot be reached" in engine.state.reason)
        with pytest.raises(openai.InternalServerError) as caught:
            await gateway.client.chat.completions.create(**ASK)
        assert (caught.value.status_code, caught.value.code) == (503, "no_engine")
        assert caught.value.response.headers["retry-after"] == "1"
        status, _, body = await gateway.request("GET", "/readyz")
        assert status == 503
        assert b"cannot be reached" in body
        await server.start(server.port)
        await until(lambda: engine.state.healthy)
        answer = await gateway.client.chat.completions.create(**ASK)
        assert answer.choices[0].message.content == WHOLE[:40]


async def test_a_server_that_is_killed_in_the_middle_ends_the_stream_with_an_error(
    start_server: StartServer, client_of: ClientOf, start_over: StartOver
) -> None:
    server = await start_server()
    server.dies_at = 10
    async with start_over(client_of(server)) as gateway:
        stream = await gateway.client.chat.completions.create(**ASK, stream=True)
        with pytest.raises(openai.APIError) as caught:
            await text_of(stream)
        assert caught.value.code == "engine_failed"
        (row,) = await gateway.rows.wait_for(1)
        assert (row.outcome, row.http_status, row.error_code) == ("failed", 200, "engine_failed")
        assert row.output_tokens == 10 * len(server.bodies)


@pytest.mark.parametrize("kind", ["vllm", "llama.cpp", "generic"])
async def test_an_answer_of_a_lost_server_continues_at_another_one(
    start_server: StartServer, client_of: ClientOf, start_over: StartOver, until: Until, kind: str
) -> None:
    servers = [await start_server(kind), await start_server(kind)]
    engines = [client_of(server, "&context=512") for server in servers]
    async with start_over(*engines) as gateway:
        for stop, expected in ((None, WHOLE[:40]), ("12", WHOLE[: WHOLE.index("12")])):
            await until(lambda: all(engine.state.healthy for engine in engines))
            for server in servers:
                server.bodies, server.dies_at = [], WHOLE.index("12") + 1
            first_only = asyncio.create_task(watch_first(*servers))
            stream = await gateway.client.chat.completions.create(**ASK, stream=True, stop=stop)
            assert await text_of(stream) == expected
            await first_only
            row = (await gateway.rows.wait_for(1 if stop is None else 2))[-1]
            assert row.prompt_tokens == gateway.prompt_tokens("hello")
            assert row.output_tokens == (40 if stop is None else len(expected) + 2)
            first, second = sorted(servers[0].bodies + servers[1].bodies, key=lambda body: len(body["prompt"]))
            num_relayed = WHOLE.index("12") + 1
            assert len(second["prompt"]) == len(first["prompt"]) + num_relayed
            size = "n_predict" if kind == "llama.cpp" else "max_tokens"
            assert (first[size], second[size]) == (40, 40 - num_relayed)


async def watch_first(*servers: Any) -> None:
    """Once one has a request, the others are not to die."""
    while not any(server.bodies for server in servers):  # noqa: ASYNC110 - a server has no event for it
        await asyncio.sleep(0)
    for server in servers:
        if not server.bodies:
            server.dies_at = None


@pytest.mark.parametrize("lost", ["ours", "theirs"])
async def test_one_of_ours_and_one_of_theirs_take_over_from_each_other(
    start_server: StartServer, client_of: ClientOf, start_over: StartOver, new_card: NewCard, lost: str
) -> None:
    server = await start_server()
    ours = FakeEngineClient(new_card())

    def script(submit: Submit) -> Iterator[tuple[Any, ...]]:
        for position, token_id in enumerate(server.tokenizer.encode(WHOLE).ids):
            if lost == "ours" and position == 10 and submit.resumed_ids is None:
                ours.die()
            yield token_id, server.tokenizer.decode([token_id])

    ours.script = script
    server.dies_at = 10 if lost == "theirs" else None
    async with start_over(client_of(server), ours, credit_window_tokens=8) as gateway:
        for number in range(50):  # either engine is some prompts' favourite
            messages = [{"role": "user", "content": f"{number} is my number"}]
            answer = await gateway.client.chat.completions.create(**{**ASK, "messages": messages})
            assert answer.choices[0].message.content == WHOLE[:40]
            if any(submit.resumed_ids for submit in ours.submits) or any(
                body["max_tokens"] < 40 for body in server.bodies
            ):
                break
        else:
            pytest.fail("none had to move")
        assert all(submit.credit_tokens == 40 for submit in ours.submits)  # all of it: it may have to move


def stream_of(data: bytes) -> bytes:
    """A whole answer with that stream in it."""
    return b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + data


def refusal(status: str, message: str, header: bytes = b"", **more: str) -> bytes:
    """As vLLM words it."""
    error: dict[str, Any] = {
        "message": message,
        "type": "BadRequestError",
        "param": None,
        "code": int(status[:3]),
        **more,
    }
    body = json.dumps({"error": error}).encode()
    return b"HTTP/1.1 %s\r\n%sContent-Length: %d\r\n\r\n%s" % (status.encode(), header, len(body), body)


ERRORS = [
    (stream_of(b"data: {what\n\n"), 502, "engine_protocol_violation", None),
    (stream_of(b"data: [1]\n\n"), 502, "engine_protocol_violation", None),
    (stream_of(b'data: {"choices": "\xff"}\n\n'), 502, "engine_protocol_violation", None),
    (stream_of(b'data: {"choices": [{"token_ids": [18446744073709551616]}]}\n\n'), 502, None, None),
    (stream_of(b'data: {"choices": 7}\n\n'), 502, "engine_protocol_violation", None),
    (stream_of(b'data: {"choices": [{"token_ids": ["x"]}]}\n\n'), 502, "engine_protocol_violation", None),
    (stream_of(b'data: {"choices": [{"token_ids": [1]}], "usage": {"completion_tokens": 9}}\n\n'), 502, None, None),
    (stream_of(b"data: [DONE]\n\n"), 502, "engine_failed", None),
    (stream_of(b""), 502, "engine_failed", None),
    (stream_of(b'data: {"error": {"message": "x", "code": 503}}\n\n'), 503, "engine_overloaded", "1"),
    (stream_of(b'event: error\ndata: {"message": "x", "code": "invalid_api_key"}\n\n'), 502, "engine_refused", None),
    (refusal("302 Found", "", b"Location: http://127.0.0.1:1/\r\n"), 502, "engine_refused", None),
    (refusal("400 Bad", "maximum context length is 512 tokens"), 400, "context_length_exceeded", None),
    (refusal("400 Bad", "no"), 502, "engine_refused", None),
    (refusal("422 Bad", "top_p is wrong", param="top_p"), 400, "invalid_request", None),
    (refusal("400 Bad", "Grammar error: unknown"), 400, "unsupported_response_format", None),
    (refusal("400 Bad", "no", code="content_filter"), 400, "content_filter", None),
    (refusal("401 No", "no such key sk-theirs"), 502, "engine_refused", None),
    (refusal("402 No", "pay first"), 502, "engine_refused", None),
    (refusal("404 No", "no model at 10.0.0.7"), 502, "engine_refused", None),
    (refusal("429 Too Many", "no money", code="insufficient_quota"), 502, "engine_refused", None),
    (refusal("429 Too Many", "full", b"Retry-After: 7\r\n"), 503, "engine_overloaded", "7"),
    (refusal("503 No", "not yet", b"Retry-After: 8.2\r\n"), 503, "engine_overloaded", "9"),
    (refusal("529 No", "not yet", b"Retry-After: Fri, 31 Dec 2999 23:59:59 GMT\r\n"), 503, "engine_overloaded", "3600"),
    (refusal("500 No", "a trace of theirs"), 502, "engine_failed", None),
]


async def test_a_server_s_errors_and_nonsense_have_stable_codes_and_cost_nothing(
    start_server: StartServer, client_of: ClientOf, start_over: StartOver, until: Until
) -> None:
    server = await start_server()
    engine = client_of(server)
    async with start_over(engine, failover_wait_s=0) as gateway:
        for raw, status, code, retry_after in ERRORS:
            await until(lambda: engine.state.healthy)
            server.raw = raw
            gateway.replicas.breakers.forget(engine.address)  # else its Retry-After would be kept to
            got, headers, body = await gateway.post(CHAT, ASK)
            error = json.loads(body)["error"]
            assert (got, error["code"]) == (status, code or "engine_protocol_violation"), raw
            assert headers.get("retry-after") == retry_after
            assert headers.get("x-should-retry") == ("false" if code == "engine_refused" else None)
            assert not any(theirs in error["message"] for theirs in ("a trace of theirs", "sk-theirs", "10.0.0.7"))
        rows = await gateway.rows.wait_for(len(ERRORS))
        assert {(row.prompt_tokens, row.output_tokens, row.cost_nanodollars) for row in rows} == {(0, 0, 0)}


async def test_its_load_is_seen_and_routes_around_it(
    start_server: StartServer, client_of: ClientOf, start_over: StartOver, until: Until
) -> None:
    busy, idle = await start_server(), await start_server()
    busy.running, busy.waiting = 30, 12
    engines = client_of(busy), client_of(idle)
    async with start_over(*engines) as gateway:
        load = engines[0].state.load
        assert (load.num_running, load.num_waiting, load.kv_blocks_total, load.kv_blocks_used) == (30, 12, 200, 50)
        assert (load.prompt_tokens_total, load.output_tokens_total, load.requests_total) == (1234, 567, 7)
        assert engines[0].state.load_is_fresh
        for i in range(6):
            await gateway.client.chat.completions.create(
                **{**ASK, "messages": [{"role": "user", "content": f"{i}" * 40}]}
            )
        assert (len(busy.bodies), len(idle.bodies)) == (0, 6)
        status, _, answer = await gateway.request("GET", "/admin/v1/engines", b"", gateway.admin_key)
        assert (status, json.loads(answer)["data"][0]["card"]["family"]) == (200, "vllm")


async def test_load_of_llama_cpp_without_metrics_follows_from_its_slots(
    start_server: StartServer, client_of: ClientOf, start_over: StartOver, until: Until
) -> None:
    server = await start_server("llama.cpp")
    server.running = 3
    engine = client_of(server)
    async with start_over(engine):
        assert engine.state.load.num_running == 3  # this gateway has given it nothing
        server.running = 1
        await until(lambda: engine.state.load.num_running != 3)
        assert engine.state.load.num_running == 1


async def test_text_that_a_server_holds_back_is_counted_and_continued(
    start_server: StartServer, client_of: ClientOf, start_over: StartOver
) -> None:
    server = await start_server("llama.cpp")
    server.text = "naïve 日本語 🙂 " * 20
    async with start_over(client_of(server)) as gateway:
        stream = await gateway.client.chat.completions.create(
            **{**ASK, "max_tokens": 53}, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == server.text.encode()[:53].decode(errors="ignore")
        assert chunks[-1].usage.completion_tokens == 53


@pytest.mark.parametrize(
    ("resumed", "stop", "reason", "text"),
    [
        (WHOLE[:40], (), "length", ""),
        (WHOLE[:20], ("8 9",), "stop", ""),
        (WHOLE[:39] + "<|end|>", (), "stop", ""),
        (WHOLE[:40], (WHOLE[38:41],), "length", WHOLE[38:40]),  # what looked like a stop string was held back
    ],
)
async def test_an_answer_of_which_only_the_end_was_lost_is_ended_without_asking(
    start_server: StartServer,
    client_of: ClientOf,
    until: Until,
    resumed: Any,
    stop: tuple[Any, ...] | tuple[str, ...],
    reason: str,
    text: Any,
) -> None:
    server = await start_server()
    engine = client_of(server)
    token_ids = server.tokenizer.encode(resumed).ids
    async with Replicas([engine]):
        await until(lambda: engine.state.healthy)
        stopping = Stopping(40, stop=stop)
        submit = Submit("r", 0, MODEL, "t", STANDARD, [1], Sampling(), stopping, 40, b"", 0, resumed_ids=token_ids)
        async with engine.open(submit) as stream:
            (finished,) = [message async for message in stream.messages()]
        assert (finished.reason, finished.num_output_tokens, finished.text) == (reason, len(token_ids), text)
        assert stream.accepted.reason is Reason.FAILED_OVER
        assert server.bodies == []


async def test_an_answer_that_is_whole_is_no_failure_although_the_connection_breaks(
    start_server: StartServer, client_of: ClientOf, start_over: StartOver
) -> None:
    server = await start_server()
    server.dies_at = 40  # before the last usage
    async with start_over(client_of(server)) as gateway:
        answer = await gateway.client.chat.completions.create(**ASK)
        assert (answer.choices[0].message.content, answer.usage.completion_tokens) == (WHOLE[:40], 40)
        assert len(server.bodies) == 1


async def test_a_server_that_cannot_prove_what_it_has_done_never_does(
    start_server: StartServer, client_of: ClientOf, until: Until
) -> None:
    engine = client_of(await start_server())
    async with Replicas([engine]) as replicas:
        await until(lambda: engine.state.healthy)
        assert not replicas.have_settled_for("another", 0.0)
        assert not are_extensible(replicas.states(), MODEL)


async def test_a_server_with_another_model_says_so(
    start_server: StartServer, client_of: ClientOf, until: Until
) -> None:
    server = await start_server("generic")
    engine = client_of(server)
    async with Replicas([engine]):
        await until(lambda: "add context=" in engine.state.reason)
        assert not engine.state.healthy


async def test_a_server_that_falls_silent_loses_its_streams_and_gets_no_new_ones(
    start_server: StartServer, client_of: ClientOf, start_over: StartOver, until: Until
) -> None:
    server = await start_server()
    server.token_s = 0.01
    engine = client_of(server, heartbeat=HASTY)
    async with start_over(engine) as gateway:
        stream = await gateway.client.chat.completions.create(**{**ASK, "max_tokens": 400}, stream=True)
        with pytest.raises(openai.APIError) as caught:
            async for _ in stream:
                server.is_silent = True
        assert caught.value.code == "engine_failed"
        assert "did not answer" in engine.state.reason
        with pytest.raises(openai.InternalServerError) as caught:
            await gateway.client.chat.completions.create(**ASK)
        assert caught.value.status_code == 503
        server.is_silent = False
        await until(lambda: engine.state.healthy)


async def test_a_server_that_takes_no_new_requests_may_finish_those_that_it_has(
    start_server: StartServer, client_of: ClientOf, start_over: StartOver, until: Until
) -> None:
    server = await start_server()
    server.token_s = 0.01
    engine = client_of(server)
    async with start_over(engine) as gateway:
        stream = await gateway.client.chat.completions.create(**{**ASK, "max_tokens": 80}, stream=True)
        server.stop_listening()
        await until(lambda: not engine.state.healthy)
        assert await text_of(stream) == WHOLE[:80]


def test_a_gateway_whose_engine_lacks_a_tokenizer_does_not_start_and_says_why(tmp_path: Path) -> None:
    address = f"openai+http://127.0.0.1:9/v1?model=tiny&kind=vllm&tokenizer={tmp_path}/nowhere"
    arguments = ["gateway", "--engine", address, "--data-dir", tmp_path / "data", "--port", "0", "--migrate"]
    command = [sys.executable, "-c", "from moiety_platform.cli.main import main; main()", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "is not a folder; name the folder of a checkpoint" in " ".join(done.stderr.split())


async def test_a_long_queue_there_is_a_long_wait_here_and_too_long_a_one_is_refused_early(
    start_server: StartServer, client_of: ClientOf, start_over: StartOver, until: Until
) -> None:
    server = await start_server()
    engine = client_of(server)
    async with start_over(engine) as gateway:
        await gateway.client.chat.completions.create(**ASK)
        await until(lambda: engine.state.class_load("standard") is not None)
        assert engine.state.class_load("standard").predicted_ttft_s == 0
        server.waiting = 100_000  # and none of them ends
        await until(lambda: engine.state.class_load("standard").predicted_ttft_s > 2 * STANDARD.max_queue_s)
        with pytest.raises(openai.RateLimitError) as caught:
            await gateway.client.chat.completions.create(**ASK)
        assert caught.value.code == "overloaded"
        assert int(caught.value.response.headers["retry-after"]) > 0
        assert len(server.bodies) == 1


def test_the_wait_is_the_queue_times_the_pace_of_ends_and_less_for_a_better_rank() -> None:
    ends = Ends()
    for at_s, num_ended in ((0.0, 90), (1.0, 3), (11.0, 8)):  # restarted after the first
        ends.note(at_s, num_ended)
    assert ends.seconds_each == 2.0
    admitted = {PRIORITY: 1, FLEX: 5}
    inflight = [(PRIORITY, False), (FLEX, False), (FLEX, False), (FLEX, False), (FLEX, True)]
    for by_priority, expected in ((False, [80.0, 80.0]), (True, [20.0, 80.0])):
        loads = class_loads(inflight, admitted, 40, ends.seconds_each, by_priority=by_priority)
        assert [load.predicted_ttft_s for load in loads] == expected
    assert [(load.num_waiting, load.num_running, load.admitted_total) for load in loads] == [(1, 0, 1), (3, 1, 5)]
