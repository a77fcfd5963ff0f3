"""A PNG that takes long to decode and little to make."""

from __future__ import annotations

import functools
import struct
import zlib

import numpy as np

SIDE = 6000
PAETH = 4


def png_of(width: int, height: int, rows: bytes) -> bytes:
    """Return a PNG in RGB with this size in its head, whose `rows`, each after its filter's number, may be others."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    compressed = chunk(b"IDAT", zlib.compress(rows, 1))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + compressed + chunk(b"IEND", b"")


@functools.cache
def slow_png() -> bytes:
    """Return an image of 36 megapixels in 2 MB: one random row again and again, by the filter that takes longest."""
    row = np.random.default_rng(0).integers(0, 256, 3 * SIDE, dtype=np.uint8).tobytes()
    return png_of(SIDE, SIDE, (bytes([PAETH]) + row) * SIDE)
