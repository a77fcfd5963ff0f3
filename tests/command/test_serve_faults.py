"""`moiety serve` on a machine in trouble: a full disk, processes that hang, and logs that another program rotates."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tests.conftest import free_port, wait_for

DEADLINE_S = 60
HANG_TIMEOUT_S = 5
NUM_REQUESTS = 250  # whose log lines are more than a pipe holds
StartServe = Callable[..., Any]


def ask(serve: Any) -> httpx.Response:
    body = {"model": "moiety-demo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    headers = {"Authorization": f"Bearer {serve.tenant_key}"}
    return httpx.post(f"{serve.url}/v1/chat/completions", json=body, headers=headers, timeout=DEADLINE_S)


@pytest.fixture(scope="module")
def full(start_serve: StartServe, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Start a serve whose log of the gateway is on a full disk, and which finds hanging processes soon."""
    directory = tmp_path_factory.mktemp("data")
    (directory / "logs").mkdir()
    (directory / "logs" / "gateway.log").symlink_to("/dev/full")
    running = start_serve("--no-dashboard", "--hang-timeout-s", str(HANG_TIMEOUT_S), data_dir=directory)
    running.wait_for_line("moiety is ready at")
    return running


def test_a_full_disk_is_named_and_requests_are_served_and_a_killed_gateway_is_restarted(full: Any) -> None:
    full.wait_for_line("the disk is full")
    body = {"model": "moiety-demo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    headers = {"Authorization": f"Bearer {full.tenant_key}"}
    with httpx.Client(timeout=DEADLINE_S, headers=headers) as client:
        for _ in range(NUM_REQUESTS):
            assert client.post(f"{full.url}/v1/chat/completions", json=body).status_code == 200
    full.part("gateway").kill()
    full.wait_for_line("the gateway ended (killed by SIGKILL); starting it again")
    full.wait_for_line("the gateway is back")
    assert ask(full).status_code == 200


def reopened_log(serve: Any) -> Path:
    """Return the gateway's log, in a file on a disk with space: before the first call, it is on the full one."""
    log: Path = serve.data_dir / "logs" / "gateway.log"
    if log.is_symlink():
        log.unlink()
        os.kill(serve.process.pid, signal.SIGHUP)
        serve.wait_for_line("the log files are opened again")
        ask(serve)
        wait_for(log.exists, "the new file")
    return log


def test_hang_up_opens_the_logs_again_and_they_say_what_is_missing(full: Any) -> None:
    full.wait_for_line("the disk is full")
    log = reopened_log(full)
    assert ask(full).status_code == 200
    wait_for(lambda: log.exists() and '"event":"request"' in log.read_text(), "the request in the new file")
    assert '"event": "output_lost"' in log.read_text()
    full.wait_for_line(f"{log} is written again")


def test_used_up_open_files_are_logged_although_no_file_can_be_opened(full: Any) -> None:
    log, gateway = reopened_log(full), full.part("gateway")
    before = gateway.rlimit(psutil.RLIMIT_NOFILE)
    gateway.rlimit(psutil.RLIMIT_NOFILE, (gateway.num_fds() // 2, before[1]))
    wait_for(lambda: '"event":"open_files_used_up"' in log.read_text(), "the event")
    gateway.rlimit(psutil.RLIMIT_NOFILE, before)
    wait_for(lambda: '"event":"open_files_used_up_no_longer"' in log.read_text(), "the end of it")
    assert ask(full).status_code == 200


@pytest.mark.parametrize("name", ["gateway", "engine", "traces"])
def test_a_process_that_hangs_is_killed_and_started_again(full: Any, name: str) -> None:
    wait_for(lambda: has_part(full, name), f"the {name}")
    before = wait_for(lambda: full.part(name), f"the {name}")
    wait_for(lambda: ask_ready(full), "the gateway's readiness")
    before.suspend()
    full.wait_for_line(f"the {name} has not responded for {HANG_TIMEOUT_S} s; killing it")
    full.wait_for_line(f"starting the {name} again")
    wait_for(lambda: has_part(full, name) and full.part(name).pid != before.pid, f"another {name}")
    wait_for(lambda: ask_ready(full), "the gateway's readiness")
    assert ask(full).status_code == 200
    metrics = httpx.get(f"{full.url}/metrics", timeout=DEADLINE_S).text
    assert f'moiety_serve_restarts_total{{process="{name}",reason="hang"}} 1.0' in metrics


def has_part(serve: Any, name: str) -> bool:
    try:
        return any(name in child.cmdline()[5:6] for child in psutil.Process(serve.process.pid).children())
    except psutil.NoSuchProcess:  # one has just ended
        return False


def ask_ready(serve: Any) -> bool:
    try:
        return httpx.get(f"{serve.url}/readyz", timeout=1).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.parametrize("is_ignored", [False, True])
def test_a_closed_terminal_ends_serve_unless_nohup_started_it(tmp_path: Path, is_ignored: bool) -> None:
    terminal, its_end = os.openpty()
    log, data_dir = tmp_path / "log", tmp_path / "data"

    command = [sys.executable, "-m", "moiety_platform.cli", "serve", "--scripted", "--port", "0", "--no-dashboard"]
    hangup = ["env", "--ignore-signal=HUP" if is_ignored else "--default-signal=HUP"]
    with log.open("wb") as file:
        process = subprocess.Popen(
            ["setsid", "--ctty", *hangup, *command, "--no-traces", "--data-dir", str(data_dir)],
            stdin=its_end,
            stdout=file,
            stderr=file,
        )
    os.close(its_end)
    try:
        wait_for(lambda: process.poll() is not None or "moiety is ready at" in log.read_text(), "the ready line")
        os.close(terminal)
        if is_ignored:
            process.send_signal(signal.SIGHUP)
            wait_for(lambda: "the log files are opened again" in log.read_text(), "the line about the logs")
            process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
        assert "draining" in log.read_text()
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(DEADLINE_S)


def test_serve_runs_although_its_own_output_cannot_be_written(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "moiety_platform.cli", "serve", "--scripted", "--port", str(port)]
    with Path("/dev/full").open("wb") as nowhere:
        process = subprocess.Popen(
            [*command, "--no-dashboard", "--no-traces", "--data-dir", str(tmp_path / "data")],
            stdin=subprocess.DEVNULL,
            stdout=nowhere,
            stderr=nowhere,
            start_new_session=True,
        )
    try:
        url = tmp_path / "data" / "serve.url"
        wait_for(lambda: process.poll() is not None or url.exists(), "the end of the start")
        assert httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=DEADLINE_S).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(DEADLINE_S)
