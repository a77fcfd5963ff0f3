"""The trace store over HTTP, before the SDK's own exporter; and our sender before a receiver that is not ours."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import StatusCode
from pydantic import ValidationError
from sqlalchemy import func, select
from tests.server_thread import serving_in_thread

from moiety_platform.db.base import Base
from moiety_platform.db.session import Database
from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_platform.http_server import HttpServer
from moiety_platform.listening import bind
from moiety_platform.trace_receiver.process import DRAIN_S, LIMITS, build_app
from moiety_platform.trace_receiver.settings import TraceSettings
from moiety_platform.trace_store.models import SpanRecord, TraceRecord
from moiety_platform.traces.exporters import EXPORT_TIMEOUT_S, grpc_exporter, otlp_exporter, store_exporter
from moiety_platform.traces.sender import QUEUE_FULL, SpanSender
from moiety_wire.messages import ModelCard

from .conftest import StartGateway

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
TOKEN, GUEST = "a token of gateways", "a token of anybody"
PROTOBUF = {"Content-Type": "application/x-protobuf", "Authorization": f"Bearer {TOKEN}"}


class Store:
    """A trace store that listens."""

    def __init__(self, url: str, database: Database) -> None:
        self.endpoint = f"{url}/otlp"
        self.url = url
        self._database = database

    async def count(self, table: Any, at_least: int) -> int:
        """Wait until there are this many rows, and return their number."""
        async with asyncio.timeout(60):
            while True:
                async with self._database.read() as session:
                    found = int(await session.scalar(select(func.count()).select_from(table)))
                if found >= at_least:
                    return found
                await asyncio.sleep(0.02)

    async def rows(self, table: Any, at_least: int) -> Any:
        await self.count(table, at_least)
        async with self._database.read() as session:
            return (await session.scalars(select(table))).all()

    async def post(self, body: bytes, **headers: str) -> httpx.Response:
        async with httpx.AsyncClient() as http:
            sent = {**PROTOBUF, **{name.replace("_", "-"): value for name, value in headers.items()}}
            return await http.post(f"{self.endpoint}/v1/traces", content=body, headers=sent)


@asynccontextmanager
async def run_store(folder: Path, *, has_tables: bool = True, **settings: Any) -> AsyncIterator[Store]:
    url = f"sqlite:///{folder / 'store.db'}"  # the gateway's of these tests, so that its admin API reads it
    database = Database.open(url)
    if has_tables:
        async with database.engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
    given = {"traces_database_url": url, "traces_token": TOKEN, "traces_untrusted_token": GUEST, **settings}
    async with build_app(TraceSettings(**given)) as app:
        listener = bind("127.0.0.1", 0)
        server = HttpServer(app, DRAIN_S, LIMITS)
        task = asyncio.create_task(server.serve([listener]))
        try:
            yield Store(f"http://127.0.0.1:{listener.getsockname()[1]}", database)
        finally:
            server.request_exit()
            await task
    await database.close()


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Any]:
    async with run_store(tmp_path) as running:
        yield running


def export(endpoint: str, token: str, compression: Any = Compression.NoCompression, spans: int = 1) -> bool:
    """Export spans as an application with OpenTelemetry's SDK does; return whether they were accepted."""
    exporter = OTLPSpanExporter(
        f"{endpoint}/v1/traces", headers={"Authorization": f"Bearer {token}"}, compression=compression, timeout=60
    )
    provider = TracerProvider(resource=Resource.create({"service.name": "shop"}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    tracer = provider.get_tracer("shop")
    for _ in range(spans):
        with tracer.start_as_current_span("checkout", attributes={"moiety.tenant_id": "ten_other", "items": 3}) as span:
            span.add_event("paid", {"method": "card"})
            span.set_status(StatusCode.ERROR, "declined")
            with tracer.start_as_current_span("ask", attributes={"moiety.outcome": "stop", "ratio": float("nan")}):
                pass
    taken = provider.force_flush()
    provider.shutdown()
    return taken


@pytest.mark.parametrize("compression", [Compression.NoCompression, Compression.Gzip])
async def test_a_standard_exporter_can_send_spans_but_not_set_their_tenant(store: Any, compression: Any) -> None:
    await asyncio.to_thread(export, store.endpoint, GUEST, compression)
    inner, outer = sorted(await store.rows(SpanRecord, 2), key=lambda row: row.name)
    assert (outer.name, outer.service, outer.parent_id, inner.parent_id) == ("checkout", "shop", None, outer.span_id)
    assert (outer.attributes, inner.attributes) == ({"items": 3}, {"ratio": "nan"})
    assert (outer.tenant_id, outer.status, outer.status_message) == ("", 2, "declined")
    (event,) = outer.events
    assert (event["name"], event["attributes"]) == ("paid", {"method": "card"})
    assert await store.count(TraceRecord, 0) == 0


async def test_one_of_ours_is_believed(store: Any) -> None:
    await asyncio.to_thread(export, store.endpoint, TOKEN)
    rows = await store.rows(SpanRecord, 2)
    assert {row.tenant_id for row in rows} == {"ten_other", ""}
    assert await store.count(TraceRecord, 1) == 1


async def test_trace_requests_without_a_token_are_refused(store: Any) -> None:
    wrong = ("", "Bearer", "Bearer wrong", f"Bearer {TOKEN}x", "Bearer \u00f6".encode(), TOKEN, f"Basic {TOKEN}")
    for authorization in wrong:
        refused = await store.post(b"", Authorization=authorization)
        assert (refused.status_code, b"token" in refused.content) == (401, True)


def test_untrusted_senders_and_gateways_must_have_different_tokens() -> None:
    with pytest.raises(ValidationError, match="must differ"):
        TraceSettings(traces_token=TOKEN, traces_untrusted_token=TOKEN)


async def test_undecodable_traces_are_refused_with_otlp_errors(store: Any) -> None:
    packed = gzip.compress(bytes(8_000_000))
    for body, headers, status in (
        (b"\xff\xff", {}, 400),
        (b"{}", {"Content_Type": "application/json"}, 415),
        (b"", {"Content_Encoding": "br"}, 415),
        (b"no gzip", {"Content_Encoding": "gzip"}, 400),
        (packed[:100], {"Content_Encoding": "gzip"}, 400),
        (packed, {"Content_Encoding": "gzip"}, 413),
        (bytes(5_000_000), {}, 413),
    ):
        answer = await store.post(body, **headers)
        assert (answer.status_code, answer.headers["content-type"]) == (status, "application/x-protobuf"), body[:20]
        assert answer.content[:1] == b"\x12"  # the message of google.rpc.Status
    async with httpx.AsyncClient() as http:
        assert (await http.get(f"{store.endpoint}/v1/traces")).status_code == 405
        assert (await http.get(f"{store.url}/readyz")).status_code == 200
        text = (await http.get(f"{store.url}/metrics")).text
    assert 'moiety_traces_requests_total{status="413"} 2.0' in text


def request_of(*spans: dict[str, Any]) -> bytes:
    request = ExportTraceServiceRequest()
    scope = request.resource_spans.add().scope_spans.add()
    for values in spans:
        good = {"trace_id": b"t" * 16, "span_id": b"s" * 8, "start_time_unix_nano": 10, "end_time_unix_nano": 20}
        scope.spans.add(**{**good, **values})
    return request.SerializeToString()


async def test_invalid_spans_are_reported_and_the_others_stored_once(store: Any) -> None:
    body = request_of({}, {"span_id": b""}, {"trace_id": bytes(16)}, {"end_time_unix_nano": 9}, {"name": "a\0b" * 400})
    answers = [ExportTraceServiceResponse.FromString((await store.post(body)).content) for _ in range(2)]
    assert [answer.partial_success.rejected_spans for answer in answers] == [3, 3]
    assert "nanoseconds" in answers[0].partial_success.error_message
    body = request_of({"span_id": b"2" * 8})
    assert (await store.post(body)).content == b""
    first, second = sorted(await store.rows(SpanRecord, 2), key=lambda row: row.span_id)
    assert (first.span_id, second.name) == ((b"2" * 8).hex(), "")
    assert await store.count(SpanRecord, 2) == 2


async def test_a_store_whose_database_is_away_takes_what_it_has_room_for_and_then_says_when_to_come_back(
    tmp_path: Path,
) -> None:
    async with run_store(tmp_path, has_tables=False, traces_queue_spans=1000) as store:
        many = request_of(*({"span_id": number.to_bytes(8, "big")} for number in range(1, 601)))
        assert (await store.post(many)).status_code == 200
        too_many = await store.post(request_of(*({"span_id": number.to_bytes(8, "big")} for number in range(1, 1002))))
        assert too_many.status_code == 413, "it would never fit"
        behind = await store.post(many)
        assert (behind.status_code, behind.headers["retry-after"]) == (503, "1")
        async with httpx.AsyncClient() as http:
            assert (await http.get(f"{store.url}/readyz")).status_code == 503
        async with store._database.engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        assert await store.count(SpanRecord, 600) == 600


async def test_a_request_can_be_found_by_its_trace_in_the_admin_api(
    start_gateway: StartGateway, card: ModelCard, store: Any
) -> None:
    sender = SpanSender("store", store_exporter(store.endpoint, TOKEN), "gateway-1", interval_s=0.01)
    async with start_gateway([FakeEngineClient(card)], sender) as gateway:
        await gateway.post(CHAT, BODY)
        await gateway.post(CHAT, BODY | {"model": "none"})
        good, _ = await gateway.rows.wait_for(2)
        await store.count(TraceRecord, 2)

        async def ask(path: str) -> Any:
            status, _, answer = await gateway.request("GET", f"/admin/v1/traces{path}", b"", gateway.admin_key)
            assert status == 200, answer
            return json.loads(answer)

        (found,) = (await ask(f"?request_id={good.request_id}"))["data"]
        assert (found["outcome"], found["model"], found["kept_for"]) == ("length", "tiny", "first")
        assert abs(found["duration_ms"] - good.duration_ms) < 5
        (refused,) = (await ask("?reason=model_not_found&outcome=rejected"))["data"]
        assert refused["request_id"] != good.request_id
        assert [len((await ask(f"?{bounds}"))["data"]) for bounds in ("min_ms=0", "min_ms=60000", "max_ms=0")] == [
            2,
            0,
            0,
        ]
        spans = (await ask(f"/{found['trace_id']}"))["spans"]
        names = {"chat tiny", "receive", "prepare", "quota.hold", "admission", "answer", "quota.settle"}
        assert {span["name"] for span in spans} == names | {"engine.queue", "engine.prefill", "engine.decode"}
        assert spans[0]["span_id"] == found["span_id"] and {span["parent_id"] for span in spans[1:]} == {
            found["span_id"]
        }
        assert (spans[0]["service"], spans[0]["kind"]) == ("moiety-gateway", "server")
    await asyncio.to_thread(sender.close)
    assert not sender.dropped


class Collector(ThreadingHTTPServer):
    """Takes OTLP/HTTP as the specification has it, by OpenTelemetry's own messages."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.headers: list[Any] = []
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers["Content-Encoding"] == "gzip":
            body = gzip.decompress(body)
        request = ExportTraceServiceRequest.FromString(body)
        self.server.spans += [
            span for part in request.resource_spans for scope in part.scope_spans for span in scope.spans
        ]
        self.server.headers.append((self.path, self.headers["Content-Type"]))
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.end_headers()
        self.wfile.write(ExportTraceServiceResponse().SerializeToString())

    def log_message(self, *_: object) -> None:
        """Log nothing."""


class GrpcCollector(TraceServiceServicer):
    """Takes OTLP/gRPC, as Collector takes OTLP/HTTP."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.server = grpc.server(ThreadPoolExecutor(1))
        add_TraceServiceServicer_to_server(self, self.server)
        self.server_port = self.server.add_insecure_port("127.0.0.1:0")

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802  # as the service has it
        self.spans += [span for part in request.resource_spans for scope in part.scope_spans for span in scope.spans]
        return ExportTraceServiceResponse()


async def send_one_trace(start_gateway: StartGateway, card: ModelCard, sender: SpanSender) -> None:
    """Trace a request that belongs to a client's trace, and close the sender."""
    async with start_gateway([FakeEngineClient(card)], sender) as gateway:
        await gateway.post(CHAT, BODY, headers={"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-00"})
        await gateway.rows.wait_for(1)
    await asyncio.to_thread(sender.close)


async def test_our_sender_can_send_by_grpc_to_a_receiver_that_is_not_ours(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    collector = GrpcCollector()
    collector.server.start()
    try:
        sender = SpanSender("otlp", grpc_exporter(f"http://127.0.0.1:{collector.server_port}"), "g", interval_s=0.01)
        await send_one_trace(start_gateway, card, sender)
    finally:
        collector.server.stop(None).wait()
    assert (sender.num_sent, len(collector.spans)) == (10, 10)
    assert {span.trace_id.hex() for span in collector.spans} == {"ab" * 16}


async def test_a_receiver_by_grpc_that_is_away_slows_no_request_and_is_counted(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    sender = SpanSender("otlp", grpc_exporter(f"http://127.0.0.1:{port}"), "g", capacity=20, interval_s=0.01)
    async with start_gateway([FakeEngineClient(card)], sender) as gateway:
        for _ in range(5):
            assert (await gateway.post(CHAT, BODY))[0] == 200
        rows = await gateway.rows.wait_for(5)
    await asyncio.to_thread(sender.close, 0.1)
    assert max(row.duration_ms for row in rows) < EXPORT_TIMEOUT_S * 1000
    assert (sender.num_sent, sender.dropped[QUEUE_FULL] > 0) == (0, True)


async def test_our_sender_can_send_to_a_receiver_that_is_not_ours(start_gateway: StartGateway, card: ModelCard) -> None:
    with serving_in_thread(Collector()) as collector:
        sender = SpanSender("otlp", otlp_exporter(f"http://127.0.0.1:{collector.server_port}"), "g", interval_s=0.01)
        await send_one_trace(start_gateway, card, sender)
    assert (sender.num_sent, len(collector.spans)) == (10, 10)
    assert set(collector.headers) == {("/v1/traces", "application/x-protobuf")}
    assert {span.trace_id.hex() for span in collector.spans} == {"ab" * 16}
    (root,) = [span for span in collector.spans if span.name == "chat tiny"]
    assert root.parent_span_id.hex() == "cd" * 8
