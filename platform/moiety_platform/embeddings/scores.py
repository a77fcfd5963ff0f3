"""Scores from vectors and logits. Pure."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
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


def numbers_of(vector: bytes) -> tuple[float, ...]:
    """Return the numbers of a little-endian float32 vector."""
    return struct.unpack(f"<{len(vector) // 4}f", vector)


def cosines(pairs: Sequence[TextPair], vectors: Mapping[str, bytes]) -> list[float]:
    """Return the cosine of the unit vectors of each pair's texts."""
    numbers = {text: numbers_of(vector) for text, vector in vectors.items()}
    return [sum(map(mul, numbers[pair.first], numbers[pair.second])) for pair in pairs]
