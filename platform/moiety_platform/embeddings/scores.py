"""Scores from vectors and logits. Pure.

Vectors stay little-endian float32 bytes, and numbers are read from them only while a score is computed.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from operator import mul

from moiety_platform.inference.generation import TextPair


def activated(logits: Sequence[float], activation: str) -> list[float]:
    """Return the scores of logits: by `sigmoid`, `softmax`, or as they are."""
    if activation == "sigmoid":
        return [0.5 * (1.0 + math.tanh(0.5 * logit)) for logit in logits]
    if activation == "softmax":
        largest = max(logits)
        powers = [math.exp(logit - largest) for logit in logits]
        total = sum(powers)
        return [power / total for power in powers]
    return list(logits)


def numbers_of(vector: bytes) -> array[float]:
    """Return the numbers of a little-endian float32 vector."""
    numbers = array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def cosines(pairs: Sequence[TextPair], vectors: Mapping[str, bytes]) -> Iterator[float]:
    """Yield the cosine of the vectors of each pair's texts, 0 if one is zero. The numbers of two vectors are in memory.

    The vectors need not be unit vectors.
    """
    text, first, first_length = "", array("f"), 0.0
    for pair in pairs:
        if pair.first != text:
            text, first = pair.first, numbers_of(vectors[pair.first])
            first_length = math.hypot(*first)
        second = numbers_of(vectors[pair.second])
        length = first_length * math.hypot(*second)
        yield max(-1.0, min(1.0, sum(map(mul, first, second)) / length)) if length else 0.0
