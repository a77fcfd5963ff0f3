"""Anthropic's `cache_control`: prefix-cache retention of a conversation that will continue."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from moiety_platform.inference.body_fields import StrictBody

_SECONDS = {"5m": 300.0, "1h": 3600.0}


class CacheControl(StrictBody):
    """Marks a prefix that will be sent again soon. The whole conversation is then retained, including the answer."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


def longest(marks: Iterable[CacheControl | None]) -> float:
    """Return the longest TTL in seconds, or 0 without marks."""
    return max((_SECONDS[mark.ttl or "5m"] for mark in marks if mark is not None), default=0.0)
