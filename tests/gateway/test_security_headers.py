"""Every answer has the security headers of docs/http.md, once: whole ones, streams, errors, pages and refusals."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from moiety_platform.security_headers import SECURITY_HEADERS

from .conftest import RunningGateway

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


def fields_of(answer: bytes) -> list[tuple[str, str]]:
    lines = answer.partition(b"\r\n\r\n")[0].decode().split("\r\n")[1:]
    return [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]


async def raw(gateway: RunningGateway, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(*gateway.address)
    writer.write(data)
    async with asyncio.timeout(60):
        answer = await reader.read()
    writer.close()
    return answer


def request(gateway: RunningGateway, line: str, body: str = "", key: str = "") -> bytes:
    fields = f"Host: t\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
    fields += f"Authorization: Bearer {key or gateway.key}\r\n"
    return f"{line} HTTP/1.1\r\n{fields}\r\n{body}".encode()


CHAT = '{"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2%s}'


@pytest.mark.parametrize(
    ("line", "body", "key", "status"),
    [
        ("POST /v1/chat/completions", CHAT % "", "", 200),
        ("POST /v1/chat/completions", CHAT % ', "stream": true', "", 200),
        ("POST /v1/chat/completions", "{", "", 400),
        ("POST /v1/chat/completions", CHAT % "", "nonsense", 401),
        ("POST /v1/messages", "{", "", 400),
        ("GET /v1/models", "", "", 200),
        ("GET /admin/v1/tenants", "", "", 403),
        ("GET /nowhere", "", "", 404),
        ("DELETE /v1/models", "", "", 405),
        ("GET /healthz", "", "", 200),
        ("HEAD /healthz", "", "", 200),
        ("GET /metrics", "", "", 200),
        ("GET /schema", "", "", 200),
        ("GET /a#b", "", "", 400),
    ],
)
async def test_every_answer_has_each_security_header_once(
    gateway: RunningGateway, line: str, body: Any, key: str, status: int
) -> None:
    answer = await raw(gateway, request(gateway, line, body, key))
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer
    fields = fields_of(answer)
    for name, value in SECURITY_HEADERS:
        assert [one for one in fields if one[0] == name] == [(name, value)]
    assert "server" not in dict(fields)
    assert "access-control-allow-origin" not in dict(fields), "no page of another origin may read answers"


async def test_an_answer_on_a_kept_connection_has_them_as_well(gateway: RunningGateway) -> None:
    _, headers, _ = await gateway.post("/v1/chat/completions", BODY)
    assert {name: headers[name] for name, _ in SECURITY_HEADERS} == dict(SECURITY_HEADERS)
