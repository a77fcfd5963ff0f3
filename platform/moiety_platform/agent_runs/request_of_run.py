"""A request's part in its run, in the request's record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moiety_platform.usage.row import UsageRow


@dataclass(frozen=True, slots=True)
class RequestOfRun:
    """A request's part in its run. `on_end` is called with the request's row, once."""

    name: str
    keep_s: float  # retention of KV
    on_end: Callable[[UsageRow], None]
