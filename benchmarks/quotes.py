"""Calibration of quotes on the real engine, and the credits of missed guarantees against the ledger.

    python benchmarks/quotes.py [--loads 0.3,0.6,0.9] [--seconds 60] [--margins 0.5,0]

Starts `moiety serve` with the demo model for each margin (setting `quote_margin`). Some requests teach the engine its
step times. Then the script measures the throughput with 16 requests in flight, and sends requests of 24 tenants with
Poisson arrivals at shares of it. Each request is quoted, and sent with its quote at once. The figures are those of
`/admin/v1/usage/requests`: the error is |actual - predicted| / predicted. The last step compares the credit of every
request with the terms of its class and with its guarantee, and asks the gateway to reconcile requests and ledger.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from random import Random
from typing import Any

import httpx
from dashboard_hour import Admin, served

from moiety_platform.bench.environment import describe_environment
from moiety_platform.bench.report import percentile

HERE = Path(__file__).parent
MODEL, CLASS, CREDIT_PERCENT = "moiety-demo", "standard", 25
NUM_TENANTS, WARM_UP, IN_FLIGHT = 24, 300, 16
PAGE = 500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", default="0.3,0.6,0.9", help="shares of the measured throughput")
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of each load")
    parser.add_argument("--margins", default="0.5,0", help="values of quote_margin")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "quotes.json")
    options = parser.parse_args()
    runs = []
    for margin in map(float, options.margins.split(",")):
        runs.append(run(margin, [float(load) for load in options.loads.split(",")], options.seconds))
        print(json.dumps(runs[-1]), flush=True)
    report = {
        "date": date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "environment": describe_environment() | {"load_average": os.getloadavg()},
        "runs": runs,
    }
    options.output.write_text(json.dumps(report, indent=2) + "\n")


def run(margin: float, loads: Sequence[float], seconds: float) -> dict[str, Any]:
    """Return the figures of one deployment with this margin."""
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as config:
        config.write(f"[gateway]\nquote_margin = {margin}\n")
        config.flush()
        with served("--config", config.name) as (url, _, admin_key, _):
            admin = Admin(url, admin_key)
            keys = make_tenants(admin)
            return {"quote_margin": margin, **asyncio.run(measure(url, admin, keys, loads, seconds))}


def make_tenants(admin: Admin) -> list[str]:
    """Create the price, the terms of the class and the tenants; return a key of each tenant."""
    admin("PUT", "/prices", {"model": MODEL, "input": "0.15", "output": "0.60"})
    admin("PATCH", f"/classes/{CLASS}", {"credit_percent": CREDIT_PERCENT})
    keys = []
    for number in range(NUM_TENANTS):
        tenant = admin("POST", "/tenants", {"name": f"tenant-{number}", "service_class": CLASS})
        project = admin("POST", "/projects", {"tenant_id": tenant["id"], "name": "production"})
        keys.append(admin("POST", "/keys", {"name": "backend", "project_id": project["id"]})["secret"])
    return keys


async def measure(
    url: str, admin: Admin, keys: Sequence[str], loads: Sequence[float], seconds: float
) -> dict[str, Any]:
    rng = Random(5)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=f"{url}/v1", timeout=120, limits=limits) as http:
        await closed_loop(http, keys, rng, num_requests=WARM_UP)
        began = time.monotonic()
        await closed_loop(http, keys, rng, num_requests=WARM_UP)
        throughput = WARM_UP / (time.monotonic() - began)
        found: dict[str, Any] = {"requests_per_s": round(throughput, 2), "loads": []}
        for load in loads:
            since = datetime.now(UTC)
            refused = await open_loop(http, keys, rng, load * throughput, seconds)
            await asyncio.sleep(3)  # the rows are written with others
            rows = requests_since(admin, since)
            found["loads"].append({"load": load, "refused": refused, **calibration(rows), **credits_of(rows)})
    found["books_agree"] = admin("GET", "/usage/reconciliation")["agrees"]
    return found


def body_of(rng: Random) -> dict[str, Any]:
    """Return a request with 10 to 400 words and 8 to 96 output tokens."""
    text = " ".join(
        rng.choice(("share", "weigh", "every", "part", "of", "the", "sum")) for _ in range(rng.randint(10, 400))
    )
    count = rng.randint(8, 96)
    messages = [{"role": "user", "content": text}]
    return {"model": MODEL, "messages": messages, "max_tokens": count, "min_tokens": count, "ignore_eos": True}


async def send(http: httpx.AsyncClient, key: str, body: Mapping[str, Any]) -> bool:
    """Quote and send a request; return whether it was answered."""
    headers = {"Authorization": f"Bearer {key}"}
    quoted = await http.post("/quote", json=body, headers=headers)
    if quoted.status_code == httpx.codes.OK:
        offers = {one["service_class"]: one["quote"] for one in quoted.json()["data"]}
        headers["x-moiety-quote"] = offers[CLASS]
    return (await http.post("/chat/completions", json=body, headers=headers)).status_code == httpx.codes.OK


async def closed_loop(http: httpx.AsyncClient, keys: Sequence[str], rng: Random, *, num_requests: int) -> None:
    """Answer so many requests, IN_FLIGHT at a time."""
    slots = asyncio.Semaphore(IN_FLIGHT)

    async def one(key: str, body: Mapping[str, Any]) -> None:
        async with slots:
            await send(http, key, body)

    await asyncio.gather(*(one(keys[number % len(keys)], body_of(rng)) for number in range(num_requests)))


async def open_loop(http: httpx.AsyncClient, keys: Sequence[str], rng: Random, rate: float, seconds: float) -> int:
    """Send requests with Poisson arrivals; return how many were refused."""
    sent, began, at = [], time.monotonic(), 0.0
    while (at := at + rng.expovariate(rate)) < seconds:
        await asyncio.sleep(max(0.0, began + at - time.monotonic()))
        sent.append(asyncio.create_task(send(http, rng.choice(keys), body_of(rng))))
    return (await asyncio.gather(*sent)).count(False)


def requests_since(admin: Admin, since: datetime) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    cursor: str | None = None
    while True:
        query = httpx.QueryParams(limit=PAGE, since=since.isoformat(), **({"cursor": cursor} if cursor else {}))
        page = admin("GET", f"/usage/requests?{query}")
        rows += page["data"]
        cursor = page["next_cursor"]
        if cursor is None:
            return rows


def calibration(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the errors of predicted times, and their ratios, which show whether they are early or late."""
    found: dict[str, Any] = {"requests": len(rows)}
    for name, actual in (("ttft", "ttft_ms"), ("duration", "duration_ms")):
        pairs = [
            (row[actual], row[f"predicted_{name}_ms"]) for row in rows if row[f"predicted_{name}_ms"] and row[actual]
        ]
        if not pairs:
            continue
        errors = [abs(real - predicted) / predicted for real, predicted in pairs]
        ratios = [real / predicted for real, predicted in pairs]
        found |= {f"{name}_predicted": len(pairs)}
        found |= {f"{name}_error_p{percent}": round(percentile(errors, percent), 3) for percent in (50, 90)}
        found |= {f"{name}_ratio_p{percent}": round(percentile(ratios, percent), 3) for percent in (50, 90)}
    return found


def credits_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the guarantees and credits, and the number of requests whose credit is not that of the terms."""
    judged = [row for row in rows if row["guarantee_met"] is not None]
    wrong = 0
    for row in rows:
        before = row["cost_nanodollars"] + row["credit_nanodollars"]
        due = before * CREDIT_PERCENT // 100 if row["guarantee_met"] is False else 0
        wrong += row["credit_nanodollars"] != due
    return {
        "guarantees": len(judged),
        "missed": sum(not row["guarantee_met"] for row in judged),
        "credited_requests": sum(row["credit_nanodollars"] > 0 for row in rows),
        "credit_nanodollars": sum(row["credit_nanodollars"] for row in rows),
        "wrong_credits": wrong,
    }


if __name__ == "__main__":
    main()
