"""Benchmark of the gateway alone: a real gateway process on one core, with the scripted engine, under closed-loop load.

Every production feature is on: keys, limits of every kind on every tenant (too high to be reached), prices, the ledger
in SQLite, and traces with their store unless disabled. The engine and the load generator share the other cores.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from moiety_platform.bench.closed_loop import Tally, run_closed_loop
from moiety_platform.bench.report import percentile
from moiety_platform.supervisor.data_dir import KEYS_FILE, read_first_keys
from moiety_platform.supervisor.ports import claim_port

MODEL = "scripted"
START_S = 60.0
STOP_S = 20.0
WARM_UP_S = 2.0
SQL_COUNTER = "moiety_sql_statements_total"
PROCESS_CPU_CLOCK = 2  # CPUCLOCK_SCHED of Linux, the kind of clock that clock_getcpuclockid returns
LARGE_CAPS = {
    "requests_per_minute": 10**9,
    "tokens_per_minute": 10**11,
    "concurrent_requests": 10**6,
    "token_counts_per_minute": 10**9,
    "tokens_per_day": 10**15,
    "tokens_per_month": 10**15,
    "money_per_day": 10**17,
    "money_per_month": 10**17,
}


class BenchFailed(Exception):
    """A part did not start; the message says which, and the last lines that it printed."""


@dataclass(frozen=True, slots=True)
class GatewayBench:
    """Settings of the benchmark: its load and its duration."""

    tenants: int
    connections: int
    seconds: float
    output_tokens: int
    stream_tokens: int
    soak_requests: int
    traces: bool = True


@dataclass(frozen=True, slots=True)
class RunningGateway:
    """A gateway that is ready."""

    process: psutil.Process
    port: int
    admin_key: str

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def rss_bytes(self) -> int:
        return int(self.process.memory_info().rss)

    @property
    def cpu_s(self) -> float:
        """Return the CPU time used so far, in seconds: on Linux by the process's clock, which counts nanoseconds."""
        if sys.platform == "linux":
            return time.clock_gettime((~self.process.pid << 3) | PROCESS_CPU_CLOCK)
        times = self.process.cpu_times()
        return float(times.user + times.system)

    async def load(self, requests: Iterator[bytes], connections: int, seconds: float = float("inf")) -> Tally:
        return await run_closed_loop("127.0.0.1", self.port, requests, connections=connections, seconds=seconds)


def measure_gateway(settings: GatewayBench, print_progress: Callable[[str], None]) -> dict[str, Any]:
    """Run the benchmark and return its figures. Raises BenchFailed, or an error of `run_closed_loop`."""
    with (
        tempfile.TemporaryDirectory(prefix="moiety-bench-") as folder,
        running(Path(folder), settings.traces) as gateway,
    ):
        return asyncio.run(_measure(settings, gateway, print_progress))


async def _measure(
    settings: GatewayBench, gateway: RunningGateway, print_progress: Callable[[str], None]
) -> dict[str, Any]:
    print_progress(f"creating {settings.tenants} tenants with keys and limits …")
    keys = await make_tenants(gateway, settings.tenants)
    answers = chat_requests(keys, settings.output_tokens, stream=False)
    print_progress("warming up …")
    await gateway.load(answers, settings.connections, WARM_UP_S)
    print_progress("one connection …")
    alone = await gateway.load(answers, 1, settings.seconds)
    print_progress(f"{settings.connections} connections …")
    statements, rss_bytes, cpu_s = await count_statements(gateway.url), gateway.rss_bytes, gateway.cpu_s
    busy = await gateway.load(answers, settings.connections, settings.seconds)
    statements, cpu_s = await count_statements(gateway.url) - statements, gateway.cpu_s - cpu_s
    print_progress("streams …")
    events = chat_requests(keys, settings.stream_tokens, stream=True)
    streams = await gateway.load(events, settings.connections, settings.seconds)
    figures = {
        "requests_per_s": round(busy.requests_per_s, 1),
        "latency_ms": _spread_ms(alone),
        "loaded_latency_ms": _spread_ms(busy),
        "cpu_us_per_request": round(cpu_s / len(busy.latencies_s) * 1e6, 1),
        "chunks_per_s": round(streams.events / streams.duration_s, 1),
        "sql_statements_per_request": round(statements / len(busy.latencies_s), 4),
        "rss_bytes": {"before": rss_bytes, "after": gateway.rss_bytes},
    }
    if settings.soak_requests:
        figures["soak"] = await _soak(settings, gateway, answers, print_progress)
    return figures


async def _soak(
    settings: GatewayBench, gateway: RunningGateway, answers: Iterator[bytes], print_progress: Callable[[str], None]
) -> dict[str, Any]:
    """Measure memory growth: resident bytes after a tenth of the requests, and after all of them."""
    rss_bytes = []
    for count in (settings.soak_requests // 10, settings.soak_requests - settings.soak_requests // 10):
        print_progress(f"{count} requests to measure the growth of memory …")
        await gateway.load(itertools.islice(answers, count), settings.connections)
        rss_bytes.append(gateway.rss_bytes)
    growth = round(rss_bytes[1] / rss_bytes[0] - 1, 4)
    return {"requests": settings.soak_requests, "rss_bytes": rss_bytes, "growth": growth}


def chat_requests(keys: list[str], output_tokens: int, stream: bool) -> Iterator[bytes]:
    """Return an endless iterator of chat completion requests, of each tenant in turn."""
    body = json.dumps(
        {
            "model": MODEL,
            "messages": [
                {"role": "system", "content": "You are a helpful assistant."},
                {"role": "user", "content": "Tell me about moieties in a few short sentences, please."},
            ],
            "max_tokens": output_tokens,
            "ignore_eos": True,
            "stream": stream,
        }
    ).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: moiety\r\nContent-Type: application/json\r\n"
        "Content-Length: {}\r\nAuthorization: Bearer {}\r\n\r\n"
    )
    return itertools.cycle([head.format(len(body), key).encode() + body for key in keys])


def _spread_ms(tally: Tally) -> dict[str, float]:
    return {f"p{percent}": round(percentile(tally.latencies_s, percent) * 1000, 3) for percent in (50, 90, 99)}


@contextmanager
def running(folder: Path, traces: bool, config: Path | None = None) -> Iterator[RunningGateway]:
    """Start the engine, the trace store if wanted, and the gateway on a core of its own; yield it when it is ready.

    With `config` the gateway reads that configuration file, to which the settings of the trace store are written.
    Raises BenchFailed.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise BenchFailed("this system cannot pin the gateway to a CPU core; run the benchmark on Linux")
    socket, data_dir = f"ipc://{folder / 'engine'}", folder / "data"
    port = claim_port("127.0.0.1", 0, "--port")
    keys_path = data_dir / KEYS_FILE
    data_dir.mkdir()
    cores = sorted(os.sched_getaffinity(0))
    own, others = (cores[:1], cores[1:]) if len(cores) > 1 else (cores, cores)
    commands = {
        "engine": (["--scripted", "--listen", socket], others),
        "gateway": (
            ["--port", str(port), "--data-dir", str(data_dir), "--engine", socket, "--migrate",
             "--first-keys", str(keys_path), "--log-format", "json"],
            own,
        ),
    }  # fmt: skip
    environments = {name: dict(os.environ) for name in ("engine", "gateway", "traces")}
    if traces:
        traces_port, token = claim_port("127.0.0.1", 0, "--port"), secrets.token_hex(16)
        environments["traces"]["MOIETY_TRACES_TOKEN"] = token
        told = {"traces_endpoint": f"http://127.0.0.1:{traces_port}/otlp", "traces_token": token}
        if config is None:
            environments["gateway"] |= {f"MOIETY_{name.upper()}": value for name, value in told.items()}
        else:
            config.write_text("\n".join(["[gateway]", *(f'{name} = "{value}"' for name, value in told.items()), ""]))
        commands["traces"] = ["--port", str(traces_port), "--data-dir", str(data_dir), "--migrate"], others
    if config is not None:
        commands["gateway"][0].extend(["--config", str(config)])
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, (arguments, affinity) in commands.items():
            os.sched_setaffinity(0, affinity)  # child processes inherit it
            command = [sys.executable, "-m", "moiety_platform.cli", name, *arguments]
            with (folder / f"{name}.log").open("wb") as log:
                processes[name] = subprocess.Popen(
                    command, stdout=log, stderr=subprocess.STDOUT, env=environments[name]
                )
        os.sched_setaffinity(0, others)
        _wait_ready("127.0.0.1", port, processes, folder)
        keys = read_first_keys(data_dir)
        assert keys is not None, "a gateway that is ready has written its first keys"
        yield RunningGateway(psutil.Process(processes["gateway"].pid), port, keys.admin_key)
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        os.sched_setaffinity(0, cores)


def _wait_ready(host: str, port: int, processes: dict[str, subprocess.Popen[bytes]], folder: Path) -> None:
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s:
        for name, process in processes.items():
            if process.poll() is not None:
                raise BenchFailed(f"the {name} exited at startup:\n{_last_lines(folder / f'{name}.log')}")
        try:
            if httpx.get(f"http://{host}:{port}/readyz", timeout=5).status_code == httpx.codes.OK:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise BenchFailed(
        f"the gateway was not ready within {START_S:.0f} s; the end of its log:\n{_last_lines(folder / 'gateway.log')}"
    )


def _last_lines(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-10:])


async def make_tenants(gateway: RunningGateway, count: int) -> list[str]:
    """Create tenants with one key and limits of every kind each; return their keys."""
    headers = {"Authorization": f"Bearer {gateway.admin_key}"}
    async with httpx.AsyncClient(base_url=f"{gateway.url}/admin/v1", headers=headers, timeout=30) as client:

        async def call(method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
            response = await client.request(method, path, json=body)
            made: dict[str, Any] = response.raise_for_status().json()
            return made

        price = {"model": MODEL, "input": "0.15", "cached_input": "0.075", "output": "0.6"}
        await call("PUT", "/prices", price)
        keys = []
        for number in range(count):
            tenant = await call("POST", "/tenants", {"name": f"bench-{number}"})
            project = await call("POST", "/projects", {"name": "default", "tenant_id": tenant["id"]})
            keys.append((await call("POST", "/keys", {"name": "key", "project_id": project["id"]}))["secret"])
            for kind, cap in LARGE_CAPS.items():
                limit = {"level": "tenant", "scope_id": tenant["id"], "kind": kind, "cap": cap}
                await call("PUT", "/quotas", limit)
        return keys


async def count_statements(url: str) -> int:
    """Return the number of SQL statements that the gateway at `url` has sent so far."""
    async with httpx.AsyncClient(base_url=url, timeout=10) as client:
        lines = (await client.get("/metrics")).text.splitlines()
    return int(float(next(line for line in lines if line.startswith(SQL_COUNTER)).rpartition(" ")[2]))
