"""Killed engines: every open request ends, every usage row is stored, and `moiety serve` restarts the engine."""

from __future__ import annotations

import json
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event
from typing import Any

import httpx
import psutil
import pytest

COMPLETIONS = "/v1/completions"
DEADLINE_S = 120
NUM_STREAMS = 4
NUM_WHOLE = 2


@dataclass
class Stream:
    """One streaming client, and what it got; written by its thread alone."""

    started: Event = field(default_factory=Event)
    status: int = 0
    events: list[str] = field(default_factory=list)
    pieces: int = 0

    def follow(self, account: Any, body: dict[str, Any]) -> None:
        client = httpx.Client(base_url=account.server.url, headers=account.headers, timeout=DEADLINE_S)
        with client, client.stream("POST", COMPLETIONS, json=body) as answer:
            self.status = answer.status_code
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    self.events.append(line.removeprefix("data: "))
                    self.pieces += '"text":"' in line and '"text":""' not in line
                    if self.pieces:
                        self.started.set()

    @property
    def request_id(self) -> str:
        return str(json.loads(self.events[0])["id"])


def asked(model: str, stream: bool, number: int) -> dict[str, Any]:
    """An answer of about 1,900 tokens: it lives longer than a kill takes."""
    prompt = f"tale {number}"
    return {"model": model, "prompt": prompt, "max_tokens": 1900, "n": 2, "ignore_eos": True, "stream": stream}


def is_error(document: str) -> bool:
    error = json.loads(document).get("error")
    return bool(error and error["code"] and error["message"])


@pytest.mark.parametrize("victims", [("front",), ("core",), ("front", "core")], ids=" and ".join)
def test_a_killed_engine_is_replaced_and_every_request_gets_an_end_and_a_row(
    server: Any, account: Any, until: Any, victims: tuple[str, ...]
) -> None:
    server.wait_until_idle()
    num_restarts = server.output.count("the engine is back")
    processes = {"front": server.engine_process(), "core": server.core_process()}
    streams = [Stream() for _ in range(NUM_STREAMS)]
    with ThreadPoolExecutor(NUM_STREAMS + NUM_WHOLE) as pool:
        followed: list[Future[None]] = [
            pool.submit(stream.follow, account, asked(server.model, True, number))
            for number, stream in enumerate(streams)
        ]
        whole = [pool.submit(account.post, COMPLETIONS, asked(server.model, False, 9)) for _ in range(NUM_WHOLE)]
        for stream in streams:
            assert stream.started.wait(DEADLINE_S), "a stream did not start"
        until(lambda: server.load()["num_inflight"] == 2 * (NUM_STREAMS + NUM_WHOLE), "all of them at the engine")
        for victim in victims:
            processes[victim].kill()
        for future in followed:
            future.result(DEADLINE_S)  # raises where a connection was cut instead of ended
        answers = [future.result(DEADLINE_S) for future in whole]

    for stream in streams:
        assert stream.status == 200
        assert is_error(stream.events[-1]), stream.events[-3:]
        assert "[DONE]" not in stream.events
    for answer in answers:
        assert answer.status_code in (502, 503), answer.text
        assert is_error(answer.text)

    until(lambda: server.output.count("the engine is back") > num_restarts, "serve says that the engine is back")
    assert "; starting it again" in server.output
    until(server.is_serving, "readiness")
    _, alive = psutil.wait_procs(processes.values(), timeout=DEADLINE_S)
    assert alive == [], "a half of the dead engine lives on"
    assert server.engine_process().pid != processes["front"].pid

    rows = {row["request_id"]: row for row in account.settled_rows(NUM_STREAMS + NUM_WHOLE)}
    assert {row["outcome"] for row in rows.values()} == {"failed"}
    assert all(row["error_code"] for row in rows.values())
    for stream in streams:
        assert rows[stream.request_id]["output_tokens"] >= stream.pieces > 0
    assert sum(row["http_status"] in (502, 503) for row in rows.values()) == NUM_WHOLE


def test_requests_while_no_engine_is_there_get_503_with_retry_after_and_a_row(
    server: Any, account: Any, until: Any
) -> None:
    num_restarts = server.output.count("the engine is back")
    server.engine_process().kill()
    until(lambda: not server.is_serving(), "the gateway notices")
    answer = account.post(COMPLETIONS, {"model": server.model, "prompt": "hello", "max_tokens": 1})
    health = server.admin.get("/healthz")
    assert health.status_code == 200
    assert answer.status_code == 503, answer.text
    assert is_error(answer.text) and answer.headers["retry-after"]
    until(lambda: server.output.count("the engine is back") > num_restarts, "serve says that the engine is back")
    until(server.is_serving, "readiness")
    (row,) = account.settled_rows(1)
    assert (row["http_status"], row["output_tokens"]) == (503, 0)
    assert row["error_code"] == answer.json()["error"]["code"]
