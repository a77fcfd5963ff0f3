"""HTTP as clients of other servers use it: HEAD, compressed bodies, other origins, HTTP/1.0 and long silences."""

from __future__ import annotations

import asyncio
import gzip
import json
import sys
import zlib
from typing import Any

import pytest

from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_platform.settings import GatewaySettings
from moiety_wire.messages import Failed, FailureCode, ModelCard, Submit

from .conftest import RunningGateway, StartGateway

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
RAW = json.dumps(BODY).encode()
APP = "https://app.example.com"
COMPRESS = {"gzip": gzip.compress, "x-gzip": gzip.compress, "deflate": zlib.compress, "zstd": zstd.compress}


def encoded(name: str) -> dict[str, str | None]:
    return {"Content-Encoding": name}


def code_of(answer: bytes) -> str:
    found: str = json.loads(answer)["error"]["code"]
    return found


async def raw(gateway: RunningGateway, data: bytes) -> tuple[bytes, bytes]:
    """Head and body of what the server sends until it closes the connection."""
    reader, writer = await asyncio.open_connection(*gateway.address)
    writer.write(data)
    async with asyncio.timeout(60):
        answer = await reader.read()
    writer.close()
    top, _, body = answer.partition(b"\r\n\r\n")
    return top, body


# ── HEAD ──


@pytest.mark.parametrize(
    "path",
    ["/healthz", "/readyz", "/health", "/ping", "/version", "/v1/models", "/v1/models/tiny", "/metrics", "/schema"],
)
async def test_head_is_answered_as_get_is_without_the_body(gateway: RunningGateway, path: str) -> None:
    status, headers, _ = await gateway.request("GET", path)
    head_status, head_headers, body = await gateway.request("HEAD", path)
    assert (head_status, body) == (status, b"") == (200, b"")
    varying = {"x-request-id", "date", "content-length" if path == "/metrics" else "date"}
    assert {k: v for k, v in head_headers.items() if k not in varying} == {
        k: v for k, v in headers.items() if k not in varying
    }


async def test_head_is_refused_as_get_is(gateway: RunningGateway) -> None:
    for path, status in (("/", 404), ("/nowhere", 404), (CHAT, 405), ("/v1/models/other", 404)):
        assert (await gateway.request("HEAD", path))[::2] == (status, b"")
    assert (await gateway.request("HEAD", "/v1/models", key="nonsense"))[0] == 401


async def test_the_head_of_a_file_does_not_read_it(gateway: RunningGateway) -> None:
    content = b'{"custom_id": "a"}\n' * 50_000
    file = await gateway.client.files.create(file=content, purpose="batch")
    for _ in range(3):
        status, headers, body = await gateway.request("HEAD", f"/v1/files/{file.id}/content")
        assert (status, headers["content-length"], body) == (200, str(len(content)), b"")
    assert (await gateway.client.files.content(file.id)).content == content


async def test_options_name_head_beside_get(gateway: RunningGateway) -> None:
    _, headers, _ = await gateway.request("OPTIONS", "/v1/models")
    assert headers["allow"] == "GET, HEAD, OPTIONS"
    _, headers, _ = await gateway.request("OPTIONS", CHAT)
    assert headers["allow"] == "OPTIONS, POST"


# ── content codings ──


@pytest.mark.parametrize("name", COMPRESS)
async def test_a_compressed_body_is_served_as_a_plain_one(gateway: RunningGateway, name: str) -> None:
    for path in (CHAT, MESSAGES, "/tokenize", "/v1/messages/count_tokens"):
        body = BODY if path != "/tokenize" else {"model": "tiny", "prompt": "hello"}
        plain = json.dumps(body).encode()
        status, _, answer = await gateway.post(path, COMPRESS[name](plain), headers=encoded(name))
        assert status == 200, answer
    tenant = {"name": f"compressed-{name}"}
    data = COMPRESS[name](json.dumps(tenant).encode())
    headers = {**encoded(name), "Content-Type": "application/json"}
    status, _, answer = await gateway.post("/admin/v1/tenants", data, key=gateway.admin_key, headers=headers)
    assert (status, json.loads(answer)["name"]) == (201, tenant["name"])


async def test_a_compressed_upload_is_stored_decoded(gateway: RunningGateway) -> None:
    line = b'{"custom_id": "a"}\n' * 20_000
    form = (
        b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + line + b"\r\n--x--\r\n"
    )
    headers = {**encoded("gzip"), "Content-Type": "multipart/form-data; boundary=x"}
    status, _, answer = await gateway.post("/v1/files", gzip.compress(form), headers=headers)
    assert (status, json.loads(answer)["bytes"]) == (200, len(line))


async def test_a_repeated_request_may_be_compressed_another_way(gateway: RunningGateway) -> None:
    key = {"Idempotency-Key": "compressed"}
    _, _, first = await gateway.post(CHAT, gzip.compress(RAW), headers=encoded("gzip") | key)
    _, headers, second = await gateway.post(CHAT, RAW, headers=key)
    assert (headers["idempotent-replayed"], second) == ("true", first)


async def test_an_unknown_coding_is_refused_with_those_that_are_known(gateway: RunningGateway) -> None:
    for path in (CHAT, MESSAGES, "/tokenize", "/v1/files"):
        for name in ("br", "gzip, gzip", "x" * 500):
            form = {"Content-Type": "multipart/form-data; boundary=x"} if path == "/v1/files" else {}
            status, headers, answer = await gateway.post(path, RAW, headers=encoded(name) | form)
            assert (status, headers["accept-encoding"]) == (415, "gzip, deflate, zstd")
            assert len(answer) < 600
            if path == CHAT:
                assert code_of(answer) == "unsupported_content_encoding"
    assert (await gateway.post(CHAT, RAW, headers=encoded("identity")))[0] == 200
    assert (await gateway.post(CHAT, RAW, key="nonsense", headers=encoded("br")))[0] == 401


async def test_a_body_that_is_not_of_its_coding_is_refused(gateway: RunningGateway) -> None:
    for name, compress in COMPRESS.items():
        for data in (RAW, compress(RAW)[:-5], compress(RAW)[:1]):
            status, _, answer = await gateway.post(CHAT, data, headers=encoded(name))
            assert (status, code_of(answer)) == (400, "invalid_content_encoding"), (name, data)
        status, _, answer = await gateway.post("/tokenize", RAW, headers=encoded(name))
        assert (status, code_of(answer)) == (400, "invalid_content_encoding")


async def test_a_compressed_body_without_content_is_refused_before_its_end(gateway: RunningGateway) -> None:
    head, empty_block = gzip.compress(b"")[:10], b"\0\0\0\xff\xff"
    body = head + empty_block * 300_000 + zlib.compress(RAW, wbits=-15)
    status, _, answer = await gateway.post(CHAT, body, headers=encoded("gzip"))
    assert (status, code_of(answer)) == (400, "invalid_content_encoding")
    assert b"almost no content" in answer


@pytest.mark.parametrize("name", ["gzip", "zstd"])
async def test_a_body_that_expands_beyond_the_limit_is_refused(
    start_gateway: StartGateway, card: ModelCard, name: str
) -> None:
    async with start_gateway([FakeEngineClient(card)], max_body_bytes=100_000) as gateway:
        just = json.dumps(BODY | {"other": "x" * (100_000 - len(RAW) - len(', "other": ""'))}).encode()
        assert len(just) == 100_000
        assert (await gateway.post(CHAT, COMPRESS[name](just), headers=encoded(name)))[0] == 200
        bomb = COMPRESS[name](b" " * (200 << 20) + RAW)
        for path in (CHAT, "/tokenize", "/v1/messages/count_tokens"):
            status, _, answer = await gateway.post(path, bomb, headers=encoded(name))
            assert status == 413, answer
        headers = encoded(name) | {"Idempotency-Key": "bomb"}
        assert (await gateway.post(CHAT, COMPRESS[name](just + b" "), headers=headers))[0] == 413
        admin = encoded(name) | {"Content-Type": "application/json"}
        assert (await gateway.post("/admin/v1/tenants", bomb, key=gateway.admin_key, headers=admin))[0] == 413


# ── pages of other origins ──


def preflight(origin: str, **more: str) -> dict[str, str | None]:
    asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    return {**asked, "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os", **more}


def cors_of(headers: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.startswith("access-control") or name == "vary"}


async def test_no_page_of_another_origin_may_call_by_default(gateway: RunningGateway) -> None:
    assert cors_of((await gateway.request("OPTIONS", CHAT, headers=preflight(APP)))[1]) == {}
    assert cors_of((await gateway.post(CHAT, BODY, headers={"Origin": APP}))[1]) == {}


async def test_pages_of_allowed_origins_may_call(start_gateway: StartGateway, card: ModelCard) -> None:
    async with start_gateway([FakeEngineClient(card)], cors_allowed_origins=f"{APP},http://localhost:3000") as gateway:
        status, headers, body = await gateway.request("OPTIONS", CHAT, key="", headers=preflight(APP))
        assert (status, body) == (204, b"")
        assert cors_of(headers) == {
            "access-control-allow-origin": APP,
            "access-control-allow-methods": "GET, HEAD, POST, DELETE, OPTIONS",
            "access-control-allow-headers": "authorization,content-type,x-stainless-os",
            "access-control-max-age": "7200",
            "vary": "Origin",
        }
        readable = {"access-control-allow-origin": APP, "access-control-expose-headers": "*", "vary": "Origin"}
        origin: dict[str, str | None] = {"Origin": APP}
        for body_sent in (BODY, BODY | {"stream": True}, b"{"):
            assert cors_of((await gateway.post(CHAT, body_sent, headers=origin))[1]) == readable
        assert cors_of((await gateway.request("GET", "/v1/models", headers=origin))[1]) == readable
        assert cors_of((await gateway.request("HEAD", "/v1/models", headers=origin))[1]) == readable
        assert cors_of((await gateway.request("GET", "/v1/models", key="nonsense", headers=origin))[1]) == readable
        for other in ("https://evil.example.com", "null", f"{APP}.evil.com", "http://app.example.com"):
            assert cors_of((await gateway.request("OPTIONS", CHAT, headers=preflight(other)))[1]) == {}
            assert cors_of((await gateway.post(CHAT, BODY, headers={"Origin": other}))[1]) == {}
        odd = preflight(APP, **{"Access-Control-Request-Headers": "a\tb; c"})
        assert "access-control-allow-headers" not in cors_of((await gateway.request("OPTIONS", CHAT, headers=odd))[1])


async def test_the_admin_api_is_never_open_to_pages_of_other_origins(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    async with start_gateway([FakeEngineClient(card)], cors_allowed_origins="*") as gateway:
        path = "/admin/v1/tenants"
        assert cors_of((await gateway.request("OPTIONS", path, headers=preflight(APP)))[1]) == {}
        _, headers, _ = await gateway.request("GET", path, key=gateway.admin_key, headers={"Origin": APP})
        assert cors_of(headers) == {}


async def test_any_origin_may_be_allowed_but_never_with_credentials(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    async with start_gateway([FakeEngineClient(card)], cors_allowed_origins="*") as gateway:
        for headers in (
            (await gateway.request("OPTIONS", CHAT, headers=preflight(APP)))[1],
            (await gateway.post(CHAT, BODY, headers={"Origin": "null"}))[1],
        ):
            assert headers["access-control-allow-origin"] == "*"
            assert "access-control-allow-credentials" not in headers


def test_an_origin_with_a_path_is_no_setting() -> None:
    assert GatewaySettings(cors_allowed_origins="https://App.example.com, *").cors_allowed_origins == (APP, "*")
    for wrong in ("https://app.example.com/", "app.example.com", "https://*.example.com", "https://a,b c"):
        with pytest.raises(ValueError, match="must be a scheme and a host"):
            GatewaySettings(cors_allowed_origins=wrong)


# ── long silences ──


def events_of(answer: bytes) -> list[bytes]:
    return [event for event in answer.split(b"\n\n") if event]


@pytest.mark.parametrize(
    ("path", "event"), [(CHAT, b": keep-alive"), (MESSAGES, b'event: ping\ndata: {"type":"ping"}')]
)
async def test_a_silent_stream_is_kept_alive_from_before_its_first_token(
    start_gateway: StartGateway, card: ModelCard, path: str, event: bytes
) -> None:
    engine = FakeEngineClient(card, token_s=0.5)
    async with start_gateway([engine], sse_keep_alive_s=0.1) as gateway:
        status, headers, answer = await gateway.post(path, BODY | {"stream": True})
        events = events_of(answer)
        assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        assert headers["x-moiety-class"]
        first, content = events.index(event), next(i for i, one in enumerate(events) if b'"1"' in one)
        assert first < content
        assert event in events[content:]
        _, _, whole = await gateway.post(path, BODY)
        assert event not in whole


async def test_keep_alive_events_are_no_part_of_a_stored_answer(start_gateway: StartGateway, card: ModelCard) -> None:
    async with start_gateway([FakeEngineClient(card, token_s=0.3)], sse_keep_alive_s=0.05) as gateway:
        key: dict[str, str | None] = {"Idempotency-Key": "kept-alive"}
        _, _, first = await gateway.post(CHAT, BODY | {"stream": True}, headers=key)
        _, headers, second = await gateway.post(CHAT, BODY | {"stream": True}, headers=key)
        assert b": keep-alive" in first
        assert headers["idempotent-replayed"] == "true"
        assert events_of(second) == [event for event in events_of(first) if event != b": keep-alive"]


async def test_a_stream_that_is_not_silent_gets_no_keep_alive(start_gateway: StartGateway, card: ModelCard) -> None:
    async with start_gateway([FakeEngineClient(card, token_s=0.05)], sse_keep_alive_s=5) as gateway:
        _, _, answer = await gateway.post(CHAT, BODY | {"stream": True, "max_tokens": 20})
        assert b": keep-alive" not in answer
    async with start_gateway([FakeEngineClient(card, token_s=0.2)], sse_keep_alive_s=0) as gateway:
        _, _, answer = await gateway.post(CHAT, BODY | {"stream": True})
        assert b": keep-alive" not in answer


async def test_a_failure_after_a_keep_alive_is_an_event_and_before_it_a_status(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    def fail(submit: Submit) -> list[Failed]:
        return [Failed(submit.request_id, 1, FailureCode.NON_FINITE, "values that are not finite")]

    for token_s, expected in ((0.4, 200), (0.0, 502)):
        async with start_gateway([FakeEngineClient(card, fail, token_s=token_s)], sse_keep_alive_s=0.1) as gateway:
            status, _, answer = await gateway.post(CHAT, BODY | {"stream": True})
            assert status == expected
            (row,) = await gateway.rows.wait_for(1)
            assert (row.http_status, row.outcome, row.prompt_tokens) == (status, "failed", 0)
            error = events_of(answer)[-1].removeprefix(b"data: ")
            assert code_of(error) == "non_finite_output"


async def test_changed_origins_and_keep_alive_intervals_hold_for_later_requests(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    async def seen(gateway: RunningGateway) -> tuple[str | None, bool]:
        _, headers, answer = await gateway.post(CHAT, BODY | {"stream": True}, headers={"Origin": APP})
        return headers.get("access-control-allow-origin"), b": keep-alive" in answer

    async with start_gateway([FakeEngineClient(card, token_s=0.3)]) as gateway:
        before = gateway.live.now
        assert await seen(gateway) == (None, False)
        await gateway.live.change(before.model_copy(update={"cors_allowed_origins": (APP,), "sse_keep_alive_s": 0.05}))
        assert await seen(gateway) == (APP, True)
        await gateway.live.change(before)
        assert await seen(gateway) == (None, False)


# ── HTTP/1.0 ──


async def test_an_http_1_0_client_gets_no_chunks(gateway: RunningGateway) -> None:
    plain: dict[bool, bytes] = {}
    for version in ("1.0", "1.1"):
        for streams in (False, True):
            body = json.dumps(BODY | {"stream": streams, "temperature": 0}).encode()
            request = f"POST {CHAT} HTTP/{version}\r\nHost: t\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
            request += f"Authorization: Bearer {gateway.key}\r\n\r\n"
            top, answer = await raw(gateway, request.encode() + body)
            assert top.startswith(b"HTTP/1.1 200")
            assert (b"transfer-encoding: chunked" in top) == (version == "1.1" and streams)
            if version == "1.0":
                plain[streams] = answer
    assert json.loads(plain[False])["choices"][0]["message"]["content"] == "1 2"
    assert events_of(plain[True])[-1] == b"data: [DONE]"
    assert all(event.startswith(b"data: ") for event in events_of(plain[True]))


async def test_an_http_1_0_client_gets_files_and_errors(gateway: RunningGateway) -> None:
    top, answer = await raw(gateway, b"GET /healthz HTTP/1.0\r\n\r\n")
    assert (b"content-length: 15" in top, json.loads(answer)) == (True, {"status": "ok"})
    top, answer = await raw(gateway, b"GET /nowhere HTTP/1.0\r\n\r\n")
    assert top.startswith(b"HTTP/1.1 404")
    assert code_of(answer) == "route_not_found"


# ── routes that clients of other servers ask for ──


async def test_health_and_ping_tell_by_their_status_whether_the_gateway_can_serve(gateway: RunningGateway) -> None:
    asked = [("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")]
    for method, path in asked:
        assert (await gateway.request(method, path, key="nobody"))[::2] == (200, b"")
    gateway.engine.die()
    for method, path in asked:
        status, headers, body = await gateway.request(method, path)
        assert (status, body, headers["retry-after"]) == (503, b"", "1")


async def test_the_version_is_returned_to_clients_with_a_key_only(gateway: RunningGateway) -> None:
    status, _, answer = await gateway.request("GET", "/version")
    assert (status, list(json.loads(answer))) == (200, ["version"])
    assert (await gateway.request("GET", "/version", key="nonsense"))[0] == 401


async def test_the_openapi_documents_tell_of_the_routes_of_other_servers(gateway: RunningGateway) -> None:
    paths = json.loads((await gateway.request("GET", "/schema/public.json"))[2])["paths"]
    own = {
        path: sorted(paths[path])
        for path in ("/health", "/ping", "/version", "/v1/tokenize", "/v1/detokenize", "/detokenize")
    }
    assert own == {
        "/health": ["get"],
        "/ping": ["get", "post"],
        "/version": ["get"],
        "/v1/tokenize": ["post"],
        "/v1/detokenize": ["post"],
        "/detokenize": ["post"],
    }
    ids = [operation["operationId"] for item in paths.values() for operation in item.values()]
    assert len(set(ids)) == len(ids)


async def test_texts_are_tokenized_and_back_below_v1_too(gateway: RunningGateway) -> None:
    for prefix in ("", "/v1"):
        _, _, answer = await gateway.post(f"{prefix}/tokenize", {"model": "tiny", "prompt": "héllo"})
        tokens = json.loads(answer)["tokens"]
        status, _, answer = await gateway.post(f"{prefix}/detokenize", {"model": "tiny", "tokens": tokens})
        assert (status, json.loads(answer)) == (200, {"prompt": "héllo"})
        assert (await gateway.post(f"{prefix}/detokenize", {"tokens": [1]}, key="nonsense"))[0] == 401
