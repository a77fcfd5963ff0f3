"""Environment of a measurement: versions, machine and revision, as every report states them."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("moiety", "httpx", "litestar", "uvicorn", "torch")


def describe_environment() -> dict[str, Any]:
    """Return versions, operating system and CPU of this process's machine.

    They say nothing of a gateway on another machine; the report's settings have only its URL.
    """
    return {
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := installed_version(name)) is not None},
        "os": platform.platform(),
        "device": describe_processor(),
        "num_cpus": os.cpu_count(),
        "git_revision": git_revision(),
    }


def installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def describe_processor() -> str:
    """Return the CPU's name as the operating system reports it."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def git_revision() -> str | None:
    """Return the git revision of this code's checkout, with `-dirty` if it was changed; None outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
