"""Liveness of one external engine: whatever it sends proves that it is there, answers to probes and bytes of streams.

A server under load, or one that computes in its only thread, answers a probe late while its streams flow.
"""

from __future__ import annotations

from moiety_platform.clock import Clock


class Liveness:
    """Owned by the client of that engine. `silence_s` is for how long nothing must have come for it to be lost."""

    def __init__(self, clock: Clock, silence_s: float) -> None:
        self._clock = clock
        self._silence_s = silence_s
        self._heard_at_s = clock.monotonic()
        self._streamed_at_s: float | None = None

    def hear(self) -> None:
        """Note that something came from the engine."""
        self._heard_at_s = self._clock.monotonic()

    def hear_stream(self) -> None:
        """Note that bytes of a stream came."""
        self._heard_at_s = self._streamed_at_s = self._clock.monotonic()

    @property
    def streams_flow(self) -> bool:
        """Whether bytes of a stream came within the bound."""
        at_s = self._streamed_at_s
        return at_s is not None and self._clock.monotonic() - at_s <= self._silence_s

    @property
    def is_lost(self) -> bool:
        """Whether nothing came for longer than the bound."""
        return self._clock.monotonic() - self._heard_at_s > self._silence_s
