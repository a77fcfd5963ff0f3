"""Cost of telemetry in the gateway: it is switched on and off in one process, which is under load meanwhile.

    python benchmarks/telemetry_cost.py [--starts 4] [--pairs 20] [--seconds 1] [--add]

A gateway runs as `moiety bench gateway` starts it, on one core, with keys, limits and the ledger. Its configuration
file names the trace store and a receiver of metrics in one half of each pair, and neither in the other half, in random
order; a reload of the file applies each change. So both halves have the same process and the same memory, which differ
between two processes by more than the cost of telemetry does. The gateway is restarted several times all the same. The
interval is of the starts' medians: the pairs of a start are not independent. `--add` adds to the starts in the output,
so that a machine must be idle for only two minutes at a time. The decisive figure is the gateway's CPU time per
request, which other load changes least.

Settings are the defaults: 2 % of the unremarkable traces are kept, and those of failures and missed SLOs; spans are
sent once a second, which a half of a pair therefore lasts. Metrics are sent once a minute: the CPU time of one export
is measured separately, and its share of a minute is added. On a busy machine SLOs are missed and more traces are kept,
and the halves of a pair differ: then read the cost of the parts, of recording a trace and of keeping one, which is
measured with one connection. The report also has the cost of counting a request.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, date, datetime
from operator import itemgetter
from pathlib import Path
from random import Random
from typing import Any

import httpx
from prometheus_client import generate_latest

from moiety_platform.bench.environment import describe_environment
from moiety_platform.bench.gateway import RunningGateway, chat_requests, make_tenants, running
from moiety_platform.metrics import Metrics
from moiety_platform.usage.row import UsageRow

HERE = Path(__file__).parent
T_975 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)  # of 2 pairs on
MOST = 0.05  # of the gateway's processor time a request: what the whole interval must lie below
ROWS = 20_000
OUTPUT_TOKENS, WARM_UP_S, SETTLING_S = 16, 3.0, 0.3
RELOADS, SECTION, RELOAD_S = "moiety_config_reloads_total ", "[gateway]\n", 60.0
PARTS, SAMPLE_RATE = ("off", "recorded", "kept"), 0.02
EXPORT_INTERVAL_MS, IDLE_S, MINUTE_S = 200, 6.0, 60.0

Pair = dict[str, dict[str, float]]  # figures with telemetry (on), and without (off)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=4, help="number of starts of the gateway")
    parser.add_argument("--pairs", type=int, default=20, help="number of pairs per start")
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds of each half of a pair")
    parser.add_argument("--tenants", type=int, default=50)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--add", action="store_true", help="add starts to those in the output")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "telemetry_cost.json")
    options = parser.parse_args()
    known = before(options)
    if len(known) + options.starts < 2:
        parser.error("--starts must be at least 2: an interval needs them")
    starts = known + [measure(options, number) for number in range(len(known), len(known) + options.starts)]
    figures = {name: compared([one["pairs"] for one in starts], of) for name, of in FIGURES.items()}
    export_share = statistics.median(one["export_ms"] for one in starts) / 1000 / MINUTE_S
    upper = figures["cpu_us_per_request"]["interval"][1] + export_share
    report = {
        "date": date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "environment": describe_environment() | {"load_average": os.getloadavg()},
        "settings": settings_of(options),
        "figures": figures,
        "more_by_start": [
            round(math.exp(ratio_of(one["pairs"], FIGURES["cpu_us_per_request"])) - 1, 4) for one in starts
        ],
        "export_share_of_a_minute": round(export_share, 6),
        "parts": cost_of_parts(starts),
        "metrics_alone": metrics_alone(),
        "verdict": {"more_at_most": round(upper, 4), "at_most_5_percent": upper <= MOST},
        "starts": starts,
    }
    options.output.write_text(rows_in_lines(json.dumps(report, indent=2)) + "\n")
    print(json.dumps({name: report[name] for name in ("figures", "parts", "metrics_alone", "verdict")}, indent=2))


def rows_in_lines(text: str) -> str:
    """Put each object of figures in one line."""
    return re.sub(r"\{\s+([^{}]*?)\s+\}", lambda found: "{" + " ".join(found[1].split()) + "}", text)


FIGURES = {name: itemgetter(name) for name in ("cpu_us_per_request", "requests_per_s", "latency_ms_p50")}


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that make pairs comparable."""
    return {"switch": "reload"} | {name: getattr(options, name) for name in ("seconds", "tenants", "connections")}


def before(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the starts in the output if new ones are added to it."""
    if not options.add or not options.output.exists():
        return []
    known = json.loads(options.output.read_text())
    if known["settings"] != settings_of(options):
        sys.exit(f"{options.output} was measured with {known['settings']}; give the same, or leave --add out")
    return list(known["starts"])


def measure(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Measure the pairs of one start of the gateway, and then the CPU time of one export of its metrics."""
    os.environ["PYTHONHASHSEED"] = str(seed + 1)  # repeatable: the order of hashes changes a process's speed
    with contextlib.ExitStack() as stack:
        endpoint = stack.enter_context(receiver())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moiety-telemetry-")))
        config = folder / "moiety.toml"
        gateway = stack.enter_context(running(folder, traces=True, config=config))
        switch = _Switch(gateway, config, endpoint)
        return asyncio.run(_measure(gateway, switch, options, Random(seed)))


class _Switch:
    """Configuration file of a running gateway, with or without telemetry."""

    def __init__(self, gateway: RunningGateway, config: Path, metrics_endpoint: str) -> None:
        self._gateway, self._config = gateway, config
        self._store = config.read_text()
        self._metrics = f'otlp_metrics_endpoint = "{metrics_endpoint}"\n'

    async def turn(self, name: str) -> None:
        """Apply "on" or "off", or a part: the export of "metrics", "recorded" traces, or also "kept" ones."""
        often = f"otlp_metrics_interval_ms = {EXPORT_INTERVAL_MS}\n"
        sampling = "trace_sample_rate = {}\ntrace_first_per_s = 0\ntrace_max_per_s = 1000000\n"
        texts = {
            "on": self._store + self._metrics,
            "off": SECTION,
            "metrics": SECTION + self._metrics + often,
            "recorded": self._store + sampling.format(0),
            "kept": self._store + sampling.format(1),
        }
        async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
            before = await self._reloads(client)
            self._config.write_text(texts[name])
            self._gateway.process.send_signal(signal.SIGHUP)
            until_s = time.monotonic() + RELOAD_S
            while await self._reloads(client) == before:
                assert time.monotonic() < until_s, "the gateway did not reload its configuration; see its log"
                await asyncio.sleep(0.05)

    async def _reloads(self, client: httpx.AsyncClient) -> float:
        lines = (await client.get(f"{self._gateway.url}/metrics")).text.splitlines()
        return float(next(line for line in lines if line.startswith(RELOADS)).removeprefix(RELOADS))


async def _measure(
    gateway: RunningGateway, switch: _Switch, options: argparse.Namespace, rng: Random
) -> dict[str, Any]:
    requests = chat_requests(await make_tenants(gateway, options.tenants), OUTPUT_TOKENS, stream=False)
    await gateway.load(requests, options.connections, WARM_UP_S)
    pairs = []
    for _ in range(options.pairs):
        pair: Pair = {}
        for name in rng.sample(("on", "off"), 2):
            await switch.turn(name)
            await gateway.load(requests, options.connections, SETTLING_S)
            cpu_s = gateway.cpu_s
            tally = await gateway.load(requests, options.connections, options.seconds)
            pair[name] = {
                "requests_per_s": round(tally.requests_per_s, 1),
                "latency_ms_p50": round(1000 * statistics.median(tally.latencies_s), 3),
                "cpu_us_per_request": round((gateway.cpu_s - cpu_s) / len(tally.latencies_s) * 1e6, 1),
            }
        pairs.append(pair)
    parts = defaultdict[str, list[float]](list)
    for _ in range(options.pairs):
        for name in rng.sample(PARTS, len(PARTS)):
            await switch.turn(name)
            await gateway.load(requests, 1, SETTLING_S)
            cpu_s = gateway.cpu_s
            tally = await gateway.load(requests, 1, options.seconds)
            parts[name].append(round((gateway.cpu_s - cpu_s) / len(tally.latencies_s) * 1e6, 1))
    idle = {}
    for name in ("off", "metrics"):
        await switch.turn(name)
        cpu_s = gateway.cpu_s
        await asyncio.sleep(IDLE_S)
        idle[name] = gateway.cpu_s - cpu_s
    export_ms = (idle["metrics"] - idle["off"]) / (IDLE_S * 1000 / EXPORT_INTERVAL_MS) * 1000
    return {"export_ms": round(export_ms, 2), "pairs": pairs, "parts": parts}


def cost_of_parts(starts: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the CPU time of recording a trace and of keeping one, and their share of a request at the default rate.

    The shares are those at one connection. From each start the quarter of the blocks with the least CPU time counts,
    which other processes have disturbed least.
    """
    least = {name: statistics.median(_first_quartile(one["parts"][name]) for one in starts) for name in PARTS}
    recorded_us, kept_us = least["recorded"] - least["off"], least["kept"] - least["recorded"]
    share = (recorded_us + SAMPLE_RATE * kept_us) / least["off"]
    return {
        "off_us": round(least["off"], 1),
        "recorded_us": round(recorded_us, 1),
        "kept_us": round(kept_us, 1),
        "share_at_default_rate": round(share, 4),
    }


def _first_quartile(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=4, method="inclusive")[0] if len(values) > 1 else values[0]


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

    return {
        "observe_us": round(cpu_us(count, ROWS), 2),
        "render_us": round(cpu_us(lambda: generate_latest(metrics.registry), 100), 1),
    }


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
