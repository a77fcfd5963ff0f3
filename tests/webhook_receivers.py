"""A receiver of webhooks on a loopback port."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from typing import Any


class Receiver:
    """Keeps what is posted to it, answers `status` with `text`, and drops every connection while it is `away`."""

    def __init__(self) -> None:
        self.url = ""
        self.status = "204 No Content"
        self.text = ""
        self.away = False
        self.num_asked = 0
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.arrived: asyncio.Queue[None] = asyncio.Queue()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        self.num_asked += 1
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:-2])}
        body = await reader.readexactly(int(headers["content-length"]))
        if not self.away:
            self.got.append((headers, body))
            self.arrived.put_nowait(None)
            text = self.text.encode()
            fields = f"HTTP/1.1 {self.status}\r\nContent-Length: {len(text)}\r\nLocation: {self.url}/moved\r\n\r\n"
            writer.write(fields.encode() + text)
            await writer.drain()
        writer.close()

    def events(self, secret: str) -> list[dict[str, Any]]:
        """Return the posted bodies, after a check of each signature as a receiver makes it."""
        for headers, body in self.got:
            stamp, _, mac = headers["moiety-signature"].partition(",v1=")
            assert headers["content-type"] == "application/json"
            expected = hmac.new(secret.encode(), stamp.removeprefix("t=").encode() + b"." + body, hashlib.sha256)
            assert hmac.compare_digest(mac, expected.hexdigest())
        return [json.loads(body) for _, body in self.got]
