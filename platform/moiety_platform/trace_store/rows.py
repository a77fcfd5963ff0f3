"""Conversion of OpenTelemetry spans to table rows. Pure.

The sender is a gateway, which may set the tenant, or another permitted sender, whose `moiety.*` attributes are dropped.
Long values are cut, so that no sender fills the store with one span.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span, Status

MAX_NAME_LENGTH = 256
MAX_TEXT_LENGTH = 1024
MAX_ATTRIBUTES = 64
MAX_PARTS = 128  # events of a span, links of a span, values of a list
OWN_PREFIX: Final = "moiety."

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MAX_NS = 2**63 - 1
_MAX_TIME_NS = 4_102_444_800 * 10**9  # the year 2100


@dataclass(slots=True)
class Rows:
    """Column values of `spans` and `traces`, in column order, and the complaint about rejected spans."""

    spans: list[tuple[Any, ...]] = field(default_factory=list)
    traces: list[tuple[Any, ...]] = field(default_factory=list)
    num_rejected: int = 0
    complaint: str = ""  # about the last rejected span

    def reject(self, complaint: str) -> None:
        self.num_rejected += 1
        self.complaint = complaint


def rows_of(resource_spans: Iterable[ResourceSpans], stored_ms: int, *, is_trusted: bool) -> Rows:
    """Return the rows of all received spans. An invalid span is rejected without the others."""
    rows = Rows()
    for of_resource in resource_spans:
        service = str(_attributes(of_resource.resource.attributes, is_trusted=True).get("service.name", ""))
        for of_scope in of_resource.scope_spans:
            for span in of_scope.spans:
                _add(rows, span, service[:MAX_NAME_LENGTH], stored_ms, is_trusted)
    return rows


def _add(rows: Rows, span: Span, service: str, stored_ms: int, is_trusted: bool) -> None:
    if len(span.trace_id) != 16 or len(span.span_id) != 8 or not any(span.trace_id) or not any(span.span_id):
        rows.reject("a span needs a trace_id of 16 bytes and a span_id of 8, not all zero")
        return
    if not 0 < span.start_time_unix_nano <= span.end_time_unix_nano <= _MAX_TIME_NS:
        rows.reject("a span needs a start and an end in Unix nanoseconds, the end not before the start")
        return
    attributes = _attributes(span.attributes, is_trusted)
    tenant_id = str(attributes.get("moiety.tenant_id", ""))
    trace_id, span_id = span.trace_id.hex(), span.span_id.hex()
    rows.spans.append(
        (
            trace_id,
            span_id,
            span.parent_span_id.hex() if len(span.parent_span_id) == 8 else None,
            _clean(span.name, MAX_NAME_LENGTH),
            _known(span.kind, Span.SpanKind),
            service,
            tenant_id,
            span.start_time_unix_nano,
            span.end_time_unix_nano,
            _known(span.status.code, Status.StatusCode),
            _clean(span.status.message, MAX_NAME_LENGTH),
            attributes,
            list(_events(span.events, is_trusted)),
            list(_links(span.links)),
            stored_ms,
        )
    )
    if is_trusted and "moiety.outcome" in attributes:
        rows.traces.append(_trace(trace_id, span_id, span, attributes, stored_ms))


def _trace(trace_id: str, span_id: str, span: Span, attributes: dict[str, Any], stored_ms: int) -> tuple[Any, ...]:
    """Return the search row of a request's root span."""

    def text(name: str) -> str:
        return str(attributes.get(name, ""))

    return (
        trace_id,
        span_id,
        text("moiety.request_id"),
        text("moiety.tenant_id"),
        text("moiety.service_class"),
        text("gen_ai.operation.name"),
        text("gen_ai.request.model"),
        _EPOCH + timedelta(microseconds=span.start_time_unix_nano // 1000),
        (span.end_time_unix_nano - span.start_time_unix_nano) / 1e6,
        text("moiety.outcome"),
        text("moiety.reason") or None,
        text("error.type") or None,
        text("moiety.kept_for"),
        stored_ms,
    )


def _events(events: Sequence[Span.Event], is_trusted: bool) -> Iterator[dict[str, Any]]:
    for event in events[:MAX_PARTS]:
        yield {
            "name": _clean(event.name, MAX_NAME_LENGTH),
            "unix_ns": min(event.time_unix_nano, _MAX_NS),
            "attributes": _attributes(event.attributes, is_trusted),
        }


def _links(links: Sequence[Span.Link]) -> Iterator[dict[str, Any]]:
    for link in links[:MAX_PARTS]:
        yield {"trace_id": link.trace_id.hex()[:32], "span_id": link.span_id.hex()[:16]}


def _attributes(pairs: Iterable[KeyValue], is_trusted: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pair in pairs:
        if len(found) == MAX_ATTRIBUTES:
            break
        if is_trusted or not pair.key.startswith(OWN_PREFIX):
            found[_clean(pair.key, MAX_NAME_LENGTH)] = _value(pair.value)
    return found


def _value(value: AnyValue) -> Any:
    """Return the value in JSON; types that JSON lacks become text."""
    kind = value.WhichOneof("value")
    if kind == "string_value":
        return _clean(value.string_value, MAX_TEXT_LENGTH)
    if kind in ("bool_value", "int_value"):
        return getattr(value, kind)
    if kind == "double_value":
        number = value.double_value
        return number if number - number == 0 else str(number)  # neither infinite nor NaN
    if kind == "array_value":
        return [_plain(part) for part in value.array_value.values[:MAX_PARTS]]
    return None if kind is None else f"({kind})"


def _plain(value: AnyValue) -> Any:
    """Return an element of a list, which contains no lists."""
    return "(array_value)" if value.WhichOneof("value") == "array_value" else _value(value)


def _known(number: int, numbers: Any) -> int:
    """Return the number if the enumeration has it, else 0; protobuf does not check it."""
    return number if number in numbers.values() else 0


def _clean(text: str, max_length: int) -> str:
    """Return the text, cut and without characters that PostgreSQL refuses."""
    return text[:max_length].replace("\0", "\N{REPLACEMENT CHARACTER}")
