"""Spans are packed as the SDK's own exporter packs them."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.trace import SpanKind
from tests.server_thread import serving_in_thread

from moiety_platform.traces.exporters import otlp_exporter
from moiety_platform.traces.packing import packed
from moiety_platform.traces.span import Attribute, Link, Span, SpanEvent

RESOURCE = {"service.name": "a", "service.instance.id": "b"}
TIMES = st.integers(1, 2**63 - 1)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
VALUES: st.SearchStrategy[Attribute] = st.one_of(
    TEXTS,
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.sampled_from([0, 1, 0.0, 1.0, -0.0, True, False]),
    st.floats(allow_nan=False),
    st.lists(TEXTS, max_size=3).map(tuple),
)
ATTRIBUTES = st.dictionaries(TEXTS, VALUES, max_size=4)


def ids(num_bytes: int) -> st.SearchStrategy[str]:
    return st.integers(1, 256**num_bytes - 1).map(lambda number: number.to_bytes(num_bytes).hex())


SPANS = st.builds(
    Span,
    trace_id=ids(16),
    span_id=ids(8),
    parent_id=st.none() | ids(8),
    name=TEXTS,
    kind=st.sampled_from(SpanKind),
    start_ns=TIMES,
    end_ns=TIMES,
    attributes=ATTRIBUTES,
    events=st.lists(st.builds(SpanEvent, TEXTS, TIMES, ATTRIBUTES), max_size=2).map(tuple),
    links=st.lists(st.builds(Link, ids(16), ids(8)), max_size=2).map(tuple),
    error=st.none() | TEXTS,
)


class Collector(HTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.taken: list[ExportTraceServiceRequest] = []


class Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:  # as the base has it
        body = gzip.decompress(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.taken.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with serving_in_thread(Collector()) as server:
        yield server


@pytest.fixture(scope="module")
def exporter(collector: Collector) -> Iterator[Any]:
    made = otlp_exporter(f"http://127.0.0.1:{collector.server_port}")
    yield made
    made.shutdown()


@given(st.lists(SPANS, min_size=1, max_size=3))
def test_packed_spans_equal_those_of_the_opentelemetry_sdk(
    collector: Collector, exporter: Any, spans: list[Span]
) -> None:
    collector.taken.clear()
    assert exporter.export(RESOURCE, spans)
    (expected,) = collector.taken[0].resource_spans
    (found,) = ExportTraceServiceRequest.FromString(packed(RESOURCE, spans)).resource_spans
    assert list(found.scope_spans) == list(expected.scope_spans)
    told = {one.key: one.value.string_value for one in expected.resource.attributes}
    assert {one.key: one.value.string_value for one in found.resource.attributes}.items() <= told.items()


@pytest.mark.parametrize("num_spans", [1, 2, 200])
def test_messages_of_any_size_have_their_length(num_spans: int) -> None:
    """A length takes one to four bytes."""
    span = Span("0a" * 16, "0b" * 8, None, "x" * 100, SpanKind.SERVER, 1, 2, {"name": "y" * 20_000})
    found = ExportTraceServiceRequest.FromString(packed(RESOURCE, [span] * num_spans))
    spans = found.resource_spans[0].scope_spans[0].spans
    assert len(spans) == num_spans
    assert (spans[-1].name, spans[-1].attributes[0].value.string_value) == (span.name, "y" * 20_000)
