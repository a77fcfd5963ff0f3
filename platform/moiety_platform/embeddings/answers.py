"""Answers of `/v1/embeddings`: vectors as base64 or numbers, complete or shortened."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence

import msgspec

from moiety_platform.inference.run import Usage

VECTORS_A_PIECE = 16


def answer_pieces(
    vectors: Sequence[bytes], *, model: str, usage: Usage, dimensions: int | None, as_base64: bool, to_unit: bool = True
) -> Iterator[bytes]:
    """Yield the body, VECTORS_A_PIECE vectors at a time.

    `vectors` are little-endian float32, in the order of the inputs; shortened ones become unit vectors `to_unit`.
    """
    yield b'{"object":"list","data":['
    for first in range(0, len(vectors), VECTORS_A_PIECE):
        entries = [
            _entry(index, shortened(vector, dimensions, to_unit), as_base64)
            for index, vector in enumerate(vectors[first : first + VECTORS_A_PIECE], start=first)
        ]
        yield (b"," if first else b"") + b",".join(entries)
    end = {
        "model": model,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "total_tokens": usage.prompt_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        },
    }
    yield b"]," + msgspec.json.encode(end)[1:]


def shortened(vector: bytes, dimensions: int | None, to_unit: bool = True) -> bytes:
    """Return the first `dimensions` numbers of a vector, `to_unit` divided by their length. Zeros stay zeros."""
    if dimensions is None or dimensions == len(vector) // 4:
        return vector
    if not to_unit:
        return vector[: 4 * dimensions]
    numbers = struct.unpack_from(f"<{dimensions}f", vector)
    length = math.hypot(*numbers) or 1.0
    return struct.pack(f"<{dimensions}f", *(number / length for number in numbers))


def _entry(index: int, vector: bytes, as_base64: bool) -> bytes:
    numbers = vector if as_base64 else struct.unpack(f"<{len(vector) // 4}f", vector)  # bytes are encoded as base64
    return msgspec.json.encode({"object": "embedding", "index": index, "embedding": numbers})
