"""OTLP encoding of our own spans, which accounts for most of the cost of a kept trace in a gateway.

The bytes of spans are written directly; objects for each message take several times as long. Field numbers are those of
OpenTelemetry's `trace/v1/trace.proto`. Encoded attributes are cached, since most of them recur.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from importlib.metadata import version
from struct import Struct

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1 import trace_pb2 as otlp
from opentelemetry.trace import SpanKind

from moiety_platform.traces.span import SCOPE, Attribute, Link, Span, SpanEvent

KNOWN_ATTRIBUTES = 4096  # cached names with their values, most of which recur: a class, an engine, a small count
_KINDS = {kind: bytes([otlp.Span.SpanKind.Value(f"SPAN_KIND_{kind.name}")]) for kind in SpanKind}
_VARINT_LIMIT = 0x80  # a length below it is one byte

# tags of fields, eight times the number of the field and its type: 0 a varint, 1 eight bytes, 2 a length and bytes
_TRACE_ID, _SPAN_ID, _PARENT_ID = b"\x0a\x10", b"\x12\x08", b"\x22\x08"  # with their lengths
_NAME, _KIND, _ATTRIBUTE, _EVENT, _LINK, _STATUS = b"\x2a", b"\x30", b"\x4a", b"\x5a", b"\x6a", b"\x7a"
_TIMES, _EVENT_TIME = Struct("<cQcQ"), Struct("<cQ")
_START, _END, _OF_EVENT = b"\x39", b"\x41", b"\x09"
_EVENT_NAME, _EVENT_ATTRIBUTE = b"\x12", b"\x1a"
_SCOPE, _SPANS, _RESOURCE, _SCOPE_SPANS, _RESOURCE_SPANS = b"\x0a", b"\x12", b"\x0a", b"\x12", b"\x0a"
_NOT_REMOTE = Struct("<I").pack(int(otlp.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK))
_SPAN_FLAGS, _LINK_FLAGS = b"\x85\x01" + _NOT_REMOTE, b"\x35" + _NOT_REMOTE


def packed(resource: Mapping[str, str], spans: Sequence[Span]) -> bytes:
    """Return an ExportTraceServiceRequest of all spans."""
    parts = [_SCOPE, _scope()]
    for span in spans:
        parts.append(_SPANS)
        parts.append(_sized(_span(span)))
    scope_spans = b"".join(parts)
    told = Resource(attributes=[KeyValue(key=name, value=_value(value)) for name, value in resource.items()])
    of_resource = b"".join((_RESOURCE, _sized(told.SerializeToString()), _SCOPE_SPANS, _sized(scope_spans)))
    return _RESOURCE_SPANS + _sized(of_resource)


@cache
def _scope() -> bytes:
    return _sized(InstrumentationScope(name=SCOPE, version=version("moiety")).SerializeToString())


def _span(span: Span) -> bytes:
    parts = [_TRACE_ID, bytes.fromhex(span.trace_id), _SPAN_ID, bytes.fromhex(span.span_id)]
    if span.parent_id is not None:
        parts += (_PARENT_ID, bytes.fromhex(span.parent_id))
    parts += (_NAME, _text(span.name), _KIND, _KINDS[span.kind], _TIMES.pack(_START, span.start_ns, _END, span.end_ns))
    for attribute in span.attributes.items():
        parts += (_ATTRIBUTE, _attribute(*attribute))
    for event in span.events:
        parts += (_EVENT, _sized(_event(event)))
    for link in span.links:
        parts += (_LINK, _sized(_link(link)))
    parts += (_STATUS, _status(span.error), _SPAN_FLAGS)
    return b"".join(parts)


def _event(event: SpanEvent) -> bytes:
    parts = [_EVENT_TIME.pack(_OF_EVENT, event.unix_ns), _EVENT_NAME, _text(event.name)]
    for attribute in event.attributes.items():
        parts += (_EVENT_ATTRIBUTE, _attribute(*attribute))
    return b"".join(parts)


def _link(link: Link) -> bytes:
    return b"".join((_TRACE_ID, bytes.fromhex(link.trace_id), _SPAN_ID, bytes.fromhex(link.span_id), _LINK_FLAGS))


@lru_cache(KNOWN_ATTRIBUTES)
def _status(error: str | None) -> bytes:
    told = otlp.Status() if error is None else otlp.Status(code=otlp.Status.STATUS_CODE_ERROR, message=error)
    return _sized(told.SerializeToString())


def _sized(data: bytes) -> bytes:
    """Return the bytes with their length before them."""
    size = len(data)
    if size < _VARINT_LIMIT:
        return bytes((size,)) + data
    length = bytearray()
    while size >= _VARINT_LIMIT:
        length.append(size & 0x7F | _VARINT_LIMIT)
        size >>= 7
    length.append(size)
    return bytes(length) + data


@lru_cache(KNOWN_ATTRIBUTES)
def _text(text: str) -> bytes:
    return _sized(text.encode())


@lru_cache(KNOWN_ATTRIBUTES, typed=True)
def _attribute(name: str, value: Attribute) -> bytes:
    return _sized(KeyValue(key=name, value=_value(value)).SerializeToString())


def _value(value: Attribute) -> AnyValue:
    match value:
        case str():
            return AnyValue(string_value=value)
        case bool():
            return AnyValue(bool_value=value)
        case int():
            return AnyValue(int_value=value)
        case float():
            return AnyValue(double_value=value)
    return AnyValue(array_value=ArrayValue(values=[AnyValue(string_value=one) for one in value]))
