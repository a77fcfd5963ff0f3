"""`moiety top` on a real gateway: live in a terminal of 80 × 24, once, as JSON, and without a gateway."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

DEADLINE_S = 60
LINES, COLUMNS = 24, 80
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
HELLO = {"model": "moiety-demo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


@pytest.fixture(scope="module")
def serve(start_serve: Callable[..., Any]) -> Any:
    running = start_serve("--no-dashboard", "--no-traces")
    with httpx.Client(base_url=running.url, headers={"Authorization": f"Bearer {running.tenant_key}"}) as client:
        for _ in range(5):
            client.post("/v1/chat/completions", json=HELLO, timeout=30).raise_for_status()
    return running


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "moiety_platform.cli", "top", *arguments]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), env={**os.environ, **environment}, capture_output=True, text=True,
                          timeout=DEADLINE_S, check=False)  # fmt: skip


class Terminal:
    """A terminal with the command in it."""

    def __init__(self, descriptor: int, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self._descriptor = descriptor
        self._written = ""

    def press(self, keys: str) -> None:
        os.write(self._descriptor, keys.encode())

    def frame(self) -> list[str]:
        """Return the contents of the screen: everything written since it was last cleared."""
        return ESCAPES.sub("", self._written.rpartition("\x1b[H")[2]).split("\r\n")

    def wait_for(self, holds: Callable[[str], bool]) -> list[str]:
        end = time.monotonic() + DEADLINE_S
        while not holds("\n".join(self.frame())):
            assert time.monotonic() < end, self._written
            if select.select([self._descriptor], [], [], 0.2)[0]:
                self._written += os.read(self._descriptor, 65536).decode()
        return self.frame()

    def wait_for_end(self) -> int:
        while self.process.poll() is None:  # a terminal whose buffer is full would block it
            if select.select([self._descriptor], [], [], 0.1)[0]:
                self._written += os.read(self._descriptor, 65536).decode()
        while select.select([self._descriptor], [], [], 0.1)[0]:
            self._written += os.read(self._descriptor, 65536).decode()
        return self.process.returncode

    @property
    def is_left(self) -> bool:
        """Return whether the alternate screen was left, the cursor is visible, and line wrap is as before."""
        waits_for_lines = bool(termios.tcgetattr(self._descriptor)[3] & termios.ICANON)
        return "\x1b[?25h" in self._written and "\x1b[?1049l" in self._written and waits_for_lines


@contextmanager
def terminal(*arguments: str) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(command(*arguments), stdin=theirs, stdout=theirs, stderr=theirs,
                               env={**kept, "TERM": "xterm-256color"}, start_new_session=True)  # fmt: skip
    try:
        yield Terminal(ours, process)
    finally:
        process.kill()
        process.wait()
        os.close(theirs)
        os.close(ours)


def test_the_live_view_fits_a_small_terminal_sorts_by_a_column_and_ends_on_q(serve: Any) -> None:
    with terminal("--data-dir", str(serve.data_dir), "--interval-s", "0.5") as shown:
        frame = shown.wait_for(lambda text: "demo" in text and "q quit" in text)
        assert len(frame) <= LINES
        assert max(map(len, frame)) <= COLUMNS
        text = "\n".join(frame)
        for words in (
            "Engines, now",
            "engine.sock",
            "ready",
            "Classes, 5 min",
            "priority",
            "share▼",
            "TTFT ms",
            "q quit",
        ):
            assert words in text
        shown.press(">")
        shown.wait_for(lambda text: "req/min▼" in text and "share▼" not in text)
        shown.press("r")
        shown.wait_for(lambda text: "req/min▲" in text)
        shown.press("\t\x1b[C")  # the engines' second column, by an arrow
        shown.wait_for(lambda text: "state▲" in text and "engine▲" not in text)
        before = frame[0]
        shown.wait_for(lambda text: "moiety top" in text and text.split("\n")[0] != before)  # it goes on reading
        shown.press("q")
        assert shown.wait_for_end() == 0
        assert shown.is_left


def test_once_in_a_pipe_and_as_json_it_says_the_same_without_escapes(serve: Any) -> None:
    plain = run("--once", "--data-dir", str(serve.data_dir))
    assert plain.returncode == 0
    assert "\x1b" not in plain.stdout
    assert "engine.sock" in plain.stdout and "demo" in plain.stdout and "q quit" not in plain.stdout
    found = json.loads(run("--json", "--data-dir", str(serve.data_dir)).stdout)
    (engine,) = found["engines"]
    assert (engine["state"], engine["model"], engine["output_tokens_per_s"]) == ("ready", "moiety-demo", 0)
    assert [one["class"] for one in found["classes"]] == ["priority", "standard", "flex", "batch"]
    (tenant,) = found["tenants"]
    assert (tenant["tenant"], tenant["share"], tenant["slo_attainment"], tenant["failed"]) == ("demo", 1, 1, 0)
    assert tenant["requests_per_min"] == pytest.approx(5 * 60 / found["window_s"], rel=1e-4)
    assert 300 <= found["window_s"] <= 361


def test_an_administrator_of_one_tenant_sees_its_own_and_no_engines(serve: Any) -> None:
    admin = httpx.Client(base_url=f"{serve.url}/admin/v1", headers={"Authorization": f"Bearer {serve.admin_key}"})
    with admin:
        other = admin.post("/tenants", json={"name": "other"}).json()["id"]
        new = {"name": "its own", "role": "tenant-admin", "tenant_id": other}
        key = admin.post("/keys", json=new).json()["secret"]
    plain = run("--once", MOIETY_URL=serve.url, MOIETY_ADMIN_KEY=key)
    assert plain.returncode == 0, plain.stderr
    assert "may not see engines" in plain.stdout
    assert "demo" not in plain.stdout


def test_without_a_gateway_it_says_so_and_ends_with_3() -> None:
    found = run("--url", "http://127.0.0.1:9", MOIETY_ADMIN_KEY="mty_x.y")
    assert (found.returncode, found.stdout) == (3, "")
    assert "does not answer" in found.stderr
