"""Time, passed by argument: wall time for what is stored and shown, monotonic time for intervals."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Protocol, runtime_checkable


@runtime_checkable  # the framework checks what it injects
class Clock(Protocol):
    """What the gateway knows of time."""

    def now(self) -> datetime:
        """Aware UTC."""
        ...

    def unix_ns(self) -> int: ...

    def monotonic(self) -> float:
        """Seconds from an arbitrary start; never goes back."""
        ...


class SystemClock:
    """The machine's clock. It is asked so often that a call of Python's own for each would show."""

    unix_ns = staticmethod(time.time_ns)
    monotonic = staticmethod(time.monotonic)

    def now(self) -> datetime:
        return datetime.now(UTC)


class ManualClock:
    """A clock that moves only when told to, for tests and simulations."""

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
