"""HTTP content encodings of answers: none is asked for, and gzip and deflate are decoded where a server uses them.

What comes out is bounded piece by piece, and the event loop gets its turn between pieces, so that a few bytes which
expand to gigabytes fill no memory and hold up nobody.
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
NO_ENCODING = {"Accept-Encoding": "identity"}  # compressed events would wait for each other


class ContentDecoder:
    """Decodes one body, which may consist of several compressed members."""

    def __init__(self, encoding: str) -> None:
        """Raises MalformedAnswer for an encoding that is not known."""
        if encoding not in ("gzip", "x-gzip", "deflate"):
            raise MalformedAnswer("its content encoding is neither gzip nor deflate, and none was asked for")
        self._format = None if encoding == "deflate" else GZIP
        self._head = b""  # of a body whose format is not known yet
        self._member = zlib.decompressobj(GZIP)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Pieces of at most MAX_PIECE_BYTES. Raises MalformedAnswer for what is not encoded so."""
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
    """By "deflate" the standard means zlib's format, and some servers the bare one: only the former has a header."""
    has_header = head[0] & 15 == zlib.DEFLATED and (head[0] << 8 | head[1]) % 31 == 0
    return ZLIB if has_header else RAW_DEFLATE


async def content_of(response: httpx.Response) -> AsyncGenerator[bytes]:
    """The decoded body, in pieces as it comes. Raises MalformedAnswer."""
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
