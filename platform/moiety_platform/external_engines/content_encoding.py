"""HTTP content encodings of answers. None is requested, but known ones are decoded where a server uses them.

The event loop runs between the bounded pieces of decoded output.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import httpx

from moiety_platform.content_codings import CODINGS, ContentDecoder, UndecodableContent, UnknownCoding
from moiety_platform.external_engines.dialect import MalformedAnswer

NO_ENCODING = {"Accept-Encoding": "identity"}  # compression would delay events


async def content_of(response: httpx.Response) -> AsyncGenerator[bytes]:
    """Yield pieces of the decoded body as they arrive. Raises MalformedAnswer."""
    told = response.headers.get("content-encoding", "").lower().split(",")
    encodings = [one for one in map(str.strip, told) if one not in ("", "identity")]
    if not encodings:
        async for chunk in response.aiter_raw():
            yield chunk
        return
    try:
        decoder = ContentDecoder(", ".join(encodings))
        async for chunk in response.aiter_raw():
            for number, piece in enumerate(decoder.feed(chunk)):
                if number:
                    await asyncio.sleep(0)
                yield piece
    except UnknownCoding:
        known = ", ".join(CODINGS)
        raise MalformedAnswer(f"its Content-Encoding must be one of {known}; none was requested") from None
    except UndecodableContent:
        raise MalformedAnswer("its content cannot be decoded by its Content-Encoding") from None
