"""A span of a kept trace in the gateway's own form; the exporters convert it to OpenTelemetry's objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec
from opentelemetry.trace import SpanKind

SCOPE = "moiety_platform"  # name of OpenTelemetry's instrumentation scope

Attribute = str | bool | int | float | tuple[str, ...]


class Link(NamedTuple):
    """A link to another span, of the same trace or another."""

    trace_id: str
    span_id: str


class SpanEvent(msgspec.Struct, frozen=True):
    """An event within a span."""

    name: str
    unix_ns: int
    attributes: Mapping[str, Attribute]


class Span(msgspec.Struct, frozen=True):
    """One span. Ids are hexadecimal. `error` is a code, None for success."""

    trace_id: str
    span_id: str
    parent_id: str | None
    name: str
    kind: SpanKind
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Attribute]
    events: tuple[SpanEvent, ...] = ()
    links: tuple[Link, ...] = ()
    error: str | None = None
