"""Decoders of HTTP content codings (RFC 9110, 8.4): gzip, deflate and zstd.

Decoded output comes in bounded pieces, so that a few bytes that expand to gigabytes fill no memory. How many pieces are
read is the caller's decision.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator, Mapping
from typing import Protocol

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

MAX_PIECE_BYTES = 64 * 1024
CODINGS = ("gzip", "deflate", "zstd")  # in the order of preference
ZLIB, RAW_DEFLATE, GZIP = zlib.MAX_WBITS, -zlib.MAX_WBITS, 16 + zlib.MAX_WBITS
MAX_MEMBERS = 1024  # of one body; each costs time, however small it is
MAX_WINDOW_LOG = 23  # 8 MiB, which decoders should support (RFC 8878, 3.1.1.1.2); memory of a decoder

_ZSTD_OPTIONS: Mapping[int, int] = {zstd.DecompressionParameter.window_log_max: MAX_WINDOW_LOG}
_OTHER_NAMES = {"x-gzip": "gzip"}
_ZLIB_HEAD_BYTES = 2


class UnknownCoding(Exception):
    """The content coding is not in CODINGS."""


class UndecodableContent(Exception):
    """The content does not have its content coding."""


class _Member(Protocol):
    """One compressed member: a gzip member, a zlib stream or a zstd frame."""

    @property
    def eof(self) -> bool: ...

    @property
    def needs_input(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class _ZlibMember:
    """A member in one of zlib's formats, which keeps the input that it has not decoded yet."""

    def __init__(self, window_bits: int) -> None:
        self._member = zlib.decompressobj(window_bits)
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return self._member.eof

    @property
    def unused_data(self) -> bytes:
        return self._member.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        piece = self._member.decompress(self._member.unconsumed_tail + data, max_length)
        self.needs_input = not self._member.unconsumed_tail and len(piece) < max_length
        return piece


class ContentDecoder:
    """Decoder of one body, which may have several compressed members."""

    def __init__(self, coding: str) -> None:
        """Create a decoder. Raises UnknownCoding."""
        name = coding.strip().lower()
        self.coding = _OTHER_NAMES.get(name, name)
        if self.coding not in CODINGS:
            raise UnknownCoding(coding)
        self._head = b""  # first bytes of a deflate body, until they tell its format
        self._member: _Member | None = None
        self._is_empty = True
        self._num_members = 0

    @property
    def is_complete(self) -> bool:
        """True if the body may end here. An empty body is complete."""
        return (self._is_empty and not self._head) or (self._member is not None and self._member.eof)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield decoded pieces of at most MAX_PIECE_BYTES. Raises UndecodableContent."""
        if self._member is None or self._member.eof:
            data = self._head + (data if self._is_empty else data.lstrip(b"\0"))  # members may be padded
            if not self._starts_member(data):
                return
        member = self._member
        while member is not None:
            try:
                piece = member.decompress(data, MAX_PIECE_BYTES)
            except (zlib.error, zstd.ZstdError):
                raise UndecodableContent(self.coding) from None
            if piece:
                yield piece
            data = b""
            if member.eof:
                data = member.unused_data.lstrip(b"\0")
                if not self._starts_member(data):
                    return
                member = self._member
            elif member.needs_input:
                return

    def _starts_member(self, data: bytes) -> bool:
        """Begin a new member with this data, and return whether there is enough to know how.

        Raises UndecodableContent if there are too many.
        """
        if not data:
            return False
        if self.coding == "deflate" and len(data) < _ZLIB_HEAD_BYTES and self._is_empty:
            self._head = data
            return False
        self._head, self._is_empty = b"", False
        self._num_members += 1
        if self._num_members > MAX_MEMBERS:
            raise UndecodableContent(self.coding)
        if self.coding == "zstd":
            self._member = zstd.ZstdDecompressor(options=_ZSTD_OPTIONS)
        else:
            self._member = _ZlibMember(GZIP if self.coding == "gzip" else _deflate_format(data))
        return True


def _deflate_format(head: bytes) -> int:
    """Return the format of a "deflate" body.

    The standard means zlib's format, but some senders use raw deflate. Only zlib's format has a header.
    """
    has_header = len(head) >= _ZLIB_HEAD_BYTES and head[0] & 15 == zlib.DEFLATED and (head[0] << 8 | head[1]) % 31 == 0
    return ZLIB if has_header else RAW_DEFLATE
