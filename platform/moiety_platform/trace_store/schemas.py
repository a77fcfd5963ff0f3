"""Response bodies of the admin API for traces."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Any

import msgspec

from moiety_platform.db.paging import Page
from moiety_platform.trace_store.models import SpanRecord, TraceRecord
from moiety_wire.shared_fields import CopyOf, copy_fields

KINDS = ("unspecified", "internal", "server", "client", "producer", "consumer")
STATUSES = ("unset", "ok", "error")


class TraceView(CopyOf[TraceRecord], msgspec.Struct, frozen=True):
    """A request whose trace was kept.

    `kept_for` is the reason: failed, slo_missed, preempted, failed_over, first, rate.
    """

    trace_id: str
    span_id: str
    request_id: str
    tenant_id: str
    service_class: str
    operation: str
    model: str
    started_at: datetime
    duration_ms: float
    outcome: str
    reason: str | None
    error_code: str | None
    kept_for: str


class TracePage(Page[TraceView], frozen=True):
    """A page of traces, newest first."""


class EventView(msgspec.Struct, frozen=True):
    """An event within a span."""

    name: str
    unix_ns: int
    attributes: dict[str, Any]


class LinkView(msgspec.Struct, frozen=True):
    """A link to another span."""

    trace_id: str
    span_id: str


class SpanView(msgspec.Struct, frozen=True):
    """One span. Times are Unix nanoseconds; `service` is the name of its process."""

    span_id: str
    parent_id: str | None
    name: str
    kind: str
    service: str
    start_ns: int
    end_ns: int
    status: str
    status_message: str
    attributes: dict[str, Any]
    events: list[EventView]
    links: list[LinkView]

    @classmethod
    def of(cls, record: SpanRecord, hidden: Collection[str]) -> SpanView:
        """Build the view without the attributes named in `hidden`."""

        def shown(attributes: dict[str, Any]) -> dict[str, Any]:
            return {name: value for name, value in attributes.items() if name not in hidden}

        return copy_fields(
            record,
            cls,
            kind=_word(KINDS, record.kind),
            status=_word(STATUSES, record.status),
            attributes=shown(record.attributes),
            events=[EventView(one["name"], one["unix_ns"], shown(one["attributes"])) for one in record.events],
            links=[LinkView(**link) for link in record.links],
        )


class LinkedSpan(msgspec.Struct, frozen=True):
    """A span of another trace that this trace links to: an engine step whose batch contained the request."""

    trace_id: str
    span: SpanView


class TraceDetail(msgspec.Struct, frozen=True):
    """A trace's spans by their start, and the spans of other traces that they link to.

    `truncated` says that there are more than are listed.
    """

    trace_id: str
    spans: list[SpanView]
    linked: list[LinkedSpan]
    truncated: bool


def _word(words: tuple[str, ...], number: int) -> str:
    return words[number] if 0 <= number < len(words) else words[0]
