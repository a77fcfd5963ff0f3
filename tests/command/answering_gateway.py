"""A gateway on a loopback port that answers commands as a test says, and keeps what they asked."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.server_thread import serving_in_thread

Reply = Callable[[str], tuple[int, Any]]  # status and object, by the method of the request


class AnsweringGateway(ThreadingHTTPServer):
    """Answers each request by `reply`. `asked` has the method, the path and the body of each request."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.reply = reply
        self.asked: list[tuple[str, str, bytes]] = []

    @property
    def options(self) -> list[str]:
        """Options by which a command reaches this gateway."""
        return ["--url", f"http://127.0.0.1:{self.server_port}", "--admin-key", "k"]


class Handler(BaseHTTPRequestHandler):
    server: AnsweringGateway

    def respond(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.asked.append((self.command, self.path, body))
        status, answer = self.server.reply(self.command)
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_DELETE = respond

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Log nothing."""


@contextmanager
def answering_gateway(reply: Reply) -> Iterator[AnsweringGateway]:
    """Serve requests until the end of the block."""
    with serving_in_thread(AnsweringGateway(reply)) as server:
        yield server
