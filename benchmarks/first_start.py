"""Time of the first start of `moiety serve` after an installation, with and without compiled kernels.

    python benchmarks/first_start.py [--model FOLDER] [--rounds 2] [--output FILE]

Each round has a new copy of the kernels' package, which nothing has compiled yet, as after an installation. The first
start compiles its kernels; a new copy is then compiled by `moiety precompile`, as `make serve` does when it installs,
and started twice. Each start has a new data folder. The figures of a start are the seconds until the first answer, the
CPU time of all its processes until then, which other load on the machine changes less, and its reports of progress.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

import httpx
import psutil

import moiety_kernels
from moiety_platform.bench.environment import describe_environment
from moiety_platform.supervisor.data_dir import read_first_keys
from moiety_platform.supervisor.ports import claim_port

HERE = Path(__file__).parent
START_S, STOP_S = 900.0, 60.0
TARGET_S = 8.0
PROGRESS = "core_loading"
STATES = ("not_compiled", "precompiled", "second")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="folder of a checkpoint; the demo model if not given")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "first_start.json")
    options = parser.parse_args()
    rounds = [measure(options.model) for _ in range(options.rounds)]
    report = {
        "date": date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "environment": describe_environment() | {"load_average": os.getloadavg()},
        "model": options.model or "the demo model",
        "medians": medians(rounds),
        "rounds": rounds,
    }
    options.output.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report["medians"], indent=2))


def medians(rounds: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, float | bool]]:
    """Return the medians of each state, and whether the time is within the target."""
    found: dict[str, dict[str, float | bool]] = {}
    for state in STATES:
        seconds, cpu_s = (statistics.median(one[state][name] for one in rounds) for name in ("seconds", "cpu_s"))
        found[state] = {"seconds": round(seconds, 2), "cpu_s": round(cpu_s, 2), "is_within_8_s": seconds <= TARGET_S}
    return found


def measure(model: str) -> dict[str, dict[str, Any]]:
    """Return the figures of the three states, and of the precompilation."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="moiety-first-start-") as folder:
        environment = with_new_kernels(Path(folder) / "compiled-by-start")
        found["not_compiled"] = start(model, environment)
        environment = with_new_kernels(Path(folder) / "precompiled")
        found["precompilation"] = precompile(model, environment)
        for state in STATES[1:]:
            found[state] = start(model, environment)
    for state, figures in found.items():
        print(state, json.dumps(figures), file=sys.stderr, flush=True)
    return found


def with_new_kernels(folder: Path) -> dict[str, str]:
    """Return an environment whose kernels are a copy in `folder`, without compiled code."""
    source = Path(moiety_kernels.__file__).parent
    shutil.copytree(source, folder / source.name, ignore=shutil.ignore_patterns("__pycache__"))
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}


def precompile(model: str, environment: Mapping[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "moiety_platform.cli", "precompile", "--json"]
    command += ["--model", model] if model else []
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def start(model: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """Start `moiety serve`, ask it one question, and return the figures until its answer."""
    port = claim_port("127.0.0.1", 0, "--port")
    with tempfile.TemporaryDirectory(prefix="moiety-first-start-") as name:
        folder = Path(name)
        log, data_dir = folder / "serve.log", folder / "data"
        command = [sys.executable, "-m", "moiety_platform.cli", "serve", "--port", str(port), "--dashboard-port", "0"]
        command += ["--data-dir", str(data_dir), *(["--model", model] if model else [])]
        begin_s = time.monotonic()
        with (
            log.open("wb") as written,
            subprocess.Popen(command, env=environment, stdout=written, stderr=written) as one,
        ):
            try:
                while not is_answered(port, data_dir):
                    is_running = one.poll() is None and time.monotonic() < begin_s + START_S
                    assert is_running, f"the start failed:\n{log.read_text(errors='replace')[-2000:]}"
                    time.sleep(0.1)
                seconds, cpu_s = time.monotonic() - begin_s, cpu_s_of(one.pid)
            finally:
                one.terminate()
                one.wait(STOP_S)
        text = "".join(path.read_text(errors="replace") for path in [log, *sorted(data_dir.rglob("*.log"))])
    return {"seconds": round(seconds, 2), "cpu_s": round(cpu_s, 2), "num_reports": text.count(PROGRESS)}


def is_answered(port: int, data_dir: Path) -> bool:
    """Return whether a chat completion is answered by now."""
    url = f"http://127.0.0.1:{port}"
    try:
        keys = read_first_keys(data_dir)
        if keys is None or httpx.get(f"{url}/readyz", timeout=5, trust_env=False).status_code != httpx.codes.OK:
            return False
        with httpx.Client(base_url=f"{url}/v1", timeout=60, trust_env=False) as client:
            client.headers["Authorization"] = f"Bearer {keys.tenant_key}"
            served = client.get("/models").json()["data"]
            question = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
            answers = [client.post("/chat/completions", json=question | {"model": one["id"]}) for one in served[:1]]
            return any(answer.status_code == httpx.codes.OK for answer in answers)
    except httpx.HTTPError:
        return False


def cpu_s_of(pid: int) -> float:
    """Return the CPU time of a process and of all processes that it started."""
    whole = psutil.Process(pid)
    return float(sum(sum(one.cpu_times()[:4]) for one in [whole, *whole.children(recursive=True)]))


if __name__ == "__main__":
    main()
