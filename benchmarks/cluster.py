"""Gateways and engines as processes; each is restarted after a kill with its data on disk."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from ending import stop_processes

from moiety_platform.supervisor.ports import claim_port

START_S = 180.0
NUM_ENGINES = 2
STEP_MS = 4


@dataclass(frozen=True)
class GatewayPlan:
    """The engines of one gateway, by number, and its own settings."""

    engines: tuple[int, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


class Cluster:
    """Gateways and engines of one deployment.

    `cores`, where given, are those of the gateways and those of the engines; `engine` replaces the options of a
    scripted one. `gateways`, where given, has a plan for each gateway, which otherwise connects to all engines;
    `engine_options`, where given, has further options for each engine.
    """

    def __init__(
        self,
        folder: Path,
        database_url: str,
        num_gateways: int,
        *,
        cores: tuple[Collection[int], Collection[int]] | None = None,
        engine: Sequence[str] = ("--scripted", "--scripted-step-ms", str(STEP_MS)),
        environment: Mapping[str, str] | None = None,
        num_engines: int = NUM_ENGINES,
        gateways: Sequence[GatewayPlan] = (),
        engine_options: Sequence[Sequence[str]] = (),
    ) -> None:
        self.folder = folder
        self.journals = [folder / f"engine-{number}.jsonl" for number in range(num_engines)]
        self.addresses = [f"ipc://{folder}/engine-{number}" for number in range(num_engines)]
        self.ports = [claim_port("127.0.0.1", 0, "--port") for _ in range(num_gateways)]
        self._database_url = database_url
        self._environment = os.environ | {"MOIETY_KEY_PEPPER": secrets.token_hex(32)} | dict(environment or {})
        self._engine_options = [[*engine, *own] for own in engine_options or [()] * num_engines]
        self._gateway_plans = gateways
        self._cores = cores
        self._processes: dict[tuple[str, int], subprocess.Popen[bytes]] = {}

    async def start_all(self) -> None:
        for number in range(len(self.addresses)):
            self.start("engine", number)
        for number in range(len(self.ports)):
            self.start("gateway", number)
            await self.ready(number)

    def start(self, kind: str, number: int) -> None:
        command, environment = self.command(kind, number)
        with (self.folder / f"{kind}-{number}.log").open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        if self._cores is not None:
            os.sched_setaffinity(process.pid, self._cores[kind == "engine"])
        self._processes[kind, number] = process

    def command(self, kind: str, number: int) -> tuple[list[str], Mapping[str, str]]:
        """Command line and environment of a process."""
        arguments = self._engine(number) if kind == "engine" else self._gateway(number)
        own = {} if kind == "engine" else self.plan_of(number).environment
        return [sys.executable, "-m", "moiety_platform.cli", *arguments], {**self._environment, **own}

    def plan_of(self, gateway: int) -> GatewayPlan:
        """Return the plan of a gateway; without one, it connects to all engines."""
        return self._gateway_plans[gateway] if self._gateway_plans else GatewayPlan(tuple(range(len(self.addresses))))

    def process(self, kind: str, number: int) -> subprocess.Popen[bytes]:
        """Return the running process, or the last one."""
        return self._processes[kind, number]

    def _engine(self, number: int) -> list[str]:
        arguments = ["engine", *self._engine_options[number], "--listen", self.addresses[number]]
        arguments += ["--unacknowledged-usage", str(self.folder / f"engine-{number}.unacknowledged")]
        return [*arguments, "--usage-journal", str(self.journals[number])]

    def _gateway(self, number: int) -> list[str]:
        data_dir = self.folder / f"gateway-{number}"
        arguments = ["gateway", "--port", str(self.ports[number]), "--data-dir", str(data_dir), "--migrate"]
        arguments += ["--database-url", self._database_url, "--log-format", "json"]
        arguments += ["--object-store-url", (self.folder / "objects").absolute().as_uri()]
        arguments += ["--first-keys", str(self.folder / "keys.json")] if number == 0 else []
        addresses = [self.addresses[engine] for engine in self.plan_of(number).engines]
        return arguments + [part for address in addresses for part in ("--engine", address)]

    def kill(self, kind: str, number: int) -> None:
        process = self._processes[kind, number]
        process.send_signal(signal.SIGKILL)
        process.wait()

    def end(self, kind: str, number: int) -> int:
        """Stop the process gracefully, wait, and return its exit code."""
        process = self._processes.pop((kind, number))
        process.terminate()
        return process.wait(START_S)

    async def supervise(self) -> None:
        """Restart processes that end, as a cluster does; a gateway that starts without a database exits."""
        while True:
            await asyncio.sleep(0.5)
            for (kind, number), process in list(self._processes.items()):
                if process.poll() is not None:
                    self.start(kind, number)

    def stop(self) -> None:
        stop_processes(self._processes.values(), wait_s=30)

    def url(self, number: int) -> str:
        return f"http://127.0.0.1:{self.ports[number]}"

    @property
    def admin_key(self) -> str:
        return str(json.loads((self.folder / "keys.json").read_text())["admin_key"])

    def admin(self) -> httpx.AsyncClient:
        """Client of the first gateway's admin API."""
        headers = {"Authorization": f"Bearer {self.admin_key}"}
        return httpx.AsyncClient(base_url=f"{self.url(0)}/admin/v1", headers=headers, timeout=60)

    async def ready(self, number: int) -> None:
        until_s = time.monotonic() + START_S
        async with httpx.AsyncClient() as client:
            while time.monotonic() < until_s:
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get(f"{self.url(number)}/readyz")).status_code == httpx.codes.OK:
                        return
                await asyncio.sleep(0.1)
        log = (self.folder / f"gateway-{number}.log").read_text(errors="replace")
        raise SystemExit(f"gateway {number} is not ready within {START_S:.0f} s:\n{log[-2000:]}")

    async def wait_settled(self, timeout_s: float) -> float:
        """Return the seconds until every engine is idle and all usage is acknowledged, at most the timeout."""
        for number in range(len(self.ports)):
            await self.ready(number)
        begin_s = time.monotonic()
        async with self.admin() as client:
            while time.monotonic() - begin_s < timeout_s:
                loads = [one["load"] for one in (await client.get("/engines")).json()["data"]]
                if all(load and not load["unacknowledged_replicas"] and not load["num_running"] for load in loads):
                    break
                await asyncio.sleep(1)
        return round(time.monotonic() - begin_s, 1)

    async def reconcile(self, hours: int = 2) -> dict[str, Any]:
        """Return the result of `moiety usage reconcile` for the last hours, engines' journals included."""
        command = [sys.executable, "-m", "moiety_platform.cli", "usage", "reconcile", "--json", "--url", self.url(0)]
        command += ["--admin-key", self.admin_key, "--hours", str(hours)]
        command += [part for path in self.journals for part in ("--journal", str(path))]
        done = await asyncio.to_thread(subprocess.run, command, stdout=subprocess.PIPE, text=True, check=False)
        figures: dict[str, Any] = json.loads(done.stdout)
        return figures


async def call(client: httpx.AsyncClient, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = (await client.request(method, path, json=body)).raise_for_status().json()
    return answer


async def make_tenant(client: httpx.AsyncClient, name: str) -> tuple[dict[str, str], str]:
    """Create a tenant with a project and a key; return their ids by level, and the key."""
    tenant = await call(client, "POST", "/tenants", {"name": name})
    project = await call(client, "POST", "/projects", {"name": "p", "tenant_id": tenant["id"]})
    key = await call(client, "POST", "/keys", {"name": "k", "project_id": project["id"]})
    return {"tenant": tenant["id"], "project": project["id"], "key": key["key"]["id"]}, key["secret"]


async def set_limits(client: httpx.AsyncClient, ids: dict[str, str], limits: Sequence[tuple[str, str, int]]) -> None:
    """Set the limits of a tenant, as (level, kind, cap)."""
    for level, kind, cap in limits:
        await call(client, "PUT", "/quotas", {"level": level, "scope_id": ids[level], "kind": kind, "cap": cap})


async def list_quotas(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    """Return all limits with their usage."""
    found, cursor = [], None
    while True:
        parameters = {"limit": 200} | ({"cursor": cursor} if cursor else {})
        page = (await client.get("/quotas", params=parameters)).raise_for_status().json()
        found += page["data"]
        cursor = page["next_cursor"]
        if cursor is None:
            return found
