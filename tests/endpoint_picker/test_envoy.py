"""Real Envoy before two real gateways, with the endpoint picker as its external processor."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tests.conftest import free_port, wait_for

from moiety_platform.endpoint_picker.picking import Candidate, pick_endpoints

from .envoy_proxy import FULL_DUPLEX, HEADERS_ONLY, running_envoy
from .picker_process import FakeGateway, running_picker

NUM_CLIENTS = 6
HELLO = {"model": "scripted", "messages": [{"role": "user", "content": "say this"}], "max_tokens": 30, "temperature": 0}


@dataclass
class Deployment:
    """An engine and two gateways with one store."""

    processes: dict[str, subprocess.Popen[bytes]]  # by address
    key: str

    @property
    def preferred(self) -> str:
        """The gateway to which the key's requests go."""
        members = [Candidate(address, 0) for address in sorted(self.processes)]
        return pick_endpoints(members, sha256(self.key.encode()).digest()).addresses[0]

    def num_served(self, address: str) -> int:
        """Return the number of chats that a gateway has answered."""
        text = httpx.get(f"http://{address}/metrics", trust_env=False, timeout=60).text
        lines = [one for one in text.splitlines() if one.startswith("moiety_requests_total{")]
        return int(sum(float(one.rpartition(" ")[2]) for one in lines))

    def client(self, url: str) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=self.key, max_retries=0, timeout=120)


@contextlib.contextmanager
def started(folder: Path, name: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "MOIETY_KEY_PEPPER": "a pepper that is long enough"}
    command = [sys.executable, "-m", "moiety_platform.cli", *arguments]
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait(timeout=60)


def is_ready(address: str) -> bool:
    try:
        return httpx.get(f"http://{address}/readyz", trust_env=False, timeout=60).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    engine, keys = f"ipc://{tmp_path}/engine.sock", tmp_path / "keys.json"
    shared = ["--engine", engine, "--database-url", f"sqlite:///{tmp_path}/moiety.db"]
    shared += ["--object-store-url", f"file://{tmp_path}/objects", "--log-format", "json"]
    scripted = ["--scripted", "--scripted-step-ms", "2", "--max-context-tokens", "65536", "--listen", engine]
    with contextlib.ExitStack() as stack:
        stack.enter_context(started(tmp_path, "engine", "engine", *scripted))
        processes: dict[str, subprocess.Popen[bytes]] = {}
        for name, first in (("a", ["--migrate", "--first-keys", str(keys)]), ("b", [])):
            port = free_port()
            options = ["gateway", "--port", str(port), "--data-dir", str(tmp_path / name), *shared, *first]
            processes[f"127.0.0.1:{port}"] = stack.enter_context(started(tmp_path, name, *options))
            wait_for(partial(is_ready, f"127.0.0.1:{port}"), f"gateway {name}", 120)
        yield Deployment(processes, json.loads(keys.read_text())["tenant_key"])


@contextlib.asynccontextmanager
async def proxied(deployment: Deployment, tmp_path: Path, **terms: Any) -> AsyncIterator[str]:
    """Run the picker, with a certificate that signs itself, and Envoy; the URL of Envoy."""
    members = list(deployment.processes)
    options = [f"--endpoint=http://{one}" for one in members]
    with running_picker(tmp_path, *options, "--num-endpoints", "2", tls=True) as picker:
        await asyncio.to_thread(picker.wait_until_ready)
        with running_envoy(tmp_path, members, picker.port, **terms) as url:
            yield url


@pytest.mark.slow
async def test_chats_go_to_one_gateway_and_a_kill_loses_only_those_in_flight_on_it(
    deployment: Deployment, tmp_path: Path
) -> None:
    async with proxied(deployment, tmp_path) as url, deployment.client(url) as client:
        model = (await client.models.list()).data[0].id
        chat = {**HELLO, "model": model}
        answer = (await client.chat.completions.create(**chat)).choices[0].message.content
        for _ in range(5):
            await client.chat.completions.create(**chat)
        (other,) = deployment.processes.keys() - {deployment.preferred}
        served = {one: await asyncio.to_thread(deployment.num_served, one) for one in deployment.processes}
        assert served == {deployment.preferred: 6, other: 0}, "a key's requests go to one gateway"

        failed: list[float] = []  # when they began
        num_answered = 0
        stopping = asyncio.Event()

        async def ask() -> None:
            nonlocal num_answered
            while not stopping.is_set():
                began_at = time.monotonic()
                try:
                    got = await client.chat.completions.create(**chat)
                except openai.APIError:
                    failed.append(began_at)
                else:
                    assert got.choices[0].message.content == answer
                    num_answered += 1

        tasks = [asyncio.create_task(ask()) for _ in range(NUM_CLIENTS)]
        try:
            async with asyncio.timeout(120):
                while num_answered < 20:  # noqa: ASYNC110 - counted by tasks that also end
                    await asyncio.sleep(0.01)
                victim = deployment.processes[deployment.preferred]
                victim.send_signal(signal.SIGKILL)
                await asyncio.to_thread(victim.wait)
                killed_at, num_before = time.monotonic(), num_answered
                while num_answered < num_before + 40:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        finally:
            stopping.set()
            await asyncio.gather(*tasks)
        assert [one for one in failed if one > killed_at] == [], "the others are served by the other gateway"
        assert len(failed) <= NUM_CLIENTS
        assert await asyncio.to_thread(deployment.num_served, other) >= 40


@pytest.mark.slow
async def test_streams_pass_whatever_the_proxy_sends_to_the_picker(deployment: Deployment, tmp_path: Path) -> None:
    chat = {**HELLO, "messages": [{"role": "user", "content": "words " * 5_000}]}  # a body of several parts

    async def streamed(base: str) -> list[str]:
        async with deployment.client(base) as client:
            model = (await client.models.list()).data[0].id
            stream = await client.chat.completions.create(**{**chat, "model": model}, stream=True)
            return [one.choices[0].delta.content or "" async for one in stream if one.choices]

    direct = await streamed(f"http://{deployment.preferred}")
    assert len(direct) > 3
    for modes, may_override in ((HEADERS_ONLY, False), (FULL_DUPLEX, True), (FULL_DUPLEX, False)):
        async with proxied(deployment, tmp_path, modes=modes, may_override=may_override) as url:
            assert "".join(await streamed(url)) == "".join(direct), modes


@pytest.mark.parametrize(("fails_open", "status"), [(True, 200), (False, 500)])
def test_without_a_picker_the_failure_mode_decides(tmp_path: Path, fails_open: bool, status: int) -> None:
    with (
        FakeGateway() as gateway,
        running_envoy(tmp_path, [gateway.address], free_port(), fails_open=fails_open) as url,
    ):
        found = httpx.get(f"{url}/readyz", trust_env=False, timeout=60).status_code
        assert found == status if fails_open else found >= status


def test_no_ready_gateway_is_503_at_the_client(tmp_path: Path) -> None:
    with FakeGateway() as gateway:
        gateway.drain()
        with running_picker(tmp_path, f"--endpoint=http://{gateway.address}", tls=True) as picker:
            picker.wait_until_ready()
            with running_envoy(tmp_path, [gateway.address], picker.port) as url:
                found = httpx.post(f"{url}/v1/chat/completions", json={}, trust_env=False, timeout=60)
                assert (found.status_code, found.headers["retry-after"]) == (503, "1")
                assert found.json()["error"]["code"] == "unavailable"
