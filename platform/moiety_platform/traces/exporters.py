"""Exporters of spans by OTLP: a fast one to our trace store, and the SDK's exporters to other collectors.

The SDK's exporters follow OpenTelemetry's environment variables (headers, certificates, compression).
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Protocol

import requests
import structlog
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, Status, StatusCode, TraceFlags
from requests.adapters import HTTPAdapter
from urllib3 import Retry

from moiety_platform.traces.packing import packed
from moiety_platform.traces.span import SCOPE, Span

EXPORT_TIMEOUT_S = 10.0
RETRIES = Retry(
    3, read=0, backoff_factor=0.5, status_forcelist=(429, 502, 503, 504), allowed_methods=("POST",),
    raise_on_status=False,
)  # fmt: skip
GZIP_LEVEL = 1  # gzip level 1: a fifth of the default level's time, for 6 % larger output

log = structlog.get_logger(__name__)

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class Exporter(Protocol):
    """Exporter that one thread calls."""

    def export(self, resource: Mapping[str, str], spans: Sequence[Span]) -> bool:
        """Send the spans; return whether they were accepted. Blocks for some tens of seconds at most."""
        ...

    def shutdown(self) -> None: ...


def store_exporter(endpoint: str, token: str | None) -> Exporter:
    """Return an exporter to the store at `endpoint`/v1/traces. With a token it uses no proxy."""
    return _ToStore(f"{endpoint.rstrip('/')}/v1/traces", token)


def otlp_exporter(endpoint: str) -> Exporter:
    """Return an exporter to `endpoint`/v1/traces of any OTLP collector."""
    url = f"{endpoint.rstrip('/')}/v1/traces"
    return _BySdk(OTLPSpanExporter(endpoint=url, timeout=EXPORT_TIMEOUT_S, compression=Compression.Gzip))


def grpc_exporter(endpoint: str) -> Exporter:
    """Return an exporter to an address such as http://collector:4317, encrypted where it is https.

    Raises ModuleNotFoundError without the optional gRPC package.
    """
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (  # noqa: PLC0415  # optional
        OTLPSpanExporter as GrpcSpanExporter,
    )

    return _BySdk(GrpcSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S))


class _ToStore:
    def __init__(self, url: str, token: str | None) -> None:
        self._url = url
        self._session = requests.Session()
        self._session.trust_env = token is None
        self._session.verify = os.environ.get("OTEL_EXPORTER_OTLP_CERTIFICATE") or True
        self._session.headers.update({"Content-Type": "application/x-protobuf", "Content-Encoding": "gzip"})
        if token is not None:
            self._session.headers["Authorization"] = f"Bearer {token}"
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, HTTPAdapter(max_retries=RETRIES))

    def export(self, resource: Mapping[str, str], spans: Sequence[Span]) -> bool:
        body = gzip.compress(packed(resource, spans), GZIP_LEVEL)
        try:
            answer = self._session.post(self._url, body, timeout=EXPORT_TIMEOUT_S)
        except requests.RequestException as exc:
            log.warning(
                "trace_store_unreachable",
                reason=type(exc).__name__,
                advice="check whether the trace store runs at the configured address",
            )
            return False
        if not answer.ok:
            log.warning(
                "trace_store_refused",
                status=answer.status_code,
                advice="check the status: 401 means that the token of the trace store differs",
            )
        return answer.ok

    def shutdown(self) -> None:
        self._session.close()


class _BySdk:
    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._scope = InstrumentationScope(SCOPE, version("moiety"))

    def export(self, resource: Mapping[str, str], spans: Sequence[Span]) -> bool:
        of = Resource.create(dict(resource))
        return self._exporter.export([self._readable(of, span) for span in spans]) is SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def _readable(self, resource: Resource, span: Span) -> ReadableSpan:
        return ReadableSpan(
            name=span.name,
            context=_context(span.trace_id, span.span_id),
            parent=None if span.parent_id is None else _context(span.trace_id, span.parent_id),
            resource=resource,
            attributes=span.attributes,
            events=[Event(event.name, event.attributes, event.unix_ns) for event in span.events],
            links=[Link(_context(*linked)) for linked in span.links],
            kind=span.kind,
            status=Status() if span.error is None else Status(StatusCode.ERROR, span.error),
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=self._scope,
        )


def _context(trace_id: str, span_id: str) -> SpanContext:
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=False, trace_flags=_SAMPLED)
