"""How large an adapter's weights are, found part by part while an upload is read. Knows no engine.

Only the highest byte of each number is looked at: it holds the sign and the upper bits of the exponent, so that it
bounds the magnitude, and NaN and infinity are above every bound. So a file of hundreds of megabytes is read
without an array library and without ever being whole in memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from moiety_platform.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

# The largest output of a product's two factors and scale for inputs of magnitude 1. What training leaves is below 1e4;
# squares of sums of such outputs, as norms take them, must fit float32 beside the model's own values.
MAX_GAIN = 1e12
_WITHOUT_SIGN = bytes(byte & 0x7F for byte in range(256))
# of a safetensors dtype: bytes of a number, bits of its exponent, the exponent's bias
_FLOATS = {"F64": (8, 11, 1023), "F32": (4, 8, 127), "BF16": (2, 8, 127), "F16": (2, 5, 15)}
_BITS, _ALL_ONES = 7, 0x7F  # of the highest byte, below the sign


def bound_of(byte: int, dtype: str) -> float:
    """Return a number that no magnitude with this highest byte, without its sign, reaches; infinity for what may be
    infinite or NaN. Of F64, whose exponent has four more bits elsewhere, it is the least such magnitude instead, so
    that nothing is refused which the engine, which looks at all bits, would take."""
    _, bits, bias = _FLOATS[dtype]
    if dtype == "F64":
        return math.inf if byte == _ALL_ONES else 2.0 ** ((byte << (bits - _BITS)) - bias)
    # the byte has the whole exponent and the first bits of the fraction, or else the exponent's first bits
    exponent = byte >> (_BITS - bits) if bits < _BITS else ((byte + 1) << (bits - _BITS)) - 1
    return math.inf if exponent >= (1 << bits) - 1 else 2.0 ** (exponent - bias + 1)


@dataclass(slots=True)
class _Factors:
    """All lora_A, or all lora_B, of a file. `width`: the most inputs of any."""

    bound: float = 0.0
    width: int = 0


@dataclass(slots=True)
class Magnitudes:
    """Bounds of a file's factors. `entries` are those of its head, whose data begin at `begin`."""

    entries: Mapping[str, Any]
    begin: int
    _factors: dict[str, _Factors] = field(default_factory=lambda: {"A": _Factors(), "B": _Factors()})

    def take(self, start: int, data: bytes) -> None:
        """Look at the next part of the file, which begins at `start`. Raises BadRequest for NaN and infinity."""
        for name, entry in self.entries.items():
            size = _FLOATS.get(entry["dtype"], (0,))[0]
            first, end = (self.begin + offset for offset in entry["data_offsets"])
            if size and first < start + len(data) and end > start:
                self._look(name, entry, data, size, first - start, end - start)

    def _look(self, name: str, entry: Mapping[str, Any], data: bytes, size: int, first: int, end: int) -> None:
        place = first + size - 1  # of the first number's highest byte in `data`; it may lie in a part before
        if place < 0:
            place += -(place // size) * size
        highest = max(data[place : min(end, len(data)) : size].translate(_WITHOUT_SIGN), default=0)
        bound = bound_of(highest, entry["dtype"])
        if math.isinf(bound):
            raise BadRequest(
                f"{name[:100]!r} has numbers that are not finite, or of the largest that {entry['dtype']} holds; "
                "train the adapter again, or save it from a step before training diverged"
            )
        factors = self._factors["A" if name.endswith(".lora_A.weight") else "B"]
        factors.bound = max(factors.bound, bound)
        factors.width = max(factors.width, int(entry["shape"][-1]))

    def check_gain(self, scale: float) -> None:
        """Raises BadRequest where outputs may overflow. `scale`: what products of the factors are multiplied by."""
        gain = abs(scale)
        for factors in self._factors.values():
            gain *= factors.bound * factors.width
        if not gain <= MAX_GAIN:
            raise BadRequest(
                f"the adapter's weights are too large: lora_B times lora_A times lora_alpha / r may reach {gain:.3g}, "
                f"and at most {MAX_GAIN:.0e} is served, since sums of squares overflow beyond; lower lora_alpha, or "
                "train it again"
            )
