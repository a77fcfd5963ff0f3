"""A decode step stays short: calls of the engine's own functions in one step, by a profile hook."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

COUNTER = Path(__file__).resolve().parents[2] / "benchmarks" / "step_calls.py"
MAX_CALLS = {1: 85, 8: 125}  # by the number of prompts that decode at once


@pytest.mark.every_value
@pytest.mark.parametrize("num_prompts", MAX_CALLS)
def test_a_decode_step_takes_few_calls(num_prompts: int) -> None:
    command = [sys.executable, COUNTER, "--prompts", str(num_prompts), "--steps", "24"]
    counted = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    figures = json.loads(counted.stdout.splitlines()[-1])
    assert 0 < figures["calls"] <= MAX_CALLS[num_prompts], (
        f"{figures['calls']} calls; `{COUNTER.name} --list` names them"
    )
