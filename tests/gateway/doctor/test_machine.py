"""`moiety doctor` on the machine: faults that are planted are found, and its commands mend them."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from moiety_platform.cli.doctor.finding import Finding, Severity
from moiety_platform.cli.doctor.machine import check_machine

from .conftest import COMMAND_S, MOIETY

NOBODY = 65534
OWN_MOUNTS = ("unshare", "--mount", "bash")


def look(tmp_path: Path, before: str, shell: tuple[str, ...] = ("bash",)) -> tuple[int, dict[str, dict[str, str]]]:
    """Run the command after others in the same shell; return its exit code and the findings by code."""
    done = run(f"{before}; moiety doctor --only machine --json --data-dir {tmp_path}", shell)
    return done.returncode, {one["code"]: one for one in json.loads(done.stdout)["findings"]}


def at_once(tmp_path: Path) -> dict[str, Finding]:
    """Examine the machine without a process; return the findings by code."""
    return {one.code: one for one in check_machine(tmp_path)}


def run(command: str, shell: tuple[str, ...] = ("bash",), **environment: str) -> subprocess.CompletedProcess[str]:
    words, whole = [*shell, "-c", MOIETY + command], {**os.environ, **environment}
    return subprocess.run(words, check=False, timeout=COMMAND_S, capture_output=True, text=True, env=whole)


def test_too_few_open_files_are_found_and_the_command_mends_it(tmp_path: Path) -> None:
    status, found = look(tmp_path, "ulimit -S -n 256")
    assert (status, found["open_files"]["level"]) == (1, "error")
    status, found = look(tmp_path, f"ulimit -S -n 256; {found['open_files']['command']}")
    assert (status, found["open_files"]["level"]) == (0, "ok")


def test_a_level_that_withholds_instructions_is_found_and_the_command_removes_it(tmp_path: Path) -> None:
    _, found = look(tmp_path, "unset MOIETY_CPU_LEVEL")
    kernels = found["cpu_kernels"]
    assert "bfloat16: " in kernels["found"] and "4 bits: " in kernels["found"]
    status, found = look(tmp_path, "export MOIETY_CPU_LEVEL=avx3")
    assert (status, found["cpu_kernels_failed"]["level"]) == (1, "error")
    assert "MOIETY_CPU_LEVEL is 'avx3'; it takes one of avx2, " in found["cpu_kernels_failed"]["found"]
    before = "export MOIETY_CPU_LEVEL=avx2"
    status, found = look(tmp_path, before)
    if "cpu_kernels" in found:
        pytest.skip("this processor has nothing that a level withholds")
    assert (status, found["cpu_level_set"]["level"]) == (0, "warning")
    assert "MOIETY_CPU_LEVEL=avx2 withholds " in found["cpu_level_set"]["found"]
    status, found = look(tmp_path, f"{before}; {found['cpu_level_set']['command']}")
    assert (status, found["cpu_kernels"]["level"]) == (0, "ok")


def test_a_driver_that_is_not_loaded_is_found_and_the_command_loads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, tools = tmp_path / "loaded", tmp_path / "bin"
    tools.mkdir()
    said = "NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver."
    script(tools / "nvidia-smi", f"test -e {loaded} || {{ echo '{said}'; exit 9; }}; echo 'H200, 580.1, 143771 MiB'")
    script(tools / "modprobe", f'test "$1" = nvidia && touch {loaded}')
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    complaint = at_once(tmp_path)["gpu_driver"]
    assert (complaint.level, complaint.found) == (Severity.ERROR, f"nvidia-smi failed: {said}")
    assert run(complaint.command).returncode == 0
    assert at_once(tmp_path)["gpu"].found == "H200, 580.1, 143771 MiB"


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_a_package_of_another_age_is_found_and_the_command_installs_the_right_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, shelf = (tmp_path / name for name in ("old", "new", "shelf"))
    (old / "litestar-1.0.dist-info").mkdir(parents=True)
    (old / "litestar-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: litestar\nVersion: 1.0\n")
    make_wheel(shelf, "litestar", "2.99.0")
    for folder in (old, new):
        monkeypatch.syspath_prepend(folder)
    complaint = at_once(tmp_path)["packages_unfit"]
    assert (complaint.level, complaint.found) == (Severity.ERROR, "litestar 1.0 does not fit this release")
    where: dict[str, Any] = {
        "PIP_TARGET": str(new),
        "PIP_FIND_LINKS": str(shelf),
        "PIP_NO_INDEX": "1",
        "PIP_NO_DEPS": "1",
    }
    done = run(complaint.command, **where)
    assert done.returncode == 0, done.stderr
    importlib.invalidate_caches()
    assert "packages_unfit" not in at_once(tmp_path)


def make_wheel(folder: Path, name: str, version: str) -> None:
    """Write a wheel with nothing in it."""
    folder.mkdir()
    inside = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{inside}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(
            f"{inside}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{inside}/RECORD", f"{inside}/METADATA,,\n{inside}/WHEEL,,\n{inside}/RECORD,,\n")


def test_a_folder_that_the_gateway_cannot_write_is_found_and_the_command_gives_it_to_its_user() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="doctor-") as name:  # that others may pass through
        place = Path(name)
        place.chmod(0o755 if os.geteuid() == 0 else 0o500)
        (complaint,) = closed(place)
        assert f"{place} cannot be written by user" in complaint.found
        assert run(complaint.command).returncode == 0
        assert closed(place) == []


def closed(data_dir: Path) -> list[Finding]:
    """Return the findings about folders that are not writable. As root, who can write to any, become nobody first."""
    mine = os.geteuid()
    if mine == 0:
        os.seteuid(NOBODY)
    try:
        return [one for one in check_machine(data_dir) if one.code == "data_dir_closed"]
    finally:
        os.seteuid(mine)


def test_a_file_in_the_journals_place_is_found_and_the_command_moves_it_away(tmp_path: Path) -> None:
    (tmp_path / "usage-journal").write_text("")
    complaint = at_once(tmp_path)["data_dir_closed"]
    assert complaint.found == f"{tmp_path / 'usage-journal'} is not a folder"
    assert run(complaint.command).returncode == 0
    assert "data_dir_closed" not in at_once(tmp_path)


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="mounts need Linux and its root user")
def test_small_memory_and_a_full_disk_are_found_and_what_the_advice_says_mends_them(tmp_path: Path) -> None:
    mounted = f"mount -t tmpfs -o size=64m none /dev/shm; mount -t tmpfs -o size=64m none {tmp_path}"
    status, found = look(tmp_path, mounted, OWN_MOUNTS)
    assert (status, found["shared_memory_small"]["level"], found["disk_full"]["level"]) == (1, "warning", "error")
    room = f"mount -o remount,size=2g /dev/shm; mount -o remount,size=2g {tmp_path}"
    status, found = look(tmp_path, f"{mounted}; {room}", OWN_MOUNTS)
    assert (status, found["shared_memory"]["level"], found["disk"]["level"]) == (0, "ok", "ok")


def test_a_disk_that_is_nearly_full_is_found(tmp_path: Path) -> None:
    found = {one.code: one for one in check_machine(tmp_path, min_free_bytes=1 << 60)}
    assert "free space" in found["disk_full"].advice
