"""Count the gateway's files and calls that one warmed streamed chat of four tokens runs through.

    python benchmarks/request_calls.py [--requests 20] [--list]

A gateway on SQLite runs in this process beside a scripted engine process. A profile hook counts the calls of the
gateway's own functions in the event loop's thread, resumptions of coroutines included, and the files that they are in.
The figures are the least of several requests, since background tasks run between them. `--list` prints each call.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import CodeType

import httpx
from call_profile import CallProfile
from pydantic import SecretStr

from moiety_migrations.run import upgrade
from moiety_platform.auth.bootstrap import ensure_bootstrap
from moiety_platform.auth.pepper import pepper_of
from moiety_platform.bootstrap.composition import assembled
from moiety_platform.clock import SystemClock
from moiety_platform.db.session import Database
from moiety_platform.listening import bind
from moiety_platform.reloading.source import SettingsSource
from moiety_platform.settings import SECTION, GatewaySettings

PACKAGE = f"{os.sep}moiety_platform{os.sep}"
WARM_UP_REQUESTS = 50
LAST_CHUNK = b"0\r\n\r\n"


class CallCounter(CallProfile):
    """Counts the calls of one thread into the gateway's own files."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def note_call(self, code: CodeType) -> None:
        if PACKAGE in code.co_filename:
            self.calls.append((code.co_filename.partition(PACKAGE)[2], code.co_qualname))

    @property
    def num_files(self) -> int:
        return len({path for path, _ in self.calls})

    @property
    def num_jumps(self) -> int:
        """Number of calls into another file than the call before."""
        return sum(one[0] != other[0] for one, other in zip(self.calls, self.calls[1:], strict=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20, help="number of counted requests")
    parser.add_argument("--list", action="store_true", help="print the calls of the shortest request")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="moiety-calls-") as folder:
        counters = asyncio.run(_count(Path(folder), options.requests))
    least = min(counters, key=lambda counter: len(counter.calls))
    if options.list:
        for path, name in least.calls:
            print(f"{path:50} {name}")
        for path, count in Counter(path for path, _ in least.calls).most_common():
            print(f"{count:4} {path}")
    report = {"files": least.num_files, "calls": len(least.calls), "jumps": least.num_jumps, "requests": len(counters)}
    print(json.dumps(report))


async def _count(folder: Path, num_requests: int) -> list[CallCounter]:
    with _scripted_engine(folder) as address:
        async with _gateway(folder, address) as (port, key):
            with ChatClient(port, key) as client:
                for _ in range(WARM_UP_REQUESTS):
                    await asyncio.to_thread(client.ask)
                counters = []
                for _ in range(num_requests):
                    await asyncio.sleep(0.05)  # the tasks that the last request started have ended
                    with CallCounter() as counter:
                        await asyncio.to_thread(client.ask)
                    counters.append(counter)
                return counters


@contextmanager
def _scripted_engine(folder: Path) -> Iterator[str]:
    address = f"ipc://{folder / 'engine'}"
    command = [sys.executable, "-m", "moiety_platform.cli", "engine", "--scripted", "--listen", address]
    with (folder / "engine.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield address
    finally:
        process.terminate()
        process.wait()


@asynccontextmanager
async def _gateway(folder: Path, engine: str) -> AsyncIterator[tuple[int, str]]:
    url = f"sqlite:///{folder / 'moiety.db'}"
    upgrade(url)
    pepper = SecretStr("benchmark" * 8)
    settings = GatewaySettings(database_url=url, engines=(engine,), data_dir=folder, key_pepper=pepper)
    database = Database.open(url)
    keys = await ensure_bootstrap(database, pepper_of(settings), SystemClock())
    await database.close()
    assert keys is not None, "the store was empty"
    source = SettingsSource.open(None, SECTION, lambda: settings)
    listener = bind("127.0.0.1", 0)
    async with assembled(source) as gateway:
        server = gateway.server
        serving = asyncio.create_task(server.serve([listener]))
        port = listener.getsockname()[1]
        await asyncio.to_thread(_wait_ready, port)
        yield port, keys.tenant_key
        server.request_exit()
        await serving


def _wait_ready(port: int) -> None:
    while httpx.get(f"http://127.0.0.1:{port}/readyz").status_code != httpx.codes.OK:
        time.sleep(0.1)


class ChatClient:
    """A client that sends one chat request after another over a kept connection."""

    def __init__(self, port: int, key: str) -> None:
        body = json.dumps(
            {
                "model": "scripted",
                "messages": [{"role": "user", "content": "hello"}],
                "max_tokens": 4,
                "ignore_eos": True,
                "stream": True,
            }
        )
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: moiety\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nAuthorization: Bearer {key}\r\n\r\n"
        )
        self._request = head.encode() + body.encode()
        self._connection = socket.create_connection(("127.0.0.1", port), timeout=30)

    def __enter__(self) -> ChatClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def ask(self) -> None:
        """Send one request and read its stream to the end."""
        self._connection.sendall(self._request)
        answer = b""
        while not answer.endswith(LAST_CHUNK):
            part = self._connection.recv(65536)
            assert part, answer[:500]
            answer += part
        assert b" 200 " in answer.split(b"\r\n", 1)[0] and b"[DONE]" in answer, answer[:500]


if __name__ == "__main__":
    main()
