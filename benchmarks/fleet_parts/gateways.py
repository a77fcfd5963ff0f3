"""Processes of a fleet: gateways, and one process with all of their engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from moiety_platform.bench.gateway import RunningGateway
from moiety_platform.supervisor.data_dir import KEYS_FILE, read_first_keys
from moiety_platform.supervisor.ports import claim_port

START_S = 300.0  # of a gateway beside others that start, on a busy machine
NUM_AT_ONCE = 4
STOP_S = 30.0
HERE = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True)
class Gateway(RunningGateway):
    """A gateway of the fleet that is ready."""

    @property
    def admin_headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.admin_key}"}


@contextmanager
def engines_process(kind: str, count: int, step_delay_s: float = 0.0) -> Iterator[list[str]]:
    """Start `count` engines of the kind in one process, and yield their addresses when all are ready."""
    command = [sys.executable, "-m", "fleet_parts.engines", kind, str(count), str(step_delay_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=HERE) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())
        finally:
            process.stdin.close()
            _stop(process)


@contextmanager
def gateway_process(folder: Path, engines: Sequence[str], *, admin_key: str = "", **settings: str) -> Iterator[Gateway]:
    """Start a gateway with its data in `folder`, and yield it when it is ready.

    `settings` are more settings by name. The first gateway of a database creates its tables and the first keys;
    another one gets the `admin_key` of the first.
    """
    port = claim_port("127.0.0.1", 0, "--port")
    command = [sys.executable, "-m", "moiety_platform.cli", "gateway", "--port", str(port), "--data-dir", str(folder)]
    if not admin_key:
        command += ["--migrate", "--first-keys", str(folder / KEYS_FILE)]
    for engine in engines:
        command += ["--engine", engine]
    environment = os.environ | {f"MOIETY_{name.upper()}": value for name, value in settings.items()}
    log_path = folder / f"gateway-{port}.log"
    with log_path.open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log, env=environment) as process:
        try:
            _wait_ready(port, process, log_path)
            if not admin_key:
                keys = read_first_keys(folder)
                assert keys is not None, "a gateway that is ready has written its first keys"
                admin_key = keys.admin_key
            yield Gateway(psutil.Process(process.pid), port, admin_key)
        finally:
            _stop(process)


def start_gateways(stack: ExitStack, folders: Sequence[Path], engines: Sequence[str], **settings: str) -> list[Gateway]:
    """Start a gateway in each new folder, some of them at once after the first; `stack` stops them."""
    for folder in folders:
        folder.mkdir()
    first = stack.enter_context(gateway_process(folders[0], engines, **settings))
    others = [gateway_process(folder, engines, admin_key=first.admin_key, **settings) for folder in folders[1:]]
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        return [first, *pool.map(stack.enter_context, others)]


def _wait_ready(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    until_s = time.monotonic() + START_S
    while True:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=5, trust_env=False).status_code == httpx.codes.OK:
                return
        except httpx.HTTPError:
            pass
        ended = process.poll() is not None
        assert not ended and time.monotonic() < until_s, f"the gateway did not start:\n{log.read_text()[-2000:]}"
        time.sleep(0.2)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
