"""HEAD requests: answered as GET is, without the body (RFC 9110, 9.3.2)."""

from __future__ import annotations

import asyncio
from typing import cast

from litestar.types import ASGIApp, Message, Receive, ReceiveMessage, Scope, Send


async def answer_head(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Let the application answer a GET request, and send only the head of its response.

    The application sees a disconnect once the head is sent, so that it does not read a file that is not sent.
    """
    is_answered = asyncio.Event()
    has_body_been_read = False

    async def receive_nothing() -> ReceiveMessage:
        nonlocal has_body_been_read
        if has_body_been_read:
            await is_answered.wait()
            return {"type": "http.disconnect"}
        has_body_been_read = True
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send_head(message: Message) -> None:
        if is_answered.is_set():
            return
        await send(message)
        if message["type"] == "http.response.start":
            is_answered.set()
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    as_get = {**scope, "method": "GET"}
    await app(cast(Scope, as_get), receive_nothing, send_head)
