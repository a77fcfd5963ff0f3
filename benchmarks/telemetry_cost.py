"""Cost of telemetry in the gateway: paired runs with traces, the trace store and metrics by OTLP, and without.

    python benchmarks/telemetry_cost.py [--starts 3] [--pairs 10] [--seconds 1.5] [--add]

Two gateways run as `moiety bench gateway` starts them, on one core, with keys, limits and the ledger: one with
telemetry, one without. They are loaded in turn, briefly each, in an order that changes from pair to pair, so that other
load on the machine affects both; and they are restarted several times, since no two processes are quite the same. Both
gateways of a start have the same seed of hashes, which otherwise differs and changes the speed of a process by several
percent. The interval is of the starts' means: the pairs of a start are not independent. `--add` adds to the starts in
the output, so that a machine must be idle for only two minutes at a time. The decisive figure is the gateway's CPU time
per request, which other load changes least.

Settings are the defaults: 2 % of the unremarkable traces are kept, metrics are sent once a minute. The report also has
the separate costs of counting a request and of exporting all metrics.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, date, datetime
from operator import itemgetter
from pathlib import Path
from random import Random
from typing import Any

from moiety_platform.bench.environment import describe_environment
from moiety_platform.bench.gateway import RunningGateway, chat_requests, make_tenants, running
from moiety_platform.metrics import Metrics
from moiety_platform.usage.row import UsageRow

HERE = Path(__file__).parent
T_975 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)  # of 2 pairs on
MOST = 0.05  # of the gateway's processor time a request: what the whole interval must lie below
ROWS = 20_000
OUTPUT_TOKENS, WARM_UP_S = 16, 3.0
METRICS_ENDPOINT = "MOIETY_OTLP_METRICS_ENDPOINT"

Pair = dict[str, dict[str, float]]  # figures of the gateway with all of it (on), and of that without (off)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=3, help="number of starts of the gateways")
    parser.add_argument("--pairs", type=int, default=10, help="number of pairs per start")
    parser.add_argument("--seconds", type=float, default=1.5, help="seconds of each load of a pair")
    parser.add_argument("--tenants", type=int, default=50)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--add", action="store_true", help="add pairs to those in the output")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "telemetry_cost.json")
    options = parser.parse_args()
    starts = before(options)
    if len(starts) + options.starts < 2:
        parser.error("--starts must be at least 2: an interval needs them")
    starts += [measure(options, number) for number in range(len(starts), len(starts) + options.starts)]
    figures = {name: compared(starts, of) for name, of in FIGURES.items()}
    report = {
        "date": date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "environment": describe_environment() | {"load_average": os.getloadavg()},
        "settings": settings_of(options),
        "starts": starts,
        "more_by_start": [round(math.exp(ratio_of(pairs, FIGURES["cpu_us_per_request"])) - 1, 4) for pairs in starts],
        "figures": figures,
        "metrics_alone": metrics_alone(),
        "verdict": {"at_most_5_percent": figures["cpu_us_per_request"]["interval"][1] <= MOST},
    }
    options.output.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps({name: report[name] for name in ("figures", "metrics_alone", "verdict")}, indent=2))


FIGURES = {name: itemgetter(name) for name in ("cpu_us_per_request", "requests_per_s", "latency_ms_p50")}


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that make pairs comparable."""
    return {name: getattr(options, name) for name in ("seconds", "tenants", "connections")}


def before(options: argparse.Namespace) -> list[list[Pair]]:
    """Return the pairs of each start in the output if new pairs are added to it."""
    if not options.add or not options.output.exists():
        return []
    known = json.loads(options.output.read_text())
    if known["settings"] != settings_of(options):
        sys.exit(f"{options.output} was measured with {known['settings']}; give the same, or leave --add out")
    return list(known["starts"])


def measure(options: argparse.Namespace, seed: int) -> list[Pair]:
    """Measure the pairs of one start of both gateways, in alternating order."""
    rng, cores, gateways = Random(seed), os.sched_getaffinity(0), dict[str, RunningGateway]()
    os.environ["PYTHONHASHSEED"] = str(seed + 1)  # of both
    with contextlib.ExitStack() as stack:
        for name in ("on", "off") if seed % 2 else ("off", "on"):
            os.sched_setaffinity(0, cores)  # a start leaves us without the core that the next one has as well
            gateways[name] = stack.enter_context(started(name))
        return asyncio.run(load_in_turn(gateways, options, rng))


@contextlib.contextmanager
def started(name: str) -> Iterator[RunningGateway]:
    """Start the gateway with or without telemetry."""
    with contextlib.ExitStack() as stack:
        if name == "on":
            os.environ[METRICS_ENDPOINT] = stack.enter_context(receiver())
        gateway = stack.enter_context(running(Path(stack.enter_context(folder())), traces=name == "on"))
        os.environ.pop(METRICS_ENDPOINT, None)
        yield gateway


def folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="moiety-telemetry-")


async def load_in_turn(gateways: dict[str, RunningGateway], options: argparse.Namespace, rng: Random) -> list[Pair]:
    requests = {}
    for name, gateway in gateways.items():
        keys = await make_tenants(gateway, options.tenants)
        requests[name] = chat_requests(keys, OUTPUT_TOKENS, stream=False)
        await gateway.load(requests[name], options.connections, WARM_UP_S)
    pairs = []
    for _ in range(options.pairs):
        pair: Pair = {}
        for name in rng.sample(sorted(gateways), 2):
            gateway, cpu_s = gateways[name], gateways[name].cpu_s
            tally = await gateway.load(requests[name], options.connections, options.seconds)
            pair[name] = {
                "requests_per_s": round(tally.requests_per_s, 1),
                "latency_ms_p50": round(1000 * statistics.median(tally.latencies_s), 3),
                "cpu_us_per_request": round((gateway.cpu_s - cpu_s) / len(tally.latencies_s) * 1e6, 1),
            }
        pairs.append(pair)
    return pairs


@contextlib.contextmanager
def receiver() -> Iterator[str]:
    """Start a receiver of metrics and yield its address."""
    command = [sys.executable, str(HERE / "telemetry_outage.py"), "--receive"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1/metrics"
        finally:
            process.kill()


def ratio_of(pairs: Sequence[Pair], of: Callable[[dict[str, float]], float]) -> float:
    """Return the logarithm of the ratio of `on` to `off` in one start: the median of its pairs."""
    return statistics.median(math.log(of(one["on"]) / of(one["off"])) for one in pairs)


def compared(starts: Sequence[Sequence[Pair]], of: Callable[[dict[str, float]], float]) -> dict[str, Any]:
    """Return the medians, and the difference of `on` from `off`.

    The difference is the geometric mean of the starts' ratios, with its 95 % interval.
    """
    pairs = [pair for pairs in starts for pair in pairs]
    ratios = [ratio_of(pairs, of) for pairs in starts]
    t = T_975[min(len(ratios), len(T_975) + 1) - 2]
    mean, margin = statistics.mean(ratios), t * statistics.stdev(ratios) / math.sqrt(len(ratios))
    return {
        "on": statistics.median(of(one["on"]) for one in pairs),
        "off": statistics.median(of(one["off"]) for one in pairs),
        "more": round(math.exp(mean) - 1, 4),
        "interval": [round(math.exp(mean + sign * margin) - 1, 4) for sign in (-1, 1)],
    }


def metrics_alone() -> dict[str, float]:
    """Return the CPU time of counting one request, and of exporting all metrics once, in this process."""
    metrics = Metrics()
    row = UsageRow("r", "ten_a", "p", "k", "/v1", "m", "standard", datetime.now(UTC), "length", 200, 1, 20, 0, 8, 0.1,
                   5.0, 20.0, slo_attained=True)  # fmt: skip

    def count() -> None:
        metrics.observe(row, "chat", "m", 0.002)
        metrics.observe_admission("standard", "admitted", "in_time")

    return {"observe_us": round(cpu_us(count, ROWS), 2), "render_us": round(cpu_us(metrics.render, 100), 1)}


def cpu_us(do: Callable[[], object], times: int) -> float:
    """Return the smallest of five measurements."""
    found = []
    for _ in range(5):
        began_s = time.process_time()
        for _ in range(times):
            do()
        found.append((time.process_time() - began_s) / times * 1e6)
    return min(found)


if __name__ == "__main__":
    main()
