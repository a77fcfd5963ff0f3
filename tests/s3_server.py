"""A server that speaks S3, in a process of its own on loopback, with a bucket."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import certifi
import httpx

START_S = 60.0
BUCKET = "objects"


@dataclass
class S3Server:
    """Server with an empty bucket. `environment` has the variables by which obstore finds it."""

    _process: Any = None
    _port: int = 0

    def __enter__(self) -> Self:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.stop()

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
            "SSL_CERT_FILE": certifi.where(),  # obstore's client does not begin without any, even for http://
        }

    @property
    def url(self) -> str:
        return f"s3://{BUCKET}/moiety"

    def start(self) -> None:
        """Start it on the same port, without its former objects."""
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self._port)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until_s = time.monotonic() + START_S
        while True:
            assert self._process.poll() is None, "the server has ended"
            try:
                httpx.put(f"{self.environment['AWS_ENDPOINT_URL']}/{BUCKET}", trust_env=False).raise_for_status()
            except httpx.TransportError:
                assert time.monotonic() < until_s, "the server does not answer"
                time.sleep(0.05)
            else:
                return

    def stop(self) -> None:
        """Stop it. Idempotent."""
        self._process.terminate()
        self._process.wait(timeout=START_S)
