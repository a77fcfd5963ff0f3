"""A release that the chart's runner runs, for the tests that use one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import free_port

EXAMPLE = Path(__file__).parents[2] / "helm" / "moiety" / "examples" / "kind.yaml"
START_S = 150.0
NEEDS_ROOT = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="namespaces need Linux and its root user"
)


@dataclass
class Running:
    """A release that runs. `url` leads to its gateways."""

    process: subprocess.Popen[bytes]
    folder: Path
    url: str

    def said(self) -> str:
        return (self.folder / "said.log").read_text()

    def wait_for(self, words: str) -> None:
        until = time.monotonic() + START_S
        while words not in self.said():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < until, self.said()
            time.sleep(0.2)

    def upgrade(self) -> None:
        self.process.send_signal(signal.SIGHUP)

    def secret(self, name: str, entry: str) -> str:
        return (self.folder / "secrets" / name / entry).read_text()

    def pods(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads((self.folder / "pods.json").read_text())
        return found

    def run_inside(self, part: str, code: str) -> subprocess.CompletedProcess[bytes]:
        """Run Python in the network of one of a part's pods."""
        process = next(one["process"] for one in self.pods() if one["part"] == part)
        words = ["nsenter", "--target", str(process), "--net", sys.executable, "-c", code]
        return subprocess.run(words, capture_output=True, check=False, env=environment())

    @property
    def owner_key(self) -> str:
        return self.secret("rel-moiety-owner", "key")


@contextmanager
def running(folder: Path, values: str, *options: str) -> Iterator[Running]:
    """Run the example for laptops with these values until the block ends."""
    (folder / "values.yaml").write_text(values)
    port = free_port()
    command = [sys.executable, "-m", "moiety_podrun", "--name", "rel", "--folder", str(folder), *options]
    command += ["--values", str(EXAMPLE), "--values", str(folder / "values.yaml"), "--forward", f"{port}=rel-moiety"]
    with (folder / "said.log").open("wb") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, env=environment())
        found = Running(process, folder, f"http://127.0.0.1:{port}")
        try:
            found.wait_for("everything is ready")
            yield found
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=90) == 0


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
