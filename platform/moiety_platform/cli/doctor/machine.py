"""This machine and what is installed on it."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from moiety_platform.cli.doctor.finding import Finding, ok, warn, wrong

AREA = "machine"
OLDEST_PYTHON = (3, 11)
MIN_FILES = 4096  # a stream is a connection; each engine, database connection and journal is one more
GOOD_FILES = 65_536
MIN_FREE_BYTES = 1 << 30
MIN_SHARED_BYTES = 512 << 20
DRIVER_TIMEOUT_S = 10
PACKAGES = ("moiety", "torch", "triton", "litestar", "sqlalchemy", "pyzmq")


def look_at_machine(data_dir: Path, *, min_free_bytes: int = MIN_FREE_BYTES) -> Iterator[Finding]:
    """Python, packages, GPU, disk, open files, shared memory."""
    yield from _python()
    yield from _gpu()
    yield _disk(data_dir, min_free_bytes)
    yield _files()
    yield _shared_memory(Path("/dev/shm"))


def versions() -> dict[str, str | None]:
    """Of what matters; None for what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "platform": platform.platform()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def _python() -> Iterator[Finding]:
    shown = ", ".join(f"{name} {number or '–'}" for name, number in versions().items())
    if sys.version_info < OLDEST_PYTHON:
        yield wrong(AREA, "python_too_old", shown, "install Python 3.11 or newer, and Moiety with it")
    else:
        yield ok(AREA, "versions", shown)


def _gpu() -> Iterator[Finding]:
    if not Path("/dev/nvidiactl").exists():
        yield ok(AREA, "gpu", "no NVIDIA GPU: engines run on the processor")
        return
    tool = shutil.which("nvidia-smi")
    if tool is None:
        yield warn(AREA, "gpu_unknown", "there is a GPU, but no nvidia-smi", "install the driver's tools")
        return
    query = [tool, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=DRIVER_TIMEOUT_S, check=True)
    except (subprocess.SubprocessError, OSError) as exc:
        advice = "the driver does not answer: see dmesg, and load or reinstall the driver"
        yield wrong(AREA, "gpu_driver", f"nvidia-smi failed: {exc}", advice)
        return
    yield ok(AREA, "gpu", told.stdout.strip().replace("\n", "; "))
    if versions()["torch"] is not None and versions()["triton"] is None:
        advice = "install triton, or engines compute experts by plain torch"
        yield warn(AREA, "triton_missing", "torch is there, triton is not", advice, "pip install triton")


def _disk(data_dir: Path, min_free_bytes: int) -> Finding:
    place = data_dir if data_dir.exists() else Path.cwd()
    free = shutil.disk_usage(place).free
    told = f"{free / (1 << 30):.1f} GiB free under {place}"
    if free < min_free_bytes:
        advice = "make room, or move the data directory: a full disk loses usage rows that the database cannot take"
        return wrong(AREA, "disk_full", told, advice)
    return ok(AREA, "disk", told)


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    told = f"{soft} files may be open at once (at most {hard})"
    if soft < MIN_FILES:
        reach = GOOD_FILES if hard == resource.RLIM_INFINITY else min(hard, GOOD_FILES)
        advice = f"each stream is an open file: raise it to {MIN_FILES} or more before the gateway starts"
        return wrong(AREA, "open_files", told, advice, f"ulimit -n {reach}")
    return ok(AREA, "open_files", told)


def _shared_memory(place: Path) -> Finding:
    if not place.exists():
        return ok(AREA, "shared_memory", "there is none here")
    found = os.statvfs(place)
    size = found.f_blocks * found.f_frsize
    told = f"{size >> 20} MiB of shared memory"
    if size < MIN_SHARED_BYTES:
        advice = "engines of several ranks need it: mount an emptyDir of medium Memory at /dev/shm, or --shm-size"
        return warn(AREA, "shared_memory_small", told, advice)
    return ok(AREA, "shared_memory", told)
