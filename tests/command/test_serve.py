"""`moiety serve` from outside: what it prints, what it survives, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tests.conftest import wait_for

DEADLINE_S = 60
SOCKETS = shutil.ignore_patterns("*.sock", "*.ipc")  # sockets of processes that have ended cannot be copied
StartServe = Callable[..., Any]


@pytest.fixture(scope="module")
def serve(start_serve: StartServe, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One serve for the tests that leave it as it was, on a directory that was there before and that all can read."""
    directory = tmp_path_factory.mktemp("data")
    directory.chmod(0o755)
    running = start_serve("--no-dashboard", data_dir=directory)
    running.wait_for_line("moiety is ready at")
    return running


def ask(serve: Any, timeout_s: float = DEADLINE_S) -> httpx.Response:
    body = {"model": "moiety-demo", "messages": [{"role": "user", "content": "hello"}]}
    headers = {"Authorization": f"Bearer {serve.tenant_key}"}
    return httpx.post(f"{serve.url}/v1/chat/completions", json=body, headers=headers, timeout=timeout_s)


def streaming(serve: Any) -> AbstractContextManager[httpx.Response]:
    body = {"model": "moiety-demo", "stream": True, "messages": [{"role": "user", "content": "x" * 50}]}
    headers = {"Authorization": f"Bearer {serve.tenant_key}"}
    return httpx.stream("POST", f"{serve.url}/v1/chat/completions", json=body, headers=headers, timeout=DEADLINE_S)


def usage_rows(serve: Any) -> list[tuple[str, str | None, int]]:
    """Return outcome, error code and prompt tokens of every row in the store."""
    with closing(sqlite3.connect(serve.data_dir / "moiety.db")) as store:
        return store.execute("SELECT outcome, error_code, prompt_tokens FROM usage").fetchall()


def children(serve: Any) -> list[psutil.Process]:
    """The parts that run as such; a process that has not yet become its part has a shorter command line."""
    return [child for child in psutil.Process(serve.process.pid).children() if len(child.cmdline()) > 5]


def gone(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=DEADLINE_S)
    return all(process.status() == psutil.STATUS_ZOMBIE for process in alive if process.is_running())


def printed_command(output: str) -> str:
    """Return the command that a user would copy: from the line with `curl` to the first line that is not continued."""
    lines = output.splitlines()
    start = next(index for index, line in enumerate(lines) if "curl" in line)
    end = next(index for index in range(start, len(lines)) if not lines[index].endswith("\\"))
    assert end > start
    return "\n".join(lines[start : end + 1])


def test_the_printed_command_answers(serve: Any) -> None:
    command = ["bash", "-c", printed_command(serve.output)]
    answer = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=DEADLINE_S).stdout)
    assert answer["choices"][0]["message"]["content"]
    assert answer["usage"]["completion_tokens"] > 0


def test_the_ready_line_comes_last_after_addresses_and_key(serve: Any) -> None:
    own = [line for line in serve.output.splitlines() if line and " | " not in line]
    last = next(index for index, line in enumerate(own) if line.startswith("moiety is ready at http://127.0.0.1:"))
    assert any(serve.tenant_key in line for line in own[:last])
    assert httpx.get(f"{serve.url}/readyz").status_code == 200


def test_secrets_are_in_private_files_and_in_no_log(serve: Any) -> None:
    for name in ("keys.json", "pepper"):
        assert (serve.data_dir / name).stat().st_mode & 0o077 == 0
    assert ask(serve).status_code == 200
    for log in (serve.data_dir / "logs").iterdir():
        assert "mty_" not in log.read_text(encoding="utf-8")


def test_a_port_in_use_is_said_before_anything_starts(start_serve: StartServe, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = start_serve("--port", str(port), data_dir=tmp_path / "data")
        assert refused.process.wait(DEADLINE_S) == 1
    assert f"127.0.0.1:{port}" in refused.output
    assert "--port" in refused.output
    assert not (tmp_path / "data").exists()


def test_a_second_serve_on_the_same_data_directory_is_refused(start_serve: StartServe, serve: Any) -> None:
    second = start_serve("--no-dashboard", "--no-traces", data_dir=serve.data_dir)
    assert second.process.wait(DEADLINE_S) == 1
    assert re.search(r"in use by another moiety serve \(process \d+\)", second.output)
    assert ask(serve).status_code == 200


def test_an_engine_that_cannot_start_ends_serve_with_its_reason(start_serve: StartServe) -> None:
    failed = start_serve("--no-dashboard", "--no-traces", "--", "--scripted-tokens-per-step", "none")
    assert failed.process.wait(DEADLINE_S) == 1
    assert "the engine ended before it was ready" in failed.output
    assert "engine.log" in failed.output


def traces_of(serve: Any) -> list[dict[str, Any]]:
    headers = {"Authorization": f"Bearer {serve.admin_key}"}
    answer = httpx.get(f"{serve.url}/admin/v1/traces", headers=headers, timeout=DEADLINE_S)
    found: list[dict[str, Any]] = answer.json()["data"] if answer.status_code == 200 else []
    return found


def test_traces_are_found_after_the_trace_store_was_killed(serve: Any) -> None:
    asked: set[str] = set()  # not every answer's trace is kept, nor any that ends while the store is away

    def finds_one() -> bool:
        asked.add(ask(serve).json()["id"])
        return not asked.isdisjoint(one["request_id"] for one in traces_of(serve))

    wait_for(finds_one, "a trace of what was asked")
    asked.clear()
    serve.part("traces").kill()
    serve.wait_for_line("starting the traces again")
    wait_for(finds_one, "a trace of what was asked since the store was killed")
    assert (serve.data_dir / "traces.db").stat().st_mode & 0o077 == 0


def test_a_killed_engine_is_restarted_and_said_so_and_requests_work_again(serve: Any) -> None:
    before = serve.part("engine")
    before.kill()
    serve.wait_for_line("the engine ended (killed by SIGKILL); starting it again")
    serve.wait_for_line("the engine is back")
    assert serve.part("engine").pid != before.pid
    assert ask(serve).status_code == 200


@pytest.mark.thorough
def test_an_engine_killed_twice_in_a_row_is_said_to_be_back_once(start_serve: StartServe) -> None:
    running = start_serve("--no-dashboard", "--no-traces")
    running.wait_for_line("moiety is ready at")
    running.part("engine").kill()
    running.wait_for_line("starting the engine again")
    wait_for(lambda: "engine" in [child.cmdline()[5] for child in children(running)], "the engine's second run")
    running.part("engine").kill()
    running.wait_for_line("the engine is back")
    running.part("gateway").kill()
    running.wait_for_line("the gateway is back")
    assert running.output.count("the engine is back") == 1


def test_a_killed_gateway_is_restarted_with_the_same_keys(serve: Any) -> None:
    serve.part("gateway").kill()
    serve.wait_for_line("the gateway ended (killed by SIGKILL); starting it again")
    serve.wait_for_line("the gateway is back")
    assert ask(serve).status_code == 200


def test_a_stop_lets_a_running_answer_end_and_leaves_no_process(start_serve: StartServe) -> None:
    running = start_serve("--no-dashboard", "--no-traces", "--", "--scripted-step-ms", "50")
    running.wait_for_line("moiety is ready at")
    processes = running.family()
    assert len(processes) >= 2
    first = threading.Event()
    texts: list[str] = []

    def stream() -> None:
        body = {"model": "moiety-demo", "stream": True, "messages": [{"role": "user", "content": "x" * 20}]}
        headers = {"Authorization": f"Bearer {running.tenant_key}"}
        url = f"{running.url}/v1/chat/completions"
        with httpx.stream("POST", url, json=body, headers=headers, timeout=DEADLINE_S) as response:
            for line in response.iter_lines():
                texts.append(line)
                first.set()

    reader = threading.Thread(target=stream)
    reader.start()
    assert first.wait(DEADLINE_S)
    assert running.stop(signal.SIGINT) == 0
    reader.join(DEADLINE_S)
    assert "data: [DONE]" in texts
    assert "draining" in running.output
    assert gone(processes)


def test_a_second_signal_ends_at_once_and_the_running_answer_is_still_accounted_for(start_serve: StartServe) -> None:
    running = start_serve("--no-dashboard", "--no-traces", "--", "--scripted-step-ms", "1000")
    running.wait_for_line("moiety is ready at")
    processes = running.family()
    with streaming(running) as response:
        assert response.status_code == 200
        os.kill(running.process.pid, signal.SIGTERM)
        running.wait_for_line("draining")
        os.kill(running.process.pid, signal.SIGTERM)
        running.process.wait(DEADLINE_S)
    assert "stopping at once" in running.output
    assert gone(processes)
    rows = usage_rows(running)
    assert all((outcome, error_code) != ("failed", "gateway_killed") for outcome, error_code, _ in rows)
    if not rows:  # a busy machine gave it no time to write within two seconds: the next start does
        again = start_serve("--no-dashboard", "--no-traces", data_dir=running.data_dir)
        again.wait_for_line("moiety is ready at")
        assert again.stop() == 0
    ((_, _, prompt_tokens),) = usage_rows(running)
    assert prompt_tokens > 0


def test_a_killed_gateway_loses_no_usage_row(start_serve: StartServe) -> None:
    running = start_serve("--no-dashboard", "--no-traces", "--", "--scripted-step-ms", "300")
    running.wait_for_line("moiety is ready at")
    log = running.data_dir / "logs" / "gateway.log"
    with streaming(running) as response:
        lines = response.iter_lines()  # held, since a dropped iterator closes the connection
        assert next(lines)
        assert ask(running).status_code == 200
        wait_for(lambda: '"event":"request"' in log.read_text(encoding="utf-8"), "the row of the whole answer")
        running.part("gateway").kill()
        running.wait_for_line("the gateway ended (killed by SIGKILL); starting it again")
    running.wait_for_line("the gateway is back")
    headers = {"Authorization": f"Bearer {running.admin_key}"}
    end = time.monotonic() + DEADLINE_S
    rows: list[dict[str, Any]] = []
    while len(rows) < 2:
        assert time.monotonic() < end, rows
        rows = httpx.get(f"{running.url}/admin/v1/usage/requests", headers=headers, timeout=DEADLINE_S).json()["data"]
    killed, ended = sorted(rows, key=lambda row: row["error_code"] is None)
    assert (killed["outcome"], killed["error_code"]) == ("failed", "gateway_killed")
    assert killed["prompt_tokens"] > 0 and killed["output_tokens"] == 0
    assert ended["http_status"] == 200 and ended["output_tokens"] > 0


@pytest.fixture(scope="module")
def killed(start_serve: StartServe) -> Any:
    """Kill a serve, and wait until none of its processes is left."""
    running = start_serve("--no-dashboard", "--no-traces")
    running.wait_for_line("moiety is ready at")
    processes = running.family()
    running.process.kill()
    running.process.wait(DEADLINE_S)
    assert gone(processes)
    return running


def test_a_lost_database_gets_new_keys_that_work_and_are_shown(
    start_serve: StartServe, killed: Any, tmp_path: Path
) -> None:
    old = killed.admin_key
    data_dir = shutil.copytree(killed.data_dir, tmp_path / "data", ignore=SOCKETS)
    for path in data_dir.glob("moiety.db*"):
        path.unlink()
    again = start_serve("--no-dashboard", "--no-traces", data_dir=data_dir)
    again.wait_for_line("moiety is ready at")
    assert again.admin_key != old
    assert f"admin key   {again.admin_key}" in again.output
    assert ask(again).status_code == 200
    headers = {"Authorization": f"Bearer {again.admin_key}"}
    assert httpx.get(f"{again.url}/admin/v1/tenants", headers=headers).status_code == 200


def test_the_data_is_private_also_in_a_directory_that_was_there_before(serve: Any) -> None:
    assert ask(serve).status_code == 200
    shared = [path for path in serve.data_dir.rglob("*") if not path.is_socket() and path.stat().st_mode & 0o077]
    assert shared == []
    assert (serve.data_dir / "usage-journal").is_dir()


def test_no_process_outlives_a_killed_serve_and_the_next_start_has_the_same_key(
    start_serve: StartServe, killed: Any, tmp_path: Path
) -> None:
    data_dir = shutil.copytree(killed.data_dir, tmp_path / "data", ignore=SOCKETS)
    again = start_serve("--no-dashboard", "--no-traces", data_dir=data_dir)
    again.wait_for_line("moiety is ready at")
    assert again.tenant_key == killed.tenant_key
    assert "admin key" not in again.output  # it is shown once
    assert ask(again).status_code == 200
    assert again.stop(signal.SIGTERM) == 0
