"""Every kernel builds for the GPUs that it is meant for, without having one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from moiety_kernels.gpu.targets import TARGETS


def report(target: str) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "moiety_kernels.gpu.report", target]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    assert rows
    return rows


@pytest.mark.parametrize("target", ["sm_80", "sm_100", "gfx942"])
def test_every_kernel_compiles(target: str) -> None:
    assert [row["error"] for row in report(target) if row["error"]] == []


def test_on_hopper_nothing_spills_and_shared_memory_suffices() -> None:
    for row in report("sm_90"):
        assert row["error"] is None, row
        assert row["spill_bytes"] == 0, row
        assert row["shared_bytes"] <= TARGETS["sm_90"].max_shared_bytes, row
