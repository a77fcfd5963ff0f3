"""The benchmark of complete traces, with few requests: real processes, kills included."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_requests_of_every_end_leave_a_whole_trace_each_though_engines_are_killed(tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "trace_completeness.py"), "--scripted"]
    command += ["--requests", "120", "--kill-every-s", "0.4", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert output.exists(), done.stderr
    report = json.loads(output.read_text())
    assert report["verdict"] == dict.fromkeys(report["verdict"], True), report
    assert report["requests"] > 60 and report["engines_killed"] >= 1
