"""The gateway under steady load during a PostgreSQL outage: affected requests, and whether usage records agree.

    python benchmarks/database_outage.py [--rate 1000] [--tenants 200] [--outage 5] [--seconds 10]

One gateway on its own core serves two scripted engines. Most tenants have limits of every kind that are far away; a few
are close to their cap. Requests are sent at a fixed rate, with some long streams throughout. First the SQL statements
of the requests far from their limits are counted. Then, under load, the database is paused (SIGSTOP of all its
processes), and later shut down and restarted. Tenants far from their limits must not be affected; those near them may
get 503 with Retry-After; afterwards everything is booked to the token, and no lease is outstanding. Needs the `dev`
extra.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psycopg

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from cluster import Cluster, call, list_quotas, make_tenant, set_limits  # noqa: E402 - the script's own folder
from open_loop import OpenLoop, Sent  # noqa: E402
from postgres import Postgres, run_in_folder  # noqa: E402

from moiety_platform.bench.environment import describe_environment, installed_version  # noqa: E402
from moiety_platform.bench.gateway import LARGE_CAPS, count_statements  # noqa: E402
from moiety_platform.bench.report import percentile  # noqa: E402

OUTPUT_TOKENS = 8
PROMPT = "Tell me about moieties in a few short sentences, please."
NUM_NEAR, NEAR_RATE, NEAR_REQUESTS = 4, 16.0, 60  # tenants, requests/s of all, what the cap of one has room for
NUM_STREAMS, STREAM_S = 8, 9.0
WARM_UP_S, SETTLE_S, PAUSE_S = 5.0, 60.0, 2.0
MAX_STATEMENTS = 0.05
VARIANTS = ("stands_still", "refuses")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rate", type=float, default=1000.0, help="requests per second of the tenants that are far from their limits"
    )
    parser.add_argument("--tenants", type=int, default=200)
    parser.add_argument("--outage", type=float, default=5.0, help="seconds of each outage")
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds before each outage, and after it")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "database_outage.json")
    options = parser.parse_args()
    report = run_in_folder("moiety-outage-", partial(_run, options))
    environment = describe_environment()
    environment["versions"] |= {name: installed_version(name) for name in ("asyncpg", "sqlalchemy", "msgspec")}
    environment["versions"]["postgresql"] = report.pop("postgresql")
    report = {
        "date": date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "environment": environment,
        "settings": {name: value for name, value in vars(options).items() if name != "output"},
        **report,
    }
    options.output.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report["verdict"]))
    sys.exit(0 if all(report["verdict"].values()) else 1)


async def _run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))
    own, others = (cores[:1], cores[1:]) if len(cores) > 1 else (cores, cores)
    os.sched_setaffinity(0, others)  # what is started inherits it
    with contextlib.ExitStack() as stack:
        postgres = Postgres(folder)
        stack.callback(postgres.close)
        cluster = Cluster(folder, postgres.url, 1, cores=(own, others))
        stack.callback(cluster.stop)
        await cluster.start_all()
        far, near = await _make_tenants(cluster, options.tenants)
        load = OpenLoop("127.0.0.1", cluster.ports[0])
        counted = await _count_statements(cluster, load, far, options)
        print(f"away from limits: {json.dumps(counted)}", file=sys.stderr)
        outages = {}
        for number, variant in enumerate(VARIANTS):
            keys = near[number * NUM_NEAR :][:NUM_NEAR]
            async with httpx.AsyncClient(base_url=cluster.url(0), timeout=60) as client:
                outages[variant] = await _break(load, client, postgres, variant, far, keys, options)
            print(f"{variant}: {json.dumps(outages[variant])}", file=sys.stderr)
        books = await _books(cluster, postgres)
        books["answered_and_not_billed"] = sum(one["whole"] for one in (counted, *outages.values()))
        books["answered_and_not_billed"] -= books.pop("billed")
        return {
            "postgresql": postgres.version,
            "verdict": _judge(counted, outages, books),
            "away_from_limits": counted,
            "outages": outages,
            "books": books,
        }


async def _make_tenants(cluster: Cluster, num_far: int) -> tuple[list[str], list[str]]:
    """Return the keys of tenants far from their limits, and of those near: a few for each variant."""
    price = {"model": "scripted", "input": "0.15", "cached_input": "0.075", "output": "0.6"}
    far, near = [], []
    async with cluster.admin() as client:
        await call(client, "PUT", "/prices", price)
        for number in range(num_far):
            ids, key = await make_tenant(client, f"far-{number}")
            await set_limits(client, ids, [("tenant", kind, cap) for kind, cap in LARGE_CAPS.items()])
            far.append(key)
        for number in range(NUM_NEAR * len(VARIANTS)):
            ids, key = await make_tenant(client, f"near-{number}")
            cap = NEAR_REQUESTS * (len(PROMPT) + OUTPUT_TOKENS)
            await set_limits(client, ids, [("tenant", "tokens_per_day", cap)])
            near.append(key)
    return far, near


def _requests(keys: list[str], num_output: int = OUTPUT_TOKENS) -> Iterator[tuple[int, bytes]]:
    """Yield completions of all keys in turn, without end."""
    body = {"model": "scripted", "prompt": PROMPT, "max_tokens": num_output, "ignore_eos": True}
    data = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: moiety\r\nContent-Type: application/json\r\n"
        "Content-Length: {}\r\nAuthorization: Bearer {}\r\n\r\n"
    )
    return itertools.cycle([(who, head.format(len(data), key).encode() + data) for who, key in enumerate(keys)])


async def _count_statements(
    cluster: Cluster, load: OpenLoop, far: list[str], options: argparse.Namespace
) -> dict[str, Any]:
    """Return the SQL statements per request of tenants far from their limits, with leases at full size."""
    requests = _requests(far)
    warm = await load.run(requests, options.rate, max(WARM_UP_S, 2 * options.tenants / options.rate))
    before = await count_statements(cluster.url(0))
    sent = await load.run(requests, options.rate, options.seconds)
    statements = await count_statements(cluster.url(0)) - before
    await load.wait_idle(SETTLE_S)
    return {
        "whole": sum(one.status == 200 for one in (*warm, *sent)),
        "failed": sum(one.status != 200 for one in (*warm, *sent)),
        "sql_statements_per_request": round(statements / len(sent), 4),
        "sql_statements_per_s": round(statements / options.seconds, 1),
        **_figures(sent),
    }


async def _break(
    load: OpenLoop,
    client: httpx.AsyncClient,
    postgres: Postgres,
    variant: str,
    far: list[str],
    near: list[str],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Run load through a database outage; return the results before, during and after it."""
    of_near = OpenLoop(*load.address)
    seconds = 2 * options.seconds + options.outage
    begin_s = time.perf_counter()
    far_load = asyncio.create_task(load.run(_requests(far), options.rate, seconds))
    near_load = asyncio.create_task(of_near.run(_requests(near), NEAR_RATE, seconds))
    await asyncio.sleep(options.seconds - PAUSE_S)
    streams = [asyncio.create_task(_stream(client, key)) for key in far[:NUM_STREAMS]]
    await asyncio.sleep(begin_s + options.seconds - time.perf_counter())
    away_s = time.perf_counter()
    breaking = postgres.paused() if variant == "stands_still" else postgres.stopped()
    await asyncio.to_thread(breaking.__enter__)
    await asyncio.sleep(away_s + options.outage - time.perf_counter())
    await asyncio.to_thread(breaking.__exit__, None, None, None)
    back_s = time.perf_counter()
    of_far, of_near_limits = await far_load, await near_load
    await load.wait_idle(SETTLE_S)
    await of_near.wait_idle(SETTLE_S)
    num_streams = sum(await asyncio.gather(*streams))
    spans = {"before": (0.0, away_s), "during": (away_s, back_s), "after": (back_s, float("inf"))}
    parts = {
        name: [[one for one in sent if from_s <= one.due_s < to_s] for sent in (of_far, of_near_limits)]
        for name, (from_s, to_s) in spans.items()
    }
    return {
        "away_s": round(back_s - away_s, 2),
        "whole": sum(one.status == 200 for one in (*of_far, *of_near_limits)) + num_streams,
        "streams": {"whole": num_streams, "of": NUM_STREAMS},
        "far": {name: _figures(far_part) for name, (far_part, _) in parts.items()},
        "near": {name: _answers(near_part) for name, (_, near_part) in parts.items()},
        "near_503_without_retry_after": sum(one.status == 503 and not one.retry_after for one in of_near_limits),
    }


async def _stream(client: httpx.AsyncClient, key: str) -> bool:
    """Run one stream through the outage; return whether it was complete."""
    num_tokens = round(STREAM_S * 1000 / 4)
    body = {"model": "scripted", "prompt": PROMPT, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    headers, last, usage = {"Authorization": f"Bearer {key}"}, "", ""
    async with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        async for line in response.aiter_lines():
            if line:
                last, usage = line, last
    return last == "data: [DONE]" and json.loads(usage[6:])["usage"]["completion_tokens"] == num_tokens


def _figures(sent: list[Sent]) -> dict[str, Any]:
    latencies_s = [one.latency_s for one in sent]
    return {
        "requests": len(sent),
        "answers": _answers(sent),
        "latency_ms": {f"p{p}": round(percentile(latencies_s, p) * 1000, 1) for p in (50, 90, 99, 100)},
        "sent_late_ms_p99": round(percentile([one.sent_s - one.due_s for one in sent], 99) * 1000, 1),
    }


def _answers(sent: list[Sent]) -> dict[str, int]:
    return {str(status): count for status, count in sorted(Counter(one.status for one in sent).items())}


async def _books(cluster: Cluster, postgres: Postgres) -> dict[str, Any]:
    """Return the billed usage by all sources, and the outstanding leases after the gateway has stopped."""
    waited_s = await cluster.wait_settled(SETTLE_S)
    figures = await cluster.reconcile()
    async with cluster.admin() as client:
        quotas = await list_quotas(client)
    stopped_with = await asyncio.to_thread(cluster.end, "gateway", 0)
    with contextlib.closing(psycopg.connect(postgres.url, autocommit=True)) as connection:

        def count(statement: str) -> int:
            row = connection.execute(statement).fetchone()
            assert row is not None, "an aggregate has one row"
            return int(row[0])

        outstanding = count("SELECT count(*) FROM quota_leases WHERE granted > settled")
        billed = count("SELECT count(*) FROM usage WHERE outcome IN ('stop', 'length')")
        half = count("SELECT count(*) FROM usage WHERE outcome NOT IN ('stop', 'length', 'rejected')")
    stocks = [quota for quota in quotas if quota["kind"].endswith(("_day", "_month"))]
    return {
        "reconcile": {name: figures[name] for name in ("agrees", "total", "tenants", "differences", "quarantined")},
        "engines": figures["engines"],
        "settled_after_s": waited_s,
        "over_caps": sum(quota["used"] > quota["cap"] for quota in stocks),
        "gateway_exit_code": stopped_with,
        "leases_outstanding": outstanding,
        "rows_neither_whole_nor_refused": half,
        "billed": billed,
    }


def _judge(counted: dict[str, Any], outages: dict[str, Any], books: dict[str, Any]) -> dict[str, bool]:
    parts = [part for outage in outages.values() for part in outage["far"].values()]
    near = [part for outage in outages.values() for part in outage["near"].values()]
    return {
        "far_from_limits_nobody_notices": not counted["failed"]
        and all(part["answers"].keys() == {"200"} for part in parts)
        and all(one["streams"]["whole"] == one["streams"]["of"] for one in outages.values()),
        "few_statements": counted["sql_statements_per_request"] <= MAX_STATEMENTS,
        "near_limits_503_with_retry_after": all(
            "503" in outage["near"]["during"] and not outage["near_503_without_retry_after"]
            for outage in outages.values()
        )
        and all(part.keys() <= {"200", "429", "503"} for part in near),
        "load_was_on_time": all(part["sent_late_ms_p99"] < 50 for part in parts),
        "books_agree": books["reconcile"]["agrees"] and not books["over_caps"],
        "bills_are_what_engines_counted": not books["engines"]["differences"] and not books["engines"]["unproven"],
        "every_answer_is_billed": not books["answered_and_not_billed"] and not books["rows_neither_whole_nor_refused"],
        "nothing_outstanding": not books["leases_outstanding"]
        and not books["reconcile"]["quarantined"]
        and books["settled_after_s"] < SETTLE_S,
    }


if __name__ == "__main__":
    main()
