"""Servers and gateways as processes, each in its own process group, which ends with it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from moiety_platform.engine_addresses import ExternalKind
from moiety_platform.supervisor.ports import claim_port

MODEL = "qwen3-moe"
CONTEXT_TOKENS = 1024
START_S = 300.0
MOIETY = "from moiety_platform.cli.main import main; main()"


@dataclass(frozen=True, slots=True)
class Server:
    """A running server."""

    kind: ExternalKind
    url: str
    process: subprocess.Popen[bytes]
    address: str  # for a gateway


@contextmanager
def gateway(server: Server, folder: Path) -> Iterator[str]:
    """Start a gateway and yield its URL; the first keys are in `keys.json`."""
    port = claim_port("127.0.0.1", 0, "--port")
    command = [sys.executable, "-c", MOIETY, "gateway", "--migrate", "--first-keys", folder / "keys.json"]
    command += ["--data-dir", folder / "data", "--port", port, "--engine", server.address, "--drain-s", 1]
    with process(command, folder / "gateway.log", {}) as running:
        wait(f"http://127.0.0.1:{port}/healthz", running, folder / "gateway.log")
        yield f"http://127.0.0.1:{port}"


@contextmanager
def process(command: list[Any], log: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        running = subprocess.Popen(
            [str(part) for part in command],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
            start_new_session=True,
        )
    try:
        yield running
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGTERM)
        try:
            running.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()


def wait(url: str, running: subprocess.Popen[bytes], log: Path) -> None:
    """Return once it answers; ends the script with its log if it does not."""
    started = time.monotonic()
    while time.monotonic() - started < START_S:
        if running.poll() is not None:
            break
        try:
            if httpx.get(url, trust_env=False, timeout=5).status_code == httpx.codes.OK:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise SystemExit(f"it does not answer {url}; its log ends:\n{log.read_text(errors='replace')[-4000:]}")
