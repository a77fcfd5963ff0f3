"""Several gateways on one PostgreSQL with two engines, under tight limits, with faults; then a check of usage records.

    python benchmarks/faults.py [--seconds 60] [--tenants 200] [--clients 48] [--gateways 4] [--no-faults] [--sqlite]

Streams of many tenants, part of them aborted at a random byte or after a moment, go through randomly chosen gateways.
Meanwhile an engine is killed, two gateways are killed (all with SIGKILL, all restarted), and the database is cut off
for 5 s. Afterwards, when all is idle: the settled usage of every limit is within its cap; requests, ledger, hourly sums
and limits agree; every bill equals the engines' records; no lease is held. Needs the `dev` extra.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

import httpx

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from cluster import Cluster, call, list_quotas, make_tenant, set_limits  # noqa: E402 - the script's own folder
from postgres import Postgres, Relay  # noqa: E402

from moiety_platform.bench.environment import describe_environment  # noqa: E402

SETTLE_S, OUTAGE_S = 120.0, 5.0
LEASE_ENDS_S = 45.0
FAULTS = (  # at which part of the time, and what
    (0.10, "engine", 0),
    (0.35, "gateway", 0),
    (0.55, "outage", 0),
    (0.75, "gateway", 1),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--tenants", type=int, default=200)
    parser.add_argument("--clients", type=int, default=48)
    parser.add_argument("--gateways", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--no-faults", action="store_true", help="inject no faults, to measure how far limits are used up"
    )
    parser.add_argument("--sqlite", action="store_true", help="use SQLite and one gateway")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "faults.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="moiety-faults-") as name:
        Path(name).chmod(0o755)  # PostgreSQL runs as a user of its own
        report = asyncio.run(_run(options, Path(name)))
    report = {
        "date": date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "environment": describe_environment(),
        **report,
    }
    options.output.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report["verdict"]))
    sys.exit(0 if all(report["verdict"].values()) else 1)


async def _run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    async with contextlib.AsyncExitStack() as stack:
        relay, url = None, f"sqlite:///{folder / 'moiety.db'}"
        if not options.sqlite:
            postgres = Postgres(folder)
            stack.callback(postgres.close)
            relay = Relay(postgres.socket_path)
            await relay.mend()
            url = relay.url
        cluster = Cluster(folder, url, 1 if options.sqlite else options.gateways)
        stack.callback(cluster.stop)
        await cluster.start_all()
        keys = await _make_tenants(cluster, options)
        supervisor = asyncio.create_task(cluster.supervise())
        stack.callback(supervisor.cancel)
        tally: Counter[str] = Counter()
        end_s = time.monotonic() + options.seconds
        clients = [_client(cluster, keys, tally, end_s, options, seed) for seed in range(options.clients)]
        breaking: list[Any] = [] if options.no_faults else [_break(cluster, relay, options)]
        begin_s = time.monotonic()
        broken, *_ = await asyncio.gather(*(breaking or [asyncio.sleep(0)]), *clients)
        print(f"{sum(tally.values())} requests in {time.monotonic() - begin_s:.0f} s: {dict(tally)}", file=sys.stderr)
        waited_s = await cluster.wait_settled(SETTLE_S)
        await asyncio.sleep(LEASE_ENDS_S)  # leases of gateways that died expire, and are released where that is proven
        figures = await cluster.reconcile() | {"waited_s": waited_s}
        async with cluster.admin() as client:
            quotas = await list_quotas(client)
        return {
            "settings": {name: value for name, value in vars(options).items() if name != "output"},
            "answers": dict(tally),
            "faults": broken or [],
            **_judge(figures, quotas, options.no_faults),
            "reconciliation": figures,
        }


async def _make_tenants(cluster: Cluster, options: argparse.Namespace) -> list[str]:
    """Create tenants with limits on all levels, so tight that most are reached; return their keys."""
    rng, keys = random.Random(options.seed), []
    price = {"model": "scripted", "input": "0.15", "cached_input": "0.075", "output": "0.6"}
    async with cluster.admin() as client:
        await call(client, "PUT", "/prices", price)
        for number in range(options.tenants):
            ids, key = await make_tenant(client, f"tenant-{number}")
            keys.append(key)
            limits = [("tenant", "tokens_per_day", rng.randint(150, 1500))]
            if not options.no_faults:
                limits += [
                    ("key", "concurrent_requests", rng.randint(2, 4)),
                    ("project", "requests_per_minute", rng.randint(6, 30)),
                    ("key", "money_per_day", rng.randint(50_000, 500_000)),
                ]
            await set_limits(client, ids, limits)
    return keys


async def _client(
    cluster: Cluster, keys: list[str], tally: Counter[str], end_s: float, options: argparse.Namespace, seed: int
) -> None:
    """Send one request after the other, each for a random tenant through a random gateway."""
    rng = random.Random(1000 * options.seed + seed)
    async with httpx.AsyncClient(timeout=15) as client:
        while time.monotonic() < end_s:
            tally[await _ask(client, cluster, rng.choice(keys), rng, options)] += 1


async def _ask(
    client: httpx.AsyncClient, cluster: Cluster, key: str, rng: random.Random, options: argparse.Namespace
) -> str:
    body: dict[str, Any] = {
        "model": "scripted",
        "messages": [{"role": "user", "content": "x" * rng.randint(1, 60)}],
        "max_tokens": rng.randint(1, 120),
        "ignore_eos": True,
        "stream": True,
        "n": rng.choice((1, 1, 1, 2)),
    }
    url = f"{cluster.url(rng.randrange(len(cluster.ports)))}/v1/chat/completions"
    headers: dict[str, Any] = {"Authorization": f"Bearer {key}"}
    leaves_after = None if options.no_faults or rng.random() < 0.6 else rng.randint(0, 6000)
    patience_s = 15.0 if options.no_faults or rng.random() < 0.9 else rng.random() * 0.3
    try:
        async with asyncio.timeout(patience_s), client.stream("POST", url, json=body, headers=headers) as response:
            num_bytes, last = 0, b""
            async for data in response.aiter_raw():
                num_bytes, last = num_bytes + len(data), data[-40:]
                if leaves_after is not None and num_bytes >= leaves_after:
                    return "left"
            if response.status_code != httpx.codes.OK:
                return str(response.status_code)
            return "whole" if b"[DONE]" in last else "broken"
    except TimeoutError:
        return "gave up"
    except httpx.HTTPError:
        await asyncio.sleep(0.05)
        return "no connection"


async def _break(cluster: Cluster, relay: Relay | None, options: argparse.Namespace) -> list[dict[str, Any]]:
    begin_s, done = time.monotonic(), []
    for part, kind, number in FAULTS:
        await asyncio.sleep(max(0.0, begin_s + part * options.seconds - time.monotonic()))
        at_s = round(time.monotonic() - begin_s, 1)
        if kind == "outage":
            if relay is None:
                continue
            await relay.cut()
            await asyncio.sleep(OUTAGE_S)
            await relay.mend()
        elif kind == "gateway" and number >= len(cluster.ports):
            continue
        else:
            cluster.kill(kind, number)
        done.append({"at_s": at_s, "what": kind, "number": number})
    return done


def _judge(figures: dict[str, Any], quotas: list[dict[str, Any]], steady: bool) -> dict[str, Any]:
    stocks = [quota for quota in quotas if quota["kind"].endswith(("_day", "_month"))]
    used = [quota["used"] / quota["cap"] for quota in stocks]
    engines = figures["engines"]
    verdict: dict[str, Any] = {
        "within_caps": all(quota["used"] <= quota["cap"] for quota in stocks),
        "books_agree": figures["agrees"],
        "bills_are_what_engines_counted": not engines["differences"],
        "nothing_unsettled": figures["waited_s"] < SETTLE_S,
        "nothing_quarantined": not figures["quarantined"],
    }
    reached = sorted(share for share in used if share > 0)
    median = reached[len(reached) // 2] if reached else 0.0
    if steady:
        verdict["used_up"] = median >= 0.98
    return {
        "verdict": verdict,
        "figures": {
            "limits": len(quotas),
            "utilisation_median": round(median, 4),
            "utilisation_min": round(reached[0], 4) if reached else 0.0,
            "compared_with_engines": engines["compared"],
            "unproven": engines["unproven"],
        },
    }


if __name__ == "__main__":
    main()
