"""Batches over processes that are killed: gateways and an engine as they are deployed, on each database.

With MOIETY_TEST_BATCH_LINES=10000 the kills are survived by so many lines; see docs/batches.md.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from sqlalchemy import select

from moiety_platform.batches.models import BatchLine
from moiety_platform.db.session import Database
from moiety_platform.usage.models import UsageRecord

NUM_LINES = int(os.environ.get("MOIETY_TEST_BATCH_LINES", "300"))
NUM_KILLS = 2
START_S = 60.0
BATCH_S = 60.0 + NUM_LINES / 10
MOIETY = "from moiety_platform.cli.main import main; main()"
CHAT = "/v1/chat/completions"


class Part:
    """One `moiety …` process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.errors: list[dict[str, Any]] = []  # that it has logged
        self._reading: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls, arguments: tuple[str, ...], environment: dict[str, str], words: str
    ) -> tuple[Part, dict[str, Any]]:
        """Start a process; return it with the first line of JSON that contains these words."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", MOIETY, *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        )
        part = cls(process)
        assert process.stdout is not None
        said = []
        async with asyncio.timeout(START_S):
            async for line in process.stdout:
                said.append(line.decode())
                if words.encode() in line:
                    part._reading = asyncio.create_task(part._read())
                    return part, json.loads(line)
        raise AssertionError("".join(said))

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            if b'"level":"error"' in line:
                self.errors.append(json.loads(line))

    async def kill(self) -> None:
        """Kill it with a signal that it cannot handle."""
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        if self._reading is not None:
            await self._reading
        self.process._transport.close()  # type: ignore[attr-defined]


class Deployment:
    """An engine and gateways on one database."""

    def __init__(self, folder: Path, database_url: str, num_gateways: int) -> None:
        self.folder = folder
        self.database_url = database_url
        self.address = f"ipc://{folder}/engine.sock"
        self.num_gateways = num_gateways
        self.parts: list[Part] = []
        self.urls: list[str] = []

    async def start(self) -> None:
        engine = ("engine", "--scripted", "--scripted-step-ms", "2", "--listen", self.address)
        self.parts = [(await Part.start(engine, {}, "engine_ready"))[0]]
        self.urls = []
        for number in range(self.num_gateways):
            data_dir = self.folder / f"gateway-{number}"
            (data_dir).mkdir(exist_ok=True)
            (data_dir / "pepper").write_bytes(b"p" * 32)
            gateway = (
                *("gateway", "--port", "0", "--engine", self.address, "--data-dir", str(data_dir)),
                *("--database-url", self.database_url, "--log-format", "json"),
                *("--object-store-url", (self.folder / "objects").as_uri()),
                *(("--first-keys", str(self.folder / "keys.json")) if number == 0 else ()),
            )
            environment = {"MOIETY_BATCH_LEASE_S": "2", "MOIETY_BATCH_CONCURRENCY": "16"}
            part, listening = await Part.start(gateway, environment, "gateway_listening")
            self.parts.append(part)
            self.urls.append(f"http://{listening['host']}:{listening['port']}")
        self.key = json.loads((self.folder / "keys.json").read_text())["tenant_key"]

    async def kill(self) -> None:
        await asyncio.gather(*(part.kill() for part in self.parts))
        assert [error for part in self.parts for error in part.errors] == []

    def client(self, number: int = 0) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.urls[number]}/v1", api_key=self.key, max_retries=5, timeout=60.0)

    async def num_answered(self, number: int) -> float:
        """Return how many lines a gateway has answered."""
        async with httpx.AsyncClient() as http:
            text = (await http.get(f"{self.urls[number]}/metrics")).text
        counts = [
            line.rpartition(" ")[2]
            for line in text.splitlines()
            if line.startswith("moiety_requests_total") and 'service_class="batch"' in line and 'status="200"' in line
        ]
        return sum(map(float, counts))


@asynccontextmanager
async def deployed(folder: Path, database_url: str, num_gateways: int) -> AsyncIterator[Deployment]:
    deployment = Deployment(folder, database_url, num_gateways)
    try:
        await deployment.start()
        yield deployment
    finally:
        await deployment.kill()


def line(number: int, least_tokens: int) -> dict[str, Any]:
    """Lines of unequal lengths, so that their ends fall apart; a token takes the engine 2 ms."""
    body = {
        "model": "scripted",
        "messages": [{"role": "user", "content": f"say {number}"}],
        "max_tokens": least_tokens + number % 20,
        "ignore_eos": True,
    }
    return {"custom_id": f"id-{number}", "method": "POST", "url": CHAT, "body": body}


async def submit(client: AsyncOpenAI, num_lines: int, least_tokens: int) -> str:
    content = b"\n".join(json.dumps(line(number, least_tokens)).encode() for number in range(num_lines))
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    batch = await client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    return batch.id


async def wait_completed(client: AsyncOpenAI, batch_id: str) -> Any:
    async with asyncio.timeout(BATCH_S):
        while (batch := await client.batches.retrieve(batch_id)).status != "completed":
            assert batch.status in ("validating", "in_progress", "finalizing"), batch
            await asyncio.sleep(0.1)
    return batch


async def check_each_once(client: AsyncOpenAI, batch: Any, database_url: str, num_lines: int) -> None:
    """Check that every line was answered once and in its place, with one usage row that agrees with the answer."""
    assert batch.request_counts.model_dump() == {"total": num_lines, "completed": num_lines, "failed": 0}
    output = [json.loads(one) for one in (await client.files.content(batch.output_file_id)).text.splitlines()]
    assert [one["custom_id"] for one in output] == [f"id-{number}" for number in range(num_lines)]
    database = Database.open(database_url)
    try:
        async with database.read() as session:
            rows = (await session.scalars(select(UsageRecord))).all()
            owners = Counter(await session.scalars(select(BatchLine.owner)))
    finally:
        await database.close()
    assert len(rows) == num_lines, "one usage row a line, and none beside them"
    assert sum(owners.values()) == num_lines
    by_id = {row.request_id: row for row in rows}
    for one in output:
        row, usage = by_id[one["response"]["request_id"]], one["response"]["body"]["usage"]
        assert (row.prompt_tokens, row.output_tokens) == (usage["prompt_tokens"], usage["completion_tokens"])
        assert (row.outcome in ("stop", "length"), row.http_status) == (True, 200)
    assert batch.usage.total_tokens == sum(row.prompt_tokens + row.output_tokens for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("dialect", [pytest.param("sqlite", marks=pytest.mark.thorough), "postgresql"], indirect=True)
async def test_every_line_is_answered_and_billed_once_although_everything_is_killed(
    tmp_path: Path, database_url: str
) -> None:
    async with deployed(tmp_path, database_url, 1) as deployment:
        async with deployment.client() as client:
            batch_id = await submit(client, NUM_LINES, 20)
        for kill in range(NUM_KILLS):
            async with deployment.client() as client, asyncio.timeout(BATCH_S):
                least = NUM_LINES * (kill + 1) // (NUM_KILLS + 2)
                batch = await client.batches.retrieve(batch_id)
                while batch.request_counts.completed < least:
                    await asyncio.sleep(random.random() * 0.1)
                    batch = await client.batches.retrieve(batch_id)
                assert batch.status == "in_progress", "it is killed in the middle"
            await deployment.kill()
            await deployment.start()
        async with deployment.client() as client:
            batch = await wait_completed(client, batch_id)
            await check_each_once(client, batch, database_url, NUM_LINES)


@pytest.mark.slow
async def test_two_gateways_share_a_batch_and_one_that_is_killed_is_replaced(
    tmp_path: Path, clean_postgres: str
) -> None:
    async with deployed(tmp_path, clean_postgres, 2) as deployment, deployment.client() as client:
        batch_id = await submit(client, NUM_LINES, 200)
        async with asyncio.timeout(BATCH_S):
            counts = [0.0]
            while not all(counts):
                counts = [await deployment.num_answered(number) for number in range(2)]
        assert (await client.batches.retrieve(batch_id)).status == "in_progress", "it is killed in the middle"
        await deployment.parts[2].kill()
        batch = await wait_completed(client, batch_id)
        await check_each_once(client, batch, clean_postgres, NUM_LINES)
