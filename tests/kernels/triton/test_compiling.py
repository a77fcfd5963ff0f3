"""Every kernel builds for the GPUs that it is meant for, without having one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from tests.conftest import THOROUGH

from moiety_kernels.gpu.targets import TARGETS

DEADLINE_S = 1180  # seven minutes of the processor where nothing is cached
pytestmark = [pytest.mark.slow, pytest.mark.timeout(DEADLINE_S + 20)]


FIRST = "sm_90"  # in `make test`; the others take minutes, and are compiled for in `make test-all`
BY_TARGET = [pytest.param(one, marks=() if one == FIRST else pytest.mark.thorough) for one in TARGETS]


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Rows of the report of a target: of every variant in `make test-all`, else of those that have each kernel,
    argument type and flag."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "moiety_kernels.gpu.report", request.param]
    command += [] if THOROUGH else ["--covering"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("rows", BY_TARGET, indirect=True)
def test_every_kernel_compiles(rows: list[dict[str, Any]]) -> None:
    errors = [row["error"] for row in rows]
    assert len(errors) > 40
    assert set(errors) == {None}
    assert not [row["variant"] for row in rows if row.get("loads_wait")]


@pytest.mark.parametrize("rows", [FIRST], indirect=True)
def test_on_hopper_nothing_spills_and_shared_memory_suffices(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert row["target"] == FIRST
        assert row["spill_bytes"] == 0, row
        assert row["shared_bytes"] <= TARGETS[FIRST].max_shared_bytes, row
