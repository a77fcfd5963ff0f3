"""The two gateways of a run: one with the demo model, one with a scripted engine."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from external.processes import MOIETY, process, wait

from clients.catalog import ServerKind
from clients.scripted_server import MODEL as SCRIPTED_MODEL
from moiety_platform.supervisor.ports import claim_port

DEMO_MODEL = "moiety-demo"


@dataclass(frozen=True, slots=True)
class Gateway:
    """Running gateway."""

    kind: ServerKind
    url: str
    key: str
    model: str

    def variables(self) -> dict[str, str]:
        """Return the environment variables that tell a client where it is."""
        prefix = f"MOIETY_{self.kind.name}"
        return {f"{prefix}_URL": self.url, f"{prefix}_KEY": self.key, f"{prefix}_MODEL": self.model}


@contextmanager
def demo_gateway(folder: Path) -> Iterator[Gateway]:
    """Run `moiety serve` with the demo model."""
    port = claim_port("127.0.0.1", 0, "--port")
    data = folder / "demo"
    command = [sys.executable, "-c", MOIETY, "serve", "--port", port, "--dashboard-port", "0", "--data-dir", data]
    with _running(command, folder / "demo.log", port) as url:
        yield Gateway(ServerKind.DEMO, url, _tenant_key(data / "keys.json"), DEMO_MODEL)


@contextmanager
def scripted_gateway(folder: Path) -> Iterator[Gateway]:
    """Run a gateway with the scripted engine."""
    port = claim_port("127.0.0.1", 0, "--port")
    keys = folder / "scripted.json"
    command = [sys.executable, "-m", "clients.scripted_server", "--port", port, "--keys", keys]
    with _running([*command, "--data", folder / "scripted"], folder / "scripted.log", port) as url:
        yield Gateway(ServerKind.SCRIPTED, url, _tenant_key(keys), SCRIPTED_MODEL)


@contextmanager
def _running(command: list[object], log: Path, port: int) -> Iterator[str]:
    with process(command, log, {}) as running:
        url = f"http://127.0.0.1:{port}"
        wait(f"{url}/readyz", running, log)
        yield url


def _tenant_key(file: Path) -> str:
    return str(json.loads(file.read_text())["tenant_key"])
