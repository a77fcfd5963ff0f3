"""The gateway as it is deployed: a process of its own, over ZeroMQ to an engine process, with a store on disk."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import zmq
import zmq.asyncio
from sqlalchemy import select

from moiety_engine.server.usage_meter import GRACE_S
from moiety_platform.db.session import Database
from moiety_platform.usage.models import UsageRecord
from moiety_wire.codec import decode_to_gateway, encode
from moiety_wire.engine_load import Load
from moiety_wire.messages import Hello

READY_S = 60.0
CALL_S = 60.0
MOIETY = "from moiety_platform.cli.main import main; main()"


class Process:
    """One `moiety …` command, which is killed when its test ends."""

    def __init__(self, process: Any) -> None:
        self.process = process

    @classmethod
    async def start(cls, *arguments: Any) -> Process:
        pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        return cls(
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", MOIETY, *arguments), stdin=null, stdout=pipe, stderr=pipe
            )
        )

    async def line(self, stream_name: str, words: str) -> dict[str, Any]:
        """Return the first line of JSON that contains these words."""
        stream = getattr(self.process, stream_name)
        async with asyncio.timeout(READY_S):
            async for line in stream:
                if words.encode() in line:
                    return json.loads(line)
        raise AssertionError(f"the process ended without saying {words!r}")

    async def end(self, signal_number: int = signal.SIGKILL) -> int:
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal_number)
        async with asyncio.timeout(READY_S):
            await self.process.communicate()
        self.process._transport.close()
        return self.process.returncode


def threads_of(pid: int) -> dict[int, str]:
    """The names of a process's threads, by their ids."""
    return {int(task.name): (task / "comm").read_text().strip() for task in Path(f"/proc/{pid}/task").iterdir()}


def check_threads(pid: int) -> None:
    """Threads of the store do not cut in on the loop of a gateway, and those of messages may."""
    threads = threads_of(pid)
    policies = {thread: os.sched_getscheduler(thread) for thread in threads}
    assert policies.pop(pid) == os.SCHED_OTHER, "the loop has its turn like every process"
    thread_priority = [threads[thread] for thread, policy in policies.items() if policy == os.SCHED_BATCH]
    assert thread_priority, f"none of the store, among {threads}"
    assert not any("ZMQ" in name for name in thread_priority), "clients wait for messages"


class Deployment:
    """An engine and a gateway."""

    def __init__(self, tmp_path: Path) -> None:
        self.address = f"ipc://{tmp_path}/engine.sock"
        self.data_dir = tmp_path / "data"
        self.engine: Any = None
        self.gateway: Any = None

    async def start_engine(self) -> None:
        self.engine = await Process.start(
            *(
                "engine",
                "--scripted",
                "--scripted-step-ms",
                "2",
                "--listen",
                self.address,
                "--max-context-tokens",
                "4096",
                "--unacknowledged-usage",
                str(self.data_dir.parent / "unacknowledged"),
            )
        )
        await self.engine.line("stdout", "engine_ready")

    async def start_gateway(self) -> None:
        keys = self.data_dir.parent / "keys.json"
        self.gateway = await Process.start(
            *("gateway", "--port", "0", "--engine", self.address, "--data-dir", str(self.data_dir), "--migrate"),
            *("--first-keys", str(keys), "--log-format", "json", "--drain-s", "20"),
        )
        listening = await self.gateway.line("stderr", "gateway_listening")
        self.host, self.port = listening["host"], listening["port"]
        self.url = f"http://{self.host}:{self.port}"
        made = json.loads(keys.read_text())
        self.key, self.admin_key = made["tenant_key"], made["admin_key"]
        self._errors = asyncio.create_task(self._read_log())

    async def _read_log(self) -> None:
        async for _ in self.gateway.process.stderr:
            pass

    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self.key, max_retries=0, timeout=CALL_S)

    async def get(self, path: str) -> tuple[int, dict[str, Any]]:
        reader, writer = await asyncio.open_connection(self.host, self.port)
        head = f"GET {path} HTTP/1.1\r\nHost: t\r\nAuthorization: Bearer {self.admin_key}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode())
        async with asyncio.timeout(CALL_S):
            answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        top, _, body = answer.partition(b"\r\n\r\n")
        return int(top.split(b" ")[1]), json.loads(body)

    async def ready(self) -> None:
        async with asyncio.timeout(READY_S):
            while (await self.get("/readyz"))[0] != 200:  # noqa: ASYNC110 - another process's state
                await asyncio.sleep(0.05)

    async def load(self) -> dict[str, Any]:
        return (await self.get("/admin/v1/engines"))[1]["data"][0]["load"]

    async def stop_gateway(self) -> int:
        self.gateway.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(READY_S):
            status = await self.gateway.process.wait()
        await self._errors
        return status

    async def kill(self) -> None:
        """Kill the engine and the gateway at once."""
        for part in (self.engine, self.gateway):
            part.process.kill()
        await self._errors
        await asyncio.gather(self.engine.end(), self.gateway.end())

    async def rows(self) -> list[UsageRecord]:
        """Return the usage rows in the store."""
        database = Database.open(f"sqlite:///{self.data_dir / 'moiety.db'}")
        try:
            async with database.read() as session:
                return list((await session.scalars(select(UsageRecord))).all())
        finally:
            await database.close()

    async def close(self) -> None:
        for part in (self.gateway, self.engine):
            if part is not None:
                await part.end()


@asynccontextmanager
async def deployed(tmp_path: Path) -> AsyncIterator[Any]:
    deployment = Deployment(tmp_path)
    try:
        await asyncio.gather(deployment.start_engine(), deployment.start_gateway())
        await deployment.ready()
        yield deployment
    finally:
        await deployment.close()


@pytest.fixture
async def deployment(tmp_path: Path) -> AsyncIterator[Any]:
    async with deployed(tmp_path) as running:
        yield running


async def test_the_openai_client_is_served_by_a_real_engine_front(deployment: Any) -> None:
    async with deployment.client() as client:
        (model,) = (await client.models.list()).data
        hello = [{"role": "user", "content": "say this"}]
        ask = {"model": model.id, "messages": hello, "max_tokens": 30, "temperature": 0}
        whole = await client.chat.completions.create(**ask)
        text = whole.choices[0].message.content
        assert "say this" in text
        stream = await client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
        assert chunks[-1].usage == whole.usage
        stopped = await client.completions.create(model=model.id, prompt="one two three", max_tokens=50, stop="thr")
        assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("one two ", "stop")
        assert stopped.usage.completion_tokens == len("one two thr")
        several = await client.completions.create(model=model.id, prompt=["ab", "cd"], n=2, max_tokens=2, logprobs=2)
        assert [choice.text for choice in several.choices] == ["ab", "ab", "cd", "cd"]
        assert several.choices[0].logprobs.tokens == ["a", "b"]
        assert [len(top) for top in several.choices[0].logprobs.top_logprobs] == [2, 2]
        long = await client.completions.create(
            model=model.id, prompt="xy", max_tokens=1000, extra_body={"ignore_eos": True}
        )
        assert long.choices[0].text == "xy" * 500  # far beyond one window of credit
        with pytest.raises(openai.BadRequestError, match=r"prompt is too long: 5000 tokens > 4095 maximum.*4096"):
            await client.completions.create(model=model.id, prompt="x" * 5000)
    assert await deployment.stop_gateway() == 0
    rows = await deployment.rows()
    assert sorted(row.outcome for row in rows) == ["length", "length", "rejected", "stop", "stop", "stop"]
    assert max(row.output_tokens for row in rows) == 1000


async def test_disconnects_leave_an_idle_engine_and_a_row_with_every_token_and_threads_keep_their_policies(
    deployment: Any,
) -> None:
    rng = random.Random(7)
    body = {"model": "scripted", "prompt": "abc", "max_tokens": 3000, "ignore_eos": True}

    async def leave_early(number: int) -> None:
        waits = number % 2 == 0  # for its first token; the others leave whenever
        data = json.dumps({**body, "stream": waits or rng.random() < 0.4, "n": rng.choice([1, 2])}).encode()
        reader, writer = await asyncio.open_connection(deployment.host, deployment.port)
        fields = f"Host: t\r\nAuthorization: Bearer {deployment.key}\r\nContent-Length: {len(data)}"
        writer.write(f"POST /v1/completions HTTP/1.1\r\n{fields}\r\n\r\n".encode() + data)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CALL_S if waits else rng.random() * 0.2):
                await (reader.readuntil(b"data: ") if waits else reader.read(rng.randrange(1, 20_000)))
        writer.transport.abort()

    for _ in range(5):
        await asyncio.gather(*(leave_early(number) for number in range(8)))
    async with asyncio.timeout(
        CALL_S
    ):  # until the engine has reported its last token: reports may be half a second old
        while True:
            load, rows = await deployment.load(), await deployment.rows()
            idle = load["requests_total"] and not load["num_running"] + load["num_waiting"]
            if idle and rows and sum(row.output_tokens for row in rows) == load["output_tokens_total"]:
                break
            await asyncio.sleep(0.05)
    assert load["kv_blocks_used"] == 0
    if sys.platform == "linux":  # elsewhere threads have no such policy
        check_threads(deployment.gateway.process.pid)
    assert await deployment.stop_gateway() == 0
    rows = await deployment.rows()
    assert len(rows) == len({row.request_id for row in rows}) <= 40
    assert {(row.outcome, row.http_status) for row in rows} == {("disconnected", 499)}
    assert sum(row.output_tokens for row in rows) == load["output_tokens_total"] > 0


async def test_a_killed_engine_breaks_streams_with_an_error_event_and_its_successor_serves(deployment: Any) -> None:
    async with deployment.client() as client:
        ask = {"model": "scripted", "prompt": "abc", "max_tokens": 4000, "extra_body": {"ignore_eos": True}}
        for _ in range(2):
            stream = await client.completions.create(**ask, stream=True)
            with pytest.raises(openai.APIError) as caught:
                async for chunk in stream:
                    if chunk.choices[0].text and deployment.engine.process.returncode is None:
                        await deployment.engine.end()
            assert caught.value.code == "engine_failed"
            await deployment.start_engine()
            await deployment.ready()
        assert (await client.completions.create(model="scripted", prompt="abc", max_tokens=3)).choices[0].text == "abc"
    assert await deployment.stop_gateway() == 0
    rows = await deployment.rows()
    assert sorted(row.outcome for row in rows) == ["failed", "failed", "length"]
    assert all(row.output_tokens > 0 for row in rows)


async def emitted_tokens(address: str) -> int:
    """All that the engine at this address has emitted, once it emits no more for lack of credit."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    loads: list[Load] = []
    try:
        socket.connect(address)
        await socket.send(encode(Hello("watcher")))
        async with asyncio.timeout(CALL_S):
            while len(loads) < 2 or loads[-1].output_tokens_total != loads[-2].output_tokens_total:
                messages = decode_to_gateway(await socket.recv())
                loads += [one for one in messages if isinstance(one, Load) and one.num_paused and not one.num_running]
    finally:
        context.destroy(linger=0)
    return loads[-1].output_tokens_total


@pytest.mark.slow
async def test_killed_together_gateway_and_engine_leave_a_bill_for_all_that_was_emitted(deployment: Any) -> None:
    async with deployment.client() as client:
        ask = {"model": "scripted", "prompt": "abc", "max_tokens": 4000, "extra_body": {"ignore_eos": True}}
        stream = await client.completions.create(**ask, stream=True, n=2)
        num_received = 0
        async for chunk in stream:
            num_received += len(chunk.choices[0].text)
            if num_received >= 100:
                break
        deployment.gateway.process.send_signal(signal.SIGSTOP)  # so that no more credit comes, and nothing is settled
        emitted = await emitted_tokens(deployment.address)
        await deployment.kill()
    assert emitted >= num_received
    await asyncio.gather(deployment.start_engine(), deployment.start_gateway())
    async with asyncio.timeout(CALL_S + GRACE_S):
        while sum(row.output_tokens for row in await deployment.rows()) < emitted:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.2)
    (row,) = await deployment.rows()
    assert (row.outcome, row.error_code, row.prompt_tokens) == ("failed", "gateway_killed", 3)
    assert row.output_tokens == emitted
    async with asyncio.timeout(CALL_S):
        while (await deployment.load())["unacknowledged_replicas"]:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.05)
    assert await deployment.stop_gateway() == 0


async def test_a_stop_lets_running_answers_come_to_their_end(deployment: Any) -> None:
    async with deployment.client() as client:
        stream = await client.completions.create(
            model="scripted", prompt="abc", max_tokens=300, stream=True, extra_body={"ignore_eos": True}
        )
        texts: list[Any] = []
        async for chunk in stream:
            if not texts:
                deployment.gateway.process.send_signal(signal.SIGTERM)
            texts.append(chunk.choices[0].text)
    assert "".join(texts) == "abc" * 100
    async with asyncio.timeout(CALL_S):
        assert await deployment.gateway.process.wait() == 0
    (row,) = await deployment.rows()
    assert (row.outcome, row.output_tokens) == ("length", 300)
