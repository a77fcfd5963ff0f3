"""HTTP content encodings of answers: none is asked for, and gzip and deflate are decoded where a server uses them.

What comes out is bounded piece by piece, and the event loop gets its turn between pieces, so that a few bytes which
expand to gigabytes fill no memory and hold up nobody.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncGenerator, Iterator

import httpx

from moiety_platform.engine_client.foreign.piece import BadAnswer

MAX_PIECE_BYTES = 64 * 1024
GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS
RAW_DEFLATE = -zlib.MAX_WBITS
NO_ENCODING = {"Accept-Encoding": "identity"}  # compressed events would wait for each other


class ContentDecoder:
    """Decodes one body, which may consist of several compressed members."""

    def __init__(self, encoding: str) -> None:
        """Raises BadAnswer for an encoding that is not known."""
        self._is_deflate = encoding == "deflate"
        if encoding not in ("gzip", "x-gzip", "deflate"):
            raise BadAnswer("its content encoding is neither gzip nor deflate, and none was asked for")
        self._member = zlib.decompressobj(GZIP_OR_ZLIB)
        self._has_begun = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Pieces of at most MAX_PIECE_BYTES. Raises BadAnswer for what is not encoded so."""
        while True:
            piece = self._decompress(data)
            if piece:
                yield piece
            if self._member.eof:
                data = self._member.unused_data.lstrip(b"\0")  # members may be padded
                if not data:
                    return
                self._member = zlib.decompressobj(GZIP_OR_ZLIB)
                continue
            data = self._member.unconsumed_tail
            if not data and len(piece) < MAX_PIECE_BYTES:
                return

    def _decompress(self, data: bytes) -> bytes:
        try:
            piece = self._member.decompress(data, MAX_PIECE_BYTES)
        except zlib.error:
            if not self._is_deflate or self._has_begun:
                raise BadAnswer("its content is not of its content encoding") from None
            self._member, self._has_begun = zlib.decompressobj(RAW_DEFLATE), True  # as some servers mean "deflate"
            return self._decompress(data)
        self._has_begun = self._has_begun or bool(piece)
        return piece


async def content_of(response: httpx.Response) -> AsyncGenerator[bytes]:
    """The decoded body, in pieces as it comes. Raises BadAnswer."""
    encoding = response.headers.get("content-encoding", "").strip().lower()
    if encoding in ("", "identity"):
        async for chunk in response.aiter_raw():
            yield chunk
        return
    decoder = ContentDecoder(encoding)
    async for chunk in response.aiter_raw():
        for number, piece in enumerate(decoder.feed(chunk)):
            if number:
                await asyncio.sleep(0)
            yield piece
