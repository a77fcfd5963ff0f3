"""A steady load of small requests of all tenants of a large store."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from open_loop import OpenLoop, Sent

from large.requests import MODEL, Sender

RATE = 50  # requests a second


def requests_of(senders: list[Sender], address: str) -> Iterator[tuple[int, bytes]]:
    """Yield small requests of all tenants in wire form."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Weigh every share."}], "max_tokens": 16}
    content = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
    rng = random.Random(5)
    while True:
        index = rng.randrange(len(senders))
        own = f"Authorization: Bearer {senders[index].key}\r\nContent-Length: {len(content)}\r\n\r\n"
        yield index, (head + own).encode() + content


def send(gateway: str, senders: list[Sender], seconds: float) -> list[Sent]:
    """Send an open loop for this number of seconds, and wait until the last answer has arrived."""
    parts = urlsplit(gateway)
    loop = OpenLoop(parts.hostname or "", parts.port or 0)

    async def run() -> list[Sent]:
        sent = await loop.run(requests_of(senders, parts.netloc), RATE, seconds)
        await loop.wait_idle(30)
        return sent

    return asyncio.run(run())


def send_until(gateway: str, senders: list[Sender], ended: Any, done: Any) -> None:
    """Send open loops of some seconds until stopped; `done` counts them."""
    while not ended.is_set():
        send(gateway, senders, 2.0)
        done.value += 1
