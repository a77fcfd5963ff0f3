"""Agents that are stopped in the middle of an answer, and the reports of their requests by gateway and engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from commands import AGENT_TIMEOUT_S, prepared_command
from tasks import Server, expect

MIN_STREAMED_TOKENS = 20  # of an answer before the agent is stopped
STOP_TIMEOUT_S = 20.0  # for an agent that was interrupted
FREE_TIMEOUT_S = 15.0  # for the engine after that: a heartbeat comes each second
POLL_S = 0.1
_IDLE = ("num_running", "num_waiting", "num_paused", "kv_blocks_used")


def expect_cancelled(server: Server, command: Sequence[str], settings: Mapping[str, str]) -> None:
    """Interrupt the agent in the middle of an answer (Ctrl-C), then kill another one.

    Each time the engine must become idle with all KV blocks free, and every request must be logged as disconnected,
    with the tokens that the engine generated for it as its output tokens.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it, and so do its agents
    for sent in (signal.SIGINT, signal.SIGKILL):
        _stop_once(server, command, settings, sent)


def _stop_once(server: Server, command: Sequence[str], settings: Mapping[str, str], sent: signal.Signals) -> None:
    before = _wait_for(server, _is_idle, FREE_TIMEOUT_S, "the engine was not idle before the agent started")
    made = prepared_command(command, settings)
    with tempfile.TemporaryFile() as output:
        running = subprocess.Popen(
            made.arguments,
            cwd=made.folder,
            env=made.environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            least = before["output_tokens_total"] + MIN_STREAMED_TOKENS

            def is_streaming(load: Mapping[str, Any]) -> bool:
                expect(running.poll() is None, f"the agent ended before: {_end_of(output)}")
                return bool(load["output_tokens_total"] >= least)

            _wait_for(server, is_streaming, AGENT_TIMEOUT_S, "the agent got no answer")
            os.killpg(running.pid, sent)
            running.wait(STOP_TIMEOUT_S)
        finally:
            if running.poll() is None:
                os.killpg(running.pid, signal.SIGKILL)
                running.wait()
    after = _wait_for(server, _is_idle, FREE_TIMEOUT_S, f"the engine computes further after {sent.name}")
    _expect_billed(server, before, after)


def _expect_billed(server: Server, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Check the log of the requests that the engine had between two loads."""
    num_requests = after["requests_total"] - before["requests_total"]
    until = time.monotonic() + FREE_TIMEOUT_S
    while True:
        rows = _asked(server, f"/admin/v1/requests?model={server.model}&limit=100")["data"]
        if len(rows) >= after["requests_total"] or time.monotonic() > until:
            break
        time.sleep(POLL_S)
    expect(num_requests > 0 and len(rows) == after["requests_total"], (num_requests, len(rows)))
    ended = rows[:num_requests]
    expect({(row["outcome"], row["http_status"]) for row in ended} == {("disconnected", 499)}, ended)
    billed = sum(row["output_tokens"] for row in ended)
    expect(billed == after["output_tokens_total"] - before["output_tokens_total"], (billed, before, after))


def _is_idle(load: Mapping[str, Any]) -> bool:
    return not any(load[name] for name in _IDLE)


def _wait_for(
    server: Server, condition: Callable[[Mapping[str, Any]], bool], timeout_s: float, otherwise: str
) -> Mapping[str, Any]:
    """Return the load of the model's engine once it meets the condition; `otherwise` is the failure's message."""
    until = time.monotonic() + timeout_s
    while True:
        engines = _asked(server, "/admin/v1/engines")["data"]
        (load,) = [one["load"] for one in engines if one["card"] is not None and one["card"]["model"] == server.model]
        if condition(load):
            return dict(load)
        expect(time.monotonic() < until, f"{otherwise}: { ({name: load[name] for name in _IDLE}) }")
        time.sleep(POLL_S)


def _asked(server: Server, path: str) -> Any:
    asked = urllib.request.Request(server.url + path, headers={"Authorization": f"Bearer {server.admin_key}"})
    with urllib.request.urlopen(asked, timeout=30) as answer:
        return json.load(answer)


def _end_of(output: Any) -> str:
    output.seek(0)
    return bytes(output.read()).decode(errors="replace")[-300:]
