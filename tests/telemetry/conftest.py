"""A real serve with the scripted engine, all three `/metrics` of it, and a receiver of OTLP beside it."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from prometheus_client.parser import text_string_to_metric_families
from tests.conftest import free_port
from tests.server_thread import serving_in_thread

MODEL = "moiety-demo"
HELLO = {"model": MODEL, "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 4}


@dataclass
class Receiver:
    """Takes metrics as a collector does, and keeps the last of each name."""

    url: str = ""
    services: set[str] = field(default_factory=set)
    metrics: dict[str, Metric] = field(default_factory=dict)

    def take(self, body: bytes) -> None:
        request = ExportMetricsServiceRequest.FromString(body)
        for of_resource in request.resource_metrics:
            attributes = {one.key: one.value.string_value for one in of_resource.resource.attributes}
            self.services.add(attributes["service.name"])
            for scope in of_resource.scope_metrics:
                self.metrics |= {metric.name: metric for metric in scope.metrics}


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    found = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            found.take(gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body)
            answer = ExportMetricsServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_arguments: object) -> None:
            """Log nothing: the standard library would write to the terminal."""

    with serving_in_thread(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as server:
        found.url = f"http://127.0.0.1:{server.server_port}/v1/metrics"
        yield found


@dataclass
class Family:
    """A metric as `/metrics` has it."""

    name: str  # as a query names it
    type: str
    labels: set[str]  # of its samples, if it has any
    meaning: str


@dataclass
class Running:
    """A serve, and where its processes tell their metrics."""

    serve: Any
    traces_port: int
    engine_port: int
    client: httpx.Client

    def families(self, process: str) -> dict[str, Family]:
        url = {
            "gateway": f"{self.serve.url}/metrics",
            "engine": f"http://127.0.0.1:{self.engine_port}/metrics",
            "trace store": f"http://127.0.0.1:{self.traces_port}/metrics",
        }[process]
        text = httpx.get(url, timeout=30).raise_for_status().text
        found = {}
        for one in text_string_to_metric_families(text):
            name = f"{one.name}_total" if one.type == "counter" else one.name
            labels = {label for sample in one.samples for label in sample.labels} - {"le"}
            found[name] = Family(name, one.type, labels, one.documentation)
        return found

    def admin(self, method: str, path: str, body: Any = None) -> Any:
        headers = {"Authorization": f"Bearer {self.serve.admin_key}"}
        return self.client.request(method, f"/admin/v1{path}", json=body, headers=headers).raise_for_status().json()

    def chat(self, key: str = "", **headers: str) -> httpx.Response:
        chosen = {"Authorization": f"Bearer {key or self.serve.tenant_key}", **headers}
        return self.client.post("/v1/chat/completions", json=HELLO, headers=chosen)

    def send_document(self) -> httpx.Response:
        """Send a chat with a text file."""
        part = {"type": "file", "file": {"filename": "a.txt", "file_data": "YQ=="}}
        body = {**HELLO, "messages": [{"role": "user", "content": [part]}]}
        headers = {"Authorization": f"Bearer {self.serve.tenant_key}"}
        return self.client.post("/v1/chat/completions", json=body, headers=headers)


@pytest.fixture(scope="module")
def running(
    start_serve: Callable[..., Any], receiver: Receiver, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    traces_port, engine_port = free_port(), free_port()
    config = tmp_path_factory.mktemp("config") / "moiety.toml"
    config.write_text(f'[gateway]\notlp_metrics_endpoint = "{receiver.url}"\notlp_metrics_interval_ms = 200\n')
    serve = start_serve(
        *("--no-dashboard", "--traces-port", str(traces_port), "--config", str(config)),
        *("--", "--metrics-listen", f"127.0.0.1:{engine_port}"),
    )
    with httpx.Client(base_url=serve.url, timeout=30) as client:
        serve.wait_for_line("traces_listening")
        yield Running(serve, traces_port, engine_port, client)
