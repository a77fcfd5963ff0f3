"""A span of a kept trace, as the gateway says it; OpenTelemetry's own objects are made where it is sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from opentelemetry.trace import SpanKind

SCOPE = "moiety_platform"  # of instrumentation, as OpenTelemetry calls who made a span

Attribute = str | bool | int | float | tuple[str, ...]


class Link(NamedTuple):
    """A span that another one belongs with, of the same trace or another."""

    trace_id: str
    span_id: str


@dataclass(frozen=True, slots=True)
class SpanEvent:
    name: str
    unix_ns: int
    attributes: Mapping[str, Attribute]


@dataclass(frozen=True, slots=True)
class Span:
    """Ids are hexadecimal. `error` is a code, None where it ended well."""

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
