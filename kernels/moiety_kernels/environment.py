"""Environment of a measurement: versions, machine and git revision. Imports nothing that is measured."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def describe_environment(*packages: str) -> dict[str, Any]:
    """Describe this process: our version, the versions of `packages`, Python, the git revision and the CPU."""
    described: dict[str, Any] = {"moiety": installed_version("moiety"), "python": platform.python_version()}
    described |= {name: installed_version(name) for name in packages}
    return described | {"git_revision": git_revision(), "cpu": cpu_name()}


def installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def git_revision() -> str | None:
    """Return the revision of the checkout that this code runs from; None outside one."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def cpu_name() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text(encoding="utf-8").splitlines() if information.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
