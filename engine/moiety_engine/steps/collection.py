"""Sampled steps of one request: a bounded number, spread over its whole time."""

from __future__ import annotations

import msgspec

from moiety_wire.codec import encode_notes

MAX_STEPS = 32


class StepCollection:
    """Steps of one request. At the bound, every second step is dropped and the sampling stride doubles."""

    def __init__(self) -> None:
        self._steps: list[msgspec.Raw] = []
        self._num_seen = 0
        self._stride = 1

    def add(self, step: msgspec.Raw) -> None:
        if self._num_seen % self._stride == 0:
            if len(self._steps) == MAX_STEPS:
                del self._steps[1::2]
                self._stride *= 2
            if self._num_seen % self._stride == 0:
                self._steps.append(step)
        self._num_seen += 1

    def packed(self) -> bytes:
        """Return the steps in wire format; empty where there are none."""
        return encode_notes(self._num_seen, self._steps) if self._steps else b""
