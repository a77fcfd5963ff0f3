"""W3C trace context, from clients and to engines."""

from __future__ import annotations

import re
from typing import NamedTuple

_TRACEPARENT = re.compile(
    r"(?:00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}|(?!00|ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(?:-.*)?)"
)
MAX_LENGTH = 512


class Parent(NamedTuple):
    """A client's span, in hexadecimal, and the client's traceparent."""

    trace_id: str
    span_id: str
    traceparent: str


def parse_traceparent(text: str | None) -> Parent | None:
    """Return the parent; None for a missing or invalid context, with which a request starts a new trace."""
    if not text or len(text) > MAX_LENGTH or (found := _TRACEPARENT.fullmatch(text)) is None:
        return None
    trace_id, span_id = found[1] or found[3], found[2] or found[4]
    if not trace_id.strip("0") or not span_id.strip("0"):
        return None
    return Parent(trace_id, span_id, text)


def format_traceparent(trace_id: str, span_id: str) -> str:
    """Return a traceparent with the sampled flag: the decision is made at the end, so everybody records."""
    return f"00-{trace_id}-{span_id}-01"
