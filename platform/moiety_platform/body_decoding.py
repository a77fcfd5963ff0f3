"""Request bodies with a content coding: decoded for every route, before anything reads them.

Limits hold for the decoded bytes. Decoding stops at the limit, so that a body costs no more than an uncompressed one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from litestar.types import Receive, ReceiveMessage

from moiety_platform.content_codings import CODINGS, ContentDecoder, UndecodableContent, UnknownCoding
from moiety_platform.errors import BadRequest, PlatformError, TooLarge, UnsupportedContentCoding

INLINE_BYTES = 64 * 1024  # decoded by the event loop; threads decode the rest of a body
THREAD_PIECES = 16  # decoded by one call in a thread
MAX_EXCESS_FACTOR = (
    16  # times the limit, up to which the rest of an excessive body is read, so that the client gets the error
)
MAX_EXPANSION = 2  # times the content, and so many bytes more, that its encoded form may have: empty blocks have none
MAX_OVERHEAD_BYTES = 1024 * 1024
BAD_CODING = "invalid_content_encoding"
MAX_SHOWN = 64  # characters of an unknown coding in an error message


class DecodedBody:
    """A `receive` that decodes the body of a request. Errors are raised to the reader of the body."""

    def __init__(self, receive: Receive, coding: str, max_bytes: int | None) -> None:
        """Create a reader. `max_bytes` is the limit on the decoded body; None leaves it to the reader."""
        self._receive = receive
        self._coding = coding
        self._max_bytes = max_bytes
        self._decoder: ContentDecoder | None = None
        self._pieces: Iterator[bytes] = iter(())
        self._num_bytes = self._num_encoded = 0
        self._is_last = False  # the last part of the encoded body has been received

    async def __call__(self) -> ReceiveMessage:
        """Return the next message. Raises UnsupportedContentCoding, BadRequest or TooLarge."""
        if self._decoder is None:
            self._decoder = await self._new_decoder()
        while True:
            piece = await self._next_piece()
            if piece is not None:
                self._num_bytes += len(piece)
                if self._max_bytes is not None and self._num_bytes > self._max_bytes:
                    await self._drain(self._max_bytes)
                    message = f"the body is larger than the {self._max_bytes} bytes that this server accepts; send less"
                    raise TooLarge(f"decoded, {message}")
                return {"type": "http.request", "body": piece, "more_body": True}
            if self._is_last:
                return self._end(self._decoder)
            message_received = await self._receive()
            if message_received["type"] != "http.request":
                return message_received
            self._is_last = not message_received["more_body"]
            self._num_encoded += len(message_received["body"])
            if self._num_encoded > MAX_EXPANSION * self._num_bytes + MAX_OVERHEAD_BYTES:
                await self._drain(self._max_bytes or MAX_OVERHEAD_BYTES)
                raise self._bad("has almost no content")
            self._pieces = self._decoder.feed(message_received["body"])

    async def _new_decoder(self) -> ContentDecoder:
        try:
            return ContentDecoder(self._coding)
        except UnknownCoding:
            await self._drain(self._max_bytes or INLINE_BYTES)
            raise UnsupportedContentCoding(
                f"the content encoding {self._coding[:MAX_SHOWN]!r} is not supported; send the body with one of "
                f"{', '.join(CODINGS)}, or without"
            ) from None

    async def _next_piece(self) -> bytes | None:
        """Return decoded bytes, None if the received part has no more."""
        try:
            if self._num_bytes < INLINE_BYTES:
                return next(self._pieces, None)
            return await asyncio.to_thread(_join_pieces, self._pieces)
        except UndecodableContent:
            raise self._bad("is not valid") from None

    def _end(self, decoder: ContentDecoder) -> ReceiveMessage:
        if not decoder.is_complete:
            raise self._bad("ends early")
        return {"type": "http.request", "body": b"", "more_body": False}

    def _bad(self, what: str) -> PlatformError:
        return BadRequest(
            f"the body's {self._coding} data {what}; compress the whole body as its Content-Encoding says, or send it "
            "without one",
            code=BAD_CODING,
        )

    async def _drain(self, max_bytes: int) -> None:
        """Read and drop the rest of the encoded body, up to MAX_EXCESS_FACTOR times the limit."""
        num_bytes = 0
        while not self._is_last and num_bytes <= MAX_EXCESS_FACTOR * max_bytes:
            message = await self._receive()
            if message["type"] != "http.request":
                return
            num_bytes += len(message["body"])
            self._is_last = not message["more_body"]


def _join_pieces(pieces: Iterator[bytes]) -> bytes | None:
    found = [piece for _, piece in zip(range(THREAD_PIECES), pieces, strict=False)]
    return b"".join(found) or None
