"""The two gateways of a run: one with the demo model, one with scripted engines."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from external.processes import MOIETY, process, wait

from clients.catalog import ServerKind
from clients.python.tasks import Server
from clients.scripted_server import ENDLESS_MODEL
from clients.scripted_server import MODEL as SCRIPTED_MODEL
from moiety_platform.supervisor.ports import claim_port

DEMO_MODEL = "moiety-demo"
ENGINE_START_S = 60.0


@dataclass(frozen=True, slots=True)
class Gateway(Server):
    """Running gateway."""

    kind: ServerKind

    def variables(self) -> dict[str, str]:
        """Return the environment variables that tell a client where it is."""
        prefix = f"MOIETY_{self.kind.name}"
        return {f"{prefix}_URL": self.url, f"{prefix}_KEY": self.key, f"{prefix}_MODEL": self.model} | {
            f"{prefix}_ADMIN_KEY": self.admin_key
        }


@contextmanager
def demo_gateway(folder: Path) -> Iterator[Gateway]:
    """Run `moiety serve` with the demo model."""
    port = claim_port("127.0.0.1", 0, "--port")
    data = folder / "demo"
    command = [sys.executable, "-c", MOIETY, "serve", "--port", port, "--dashboard-port", "0", "--data-dir", data]
    with _running(command, folder / "demo.log", port) as url:
        yield _gateway(ServerKind.DEMO, url, data / "keys.json", DEMO_MODEL)


@contextmanager
def scripted_gateways(folder: Path) -> Iterator[tuple[Gateway, Gateway]]:
    """Run a gateway with the scripted engine, and with one whose answers take minutes as its second model."""
    address = f"ipc://{folder / 'endless.sock'}"
    engine = [sys.executable, "-m", "clients.endless_engine", "--listen", address]
    with process(engine, folder / "endless.log", {}), _scripted_gateway(folder, address) as url:
        keys = folder / "scripted.json"
        _wait_for_model(url, keys, ENDLESS_MODEL)
        yield (
            _gateway(ServerKind.SCRIPTED, url, keys, SCRIPTED_MODEL),
            _gateway(ServerKind.ENDLESS, url, keys, ENDLESS_MODEL),
        )


@contextmanager
def _scripted_gateway(folder: Path, engine: str) -> Iterator[str]:
    port = claim_port("127.0.0.1", 0, "--port")
    keys = folder / "scripted.json"
    command = [sys.executable, "-m", "clients.scripted_server", "--port", port, "--keys", keys, "--engine", engine]
    with _running([*command, "--data", folder / "scripted"], folder / "scripted.log", port) as url:
        yield url


def _wait_for_model(url: str, keys: Path, model: str) -> None:
    """Return once the gateway serves the model. Raises TimeoutError."""
    headers = {"Authorization": f"Bearer {json.loads(keys.read_text())['tenant_key']}"}
    until = time.monotonic() + ENGINE_START_S
    while model not in httpx.get(f"{url}/v1/models", headers=headers, trust_env=False).text:
        if time.monotonic() > until:
            raise TimeoutError(f"the engine of {model} did not start; see its log")
        time.sleep(0.1)


@contextmanager
def _running(command: list[object], log: Path, port: int) -> Iterator[str]:
    with process(command, log, {}) as running:
        url = f"http://127.0.0.1:{port}"
        wait(f"{url}/readyz", running, log)
        yield url


def _gateway(kind: ServerKind, url: str, keys: Path, model: str) -> Gateway:
    found = json.loads(keys.read_text())
    return Gateway(url, found["tenant_key"], model, found["admin_key"], kind)
