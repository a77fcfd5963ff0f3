"""Processes of a run: two gateways, two scripted engines, two with the demo model, a trace store, and PostgreSQL."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from pathlib import Path

import httpx
import psutil
from cluster import Cluster
from postgres import Postgres

from chaos.places import SmallDisk, Wires, WrongClock
from moiety_podrun.network import ROUTER

SCRIPTED, DEMO = "scripted", "moiety-demo"
NUM_GATEWAYS, NUM_SCRIPTED, NUM_DEMO = 2, 2, 2
GATEWAY_PORT, ENGINE_PORT, TRACES_PORT = 8000, 5757, 4318
STEP_MS, TOKENS_PER_STEP = 32, 4
BATCH_CONCURRENCY = 2  # lines of batches at a gateway, so that a batch lasts
DISK_MIB, DEMO_KV = 48, "16MiB"
TRACES_FILE = "disk/traces/traces.db"
Part = tuple[str, int]
SCRIPTED_PARTS: frozenset[Part] = frozenset(
    [("traces", 0), *(("gateway", n) for n in range(NUM_GATEWAYS)), *(("engine", n) for n in range(NUM_SCRIPTED))]
)
SKEWED: frozenset[Part] = frozenset({("gateway", 1), ("engine", 1)})  # those whose wall clock can be set


class Stage(Cluster):
    """Owner of all processes. `held` parts are not restarted when they end; all others are, as in a cluster."""

    def __init__(
        self,
        folder: Path,
        database_url: str,
        wires: Wires,
        clock: WrongClock,
        *,
        demo: bool,
        skewed: Collection[Part],
        environment: Mapping[str, str],
    ) -> None:
        token = secrets.token_hex(16)
        super().__init__(
            folder,
            database_url,
            NUM_GATEWAYS,
            environment={
                "MOIETY_TRACES_TOKEN": token,
                "MOIETY_TRACES_ENDPOINT": f"http://{ROUTER}:{TRACES_PORT}/otlp",
                "MOIETY_TRACES_DATABASE_URL": f"sqlite:///{folder / TRACES_FILE}",
                "MOIETY_BATCH_CONCURRENCY": str(BATCH_CONCURRENCY),
                "OMP_NUM_THREADS": "1",
                **environment,
            },
        )
        self.wires, self.clock, self.skewed = wires, clock, skewed
        self.demo = demo
        num_engines = NUM_SCRIPTED + demo * NUM_DEMO
        self.addresses = [f"tcp://{wires.peers[f'engine-{n}'].address}:{ENGINE_PORT}" for n in range(num_engines)]
        self.journals = [folder / f"engine-{number}.jsonl" for number in range(num_engines)]
        self.parts: list[Part] = [("traces", 0), *(("engine", n) for n in range(num_engines))]
        self.parts += [("gateway", number) for number in range(NUM_GATEWAYS)]
        self.held: set[Part] = set()
        self.ends: list[tuple[float, Part, int]] = []  # when, which and how processes ended by themselves

    @staticmethod
    def names(*, demo: bool) -> list[str]:
        """Return the names of the parts with their own network."""
        return [f"gateway-{n}" for n in range(NUM_GATEWAYS)] + [
            f"engine-{n}" for n in range(NUM_SCRIPTED + demo * NUM_DEMO)
        ]

    @property
    def traces_file(self) -> Path:
        """Return the file of the trace store."""
        return self.folder / TRACES_FILE

    async def start_all(self) -> None:
        self.start("traces", 0)
        await super().start_all()
        until_s = time.monotonic() + 90
        while not await self.is_whole():
            if time.monotonic() > until_s:
                raise SystemExit("engines are not all ready within 90 s")
            await asyncio.sleep(0.5)

    def command(self, kind: str, number: int) -> tuple[list[str], Mapping[str, str]]:
        environment = self._environment | (self.clock.environment if (kind, number) in self.skewed else {})
        words = self._traces() if kind == "traces" else self._engine(number)
        if kind == "gateway":
            words = self._gateway(number)
        within = self.wires.within(f"{kind}-{number}")
        return [*within, sys.executable, "-m", "moiety_platform.cli", *words], environment

    def _engine(self, number: int) -> list[str]:
        scripted = ["--scripted", "--name", SCRIPTED, "--scripted-step-ms", str(STEP_MS)]
        scripted += ["--scripted-tokens-per-step", str(TOKENS_PER_STEP)]
        words = ["engine", "--listen", self.addresses[number], "--usage-journal", str(self.journals[number])]
        words += ["--unacknowledged-usage", str(self.folder / "disk" / f"engine-{number}.unacknowledged")]
        demo = ["--device", "cpu", "--threads", "1", "--kv-memory-bytes", DEMO_KV]
        return words + (scripted if number < NUM_SCRIPTED else demo)

    def _gateway(self, number: int) -> list[str]:
        words = ["gateway", "--host", self.wires.peers[f"gateway-{number}"].address, "--port", str(GATEWAY_PORT)]
        words += ["--data-dir", str(self.folder / "disk" / f"gateway-{number}"), "--migrate", "--log-format", "json"]
        words += ["--database-url", self._database_url]
        words += ["--object-store-url", (self.folder / "disk" / "objects").absolute().as_uri()]
        words += ["--first-keys", str(self.folder / "keys.json")] if number == 0 else []
        return words + [part for address in self.addresses for part in ("--engine", address)]

    def _traces(self) -> list[str]:
        words = ["traces", "--host", ROUTER, "--port", str(TRACES_PORT), "--migrate", "--log-format", "json"]
        return [*words, "--data-dir", str(self.folder / "disk" / "traces")]

    def url(self, number: int) -> str:
        return f"http://{self.wires.peers[f'gateway-{number}'].address}:{GATEWAY_PORT}"

    async def supervise(self) -> None:
        while True:
            await asyncio.sleep(0.25)
            for part in self.parts:
                code = self.process(*part).poll()
                if code is not None and part not in self.held:
                    self.ends.append((time.monotonic(), part, code))
                    self.start(*part)

    def family(self, part: Part) -> list[psutil.Process]:
        """Return a part's process and its children, server before core."""
        try:
            process = psutil.Process(self.process(*part).pid)
            return [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def tell(self, part: Part, number: signal.Signals) -> None:
        """Send a signal to all processes of a part."""
        for process in self.family(part):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    @contextlib.contextmanager
    def paused(self, part: Part) -> Iterator[None]:
        """Pause all processes of a part."""
        self.tell(part, signal.SIGSTOP)
        try:
            yield
        finally:
            self.tell(part, signal.SIGCONT)

    async def is_whole(self) -> bool:
        """Return whether every gateway is ready and all engines that it sees are healthy."""
        async with httpx.AsyncClient(timeout=1.0, headers={"Authorization": f"Bearer {self.admin_key}"}) as client:
            try:
                for number in range(NUM_GATEWAYS):
                    if (await client.get(f"{self.url(number)}/readyz")).status_code != httpx.codes.OK:
                        return False
                    found = (await client.get(f"{self.url(number)}/admin/v1/engines")).json()["data"]
                    if not all(one["healthy"] and one["load"] for one in found) or len(found) != len(self.addresses):
                        return False
            except (httpx.HTTPError, KeyError, ValueError):
                return False
        return True

    def log(self, part: Part) -> Path:
        return self.folder / f"{part[0]}-{part[1]}.log"


@contextlib.asynccontextmanager
async def on_stage(
    folder: Path,
    *,
    demo: bool,
    skewed: Collection[Part] = SKEWED,
    environment: Mapping[str, str] | None = None,
    disk_mib: int = DISK_MIB,
) -> AsyncIterator[tuple[Stage, Postgres, SmallDisk]]:
    """Start all parts and their supervisor, and yield them once all are ready."""
    with contextlib.ExitStack() as stack:
        postgres = Postgres(folder)
        stack.callback(postgres.close)
        disk = SmallDisk(folder / "disk", disk_mib)
        stack.callback(disk.close)
        wires, clock = Wires(Stage.names(demo=demo)), WrongClock(folder)
        given = environment or {}
        stage = Stage(folder, postgres.url, wires, clock, demo=demo, skewed=skewed, environment=given)
        stack.callback(stage.stop)
        await stage.start_all()
        supervisor = asyncio.create_task(stage.supervise())
        stack.callback(supervisor.cancel)
        yield stage, postgres, disk
