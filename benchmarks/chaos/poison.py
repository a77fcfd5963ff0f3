"""Invalid requests, written to the socket by hand where a client would refuse to send them.

A refusal with 4xx, or a closed connection, is correct. A 500, or an answer of 200, is a fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Callable

from chaos.stage import GATEWAY_PORT, NUM_GATEWAYS, SCRIPTED, Stage

CLOSED = 0  # the connection was, without an answer
LIMIT_S = 60.0  # for an answer
SLOW_EVERY_S = 0.3
PATH = "/v1/chat/completions"

Body = Callable[[random.Random], bytes]


def _chat(**more: object) -> bytes:
    return json.dumps(
        {"model": SCRIPTED, "messages": [{"role": "user", "content": "x"}], "max_tokens": 4} | more
    ).encode()


BODIES: dict[str, Body] = {
    "malformed": lambda rng: _chat()[: rng.randint(1, 60)],
    "no_json": lambda rng: rng.randbytes(300),
    "deep": lambda _: b'{"model": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "invalid_utf8": lambda _: b'{"model": "scripted", "messages": [{"role": "user", "content": "\xff\xfe\xc3"}]}',
    "lone_surrogate": lambda _: b'{"model": "scripted", "messages": [{"role": "user", "content": "\\ud800"}]}',
    "huge_body": lambda _: _chat(user="y" * 5_000_000),
    "huge_number": lambda _: _chat().replace(b'"max_tokens": 4', b'"max_tokens": ' + b"9" * 5000),
    "wrong_types": lambda _: _chat(messages={"role": ["user"]}, temperature="hot", stop=7),
    "too_many_choices": lambda _: _chat(n=10**6),
    "too_long": lambda _: _chat(messages=[{"role": "user", "content": "z" * 900_000}]),
    "no_such_model": lambda _: _chat(model="\u202e" * 200),
    "catastrophic": lambda _: _chat(response_format={"type": "json_schema", "json_schema": {"schema": _endless()}}),
}


def _endless() -> dict[str, object]:
    """Return a schema that refers to itself through a hundred levels, and an expression of exponential cost."""
    schema: dict[str, object] = {"type": "string", "pattern": "(((((a+)+)+)+)+)+$"}
    for _ in range(50):
        schema = {"anyOf": [schema, {"$ref": "#"}]}
    return schema


class Poison:
    """Sender of invalid requests until it is stopped; `answers` counts the answers by kind."""

    def __init__(self, stage: Stage, key: str, seed: int) -> None:
        self.answers: Counter[tuple[str, int]] = Counter()
        self._stage, self._key, self._rng = stage, key, random.Random(seed)

    @property
    def harm(self) -> dict[str, int]:
        """Return the answers that are faults, by kind and status."""
        return {f"{kind} {status}": n for (kind, status), n in self.answers.items() if status >= 500 or status == 200}

    async def run(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        await asyncio.gather(self._send_bodies(until_s), *(self._loris(until_s) for _ in range(20)), self._requests())

    async def _send_bodies(self, until_s: float) -> None:
        while time.monotonic() < until_s:
            for kind, body in BODIES.items():
                await self._count(kind, self._head(len(data := body(self._rng))) + data)
                await asyncio.sleep(0.02)

    async def _requests(self) -> None:
        """Send requests that are not HTTP, or try to smuggle a second request."""
        for kind, data in {
            "no_http": self._rng.randbytes(2000),
            "long_line": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
            "many_headers": b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 5000 + b"\r\n",
            "two_lengths": self._head(10, "Content-Length: 20\r\n") + b"0123456789",
            "smuggled": self._head(10, "Transfer-Encoding: chunked\r\n") + b"5\r\n01234\r\n",
            "bad_chunk": self._head(None, "Transfer-Encoding: chunked\r\n") + b"zz\r\nabc\r\n",
        }.items():
            await self._count(kind, data)

    async def _loris(self, until_s: float) -> None:
        """Open a request and send a byte now and then, in the head or in the body."""
        data = self._head(4000) if self._rng.random() < 0.5 else b"POST /v1/chat/completions HTTP/1.1\r\n"
        with contextlib.suppress(OSError):
            _, writer = await self._open()
            writer.write(data)
            while time.monotonic() < until_s and not writer.is_closing():
                writer.write(b"X" if data.endswith(b"\r\n\r\n") else b"X-A: b\r\n")
                await asyncio.sleep(SLOW_EVERY_S)
            writer.transport.abort()

    def _head(self, length: int | None, more: str = "") -> bytes:
        lines = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {self._key}\r\n{more}"
        lines += "Content-Type: application/json\r\n" + ("" if length is None else f"Content-Length: {length}\r\n")
        return f"{lines}\r\n".encode()

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        number = self._rng.randrange(NUM_GATEWAYS)
        return await asyncio.open_connection(self._stage.wires.peers[f"gateway-{number}"].address, GATEWAY_PORT)

    async def _count(self, kind: str, data: bytes) -> None:
        status = CLOSED
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            async with asyncio.timeout(LIMIT_S):
                reader, writer = await self._open()
                try:
                    with contextlib.suppress(OSError):  # it may refuse before it has read all
                        writer.write(data)
                        await writer.drain()
                    line = await reader.readline()
                    status = int(line.split()[1]) if line.startswith(b"HTTP/1.1 ") else CLOSED
                finally:
                    writer.transport.abort()
        self.answers[kind, status] += 1
