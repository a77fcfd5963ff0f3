"""What telemetry costs the gateway: paired runs with traces, their store and metrics by OTLP, and without.

    python benchmarks/telemetry_cost.py [--pairs 6] [--seconds 5] [--within 140] [--add]

Each run is a `moiety bench gateway`: one process on a core of its own before the scripted engine, with keys, limits and
the ledger. The two of a pair follow each other, in an order that changes from pair to pair, so that what else the
machine does falls on both. With `--within` no pair is begun that would not end in so many seconds, and `--add` adds to
the pairs that the output has, so that a machine need be quiet for a few minutes only. The figure to go by is the
processor time a request, which other load changes least. Also told: what counting a request and telling all metrics
take by themselves.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from moiety_platform.bench.environment import describe_environment
from moiety_platform.metrics import Metrics
from moiety_platform.usage.row import UsageRow

HERE = Path(__file__).parent
T_975 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)  # of 2 pairs on
MOST = 0.05  # of the gateway's processor time a request: what the whole interval must lie below
ROWS = 20_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each part of a run")
    parser.add_argument("--tenants", type=int, default=50)
    parser.add_argument("--within", type=float, default=math.inf, help="seconds, in which all is measured")
    parser.add_argument("--add", action="store_true", help="to the pairs that the output has")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "telemetry_cost.json")
    options = parser.parse_args()
    if options.pairs < 2:
        parser.error("--pairs must be at least 2: an interval needs them")
    pairs = [*before(options), *measure(options)]
    figures = {name: compared(pairs, of) for name, of in FIGURES.items()}
    report = {
        "date": date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "environment": describe_environment() | {"load_average": os.getloadavg()},
        "settings": settings_of(options),
        "pairs": pairs,
        "figures": figures,
        "metrics_alone": metrics_alone(),
        "verdict": {"at_most_5_percent": figures["cpu_us_per_request"]["interval"][1] <= MOST},
    }
    options.output.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps({name: report[name] for name in ("figures", "metrics_alone", "verdict")}, indent=2))


FIGURES: dict[str, Callable[[dict[str, Any]], float]] = {
    "cpu_us_per_request": lambda run: run["cpu_us_per_request"],
    "requests_per_s": lambda run: run["requests_per_s"],
    "latency_ms_p50": lambda run: run["latency_ms"]["p50"],
}


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """Those that make pairs comparable."""
    return {"seconds": options.seconds, "tenants": options.tenants}


def before(options: argparse.Namespace) -> list[dict[str, dict[str, Any]]]:
    """The pairs that the output has, where some are added to them."""
    if not options.add:
        return []
    known = json.loads(options.output.read_text())
    if known["settings"] != settings_of(options):
        sys.exit(f"{options.output} was measured with {known['settings']}; give the same, or leave --add out")
    return list(known["pairs"])


def measure(options: argparse.Namespace) -> Iterator[dict[str, dict[str, Any]]]:
    """As many pairs as are wanted, or as there is time for."""
    began_s, longest_s = time.monotonic(), 0.0
    for number in range(options.pairs):
        begin_s = time.monotonic()
        if number >= 2 and begin_s - began_s + longest_s > options.within:
            return
        yield pair(options, number)
        longest_s = max(longest_s, time.monotonic() - begin_s)


def pair(options: argparse.Namespace, number: int) -> dict[str, dict[str, Any]]:
    """One run with and one without."""
    order = ("on", "off") if number % 2 == 0 else ("off", "on")
    return {which: run(options, is_on=which == "on") for which in order}


def run(options: argparse.Namespace, *, is_on: bool) -> dict[str, Any]:
    command = [sys.executable, "-m", "moiety_platform.cli", "bench", "gateway", "--json"]
    command += ["--tenants", str(options.tenants), "--seconds", str(options.seconds), "--stream-tokens", "100"]
    with receiver() if is_on else contextlib.nullcontext({}) as environment:
        command += [] if is_on else ["--no-traces"]
        done = subprocess.run(command, env=os.environ | environment, stdout=subprocess.PIPE, check=True)
    report: dict[str, Any] = json.loads(done.stdout)
    return {name: report[name] for name in ("requests_per_s", "latency_ms", "cpu_us_per_request")}


@contextlib.contextmanager
def receiver() -> Iterator[dict[str, str]]:
    """What takes metrics, and the settings that send them to it every second."""
    command = [sys.executable, str(HERE / "telemetry_outage.py"), "--receive"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        endpoint = f"http://127.0.0.1:{int(process.stdout.readline())}/v1/metrics"
        try:
            yield {"MOIETY_OTLP_METRICS_ENDPOINT": endpoint, "MOIETY_OTLP_METRICS_INTERVAL_MS": "1000"}
        finally:
            process.kill()


def compared(pairs: Sequence[dict[str, dict[str, Any]]], of: Callable[[dict[str, Any]], float]) -> dict[str, Any]:
    """The medians, and by how much `on` is more than `off`: the geometric mean of the pairs' ratios, with its 95 %
    interval."""
    ratios = [math.log(of(one["on"]) / of(one["off"])) for one in pairs]
    t = T_975[min(len(ratios), len(T_975) + 1) - 2]
    mean, margin = statistics.mean(ratios), t * statistics.stdev(ratios) / math.sqrt(len(ratios))
    return {
        "on": statistics.median(of(one["on"]) for one in pairs),
        "off": statistics.median(of(one["off"]) for one in pairs),
        "more": round(math.exp(mean) - 1, 4),
        "interval": [round(math.exp(mean + sign * margin) - 1, 4) for sign in (-1, 1)],
    }


def metrics_alone() -> dict[str, float]:
    """Processor time of counting one request, and of telling everything once, in this process."""
    metrics = Metrics()
    row = UsageRow("r", "ten_a", "p", "k", "/v1", "m", "standard", datetime.now(UTC), "length", 200, 1, 20, 0, 8, 0.1,
                   5.0, 20.0, sla_attained=True)  # fmt: skip

    def count() -> None:
        metrics.observe(row, "chat", "m", 0.002)
        metrics.observe_admission("standard", "admitted", "in_time")

    return {"observe_us": round(cpu_us(count, ROWS), 2), "render_us": round(cpu_us(metrics.render, 100), 1)}


def cpu_us(do: Callable[[], object], times: int) -> float:
    """The least of five."""
    found = []
    for _ in range(5):
        began_s = time.process_time()
        for _ in range(times):
            do()
        found.append((time.process_time() - began_s) / times * 1e6)
    return min(found)


if __name__ == "__main__":
    main()
