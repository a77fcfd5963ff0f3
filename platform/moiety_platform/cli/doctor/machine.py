"""Checks of this machine and of the installed packages."""

from __future__ import annotations

import json
import os
import platform
import resource
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement

from moiety_platform.cli.doctor.finding import Finding, fail, ok, warn
from moiety_platform.gpu_driver import NVIDIA_DRIVER

AREA = "machine"
PARTS = ("gateway", "engine", "dashboard", "deepspeed", "plot", "grpc", "parquet")  # extras of serving parts
MIN_FILES = 4096  # a stream is a connection; each engine, database connection and journal is one more
GOOD_FILES = 65_536
MIN_FREE_BYTES = 1 << 30
MIN_SHARED_BYTES = 512 << 20
DRIVER_TIMEOUT_S = 10
KERNELS_TIMEOUT_S = 120
EFFECTIVE = os.access in os.supports_effective_ids
PACKAGES = ("moiety", "torch", "triton", "litestar", "sqlalchemy", "pyzmq")


def check_machine(data_dir: Path, *, min_free_bytes: int = MIN_FREE_BYTES) -> Iterator[Finding]:
    """Check packages, GPU, CPU kernels, data directory, disk, open files and shared memory."""
    yield _packages()
    yield from _gpu()
    yield from _cpu_kernels()
    yield from _data_dir(data_dir)
    yield _disk(data_dir, min_free_bytes)
    yield _files()
    yield _shared_memory(Path("/dev/shm"))


def versions() -> dict[str, str | None]:
    """Return the versions of the relevant packages; None for those that are not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "platform": platform.platform()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def _packages() -> Finding:
    """Check the installed packages against this release's requirements; missing ones are ignored."""
    try:
        wanted = [Requirement(text) for text in requires("moiety") or ()]
    except PackageNotFoundError:
        return ok(AREA, "versions", "Moiety runs from its sources, which have no list of required package versions")
    unfit = {}
    for requirement in wanted:
        marker = requirement.marker
        if requirement.name == "moiety" or not (marker is None or any(marker.evaluate({"extra": x}) for x in PARTS)):
            continue
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            unfit[f"{requirement.name}{requirement.specifier}"] = f"{requirement.name} {found}"
    if unfit:
        command = f"{shlex.quote(sys.executable)} -m pip install {' '.join(map(shlex.quote, unfit))}"
        message = f"{', '.join(unfit.values())} {'do' if len(unfit) > 1 else 'does'} not fit this release"
        return fail(
            AREA, "packages_unfit", message, "install the required versions, and restart the processes", command
        )
    shown = ", ".join(f"{name} {number or '–'}" for name, number in versions().items())
    return ok(AREA, "versions", shown)


def _gpu() -> Iterator[Finding]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        if NVIDIA_DRIVER.exists():
            yield warn(AREA, "gpu_unknown", "there is a GPU, but no nvidia-smi", "install the driver's tools")
        else:
            yield ok(AREA, "gpu", "no NVIDIA GPU: engines run on the processor")
        return
    query = [tool, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=DRIVER_TIMEOUT_S, check=False)
        failure = "" if told.returncode == 0 else (told.stdout or told.stderr).strip() or f"exit code {told.returncode}"
    except (subprocess.SubprocessError, OSError) as exc:
        failure = str(exc)
    if failure:
        advice = (
            "the driver is not loaded: load it; if that fails, dmesg gives the reason, and the driver must be "
            "installed again"
        )
        yield fail(AREA, "gpu_driver", f"nvidia-smi failed: {failure}", advice, "modprobe nvidia")
        return
    yield ok(AREA, "gpu", told.stdout.strip().replace("\n", "; "))
    if versions()["torch"] is not None and versions()["triton"] is None:
        advice = "install triton; without it, engines compute experts with torch, which is slower"
        command = f"{shlex.quote(sys.executable)} -m pip install triton"
        yield warn(AREA, "triton_missing", "torch is installed, but triton is not", advice, command)


def _cpu_kernels() -> Iterator[Finding]:
    """Report the kernels for this CPU; a gateway's machine has none, and a process of its own loads the compiler."""
    if find_spec("numba") is None or find_spec("moiety_kernels") is None:
        return
    command = [sys.executable, "-m", "moiety_kernels.cpu.paths"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=KERNELS_TIMEOUT_S, check=False)
        failure = (told.stderr.strip().splitlines() or [f"exit code {told.returncode}"])[-1] if told.returncode else ""
    except (subprocess.SubprocessError, OSError) as exc:
        failure = str(exc)
    if failure:
        advice = "an engine on this processor fails in the same way: correct the setting or the installation"
        yield fail(AREA, "cpu_kernels_failed", f"the CPU kernels cannot be loaded: {failure}", advice)
        return
    report = json.loads(told.stdout)
    reasons: dict[str, str] = {}
    for path in report["paths"].values():
        reasons |= path["not"]
    serving = "; ".join(f"{weights}: {path['title']}" for weights, path in report["paths"].items())
    against = "".join(f"; no {title}: {reason}" for title, reason in reasons.items())
    level = f" (level {report['compiled_for']})" if report["compiled_for"] else ""
    found = f"an engine on this processor{level} multiplies weights by their type, {serving}{against}"
    if report["withheld"]:
        message = f"MOIETY_CPU_LEVEL={report['level']} withholds instructions of this processor; {found}"
        advice = "unless this is a test, remove the variable here and from the engines' environment"
        yield warn(AREA, "cpu_level_set", message, advice, "unset MOIETY_CPU_LEVEL")
        return
    yield ok(AREA, "cpu_kernels", found)


def _data_dir(data_dir: Path) -> Iterator[Finding]:
    """Check that the current user, who should be the gateway's, may write the data directory and the usage journal."""
    for folder in (data_dir, data_dir / "usage-journal"):
        if folder.exists() and not os.access(folder, os.R_OK | os.W_OK | os.X_OK, effective_ids=EFFECTIVE):
            yield _closed(folder)


def _closed(folder: Path) -> Finding:
    found, user = folder.stat(), os.geteuid()
    place = shlex.quote(str(folder))
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        advice = "its file system is read-only: mount one that can be written there, or set another data directory"
        return fail(AREA, "data_dir_closed", f"{folder} cannot be written", advice)
    if not folder.is_dir():
        advice = "a file has the name of the folder: move the file"
        return fail(AREA, "data_dir_closed", f"{folder} is not a folder", advice, f"mv {place} {place}.away")
    message = f"{folder} cannot be written by user {user}: it is of user {found.st_uid}, mode {found.st_mode & 0o777:o}"
    advice = "change its owner to the gateway's user; otherwise usage that the database cannot store is lost"
    command = f"chmod u+rwx {place}" if found.st_uid == user else f"chown -R {user} {place}"
    return fail(AREA, "data_dir_closed", message, advice, command)


def _disk(data_dir: Path, min_free_bytes: int) -> Finding:
    place = data_dir if data_dir.exists() else Path.cwd()
    free = shutil.disk_usage(place).free
    message = f"{free / (1 << 30):.1f} GiB free under {place}"
    if free < min_free_bytes:
        advice = (
            "free space, or move the data directory: with a full disk, usage rows that the database cannot "
            "store are lost"
        )
        return fail(AREA, "disk_full", message, advice)
    return ok(AREA, "disk", message)


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    message = f"{soft} files can be open at the same time (at most {hard})"
    if soft < MIN_FILES:
        reach = GOOD_FILES if hard == resource.RLIM_INFINITY else min(hard, GOOD_FILES)
        advice = f"each stream is an open file: raise the limit to {MIN_FILES} or more before the gateway starts"
        return fail(AREA, "open_files", message, advice, f"ulimit -n {reach}")
    return ok(AREA, "open_files", message)


def _shared_memory(place: Path) -> Finding:
    if not place.exists():
        return ok(AREA, "shared_memory", "there is none here")
    found = os.statvfs(place)
    size = found.f_blocks * found.f_frsize
    message = f"{size >> 20} MiB of shared memory"
    if size < MIN_SHARED_BYTES:
        advice = "engines of several ranks need it: mount an emptyDir of medium Memory at /dev/shm, or --shm-size"
        return warn(AREA, "shared_memory_small", message, advice)
    return ok(AREA, "shared_memory", message)
