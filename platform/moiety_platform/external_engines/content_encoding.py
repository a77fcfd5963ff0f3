"""HTTP content encodings of answers. None is requested, but gzip and deflate are decoded where a server uses them.

Decoded output is bounded piece by piece, and the event loop runs between pieces. A few bytes that expand to gigabytes
neither fill the memory nor block other requests.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncGenerator, Iterator

import httpx

from moiety_platform.external_engines.piece import MalformedAnswer

MAX_PIECE_BYTES = 64 * 1024
ZLIB, RAW_DEFLATE, GZIP = zlib.MAX_WBITS, -zlib.MAX_WBITS, 16 + zlib.MAX_WBITS
ZLIB_HEAD_BYTES = 2
NO_ENCODING = {"Accept-Encoding": "identity"}  # compression would delay events


class ContentDecoder:
    """Decoder of one body, which may have several compressed members."""

    def __init__(self, encoding: str) -> None:
        """Create a decoder. Raises MalformedAnswer for an unknown encoding."""
        if encoding not in ("gzip", "x-gzip", "deflate"):
            raise MalformedAnswer("its content encoding is neither gzip nor deflate, and none was asked for")
        self._format = None if encoding == "deflate" else GZIP
        self._head = b""  # first bytes of a body whose format is not yet known
        self._member = zlib.decompressobj(GZIP)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield decoded pieces of at most MAX_PIECE_BYTES. Raises MalformedAnswer for data of another encoding."""
        if self._format is None:
            self._head = data = self._head + data
            if len(data) < ZLIB_HEAD_BYTES:
                return
            self._format = _format_of(data)
            self._member = zlib.decompressobj(self._format)
        while True:
            try:
                piece = self._member.decompress(data, MAX_PIECE_BYTES)
            except zlib.error:
                raise MalformedAnswer("its content is not of its content encoding") from None
            if piece:
                yield piece
            if self._member.eof:
                data = self._member.unused_data.lstrip(b"\0")  # members may be padded
                if not data:
                    return
                self._member = zlib.decompressobj(self._format)
                continue
            data = self._member.unconsumed_tail
            if not data and len(piece) < MAX_PIECE_BYTES:
                return


def _format_of(head: bytes) -> int:
    """Return the format of a "deflate" body.

    The standard means zlib's format, but some servers send raw deflate. Only zlib's format has a header.
    """
    has_header = head[0] & 15 == zlib.DEFLATED and (head[0] << 8 | head[1]) % 31 == 0
    return ZLIB if has_header else RAW_DEFLATE


async def content_of(response: httpx.Response) -> AsyncGenerator[bytes]:
    """Yield pieces of the decoded body as they arrive. Raises MalformedAnswer."""
    told = response.headers.get("content-encoding", "").lower().split(",")
    encodings = [one for one in map(str.strip, told) if one not in ("", "identity")]
    if not encodings:
        async for chunk in response.aiter_raw():
            yield chunk
        return
    decoder = ContentDecoder(", ".join(encodings))
    async for chunk in response.aiter_raw():
        for number, piece in enumerate(decoder.feed(chunk)):
            if number:
                await asyncio.sleep(0)
            yield piece
