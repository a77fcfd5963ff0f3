"""The path of a request through the gateway stays short: files and calls of a streamed chat, by a profile hook."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

COUNTER = Path(__file__).resolve().parents[2] / "benchmarks" / "request_calls.py"
MAX_FILES, MAX_CALLS = 44, 349


@pytest.mark.every_value
def test_a_streamed_chat_of_four_tokens_takes_few_calls_in_few_files() -> None:
    command = [sys.executable, COUNTER, "--requests", "24"]
    counted = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    figures = json.loads(counted.stdout.splitlines()[-1])
    assert 0 < figures["files"] <= MAX_FILES and 0 < figures["calls"] <= MAX_CALLS, (
        f"{figures['files']} files and {figures['calls']} calls; `{COUNTER.name} --list` names them"
    )
