"""The gateway under steady load during an outage of its trace store and metrics receiver: effect on requests.

    python benchmarks/telemetry_outage.py [--rate 100] [--outage 30] [--seconds 15] [--rounds 1]

A real `moiety serve` with the scripted engine keeps the trace of every request and sends metrics every second by OTLP
to a receiver of this script. Requests are sent at a fixed rate. Under load both receivers are stopped (SIGSTOP), and
continue after the outage. No request may be lost or slower than before and after, and every span that does not arrive
must be counted. Latencies are meaningful only on an otherwise idle machine; the gateway's CPU time on any.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import date
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from open_loop import OpenLoop, Sent  # noqa: E402 - the script's own folder

from moiety_platform.bench.environment import describe_environment  # noqa: E402
from moiety_platform.bench.report import percentile  # noqa: E402
from moiety_platform.supervisor.data_dir import read_first_keys  # noqa: E402
from moiety_platform.supervisor.ports import claim_port  # noqa: E402
from moiety_platform.traces.sender import BATCH  # noqa: E402

OUTPUT_TOKENS = 8
START_S, IDLE_S, SETTLE_S = 90.0, 30.0, 60.0
SLOWER_BY, SLOWER_BY_MS = 1.25, 2.0  # the p99 of the outage over the worse of those before and after
DEARER_BY = 1.1  # likewise the gateway's processor time a request
PHASES = ("before", "outage", "after")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=100.0, help="requests per second")
    parser.add_argument("--outage", type=float, default=30.0, help="seconds of the outage")
    parser.add_argument("--seconds", type=float, default=15.0, help="seconds before the outage, and after it")
    parser.add_argument(
        "--rounds", type=int, default=1, help="number of rounds; each has a time before, an outage and a time after"
    )
    parser.add_argument("--output", type=Path, default=HERE / "results" / "telemetry_outage.json")
    parser.add_argument("--receive", action="store_true", help=argparse.SUPPRESS)  # how it starts its own receiver
    options = parser.parse_args()
    if options.receive:
        receive()
        return
    with tempfile.TemporaryDirectory(prefix="moiety-telemetry-") as name:
        report = asyncio.run(measure(options, Path(name)))
    report = {
        "date": date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "environment": describe_environment() | {"load_average": os.getloadavg()},
        "settings": {name: value for name, value in vars(options).items() if name not in ("output", "receive")},
        **report,
    }
    options.output.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps({"phases": report["phases"], "verdict": report["verdict"]}, indent=2))
    sys.exit(0 if all(report["verdict"].values()) else 1)


def receive() -> None:
    """Start a receiver that accepts everything, as a collector does; print its port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_arguments: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        print(server.server_port, flush=True)
        server.serve_forever()


@contextlib.contextmanager
def running(folder: Path) -> Iterator[tuple[str, psutil.Process, list[psutil.Process]]]:
    """Start `moiety serve`; yield its address, its gateway, and the processes to be paused."""
    with contextlib.ExitStack() as stack:
        receiver = subprocess.Popen([sys.executable, __file__, "--receive"], stdout=subprocess.PIPE, text=True)
        stack.callback(receiver.kill)
        assert receiver.stdout is not None
        endpoint = f"http://127.0.0.1:{int(receiver.stdout.readline())}/v1/metrics"
        environment = os.environ | {
            "MOIETY_TRACE_SAMPLE_RATE": "1",
            "MOIETY_TRACE_MAX_PER_S": "1000000",
            "MOIETY_OTLP_METRICS_ENDPOINT": endpoint,
            "MOIETY_OTLP_METRICS_INTERVAL_MS": "1000",
        }
        port = claim_port("127.0.0.1", 0, "--port")
        command = [sys.executable, "-m", "moiety_platform.cli", "serve", "--scripted", "--no-dashboard"]
        with (folder / "log").open("wb") as log:
            serve = subprocess.Popen(
                [*command, "--port", str(port), "--data-dir", str(folder / "data")],
                stdout=log, stderr=subprocess.STDOUT, env=environment,
            )  # fmt: skip
        stack.callback(serve.wait, 60)
        stack.callback(serve.terminate)
        wait_for_line(folder / "log", "traces_listening")
        parts = psutil.Process(serve.pid).children()
        store, gateway = (next(part for part in parts if name in part.cmdline()) for name in ("traces", "gateway"))
        yield f"http://127.0.0.1:{port}", gateway, [store, psutil.Process(receiver.pid)]


def wait_for_line(log: Path, words: str) -> None:
    end_s = time.monotonic() + START_S
    while words not in log.read_text(errors="replace"):
        if time.monotonic() > end_s:
            raise SystemExit(f"not ready within {START_S:.0f} s:\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.1)


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    with running(folder) as (url, gateway, receivers):
        keys = read_first_keys(folder / "data")
        assert keys is not None, "a serve that is ready has keys"
        loop = OpenLoop(*address(url))
        request = itertools.repeat((0, chat(keys.tenant_key)))
        await loop.run(request, options.rate, 3.0)  # warm up
        first = await settled(url)
        sent: dict[str, list[Sent]] = {phase: [] for phase in PHASES}
        cpu_s = dict.fromkeys(PHASES, 0.0)

        async def load(phase: str, seconds: float) -> None:
            cpu_s[phase] -= cpu_of(gateway)
            sent[phase] += await loop.run(request, options.rate, seconds)
            await loop.wait_idle(IDLE_S)
            cpu_s[phase] += cpu_of(gateway)

        for _ in range(options.rounds):
            await load("before", options.seconds)
            with standing_still(receivers):
                await load("outage", options.outage)
            await load("after", options.seconds)
        return judged(sent, cpu_s, first, await settled(url))


def cpu_of(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@contextlib.contextmanager
def standing_still(processes: list[psutil.Process]) -> Iterator[None]:
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            process.send_signal(signal.SIGCONT)


def address(url: str) -> tuple[str, int]:
    host, port = url.removeprefix("http://").split(":")
    return host, int(port)


def chat(key: str) -> bytes:
    """Return one request in wire form."""
    message = {"role": "user", "content": "Tell me about moieties in a few short sentences, please."}
    fields = {"model": "moiety-demo", "messages": [message], "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
    body = json.dumps(fields).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: moiety\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nAuthorization: Bearer {key}\r\n\r\n"
    )
    return head.encode() + body


async def settled(url: str) -> dict[str, float]:
    """Return the gateway's counts, once its spans have been sent or dropped."""
    end_s, before = time.monotonic() + SETTLE_S, counts(url)
    while time.monotonic() < end_s:
        await asyncio.sleep(3)  # a sender sends once a second
        now = counts(url)
        if all(now[name] == before[name] for name in ("sent", "queue_full", "not_taken")):
            return now
        before = now
    return before


def counts(url: str) -> dict[str, float]:
    found = dict.fromkeys(("requests", "sent", "queue_full", "not_taken", "exports_taken", "exports_not_taken"), 0.0)
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=30).text):
        for sample in family.samples:
            if sample.name == "moiety_requests_total":
                found["requests"] += sample.value
            elif sample.name == "moiety_spans_sent_total":
                found["sent"] += sample.value
            elif sample.name == "moiety_spans_dropped_total":
                found[sample.labels["reason"]] += sample.value
            elif sample.name == "moiety_metric_exports_total":
                found[f"exports_{sample.labels['outcome']}"] += sample.value
    return found


def judged(
    sent: dict[str, list[Sent]], cpu_s: dict[str, float], first: dict[str, float], last: dict[str, float]
) -> dict[str, Any]:
    """Return the report: latencies by phase, the gateway's counts between `first` and `last`, and the verdict."""
    phases = {phase: figures(of, cpu_s[phase]) for phase, of in sent.items()}
    usual_us = max(phases[phase]["cpu_us_per_request"] for phase in ("before", "after"))
    told = {name: int(last[name] - first[name]) for name in first}
    a_request = first["sent"] / first["requests"]  # spans, when nothing was lost; by the steps it met, one more or less
    dropped = told["queue_full"] + told["not_taken"]
    usual_ms = max(phases["before"]["latency_ms"]["p99"], phases["after"]["latency_ms"]["p99"])
    verdict = {
        "none_lost": not any(figures["not_200"] for figures in phases.values()),
        "none_slower": phases["outage"]["latency_ms"]["p99"] <= usual_ms * SLOWER_BY + SLOWER_BY_MS,
        "none_dearer": phases["outage"]["cpu_us_per_request"] <= usual_us * DEARER_BY,
        "spans_were_dropped": dropped > 0,
        "all_spans_counted": abs(told["requests"] * a_request - told["sent"] - dropped) < BATCH / 2,
        "metrics_went_on": told["exports_not_taken"] > 0 and told["exports_taken"] > 0,
    }
    return {"phases": phases, "counted": told | {"spans_a_request": a_request}, "verdict": verdict}


def figures(sent: list[Sent], cpu_s: float) -> dict[str, Any]:
    latencies_s = [one.latency_s for one in sent]
    spread = {f"p{percent}": round(percentile(latencies_s, percent) * 1000, 2) for percent in (50, 90, 99)}
    not_200 = sum(one.status != httpx.codes.OK for one in sent)
    return {
        "requests": len(sent),
        "not_200": not_200,
        "latency_ms": spread | {"max": round(max(latencies_s) * 1000, 2)},
        "cpu_us_per_request": round(cpu_s / len(sent) * 1e6, 1),
    }


if __name__ == "__main__":
    main()
