"""Time, passed as an argument: wall time for stored and displayed values, monotonic time for intervals."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Protocol, runtime_checkable


@runtime_checkable  # the framework checks injected values
class Clock(Protocol):
    """Interface of clocks."""

    def now(self) -> datetime:
        """Return the wall time as an aware UTC datetime."""
        ...

    def unix_ns(self) -> int: ...

    def monotonic(self) -> float:
        """Return seconds from an arbitrary start; never decreases."""
        ...


class SystemClock:
    """The machine's clock. It is read so often that the cost of Python wrapper methods would show."""

    unix_ns = staticmethod(time.time_ns)
    monotonic = staticmethod(time.monotonic)

    def now(self) -> datetime:
        return datetime.now(UTC)


class ManualClock:
    """A clock for tests and simulations that moves only by `advance`."""

    def __init__(self, start: datetime = datetime(2026, 1, 1, tzinfo=UTC)) -> None:
        self._start = start
        self._elapsed_s = 0.0

    def advance(self, seconds: float) -> None:
        self._elapsed_s += seconds

    def now(self) -> datetime:
        return self._start + timedelta(seconds=self._elapsed_s)

    def unix_ns(self) -> int:
        return int(self.now().timestamp() * 1e9)

    def monotonic(self) -> float:
        return self._elapsed_s
