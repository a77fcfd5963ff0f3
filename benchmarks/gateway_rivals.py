"""Moiety's gateway against LiteLLM's proxy and Portkey's gateway on one machine, in turn, in one run.

    python benchmarks/gateway_rivals.py [--rounds 3] [--seconds 10] [--work FOLDER]

Installs the rivals into separate environments (PyPI and npm). Each gateway is one process on its own core; load
generator and upstream share the other cores. Ours runs as in `moiety bench gateway`, with keys, limits of every kind on
200 tenants, prices, ledger and spans, before the scripted engine in other processes; the rivals forward chat
completions to a server that answers at once, without a database, tenants or limits. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import httpx

from moiety_platform.bench.closed_loop import run_closed_loop
from moiety_platform.bench.environment import describe_environment
from moiety_platform.bench.report import percentile
from moiety_platform.supervisor.ports import claim_port

HERE = Path(__file__).parent
LITELLM, PORTKEY = "litellm[proxy]==1.106.0", "@portkey-ai/gateway@1.15.2"
START_S = 180.0
KEY = "sk-" + "5f1c0b9e" * 8  # LiteLLM wants one of some length
CONNECTIONS = 16
BODY = json.dumps(
    {
        "model": "scripted",
        "messages": [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": "Tell me about moieties in a few short sentences, please."},
        ],
        "max_tokens": 8,
    }
).encode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache" / "moiety-benchmarks")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "gateway_rivals.json")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    python, portkey = _install_litellm(options.work / "litellm"), _install_portkey(options.work / "portkey")
    rounds = []
    for number in range(options.rounds):
        figures = {"moiety": _run_ours(options.seconds)}
        with _upstream() as upstream:
            figures["litellm"] = _measure(_litellm(python, options.work, upstream), {}, options.seconds)
            headers = {"x-portkey-provider": "openai", "x-portkey-custom-host": f"http://127.0.0.1:{upstream}/v1"}
            figures["portkey"] = _measure(_portkey(portkey), headers, options.seconds)
        rounds.append(figures)
        print(f"round {number + 1}: {json.dumps(_ratios(figures))}", file=sys.stderr)
    report = {
        "date": date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "environment": describe_environment(),
        "settings": {"seconds": options.seconds, "connections": CONNECTIONS, "rivals": [LITELLM, PORTKEY]},
        "ratio_median": {key: statistics.median(_ratios(one)[key] for one in rounds) for key in _ratios(rounds[0])},
        "rounds": rounds,
    }
    options.output.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report["ratio_median"]))


def _ratios(figures: dict[str, Any]) -> dict[str, float]:
    """Return our requests/s divided by a rival's, and its latency divided by ours, so that more is always better."""
    ours, found = figures["moiety"], {}
    for name in ("litellm", "portkey"):
        rival = figures[name]
        found[f"requests_per_s_{name}"] = ours["requests_per_s"] / rival["requests_per_s"]
        for percent in ("p50", "p99"):
            found[f"latency_{percent}_{name}"] = rival["latency_ms"][percent] / ours["latency_ms"][percent]
    return found


def _run_ours(seconds: float) -> dict[str, Any]:
    command = [str(Path(sys.executable).parent / "moiety"), "bench", "gateway", "--duration-s", str(seconds), "--json"]
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return {name: value for name, value in report.items() if name not in ("environment", "settings")}


def _measure(gateway: Any, headers: dict[str, str], seconds: float) -> dict[str, Any]:
    fields = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {KEY}\r\n{fields}Content-Length: {len(BODY)}\r\n\r\n"
    )

    def load(port: int, connections: int, for_s: float) -> Any:
        requests = itertools.repeat(head.encode() + BODY)
        return asyncio.run(run_closed_loop("127.0.0.1", port, requests, connections=connections, seconds=for_s))

    with gateway as port:
        load(port, CONNECTIONS, 2.0)
        alone, busy = load(port, 1, seconds), load(port, CONNECTIONS, seconds)
    return {
        "requests_per_s": round(busy.requests_per_s, 1),
        "latency_ms": {f"p{p}": round(percentile(alone.latencies_s, p) * 1000, 3) for p in (50, 90, 99)},
        "loaded_latency_ms": {f"p{p}": round(percentile(busy.latencies_s, p) * 1000, 3) for p in (50, 90, 99)},
    }


@contextmanager
def _process(command: list[str], port: int, *, own_core: bool, environment: dict[str, str]) -> Iterator[int]:
    """Start a server on the first core or on the others, and wait until it listens; ours is moved to the others."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:1] if own_core and len(cores) > 1 else cores[1:] or cores)
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | environment
    )
    os.sched_setaffinity(0, cores[1:] or cores)
    try:
        end_s = time.monotonic() + START_S
        while True:
            if process.poll() is not None:
                raise SystemExit(f"{command[0]} ended with {process.returncode}")
            try:
                httpx.get(f"http://127.0.0.1:{port}/", timeout=2)
                break
            except httpx.HTTPError:
                if time.monotonic() > end_s:
                    raise SystemExit(f"{command[0]} does not listen") from None
                time.sleep(0.2)
        yield port
    finally:
        process.terminate()
        process.wait()
        os.sched_setaffinity(0, cores)


def _upstream() -> Any:
    port = claim_port("127.0.0.1", 0, "")
    command = [sys.executable, str(HERE / "rivals" / "upstream.py"), str(port)]
    return _process(command, port, own_core=False, environment={})


def _litellm(python: Path, work: Path, upstream: int) -> Any:
    config, port = work / "litellm.json", claim_port("127.0.0.1", 0, "")
    model = {"model": "openai/scripted", "api_base": f"http://127.0.0.1:{upstream}/v1", "api_key": "none"}
    models = [{"model_name": "scripted", "litellm_params": model}]
    config.write_text(json.dumps({"model_list": models, "general_settings": {"master_key": KEY}}))
    command = [str(python.parent / "litellm"), "--config", str(config), "--port", str(port), "--num_workers", "1"]
    settings = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "LITELLM_TELEMETRY": "False"}
    return _process(command, port, own_core=True, environment=settings)


def _portkey(folder: Path) -> Any:
    port = claim_port("127.0.0.1", 0, "")
    script = folder / "node_modules" / "@portkey-ai" / "gateway" / "build" / "start-server.js"
    return _process(["node", str(script), f"--port={port}", "--headless"], port, own_core=True, environment={})


def _install_litellm(folder: Path) -> Path:
    python = folder / "bin" / "python"
    if not (folder / "installed").exists():
        print(f"installing {LITELLM} into an environment of its own", file=sys.stderr)
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "-q", LITELLM], check=True)
        (folder / "installed").touch()
    return python


def _install_portkey(folder: Path) -> Path:
    if not (folder / "installed").exists():
        print(f"installing {PORTKEY}", file=sys.stderr)
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["npm", "install", "--silent", "--prefix", folder, PORTKEY], check=True)
        (folder / "installed").touch()
    return folder


if __name__ == "__main__":
    main()
