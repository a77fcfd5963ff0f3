"""Requests as bytes: which are served, how the others are refused, and that nothing hidden in one is ever served. Each
row is a rule of docs/http.md."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from moiety_platform.bootstrap.server import GatewayServer
from moiety_platform.connections import ConnectionLimits
from moiety_platform.listening import bind
from moiety_platform.settings import GatewaySettings

Send = Callable[..., Awaitable[tuple[bytes, list[str]]]]

HOST = b"Host: t\r\n"
NEXT = b"GET /next HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n"
HIDDEN = b"GET /hidden HTTP/1.1\r\nHost: t\r\n\r\n"
DEADLINE_S = 60.0


def get(target: bytes = b"/a", fields: bytes = HOST, version: bytes = b"HTTP/1.1", method: bytes = b"GET") -> bytes:
    return b"%b %b %b\r\n%b\r\n" % (method, target, version, fields)


def post(fields: bytes, body: bytes, version: bytes = b"HTTP/1.1") -> bytes:
    return get(b"/a", HOST + fields, version, b"POST") + body


CHUNKED = b"Transfer-Encoding: chunked\r\n"
ENDED = b"0\r\n\r\n"
UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
WEBSOCKET = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"

REFUSED = {
    # RFC 9112, 3.2: Host
    "no host": (get(fields=b""), 400),
    "two hosts": (get(fields=HOST + HOST), 400),
    "two hosts that differ in case": (get(fields=b"HOST: t\r\nhost: u\r\n"), 400),
    "a host with a path": (get(fields=b"Host: t/x\r\n"), 400),
    "a host with a space": (get(fields=b"Host: a b\r\n"), 400),
    "a host with a user": (get(fields=b"Host: u@t\r\n"), 400),
    # RFC 9112, 6: framing
    "length and chunked": (post(b"Content-Length: 5\r\n" + CHUNKED, ENDED + HIDDEN), 400),
    "chunked and length": (post(CHUNKED + b"Content-Length: 5\r\n", ENDED + HIDDEN), 400),
    "two lengths": (post(b"Content-Length: 3\r\nContent-Length: 3\r\n", b"abc"), 400),
    "two lengths that differ": (post(b"Content-Length: 0\r\nContent-Length: 33\r\n", HIDDEN), 400),
    "a list of lengths": (post(b"Content-Length: 3, 3\r\n", b"abc"), 400),
    "a length with a plus": (post(b"Content-Length: +3\r\n", b"abc"), 400),
    "a length below zero": (post(b"Content-Length: -3\r\n", b"abc"), 400),
    "a length in hexadecimal": (post(b"Content-Length: 0x3\r\n", b"abc"), 400),
    "a length with an underscore": (post(b"Content-Length: 1_0\r\n", b"abc"), 400),
    "an empty length": (post(b"Content-Length: \r\n", b"abc"), 400),
    "a length beyond 64 bits": (post(b"Content-Length: 18446744073709551619\r\n", b"abc"), 400),
    "another coding before chunked": (post(b"Transfer-Encoding: gzip, chunked\r\n", ENDED + HIDDEN), 501),
    "another coding": (post(b"Transfer-Encoding: identity\r\n", HIDDEN), 501),
    "a coding that looks like chunked": (post(b"Transfer-Encoding: xchunked\r\n", ENDED), 501),
    "a coding in quotes": (post(b'Transfer-Encoding: "chunked"\r\n', ENDED), 501),
    "chunked with a parameter": (post(b"Transfer-Encoding: chunked;q=1\r\n", ENDED), 501),
    "chunked twice": (post(b"Transfer-Encoding: chunked, chunked\r\n", ENDED), 400),
    "two fields of codings": (post(CHUNKED + CHUNKED, ENDED), 400),
    "chunked not last": (post(b"Transfer-Encoding: chunked, identity\r\n", ENDED), 400),
    "an empty coding": (post(b"Transfer-Encoding:\r\n", ENDED), 400),
    "chunked after a control character": (post(b"Transfer-Encoding: \x0bchunked\r\n", ENDED), 400),
    "chunked in HTTP/1.0": (post(CHUNKED, ENDED + HIDDEN, b"HTTP/1.0"), 400),
    # RFC 9112, 7.1: chunks
    "a chunk with 0x": (post(CHUNKED, b"0x3\r\nabc\r\n" + ENDED), 400),
    "a chunk below zero": (post(CHUNKED, b"-3\r\nabc\r\n" + ENDED), 400),
    "a chunk with a space": (post(CHUNKED, b"3 \r\nabc\r\n" + ENDED), 400),
    "a chunk beyond 64 bits": (post(CHUNKED, b"fffffffffffffffff\r\nabc\r\n" + ENDED), 400),
    "chunks that end in LF": (post(CHUNKED, b"3\nabc\n0\n\n"), 400),
    "an extension with LF": (post(CHUNKED, b"3;a\nbc\r\nabc\r\n" + ENDED), 400),
    "a chunk without its end": (post(CHUNKED, b"3\r\nabc0\r\n\r\n"), 400),
    "a length among trailers": (post(CHUNKED, b"3\r\nabc\r\n0\r\nContent-Length: 5\r\n\r\n"), 400),
    # RFC 9112, 2.2 and 5: lines and fields
    "a folded field": (get(fields=HOST + b"X: a\r\n b\r\n"), 400),
    "a folded first field": (get(fields=b" Host: t\r\n"), 400),
    "a space before the colon": (post(b"Content-Length : 3\r\n", b"abc"), 400),
    "a tab before the colon": (get(fields=HOST + b"X\t: a\r\n"), 400),
    "a field without a colon": (get(fields=HOST + b"Xyz\r\n"), 400),
    "a field without a name": (get(fields=HOST + b": x\r\n"), 400),
    "a name that is no token": (get(fields=HOST + b"X(y: x\r\n"), 400),
    "NUL in a value": (get(fields=HOST + b"X: a\0b\r\n"), 400),
    "a bare CR in a value": (get(fields=HOST + b"X: a\rb\r\n"), 400),
    "a control character in a value": (get(fields=HOST + b"X: a\x01b\r\n"), 400),
    "lines that end in LF": (b"GET /a HTTP/1.1\nHost: t\n\n", 400),
    "one line that ends in LF": (get(fields=b"Host: t\nX: y\r\n"), 400),
    "lines that end in CR": (b"GET /a HTTP/1.1\rHost: t\r\r", 400),
    # RFC 9112, 3: the request line
    "an authority as target": (get(b"t:80"), 400),
    "CONNECT": (get(b"t:80", method=b"CONNECT") + HIDDEN, 400),
    "an asterisk for GET": (get(b"*"), 400),
    "a target without a slash": (get(b"a"), 400),
    "a fragment": (get(b"/a#b"), 400),
    "a URL with a user": (get(b"http://u:p@t/a"), 400),
    "a URL of another scheme": (get(b"ftp://t/a"), 400),
    "a target with a control character": (get(b"/a\x01"), 400),
    "a target beyond ASCII": (get(b"/\xe9"), 400),
    "a tab in the request line": (b"GET\t/a HTTP/1.1\r\n" + HOST + b"\r\n", 400),
    "a space behind the version": (get(version=b"HTTP/1.1 "), 400),
    "a method that nobody knows": (get(method=b"FOO"), 400),
    "no version": (b"GET /a\r\n\r\n", 400),
    "HTTP/1.2": (get(version=b"HTTP/1.2"), 400),
    "HTTP/2.0": (get(version=b"HTTP/2.0"), 505),
    "HTTP/2's preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "a byte order mark": (b"\xef\xbb\xbf" + get(), 400),
    # RFC 9110, 5.3: fields that only one may be of
    "two authorizations": (get(fields=HOST + b"Authorization: Bearer a\r\nAuthorization: Bearer b\r\n"), 400),
    "two API keys": (get(fields=HOST + b"X-Api-Key: a\r\nx-api-key: b\r\n"), 400),
    "two content types": (get(fields=HOST + b"Content-Type: a/b\r\nContent-Type: b/c\r\n"), 400),
    # RFC 9110, 10.1.1
    "an expectation that nobody knows": (post(b"Expect: more\r\nContent-Length: 3\r\n", b"abc"), 417),
}  # fmt: skip

SERVED = {
    "one with a body": (post(b"Content-Length: 3\r\n", b"abc"), ["POST /a 3"]),
    "one of GET with a body": (get(fields=HOST + b"Content-Length: 33\r\n") + HIDDEN, ["GET /a 33"]),
    "one in chunks": (post(CHUNKED, b"3;a=b\r\nabc\r\n" + ENDED), ["POST /a 3"]),
    "chunked in capitals": (post(b"Transfer-Encoding: CHUNKED\r\n", b"3\r\nabc\r\n" + ENDED), ["POST /a 3"]),
    "trailer fields, which are dropped": (post(CHUNKED, b"3\r\nabc\r\n0\r\nHost: x\r\nX: y\r\n\r\n"), ["POST /a 3"]),
    "several at once": (get() + get(b"/b"), ["GET /a 0", "GET /b 0"]),
    "empty lines first": (b"\r\n\r\n" + get(), ["GET /a 0"]),
    "a URL as target": (get(b"http://t/a"), ["GET /a 0"]),
    "an asterisk of OPTIONS": (get(b"*", method=b"OPTIONS"), ["OPTIONS * 0"]),
    "an IPv6 host": (get(fields=b"Host: [::1]:8000\r\n"), ["GET /a 0"]),
    "an empty host": (get(fields=b"Host:\r\n"), ["GET /a 0"]),
    "h2c, as if it were not asked for": (get(fields=HOST + UPGRADE), ["GET /a 0"]),
    "websocket, as if it were not asked for": (get(fields=HOST + WEBSOCKET), ["GET /a 0"]),
    "h2c with a body that looks like a request": (post(UPGRADE + b"Content-Length: 33\r\n", HIDDEN), ["POST /a 33"]),
    "h2c with chunks": (post(UPGRADE + CHUNKED, b"21\r\n" + HIDDEN + b"\r\n" + ENDED), ["POST /a 33"]),
    "h2c with an empty body": (post(UPGRADE + b"Content-Length: 0\r\n", b""), ["POST /a 0"]),
    "h2c twice": (post(UPGRADE + b"Content-Length: 1\r\n", b"x") * 2, ["POST /a 1"] * 2),
}  # fmt: skip

ENDED_AFTER_ONE = {
    "Connection: close": get(fields=HOST + b"Connection: close\r\n") + HIDDEN,
    "HTTP/1.0": get(fields=b"", version=b"HTTP/1.0") + HIDDEN,
    "HTTP/1.0 that would go on": get(fields=HOST + b"Connection: keep-alive\r\n", version=b"HTTP/1.0") + HIDDEN,
}


@pytest.fixture
async def send() -> AsyncIterator[Send]:
    """`await send(data, size)`: all that a server answers to the data, sent in pieces, until it hangs up, and the
    requests that its application was given."""
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Send) -> None:
        size, message = 0, {"more_body": True}
        while message.get("more_body"):
            message = await receive()
            if message["type"] != "http.request":
                return
            size += len(message.get("body", b""))
        seen.append(f"{scope['method']} {scope['path']} {size}")
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    started = asyncio.Event()
    server = GatewayServer(app, 1, ConnectionLimits.of(GatewaySettings()), started.set)
    listener = bind("127.0.0.1", 0)
    serving = asyncio.create_task(server.serve([listener]))
    await started.wait()

    async def exchange(data: bytes, size: int) -> tuple[bytes, list[str]]:
        seen.clear()
        reader, writer = await asyncio.open_connection(*listener.getsockname()[:2])
        reading = asyncio.create_task(reader.read())
        for start in range(0, len(data), size):
            writer.write(data[start : start + size])
            await asyncio.sleep(0)  # so that pieces come as such
        async with asyncio.timeout(DEADLINE_S):
            answer = await reading
        writer.close()
        return answer, list(seen)

    yield exchange
    server.request_exit()
    await serving


def statuses(answer: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)]


@pytest.mark.parametrize("size", [10_000, 7])
@pytest.mark.parametrize("name", REFUSED)
async def test_a_request_that_servers_may_read_differently_is_refused_and_its_connection_closed(
    send: Send, name: Any, size: int
) -> None:
    data, status = REFUSED[name]
    answer, seen = await send(data + NEXT, size)
    assert statuses(answer) == [status], "nothing behind it is answered"
    assert [one for one in seen if "next" in one or "hidden" in one] == []
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    codes = {400: "bad_http", 417: "expectation_failed", 501: "unsupported_transfer_coding"}
    assert json.loads(body)["error"]["code"] == codes.get(status, "unsupported_http_version")


@pytest.mark.parametrize("size", [10_000, 7])
@pytest.mark.parametrize("name", SERVED)
async def test_a_request_is_served_with_all_of_its_body_and_so_is_the_next(send: Send, name: Any, size: int) -> None:
    data, expected = SERVED[name]
    answer, seen = await send(data + NEXT, size)
    assert seen == [*expected, "GET /next 0"]
    assert statuses(answer) == [200] * len(seen)


@pytest.mark.parametrize("name", ENDED_AFTER_ONE)
async def test_behind_a_last_request_nothing_is_served(send: Send, name: Any) -> None:
    answer, seen = await send(ENDED_AFTER_ONE[name], 10_000)
    assert (statuses(answer), seen) == ([200], ["GET /a 0"])


async def test_only_http_1_1_clients_get_100_continue(
    send: Send,
) -> None:
    data = post(b"Expect: 100-continue\r\nConnection: close\r\nContent-Length: 3\r\n", b"abc")
    assert statuses((await send(data, 10_000))[0]) == [100, 200]
    assert statuses((await send(data.replace(b"HTTP/1.1", b"HTTP/1.0"), 10_000))[0]) == [200]
