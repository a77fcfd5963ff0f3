"""Processor time that the web framework adds to a POST request, and that `moiety_platform/fast_path.py` saves.

    python benchmarks/framework_dispatch.py [--requests 5000] [--output benchmarks/results/framework_dispatch.json]

One ASGI application answers a POST of a chat request, in one part and in 64. It is called with the framework's routing,
guard and request object, as any controller would be, and directly, as the endpoints of inference are. The two take
turns; each figure is the smallest processor time of a round, per request. There are no sockets and no engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from datetime import date
from pathlib import Path
from typing import Any

from litestar import Litestar, Request, post
from litestar.types import ASGIApp, Receive, Scope, Send

from moiety_platform.allowed_methods import add_allow_header
from moiety_platform.app import EXCEPTION_HANDLERS, BoundedRequest
from moiety_platform.bench.environment import describe_environment
from moiety_platform.fast_path import DIRECT, GatewayApp
from moiety_platform.known_parameters import guard_query
from moiety_platform.request_head import add_request_id

PATH = "/v1/chat/completions"
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}).encode()
ROUNDS = 12
STREAMED = 64  # parts of a streamed answer


def answering(num_parts: int) -> ASGIApp:
    """Return an application that reads the body and answers in this number of parts."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(num_parts):
            await send({"type": "http.response.body", "body": b"data: {}\n\n", "more_body": number < num_parts - 1})

    return answer


def make_app(answer: ASGIApp) -> GatewayApp:
    """Return an application with one endpoint, and the hooks and guards of the gateway's application."""

    @post(PATH, opt={DIRECT: answer})
    async def create(request: Request[Any, Any, Any]) -> ASGIApp:
        return answer

    return GatewayApp(
        route_handlers=[create],
        exception_handlers=EXCEPTION_HANDLERS,
        guards=[guard_query],
        before_send=[add_request_id, add_allow_header],
        openapi_config=None,
        request_class=BoundedRequest,
        logging_config=None,
    )


async def serve(call: Callable[[Any, Any, Any], Awaitable[None]], num_requests: int) -> float:
    """Return the processor time of a request, in microseconds."""
    headers = [(b"host", b"gateway"), (b"content-type", b"application/json"), (b"authorization", b"Bearer mty_a.b")]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": BODY, "more_body": False}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            assert message["status"] == 200, message

    start_s = time.process_time()
    for _ in range(num_requests):
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": PATH, "raw_path": PATH.encode(), "root_path": "", "query_string": b"", "headers": headers,
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2), "state": {},
        }  # fmt: skip
        await call(scope, receive, send)
    return (time.process_time() - start_s) / num_requests * 1e6


async def measure(num_requests: int, num_parts: int) -> dict[str, float]:
    """Return the smallest time of each variant."""
    app = make_app(answering(num_parts))

    async def by_framework(scope: Any, receive: Any, send: Any) -> None:
        await Litestar.__call__(app, scope, receive, send)

    times = [(await serve(by_framework, num_requests), await serve(app, num_requests)) for _ in range(ROUNDS)]
    framework_us, direct_us = (min(one) for one in zip(*times, strict=True))
    return {
        "framework_us": round(framework_us, 1),
        "direct_us": round(direct_us, 1),
        "saved_us": round(framework_us - direct_us, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=5000, help="requests per round")
    parser.add_argument("--output", type=Path, help="JSON file for the report")
    given = parser.parse_args()
    parts = {"whole": 1, "stream": STREAMED}
    measured = {name: asyncio.run(measure(given.requests, num_parts)) for name, num_parts in parts.items()}
    report = {"date": date.today().isoformat(), "environment": describe_environment(), "measured": measured}
    print(json.dumps(report, indent=2))
    if given.output is not None:
        given.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
