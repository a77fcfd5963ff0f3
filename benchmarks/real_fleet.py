"""Real engines and gateways with streams over HTTP, for paired measurements of routing and fairness on one machine.

It owns the processes, the tenants and the requests; the scripts know what is compared. Counters of engines and figures
in answers (tokens, cached tokens, bytes) do not depend on the load of the machine; times do, so runs alternate.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from cluster import START_S, Cluster, GatewayPlan, call, make_tenant
from postgres import Postgres

from moiety_platform.bench.environment import describe_environment

REPORT_S = 1.5  # by then, each engine has sent its counters to each gateway


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer, as the client received it."""

    ttft_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class RealFleet:
    """Gateways and engines as processes, and clients of every gateway."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._numbers = itertools.count()  # in the tenants' names, which are unique
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._clients = [
            httpx.AsyncClient(base_url=cluster.url(number), timeout=120, limits=limits)
            for number in range(len(cluster.ports))
        ]

    async def close(self) -> None:
        for client in self._clients:
            await client.aclose()

    async def add_tenants(self, names: Sequence[str], service_class: str = "") -> list[str]:
        """Create new tenants, of a service class if one is given; return a key of each."""
        keys = []
        async with self._cluster.admin() as admin:
            for name in names:
                ids, key = await make_tenant(admin, f"{name} {next(self._numbers)}")
                keys.append(key)
                if service_class:
                    await call(admin, "PATCH", f"/tenants/{ids['tenant']}", {"service_class": service_class})
        return keys

    async def until_healthy(self) -> None:
        """Wait until every gateway has a report of each of its engines. Raises TimeoutError."""
        headers = {"Authorization": f"Bearer {self._cluster.admin_key}"}
        async with asyncio.timeout(START_S):
            for number, client in enumerate(self._clients):
                num_engines = len(self._cluster.plan_of(number).engines)
                while True:
                    engines = (await client.get("/admin/v1/engines", headers=headers)).raise_for_status().json()["data"]
                    if sum(bool(engine["healthy"] and engine["load"]) for engine in engines) == num_engines:
                        break
                    await asyncio.sleep(0.2)

    async def loads(self, gateway: int = 0) -> list[dict[str, Any]]:
        """Return the load reports of a gateway's engines, in their order, when no engine has requests any more."""
        headers = {"Authorization": f"Bearer {self._cluster.admin_key}"}
        path = "/admin/v1/engines"
        await asyncio.sleep(REPORT_S)
        async with asyncio.timeout(START_S):
            while True:
                found = (await self._clients[gateway].get(path, headers=headers)).raise_for_status().json()["data"]
                loads = [engine["load"] for engine in sorted(found, key=lambda engine: str(engine["address"]))]
                if all(load and not load["num_running"] and not load["num_waiting"] for load in loads):
                    return loads
                await asyncio.sleep(0.2)

    async def ask(self, gateway: int, key: str, path: str, body: dict[str, Any]) -> Answer:
        """Send a request and return its streamed answer. Raises RuntimeError if it fails."""
        body = body | {"stream": True, "stream_options": {"include_usage": True}}
        headers = {"Authorization": f"Bearer {key}"}
        begin_s, first_s, usage = time.perf_counter(), None, None
        async with self._clients[gateway].stream("POST", path, json=body, headers=headers) as response:
            if response.status_code != httpx.codes.OK:
                raise RuntimeError(f"a request failed with {response.status_code}: {await response.aread()!r}")
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if first_s is None and any(_text_of(choice) for choice in event.get("choices", ())):
                    first_s = time.perf_counter()
                usage = event.get("usage") or usage
                if "error" in event:
                    raise RuntimeError(f"a stream failed: {event['error']}")
        if usage is None:
            raise RuntimeError("a stream ended without its usage")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        ttft_s = (first_s or time.perf_counter()) - begin_s
        return Answer(ttft_s, usage["prompt_tokens"], cached, usage["completion_tokens"])


def _text_of(choice: dict[str, Any]) -> str:
    return choice.get("text") or (choice.get("delta") or {}).get("content") or ""


@contextlib.asynccontextmanager
async def real_fleet(
    engine_options: Sequence[Sequence[str]], gateways: Sequence[GatewayPlan]
) -> AsyncIterator[RealFleet]:
    """Start engines with these options, and gateways on one PostgreSQL; stop all of them at the end."""
    with contextlib.ExitStack() as stack:
        cluster = _make_cluster(stack, engine_options, gateways)
        await _start_all(cluster, len(engine_options), len(gateways))
        fleet = RealFleet(cluster)
        try:
            await fleet.until_healthy()
            yield fleet
        finally:
            await fleet.close()


async def _start_all(cluster: Cluster, num_engines: int, num_gateways: int) -> None:
    for engine in range(num_engines):
        cluster.start("engine", engine)
    cluster.start("gateway", 0)
    await cluster.ready(0)  # the database has its tables and the first keys
    for gateway in range(1, num_gateways):
        cluster.start("gateway", gateway)
    for gateway in range(1, num_gateways):
        await cluster.ready(gateway)


def _make_cluster(
    stack: contextlib.ExitStack, engine_options: Sequence[Sequence[str]], gateways: Sequence[GatewayPlan]
) -> Cluster:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moiety-fleet-")))
    folder.chmod(0o755)  # PostgreSQL runs as a user of its own
    postgres = Postgres(folder)
    stack.callback(postgres.close)
    cluster = Cluster(
        folder,
        postgres.url,
        len(gateways),
        engine=("--threads", "1"),
        num_engines=len(engine_options),
        gateways=gateways,
        engine_options=engine_options,
    )
    stack.callback(cluster.stop)
    return cluster


async def run_in_turn(works: Sequence[Callable[[], Awaitable[list[Answer]]]], num_clients: int) -> list[Answer]:
    """Run the works in their order with so many clients, each of which takes the next one when its own has ended."""
    waiting, answers = list(reversed(works)), list[Answer]()

    async def client() -> None:
        while waiting:
            answers.extend(await waiting.pop()())

    async with asyncio.TaskGroup() as group:
        for _ in range(num_clients):
            group.create_task(client())
    return answers


def describe_real_runs(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the head of a report of real runs: the machine, its load before the first run, and the settings."""
    return {
        "environment": describe_environment(),
        "load_average": [round(one, 1) for one in os.getloadavg()],
        "model": "the bundled demo model, one thread an engine",
        **settings,
    }
