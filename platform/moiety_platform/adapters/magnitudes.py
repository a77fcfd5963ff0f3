"""Magnitude check of an adapter's weights, part by part while an upload is read. Knows no engine.

Only the highest byte of each number is read: it holds the sign and the upper bits of the exponent, so it bounds the
magnitude, and NaN and infinity exceed every bound. A file of hundreds of megabytes is thus read without an array
library and is never in memory as a whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from moiety_platform.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

# The largest output of a product's two factors and scale for inputs of magnitude 1. Training leaves values below 1e4;
# squares of sums of these outputs, as norms compute them, must fit float32 beside the model's own values.
MAX_GAIN = 1e12
_WITHOUT_SIGN = bytes(byte & 0x7F for byte in range(256))
# by safetensors dtype: bytes per number, bits of the exponent, bias of the exponent
_FLOATS = {"F64": (8, 11, 1023), "F32": (4, 8, 127), "BF16": (2, 8, 127), "F16": (2, 5, 15)}
_BITS, _ALL_ONES = 7, 0x7F  # bits of the highest byte without the sign


def bound_of(byte: int, dtype: str) -> float:
    """Return a number above every magnitude with this highest byte, without its sign.

    Infinity if the number can be infinite or NaN. For F64, whose exponent has four more bits in the next byte, return
    the least magnitude instead, so that nothing is refused that the engine, which reads all bits, would accept.
    """
    _, bits, bias = _FLOATS[dtype]
    if dtype == "F64":
        return math.inf if byte == _ALL_ONES else 2.0 ** ((byte << (bits - _BITS)) - bias)
    # the byte holds the whole exponent and the first bits of the fraction, or only the exponent's first bits
    exponent = byte >> (_BITS - bits) if bits < _BITS else ((byte + 1) << (bits - _BITS)) - 1
    return math.inf if exponent >= (1 << bits) - 1 else 2.0 ** (exponent - bias + 1)


@dataclass(slots=True)
class _Factors:
    """All lora_A, or all lora_B, of a file. `width` is the largest number of inputs."""

    bound: float = 0.0
    width: int = 0


@dataclass(slots=True)
class Magnitudes:
    """Bounds of a file's factors. `entries` are the entries of its safetensors header, whose data begin at `begin`."""

    entries: Mapping[str, Any]
    begin: int
    _factors: dict[str, _Factors] = field(default_factory=lambda: {"A": _Factors(), "B": _Factors()})

    def take(self, start: int, data: bytes) -> None:
        """Check the next part of the file, which begins at `start`. Raises BadRequest for NaN and infinity."""
        for name, entry in self.entries.items():
            size = _FLOATS.get(entry["dtype"], (0,))[0]
            first, end = (self.begin + offset for offset in entry["data_offsets"])
            if size and first < start + len(data) and end > start:
                self._check_values(name, entry, data, size, first - start, end - start)

    def _check_values(self, name: str, entry: Mapping[str, Any], data: bytes, size: int, first: int, end: int) -> None:
        place = first + size - 1  # offset in `data` of the first number's highest byte; negative: in an earlier part
        if place < 0:
            place += -(place // size) * size
        highest = max(data[place : min(end, len(data)) : size].translate(_WITHOUT_SIGN), default=0)
        bound = bound_of(highest, entry["dtype"])
        if math.isinf(bound):
            raise BadRequest(
                f"{name[:100]!r} has numbers that are not finite or close to the largest {entry['dtype']}; train the "
                "adapter again, or save it from a step before training diverged"
            )
        factors = self._factors["A" if name.endswith(".lora_A.weight") else "B"]
        factors.bound = max(factors.bound, bound)
        factors.width = max(factors.width, int(entry["shape"][-1]))

    def check_gain(self, scale: float) -> None:
        """Check that outputs cannot overflow. `scale` multiplies the products of the factors. Raises BadRequest."""
        gain = abs(scale)
        for factors in self._factors.values():
            gain *= factors.bound * factors.width
        if not gain <= MAX_GAIN:
            raise BadRequest(
                f"the adapter's weights are too large: lora_B times lora_A times lora_alpha / r can reach {gain:.3g}, "
                f"more than {MAX_GAIN:.0e}: sums of squares would overflow; lower lora_alpha, or train it again"
            )
