"""OTLP/HTTP as an ASGI application: `POST /otlp/v1/traces` (and `/v1/traces`), `/healthz`, `/readyz`, `/metrics`.

Responses follow the protocol's specification: protobuf, `partial_success` for invalid spans, 400 for requests that must
not be retried, 503 with Retry-After for those that can be.
"""

from __future__ import annotations

import hmac
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from google.protobuf.message import DecodeError
from litestar.types import HTTPScope, Receive, Send
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from prometheus_client import CollectorRegistry, Counter, generate_latest

from moiety_platform.db.readiness import StoreReadiness
from moiety_platform.errors import BadRequest
from moiety_platform.known_parameters import check_query
from moiety_platform.metrics import CONTENT_TYPE
from moiety_platform.trace_receiver.writer import TraceWriter
from moiety_platform.trace_store.rows import rows_of

PATHS = ("/otlp/v1/traces", "/v1/traces")
PROTOBUF = "application/x-protobuf"
RETRY_AFTER_S = 1

Headers = Mapping[bytes, bytes]


class TraceRefusal(Exception):
    """A refused request: the status, and a message that says what to do."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class TraceTokens:
    """Tokens of permitted senders: `trusted` of gateways, `untrusted` of other senders."""

    trusted: str
    untrusted: str | None

    def is_trusted(self, authorization: str) -> bool:
        """Return whether the sender is a gateway; False for another permitted sender. Raises TraceRefusal."""
        scheme, _, token = authorization.partition(" ")
        given = token.strip().encode() if scheme.lower() == "bearer" else b""
        if hmac.compare_digest(given, self.trusted.encode()):
            return True
        if self.untrusted is not None and hmac.compare_digest(given, self.untrusted.encode()):
            return False
        raise TraceRefusal(401, "send 'Authorization: Bearer' with the token that the trace store was started with")


class TraceApp:
    """ASGI application of one process."""

    def __init__(
        self,
        tokens: TraceTokens,
        writer: TraceWriter,
        store: StoreReadiness,
        registry: CollectorRegistry,
        max_body_bytes: int,
    ) -> None:
        self.tokens = tokens  # this and the bound can be changed, for later requests
        self._writer = writer
        self._store = store
        self.registry = registry
        self.max_body_bytes = max_body_bytes
        self._requests = Counter(
            "moiety_traces_requests", "OTLP requests, by HTTP status.", ("status",), registry=registry
        )

    async def __call__(self, scope: HTTPScope, receive: Receive, send: Send) -> None:
        method, path = scope["method"], scope["path"]
        try:
            check_query(scope.get("query_string", b""), ())
        except BadRequest as exc:
            is_otlp = path in PATHS
            body = _status(exc.message) if is_otlp else exc.message.encode()
            await _answer(send, 400, body, PROTOBUF if is_otlp else "text/plain")
            return
        if path in PATHS:
            await self._take(scope, receive, send)
        elif method == "GET" and path == "/healthz":
            await _answer(send, 200, b'{"status":"ok"}', "application/json")
        elif method == "GET" and path == "/readyz":
            reason = await self._store.why_not_ready()
            await _answer(send, 503 if reason else 200, (reason or "ready").encode(), "text/plain")
        elif method == "GET" and path == "/metrics":
            await _answer(send, 200, generate_latest(self.registry), CONTENT_TYPE)
        else:
            await _answer(send, 404, b"spans are taken at POST /otlp/v1/traces", "text/plain")

    async def _take(self, scope: HTTPScope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        try:
            if scope["method"] != "POST":
                raise TraceRefusal(405, "send spans by POST")
            is_trusted = self.tokens.is_trusted(headers.get(b"authorization", b"").decode("latin-1"))
            if headers.get(b"content-type", b"").partition(b";")[0].strip() != PROTOBUF.encode():
                raise TraceRefusal(415, f"send {PROTOBUF}: the exporter's protocol 'http/protobuf'")
            max_bytes = self.max_body_bytes
            body = _unpack(headers, await _receive(receive, max_bytes), max_bytes)
            answer = self._store_spans(body, is_trusted)
        except TraceRefusal as refusal:
            self._requests.labels(str(refusal.status)).inc()
            await _answer(send, refusal.status, _status(str(refusal)), PROTOBUF)
        else:
            self._requests.labels("200").inc()
            await _answer(send, 200, answer.SerializeToString(), PROTOBUF)

    def _store_spans(self, body: bytes, is_trusted: bool) -> ExportTraceServiceResponse:
        request = ExportTraceServiceRequest()
        try:
            request.ParseFromString(body)
        except DecodeError as exc:
            raise TraceRefusal(
                400, "the body is no ExportTraceServiceRequest; send what an OTLP exporter makes"
            ) from exc
        rows = rows_of(request.resource_spans, time.time_ns() // 1_000_000, is_trusted=is_trusted)
        if len(rows.spans) > self._writer.max_spans:
            raise TraceRefusal(413, f"more than {self._writer.max_spans} spans; send fewer at a time")
        if rows.spans and not self._writer.put(rows):
            raise TraceRefusal(503, "the database is too slow or not available; send the spans again later")
        if not rows.num_rejected:
            return ExportTraceServiceResponse()
        partial = ExportTracePartialSuccess(rejected_spans=rows.num_rejected, error_message=rows.complaint)
        return ExportTraceServiceResponse(partial_success=partial)


async def _receive(receive: Receive, max_bytes: int) -> bytes:
    """Return the body, whose size is bounded. Raises TraceRefusal."""
    parts, num_bytes = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise TraceRefusal(400, "the body ended early")
        assert message["type"] == "http.request", "all that is left"
        parts.append(message["body"])
        num_bytes += len(message["body"])
        if num_bytes > max_bytes:
            raise _too_large(max_bytes)
        if not message["more_body"]:
            return b"".join(parts)


def _unpack(headers: Headers, body: bytes, max_bytes: int) -> bytes:
    encoding = headers.get(b"content-encoding", b"identity").strip().lower()
    if encoding == b"identity":
        return body
    if encoding != b"gzip":
        raise TraceRefusal(415, "compress with gzip, or not at all")
    unpacker = zlib.decompressobj(wbits=31)
    try:
        unpacked = unpacker.decompress(body, max_bytes + 1)
    except zlib.error as exc:
        raise TraceRefusal(400, "Content-Encoding is gzip, but the body is not valid gzip data") from exc
    if len(unpacked) > max_bytes:
        raise _too_large(max_bytes)
    if not unpacker.eof:
        raise TraceRefusal(400, "the body's gzip data ends early")
    return unpacked


def _too_large(max_bytes: int) -> TraceRefusal:
    return TraceRefusal(413, f"the body is more than {max_bytes} bytes; send fewer spans at a time")


def _status(message: str) -> bytes:
    """Return a google.rpc.Status with that message (field 2, a string), as the specification requires."""
    text = message.encode()
    assert len(text) < 128, "one byte tells its length"
    return b"\x12" + bytes([len(text)]) + text


async def _answer(send: Send, status: int, body: bytes, content_type: str) -> None:
    headers = [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode())]
    if status == 503:
        headers.append((b"retry-after", str(RETRY_AFTER_S).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
