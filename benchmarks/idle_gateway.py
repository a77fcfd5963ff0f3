"""CPU time of a gateway without requests: alone, with scripted engines over ZeroMQ, and with external engines.

    python benchmarks/idle_gateway.py [--engines 50] [--external 60] [--seconds 60] [--output FILE]

Each gateway is a real process with a database in SQLite and all default settings. The engines are in a process of
their own. CPU time depends on other load of the machine far less than latency does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import httpx
import psutil
from fleet_parts.gateways import engines_process, gateway_process

from moiety_engine.scripted.text_model import scripted_text_model
from moiety_platform.bench.environment import describe_environment

HERE = Path(__file__).parent
SETTLE_S = 8.0  # after the start, until the gateway is idle
KINDS = ("none", "zeromq", "vllm", "generic")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=50, help="scripted engines over ZeroMQ")
    parser.add_argument("--external", type=int, default=60, help="external engines of each kind")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "idle_gateway.json")
    options = parser.parse_args()
    figures = {}
    for kind in options.kinds:
        count = {"none": 0, "zeromq": options.engines}.get(kind, options.external)
        figures[kind] = measure(kind, count, options.seconds)
        print(kind, json.dumps(figures[kind]), flush=True)
    report = {
        "date": date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "environment": describe_environment() | {"load_average": os.getloadavg()},
        "seconds": options.seconds,
        "gateways": figures,
    }
    options.output.write_text(json.dumps(report, indent=1) + "\n")


def measure(kind: str, count: int, seconds: float) -> dict[str, Any]:
    """Return the CPU time of an idle gateway before `count` engines of the kind, as a share of one core."""
    with tempfile.TemporaryDirectory(prefix="moiety-idle-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        addresses = [] if kind == "none" else stack.enter_context(engines_process(kind, count))
        if kind in ("vllm", "generic"):
            text = scripted_text_model()
            (folder / "tokenizer.json").write_text(text.tokenizer_json)
            (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": text.chat_template}))
            (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
            addresses = [f"{one}&tokenizer={folder}&context=4096" for one in addresses]
        gateway = stack.enter_context(gateway_process(folder, addresses))
        with httpx.Client(base_url=gateway.url, headers=gateway.admin_headers, trust_env=False, timeout=30) as client:
            _wait_for_engines(client, count)
        time.sleep(SETTLE_S)
        before, begin_s = _cpu_s(gateway.process), time.monotonic()
        time.sleep(seconds)
        used_s, during_s = _cpu_s(gateway.process) - before, time.monotonic() - begin_s
        return {
            "engines": count,
            "cpu_s": round(used_s, 3),
            "seconds": round(during_s, 1),
            "percent_of_a_core": round(100 * used_s / during_s, 2),
        }


def _wait_for_engines(client: httpx.Client, count: int) -> None:
    until_s = time.monotonic() + 60
    while True:
        listed = client.get("/admin/v1/engines").raise_for_status().json()["data"]
        if sum(one["healthy"] for one in listed) >= count:
            return
        assert time.monotonic() < until_s, f"not all of {count} engines are healthy, for example {listed[:2]}"
        time.sleep(0.5)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    main()
