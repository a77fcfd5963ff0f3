"""Liveness of one external engine. Answers to health checks and bytes of streams both prove that it is alive.

A loaded or single-threaded server may answer a health check late while its streams flow.
"""

from __future__ import annotations

from moiety_platform.clock import Clock


class Liveness:
    """Liveness of one engine. Owned by its client. The engine is lost after `silence_s` without any data."""

    def __init__(self, clock: Clock, silence_s: float) -> None:
        self._clock = clock
        self._silence_s = silence_s
        self._last_data_s = clock.monotonic()
        self._last_streamed_s: float | None = None

    def record_data(self) -> None:
        """Record that data arrived from the engine."""
        self._last_data_s = self._clock.monotonic()

    def end_pause(self, interval_s: float) -> None:
        """Count no more than `interval_s` of the time until now as silence, because the engine was not asked."""
        self._last_data_s = max(self._last_data_s, self._clock.monotonic() - interval_s)

    def record_stream(self) -> None:
        """Record that bytes of a stream arrived."""
        self._last_data_s = self._last_streamed_s = self._clock.monotonic()

    @property
    def is_streaming(self) -> bool:
        """True if bytes of a stream arrived within `silence_s`."""
        at_s = self._last_streamed_s
        return at_s is not None and self._clock.monotonic() - at_s <= self._silence_s

    @property
    def is_lost(self) -> bool:
        """True if nothing arrived for longer than `silence_s`."""
        return self._clock.monotonic() - self._last_data_s > self._silence_s
