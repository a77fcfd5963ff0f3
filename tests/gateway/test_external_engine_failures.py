"""External engines that fail, fall silent or send invalid responses, and answers that continue at another engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from structlog.testing import capture_logs

from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_platform.external_engines.client import RESENDS
from moiety_platform.external_engines.external_request import RESEND_WITHIN_S
from moiety_platform.routing.choose import are_extensible
from moiety_platform.routing.replicas import Replicas
from moiety_wire.classes import STANDARD
from moiety_wire.messages import Sampling, Stopping, Submit
from moiety_wire.trace_events import Reason

from .conftest import NewCard, StartGateway, StartOver, Until
from .external_server import (
    ASK,
    CHAT,
    HASTY,
    MODEL,
    WHOLE,
    ClientOf,
    StartServer,
    client_of,
    folder,
    start_server,
    text_of,
)

__all__ = ["client_of", "folder", "start_server"]  # fixtures


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
        server.token_s = 600  # so that it ends only by a disconnect
        await stream.close()
        async with asyncio.timeout(60):
            await server.ended.wait()
        (row,) = await gateway.rows.wait_for(1)
        assert (row.outcome, row.http_status) == ("disconnected", 499)
        assert 9 <= row.output_tokens < 400
        assert gateway.engines[0].state.num_inflight == 0


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


@pytest.mark.parametrize("cuts", [False, True])
@pytest.mark.parametrize("kind", ["vllm", "generic"])  # connections to llama.cpp are not kept
async def test_a_request_on_a_kept_connection_that_the_server_closes_is_sent_again(
    start_server: StartServer, client_of: ClientOf, start_over: StartOver, kind: str, cuts: bool
) -> None:
    server = await start_server(kind)
    server.cuts = cuts
    async with start_over(client_of(server, "&context=512")) as gateway:
        await asyncio.gather(*(gateway.client.chat.completions.create(**ASK) for _ in range(3)))
        num_answered, server.num_to_drop = len(server.bodies), RESENDS
        answer = await gateway.client.chat.completions.create(**ASK)
        assert answer.choices[0].message.content == WHOLE[:40]
        assert (server.num_to_drop, len(server.bodies)) == (0, num_answered + 1)
        assert gateway.engines[0].state.healthy
        assert [row.outcome for row in await gateway.rows.wait_for(4)] == ["length"] * 4


@pytest.mark.parametrize(
    "drop_after_s, drops_with",
    [(2 * RESEND_WITHIN_S, b""), (0.0, b"no head\r\n\r\n"), (0.0, b"HTTP/1.1 500 Oops\r\nno field\r\n\r\n")],
)
async def test_a_request_that_a_server_has_worked_on_or_answered_is_sent_again_by_failover_alone(
    start_server: StartServer, client_of: ClientOf, start_over: StartOver, drop_after_s: float, drops_with: bytes
) -> None:
    server = await start_server()
    async with start_over(client_of(server)) as gateway:
        await asyncio.gather(*(gateway.client.chat.completions.create(**ASK) for _ in range(6)))
        server.num_to_drop, server.drop_after_s, server.drops_with = 6, drop_after_s, drops_with
        with capture_logs() as logs:
            with contextlib.suppress(openai.InternalServerError):
                await gateway.client.chat.completions.create(**ASK)
            (done,) = (one for one in logs if one["event"] == "request")
        assert not [one for one in logs if one["event"] == "engine_request_resent"]
        assert 1 <= server.num_dropped <= 1 + done["failovers"]


@pytest.mark.parametrize("cuts", [False, True])
async def test_a_request_whose_new_connection_breaks_is_sent_again_by_failover_alone(
    start_server: StartServer, client_of: ClientOf, start_over: StartOver, cuts: bool
) -> None:
    """Otherwise a request that ends a server would end more of them than failover allows."""
    server = await start_server()
    server.raw, server.cuts = b"", cuts
    async with start_over(client_of(server)) as gateway:
        with capture_logs() as logs, pytest.raises(openai.InternalServerError) as caught:
            await gateway.client.chat.completions.create(**ASK)
        assert caught.value.code == "engine_failed"
        (done,) = (one for one in logs if one["event"] == "request")
        assert len(server.bodies) == 1 + done["failovers"]


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
    """As soon as one server has a request, let the others not fail."""
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
        assert all(submit.credit_tokens == 40 for submit in ours.submits)  # all of it, since it may have to move


def stream_of(data: bytes) -> bytes:
    """Return a whole HTTP answer with this stream as its body."""
    return b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + data


def refusal(status: str, message: str, header: bytes = b"", **more: str) -> bytes:
    """Return an error in the format of vLLM."""
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
