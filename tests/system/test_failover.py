"""One of two real engines is killed while it answers: every answer is that of an undisturbed run, and so is its bill.

`MOIETY_TEST_FAILOVER_REQUESTS=100 pytest tests/system/test_failover.py` runs it with more requests at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

DEADLINE_S = 180.0  # generous: the machine may be busy
NUM_REQUESTS = int(os.environ.get("MOIETY_TEST_FAILOVER_REQUESTS", "24"))
MAX_TOKENS = 160
MOIETY = str(Path(sys.executable).with_name("moiety"))


@dataclass
class Answer:
    """What one request got, free of what two runs of it never share."""

    request_id: str = ""
    status: int = 0
    text: dict[int, str] = field(default_factory=dict)  # by choice
    tokens: dict[int, list[str]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    finish_reasons: dict[int, str] = field(default_factory=dict)
    usage: dict[str, int] = field(default_factory=dict)
    errors: list[Any] = field(default_factory=list)
    num_events: int = 0

    def take(self, document: dict[str, Any]) -> None:
        """One event of a stream, or a whole answer."""
        if "error" in document:
            self.errors.append(document["error"])
            return
        self.num_events += 1
        self.request_id = document["id"]
        if document.get("usage"):
            self.usage = {name: document["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
        for choice in document["choices"]:
            index = choice["index"]
            message = choice.get("delta") or choice.get("message") or {}
            self.text[index] = self.text.get(index, "") + (choice.get("text") or message.get("content") or "")
            if choice.get("finish_reason"):
                self.finish_reasons[index] = choice["finish_reason"]
            logprobs = choice.get("logprobs") or {}
            entries = logprobs.get("content") or []
            self.tokens.setdefault(index, []).extend(logprobs.get("tokens") or [one["token"] for one in entries])
            self.logprobs.setdefault(index, []).extend(
                logprobs.get("token_logprobs") or [one["logprob"] for one in entries]
            )


def question(number: int, model: str) -> tuple[str, dict[str, Any]]:
    """Greedy and seeded, streamed and whole, one choice and two, with logprobs, penalties and stop strings."""
    words = f"Tale {number}: once upon a time there were {number} sisters and"
    base = {"model": model, "max_tokens": MAX_TOKENS, "ignore_eos": True, "temperature": 0}
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    prompt = {"prompt": words}
    match number % 4:
        case 0:
            return "/v1/completions", base | streamed | prompt | {"logprobs": 2}
        case 1:
            sampled = {"temperature": 0.9, "top_p": 0.95, "seed": number, "n": 2}
            return "/v1/completions", base | streamed | prompt | sampled
        case 2:
            sampled = {"temperature": 1.0, "seed": number, "frequency_penalty": 0.3, "logprobs": 1}
            return "/v1/completions", base | prompt | sampled
        case _:
            messages = {"messages": [{"role": "user", "content": words}], "logprobs": True, "stop": ["@@never@@"]}
            return "/v1/chat/completions", base | streamed | messages


class Cluster:
    """Two engines and a gateway, each a process of its own, as a cluster runs them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self.addresses = [f"ipc://{folder}/engine-{number}.sock" for number in range(2)]
        self.engines = [self._start_engine(address) for address in self.addresses]
        gateway = ("gateway", "--port", "0", "--data-dir", str(folder / "data"), "--migrate", "--log-format", "json")
        engines = [word for address in self.addresses for word in ("--engine", address)]
        self._gateway = self._start("gateway", *gateway, *engines, "--first-keys", str(folder / "keys.json"))

    def _start_engine(self, address: str) -> subprocess.Popen[bytes]:
        name = f"engine-{len(self._processes)}"
        return self._start(name, "engine", "--listen", address, "--dtype", "float32", "--threads", "1")

    def _start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self._folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen([MOIETY, *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._processes.append(process)
        return process

    def wait_ready(self, until: Callable[..., Any]) -> None:
        log = self._folder / "gateway.log"
        found = until(lambda: re.search(r'\{.*"gateway_listening".*\}', log.read_text()), "the gateway listens")
        listening = json.loads(found[0])
        self.url = f"http://{listening['host']}:{listening['port']}"
        keys = json.loads((self._folder / "keys.json").read_text())
        self.key, self._admin_key = keys["tenant_key"], keys["admin_key"]
        until(lambda: all(engine["healthy"] for engine in self.engine_states()), "both engines", DEADLINE_S)
        (self.model,) = {engine["card"]["model"] for engine in self.engine_states()}

    def admin(self, path: str, **parameters: Any) -> Any:
        headers = {"Authorization": f"Bearer {self._admin_key}"}
        answer = httpx.get(self.url + path, params=parameters, headers=headers, timeout=DEADLINE_S)
        assert answer.status_code == 200, answer.text
        return answer

    def engine_states(self) -> list[dict[str, Any]]:
        return self.admin("/admin/v1/engines").json()["data"]

    def busier_engine(self) -> subprocess.Popen[bytes]:
        """Return the engine with most requests in flight."""
        num_inflight = {state["address"]: state["num_inflight"] for state in self.engine_states()}
        return max(zip(self.addresses, self.engines, strict=True), key=lambda one: num_inflight[one[0]])[1]

    def num_failovers(self) -> int:
        counts = re.findall(r"^moiety_failovers_total\{.*\} (\S+)$", self.admin("/metrics").text, re.MULTILINE)
        return int(sum(map(float, counts)))

    def moved(self) -> list[dict[str, Any]]:
        """Return the log entries of requests that continued at another engine."""
        lines = (self._folder / "gateway.log").read_text().splitlines()
        told = [json.loads(line) for line in lines if '"failovers"' in line]
        return [line for line in told if line["failovers"] and line["recomputed_tokens"]]

    def rows(self) -> dict[str, dict[str, Any]]:
        """Every usage row, by the request's id."""
        rows: list[dict[str, Any]] = []
        cursor: dict[str, str] = {}
        while True:
            page = self.admin("/admin/v1/usage/requests", limit=100, **cursor).json()
            rows += page["data"]
            if page["next_cursor"] is None:
                assert len({row["request_id"] for row in rows}) == len(rows)
                return {row["request_id"]: row for row in rows}
            cursor = {"cursor": page["next_cursor"]}

    async def ask(self, number: int, answer: Answer, client: httpx.AsyncClient) -> None:
        path, body = question(number, self.model)
        async with client.stream("POST", self.url + path, json=body) as response:
            answer.status = response.status_code
            if not body.get("stream"):
                answer.take(json.loads(await response.aread()))
                return
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    answer.take(json.loads(line.removeprefix("data: ")))

    async def ask_all(self, disturb: Callable[[list[Answer]], Any] | None = None) -> list[Answer]:
        answers = [Answer() for _ in range(NUM_REQUESTS)]
        limits = httpx.Limits(max_connections=NUM_REQUESTS)
        headers = {"Authorization": f"Bearer {self.key}"}
        async with (
            httpx.AsyncClient(timeout=DEADLINE_S, limits=limits, headers=headers) as client,
            asyncio.TaskGroup() as group,
        ):
            for number, answer in enumerate(answers):
                group.create_task(self.ask(number, answer, client))
            if disturb is not None:
                group.create_task(disturb(answers))
        return answers

    def close(self) -> None:
        family = [psutil.Process(process.pid) for process in self._processes if process.poll() is None]
        family += [child for process in family for child in process.children(recursive=True)]
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        for process in self._processes:
            process.wait(DEADLINE_S)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, until: Callable[..., Any]) -> Iterator[Cluster]:
    running = Cluster(tmp_path_factory.mktemp("failover"))
    try:
        running.wait_ready(until)
        yield running
    finally:
        running.close()


def test_with_one_of_two_engines_killed_every_answer_and_its_bill_are_those_of_an_undisturbed_run(
    cluster: Cluster, until: Callable[..., Any]
) -> None:
    expected = asyncio.run(cluster.ask_all())
    assert cluster.num_failovers() == 0

    async def kill_one(answers: list[Answer]) -> None:
        """Kill the busier engine after every stream has begun, or after the quickest is half finished."""
        end = time.monotonic() + DEADLINE_S
        streamed = [answer for number, answer in enumerate(answers) if number % 4 != 2]
        counts, busier = [0], None
        while min(counts) < 5 and max(counts) < MAX_TOKENS / 2:
            assert time.monotonic() < end, "the streams did not begin"
            await asyncio.sleep(0.002)
            counts = [answer.num_events for answer in streamed]
            if busier is None and max(counts) > 1:  # all requests have an engine
                busier = await asyncio.to_thread(cluster.busier_engine)
        assert busier is not None
        busier.kill()

    got = asyncio.run(cluster.ask_all(kill_one))

    assert cluster.num_failovers() >= NUM_REQUESTS / 4, "hardly anything ran on the engine that was killed"
    assert any(line["recomputed_tokens"] > line["prompt_tokens"] for line in cluster.moved()), "none had begun"
    for number, (answer, right) in enumerate(zip(got, expected, strict=True)):
        assert (answer.status, answer.errors) == (200, []), (number, answer)
        assert (answer.text, answer.finish_reasons) == (right.text, right.finish_reasons), number
        assert (answer.tokens, answer.usage) == (right.tokens, right.usage), number
        assert set(answer.finish_reasons.values()) == {"length"}
        for choice, logprobs in right.logprobs.items():
            assert answer.logprobs[choice] == pytest.approx(logprobs, abs=1e-3), number

    ids = {answer.request_id for answer in (*expected, *got)}
    rows = until(lambda: (rows := cluster.rows()) and ids <= rows.keys() and rows, "every usage row")
    assert rows.keys() == ids
    for answer, right in zip(got, expected, strict=True):
        row, right_row = rows[answer.request_id], rows[right.request_id]
        for name in ("outcome", "http_status", "error_code", "prompt_tokens", "output_tokens", "num_choices"):
            assert row[name] == right_row[name], (name, row, right_row)
    until(lambda: not any(state["num_inflight"] for state in cluster.engine_states()), "nothing is left in flight")
