"""`moiety endpoint-picker` as a process, and servers that answer `/readyz` like gateways."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import grpc
import httpx
from tests.conftest import free_port, wait_for

from moiety_platform.endpoint_picker import messages as ext_proc
from moiety_platform.endpoint_picker.processing import SUBSET, SUBSET_NAMESPACE

KEY = f"mty_{16 * 'k'}.{32 * 's'}"


@dataclass
class Picker:
    """A running endpoint picker."""

    process: subprocess.Popen[bytes]
    log: Path
    port: int
    health_port: int
    metrics_port: int

    @property
    def output(self) -> str:
        return self.log.read_text()

    def health(self, service: str = "readiness") -> int:
        """Return the status of the service, which the health port reports."""
        with grpc.insecure_channel(f"127.0.0.1:{self.health_port}") as channel:
            check = channel.unary_unary(
                f"/{'/'.join(ext_proc.HEALTH_METHOD)}",
                ext_proc.HealthCheckRequest.SerializeToString,
                ext_proc.HealthCheckResponse.FromString,
            )
            return int(check(ext_proc.HealthCheckRequest(service=service), timeout=30, wait_for_ready=True).status)

    def metrics(self) -> str:
        """Return the text of `/metrics`."""
        answer = httpx.get(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=30, trust_env=False)
        return answer.raise_for_status().text

    def wait_until_ready(self) -> None:
        wait_for(
            lambda: self.process.poll() is not None or self.health() == ext_proc.SERVING, f"readiness: {self.output}"
        )
        assert self.process.poll() is None, self.output


@contextmanager
def running_picker(
    folder: Path, *arguments: str, tls: bool = False, environment: Mapping[str, str] | None = None
) -> Iterator[Picker]:
    """Run the command on free ports until the block ends, without TLS unless it is wanted."""
    log, ports = folder / "picker.log", (free_port(), free_port(), free_port())
    command = [sys.executable, "-m", "moiety_platform.cli", "endpoint-picker", *arguments]
    named = zip(("--port", "--health-port", "--metrics-port"), map(str, ports), strict=True)
    command[4:4] = [*(one for pair in named for one in pair), "--probe-interval-s", "0.05"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--tls" if tls else "--no-tls"], stdout=output, stderr=output,
            env={**os.environ, **(environment or {})},
        )  # fmt: skip
    try:
        yield Picker(process, log, *ports)
        assert process.poll() is None, log.read_text()
    finally:
        process.terminate()
        assert process.wait(timeout=30) == 0, log.read_text()


def request_headers(key: str | None = KEY, subset: Any = None, **modes: int) -> Any:
    """Return the first message of a stream, with header values as bytes."""
    message = ext_proc.ProcessingRequest()
    message.request_headers.SetInParent()
    fields = {":path": "/v1/chat/completions"} | ({} if key is None else {"authorization": f"Bearer {key}"})
    for name, value in fields.items():
        message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    if subset is not None:
        message.metadata_context.filter_metadata[SUBSET_NAMESPACE].update({SUBSET: subset})
    for name, mode in modes.items():
        setattr(message.protocol_config, name, mode)
    return message


def response_headers(content_type: str = "application/json") -> Any:
    message = ext_proc.ProcessingRequest()
    message.response_headers.headers.headers.add(key="content-type", raw_value=content_type.encode())
    return message


def exchange(channel: grpc.Channel, messages: list[Any]) -> list[Any]:
    """Send the messages of one HTTP request as Envoy does, and return the answers."""
    call = channel.stream_stream(
        f"/{'/'.join(ext_proc.PROCESS_METHOD)}",
        ext_proc.ProcessingRequest.SerializeToString,
        ext_proc.ProcessingResponse.FromString,
    )
    return list(call(iter(messages), timeout=60, wait_for_ready=True))


@dataclass
class FakeGateway:
    """Server on loopback whose readiness a test sets."""

    status: int = 200
    answer: dict[str, Any] = field(default_factory=lambda: {"status": "ready", "open_requests": 0})
    host: str = "127.0.0.1"
    port: int = 0

    def __enter__(self) -> Self:
        self._server = ThreadingHTTPServer((self.host, self.port), type("Handler", (_Handler,), {"gateway": self}))
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def address(self) -> str:
        return f"{self.host}:{self._server.server_port}"

    def drain(self) -> None:
        """Answer like a gateway that stops."""
        self.status, self.answer = 503, {"status": "not ready", "reason": "the gateway is stopping"}


class _Handler(BaseHTTPRequestHandler):
    gateway: FakeGateway
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        text = json.dumps(self.gateway.answer).encode()
        self.send_response(self.gateway.status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
