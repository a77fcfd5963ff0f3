"""Compressed content is decoded in small pieces, however it is split, and invalid content is refused."""

from __future__ import annotations

import gzip
import random
import sys
import zlib

import pytest

from moiety_platform.content_codings import (
    MAX_MEMBERS,
    MAX_PIECE_BYTES,
    ContentDecoder,
    UndecodableContent,
    UnknownCoding,
)

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

TEXT = random.Random(0).randbytes(3000) + b"a" * 200_000 + random.Random(1).randbytes(3000)
BARE = zlib.compress(TEXT, wbits=-zlib.MAX_WBITS)


def decoded(coding: str, data: bytes, size: int) -> tuple[bytes, ContentDecoder]:
    decoder = ContentDecoder(coding)
    chunks = [data[at : at + size] for at in range(0, len(data), size)]
    pieces = [piece for chunk in chunks for piece in decoder.feed(chunk)]
    assert max(map(len, pieces), default=0) <= MAX_PIECE_BYTES
    return b"".join(pieces), decoder


@pytest.mark.parametrize(
    ("coding", "data", "text"),
    [
        ("gzip", gzip.compress(TEXT), TEXT),
        ("X-Gzip", gzip.compress(TEXT[:50]) + gzip.compress(TEXT[50:]) + b"\0\0", TEXT),
        ("deflate", zlib.compress(TEXT), TEXT),
        ("deflate", BARE, TEXT),
        ("zstd", zstd.compress(TEXT), TEXT),
        ("zstd", zstd.compress(TEXT[:50]) + zstd.compress(TEXT[50:]), TEXT),
        ("zstd", zstd.compress(b""), b""),
        ("gzip", b"", b""),
    ],
    ids=["gzip", "members", "zlib", "bare", "zstd", "frames", "nothing", "empty"],
)
def test_content_is_decoded_however_it_is_cut(coding: str, data: bytes, text: bytes) -> None:
    for size in (1, 7, len(data) or 1):
        found, decoder = decoded(coding, data, size)
        assert found == text
        assert decoder.is_complete


@pytest.mark.parametrize(
    ("coding", "data"), [("gzip", gzip.compress(TEXT)), ("deflate", BARE), ("zstd", zstd.compress(TEXT))]
)
def test_content_that_breaks_off_is_not_complete(coding: str, data: bytes) -> None:
    for length in (1, 2, 10, len(data) - 1):
        assert not decoded(coding, data[:length], 64)[1].is_complete


def test_content_that_expands_without_end_comes_in_small_pieces() -> None:
    zeros = bytes(64 << 20)
    for coding, bomb in (("gzip", gzip.compress(zeros)), ("zstd", zstd.compress(zeros))):
        pieces = ContentDecoder(coding).feed(bomb)
        assert max(len(next(pieces)) for _ in range(10)) <= MAX_PIECE_BYTES


def test_content_of_another_coding_is_refused() -> None:
    for name in ("br", "gzip, gzip", ""):
        with pytest.raises(UnknownCoding):
            ContentDecoder(name)
    for coding in ("gzip", "deflate", "zstd"):
        with pytest.raises(UndecodableContent):
            list(ContentDecoder(coding).feed(b'{"no": "such content"}'))


def test_more_members_than_anybody_needs_are_refused() -> None:
    member = gzip.compress(b"")
    assert list(ContentDecoder("gzip").feed(member * MAX_MEMBERS)) == []
    with pytest.raises(UndecodableContent):
        list(ContentDecoder("gzip").feed(member * (MAX_MEMBERS + 1)))


def test_a_frame_that_needs_much_memory_is_refused() -> None:
    options = {zstd.CompressionParameter.window_log: 27, zstd.CompressionParameter.content_size_flag: 0}
    compressor = zstd.ZstdCompressor(options=options)
    frame = compressor.compress(b"x" * 1000) + compressor.flush()
    with pytest.raises(UndecodableContent):
        list(ContentDecoder("zstd").feed(frame))
