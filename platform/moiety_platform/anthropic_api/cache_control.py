"""What a client says of a conversation that will come back, in Anthropic's words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from moiety_platform.inference.body_fields import StrictBody

_SECONDS = {"5m": 300.0, "1h": 3600.0}


class CacheControl(StrictBody):
    """That what leads up to here will be sent again soon. All of the conversation is kept then, the answer included."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


def longest(marks: Iterable[CacheControl | None]) -> float:
    """Seconds; 0 where nothing is marked."""
    return max((_SECONDS[mark.ttl or "5m"] for mark in marks if mark is not None), default=0.0)
