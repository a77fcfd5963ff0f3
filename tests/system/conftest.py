"""A real `moiety serve` for the tests of the whole: the bundled model, a real engine, a real store, HTTP from outside.

Knows what a user can see: what the command prints, the HTTP API, the processes. Knows nothing of how it is made.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tests.conftest import wait_for

DEADLINE_S = 120.0  # generous: the machine may be busy
POLL_S = 0.05
READY = "moiety is ready at "


@dataclass
class Server:
    """A serve that runs, seen from outside. Owns the admin's HTTP client."""

    process: subprocess.Popen[bytes]
    log: Path
    data_dir: Path
    admin: httpx.Client = field(default_factory=httpx.Client)

    @property
    def output(self) -> str:
        return self.log.read_text(encoding="utf-8")

    def printed(self, pattern: str) -> str:
        found = re.search(pattern, self.output, re.MULTILINE)
        assert found is not None, f"nothing like {pattern!r} was printed:\n{self.output}"
        return found[1]

    @property
    def url(self) -> str:
        return self.printed(f"^{READY}(http://.+)$")

    @property
    def model(self) -> str:
        return self.printed(r"^ *model +(\S+)$")

    def key(self, owner: str) -> str:
        """The printed key of the `admin` or the `tenant`."""
        return self.printed(rf"^ *{owner} key +(mty_\S+)")

    def is_ready(self) -> bool:
        assert self.process.poll() is None, f"serve has ended:\n{self.output}"
        return READY in self.output

    def engine_process(self) -> psutil.Process:
        """Return the engine server: the child of serve whose own child is the core."""
        for child in psutil.Process(self.process.pid).children():
            if any("moiety_engine.core" in " ".join(grandchild.cmdline()) for grandchild in child.children()):
                return child
        raise AssertionError("serve has no child with a core")

    def core_process(self) -> psutil.Process:
        (core,) = self.engine_process().children()
        return core

    def get(self, path: str, **parameters: Any) -> dict[str, Any]:
        answer = self.admin.get(path, params=parameters)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def load(self) -> dict[str, Any]:
        """What the one engine last said of its load, with what the gateway has in flight there."""
        (engine,) = self.get("/admin/v1/engines")["data"]
        return {**engine["load"], "num_inflight": engine["num_inflight"]}

    def fresh_load(self) -> dict[str, Any]:
        """A load that the engine measured after this call."""
        before = self.load()
        known = (before["engine_id"], before["seq"] + 1)  # the next may have been on its way
        return wait_for(lambda: (now := self.load()) and (now["engine_id"], now["seq"]) > known and now, "a fresh load")

    def wait_until_idle(self) -> dict[str, Any]:
        """Wait until nothing runs; the pool of blocks must then be whole."""
        busy = ("num_inflight", "num_running", "num_waiting", "num_paused", "kv_blocks_used")
        self.fresh_load()
        return wait_for(lambda: (now := self.load()) and not any(now[name] for name in busy) and now, "an idle engine")

    def is_serving(self) -> bool:
        try:
            return self.admin.get("/readyz").status_code == 200
        except httpx.TransportError:  # the gateway is starting; the deadline decides
            return False


@dataclass(frozen=True)
class Account:
    """A key of one test alone, and the usage rows that it left."""

    server: Server
    key_id: str
    secret: str

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.secret}", "Content-Type": "application/json"}

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(self.server.url + path, headers=self.headers, json=body, timeout=DEADLINE_S)

    def rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        cursor: dict[str, str] = {}
        while True:
            page = self.server.get("/admin/v1/usage/requests", key_id=self.key_id, limit=100, **cursor)
            rows += page["data"]
            if page["next_cursor"] is None:
                return rows
            cursor = {"cursor": page["next_cursor"]}

    def settled_rows(self, number: int) -> list[dict[str, Any]]:
        """Wait for so many rows and see that there is no more of them and none twice."""
        end = time.monotonic() + DEADLINE_S
        while len(rows := self.rows()) < number:
            assert time.monotonic() < end, f"{len(rows)} usage rows after {DEADLINE_S} s; {number} requests were made"
            time.sleep(POLL_S)
        self.server.wait_until_idle()
        marker = self.post("/v1/completions", {"model": self.server.model, "prompt": "last", "max_tokens": 1})
        assert marker.status_code == 200, marker.text
        # rows are written in the order of their ends: with the marker's, all before it have come
        wait_for(lambda: marker.json()["id"] in {row["request_id"] for row in self.rows()}, "the last row")
        rows = [row for row in self.rows() if row["request_id"] != marker.json()["id"]]
        assert len({row["request_id"] for row in rows}) == len(rows)
        assert len(rows) == number
        return rows


@contextmanager
def serving(directory: Path, *options: str) -> Iterator[Server]:
    """`moiety serve` as a user starts it on an empty data directory; stopped as a user stops it."""
    log = directory / "output"
    command = [str(Path(sys.executable).with_name("moiety")), "serve", "--no-dashboard", "--port", "0", *options]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, "--data-dir", str(directory / "data")],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    running = Server(process, log, directory / "data")
    family: list[psutil.Process] = []
    try:
        wait_for(running.is_ready, "the line that says ready")
        authorization = {"Authorization": f"Bearer {running.key('admin')}"}
        running.admin = httpx.Client(base_url=running.url, headers=authorization, timeout=DEADLINE_S)
        yield running
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == 0, running.output
        assert psutil.wait_procs(family, timeout=DEADLINE_S)[1] == []
    finally:
        running.admin.close()
        if process.poll() is None:
            family = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            process.wait(DEADLINE_S)
        for left in family:
            if left.is_running():
                left.kill()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("system")) as running:
        yield running


@pytest.fixture(scope="session")
def start_server() -> Callable[..., AbstractContextManager[Server]]:
    """`with start_server(directory, *options) as server`, for a server of one module."""
    return serving


@pytest.fixture(scope="session")
def until() -> Callable[..., Any]:
    """Waits for a condition, with a deadline."""
    return wait_for


@pytest.fixture
def account(server: Server) -> Account:
    """A fresh key of the demo tenant's project."""
    project, *_ = server.get("/admin/v1/projects")["data"]  # oldest first
    made = server.admin.post("/admin/v1/keys", json={"name": "system test", "project_id": project["id"]})
    assert made.status_code == 201, made.text
    return Account(server, made.json()["key"]["id"], made.json()["secret"])
