"""The dashboard's answers have its security headers, as a browser gets them from the process."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from moiety_dashboard.web_server import SECURITY_HEADERS, SecurityHeaders

DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def dashboard() -> Iterator[str]:
    """Yield the address of a dashboard whose gateway is not running."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moiety_platform.cli", "dashboard", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            try:
                httpx.get(f"http://127.0.0.1:{port}/_stcore/health")
                break
            except httpx.TransportError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
        process.terminate()


@pytest.mark.parametrize("path", ["/", "/_stcore/health", "/favicon.png", "/nowhere/at/all.js"])
def test_every_answer_of_the_dashboard_has_each_security_header_once(dashboard: str, path: str) -> None:
    answer = httpx.get(dashboard + path)
    for name, value in SECURITY_HEADERS.items():
        assert answer.headers.get_list(name) == [value]


def test_the_policy_lets_nothing_load_from_elsewhere() -> None:
    directives = dict(one.split(" ", 1) for one in SECURITY_HEADERS["content-security-policy"].split("; "))
    assert directives["frame-ancestors"] == directives["object-src"] == "'none'"
    sources = {word for value in directives.values() for word in value.split()}
    assert sources == {"'self'", "'none'", "'unsafe-inline'", "'unsafe-eval'", "data:", "blob:"}


async def test_a_header_of_the_application_is_replaced_not_doubled() -> None:
    sent = []

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"X-Frame-Options", b"ALLOW")]})

    async def send(message: dict[str, Any]) -> None:
        sent.extend(message["headers"])

    await SecurityHeaders(app)({"type": "http"}, None, send)
    assert [value for name, value in sent if name.lower() == b"x-frame-options"] == [b"DENY"]
