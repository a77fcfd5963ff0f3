"""`python -m chaos.soak`: a day in twenty minutes, with a restart of some process every three minutes.

The scripted engine serves 100 tenants, with a load that follows the hours. Then usage records, memory, the store's
size, its sums and its retention are checked.

An hour is 50 seconds, after which the wall clocks of gateways, engines and trace store are set to the next one; the
database's clock and all monotonic clocks stay as they are. Retention settings are shortened in the same way.
Exits with 1 if a check fails. Needs what `python -m chaos` needs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from postgres import Postgres

from chaos import judge, store
from chaos.books import compare_books, what_is_left
from chaos.command import add_places, perform
from chaos.faults import ENGINE, GATEWAY, TRACES, Scene, database_stopped, kill, stop
from chaos.load import Asked, Load, Pace, Tenant, make_tenants
from chaos.stage import SCRIPTED_PARTS, Stage, on_stage
from chaos.watch import MAX_GROWTH, what_is_held
from moiety_workload.readers import read_trace

HOURS, HOUR_S = 24, 50.0
SHARES, NUM_TIGHT = {"priority": 20, "standard": 40, "flex": 20, "batch": 5}, 15
RESTART_S, SETTLE_S, LEASE_ENDS_S = 180.0, 120.0, 45.0
KEPT_KEYS_S, KEPT_TRACES_H, UPKEEP_S = 150.0, 6.0, 5.0
LONGEST = 600  # tokens of a prompt or an answer from a trace


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hours", type=int, default=HOURS)
    parser.add_argument("--rate", type=float, default=8.0, help="requests per second, averaged over the day")
    parser.add_argument(
        "--trace", type=Path, help="file with lengths of prompts and answers in ServeGen's form [uniform]"
    )
    parser.add_argument("--seed", type=int, default=0)
    add_places(parser, "soak.json")
    options = parser.parse_args()
    report = perform("chaos.soak", options, partial(soak, options))
    print(json.dumps(report["verdict"], indent=2))
    sys.exit(0 if all(report["verdict"].values()) else 1)


async def soak(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run and return the report."""
    environment = {
        "MOIETY_IDEMPOTENCY_TTL_S": str(KEPT_KEYS_S),
        "MOIETY_KEEP_TRACES_DAYS": str(KEPT_TRACES_H / 24),
        "MOIETY_RETENTION_INTERVAL_S": str(UPKEEP_S),
        "MOIETY_TRACE_SAMPLE_RATE": "0.2",
    }
    lengths = [(min(one.input_tokens, LONGEST), min(one.output_tokens, LONGEST)) for one in _trace(options.trace)]
    async with on_stage(
        folder, demo=False, skewed=SCRIPTED_PARTS, environment=environment, disk_mib=512
    ) as stage_and_more:
        stage, postgres, disk = stage_and_more
        async with stage.admin() as client:
            tenants = await make_tenants(client, random.Random(options.seed), SHARES, NUM_TIGHT)
        load, stopping = Load(stage, tenants, options.seed, lengths=lengths, keyed=0.2), asyncio.Event()
        running = asyncio.create_task(load.run(_day(options.rate), 0.0, stopping))
        restarting = asyncio.create_task(_restart(Scene(stage, postgres, disk, tenants, {})))
        samples = await _live(stage, postgres, options.hours)
        stopping.set()
        restarting.cancel()
        await running
        waited_s = await stage.wait_settled(SETTLE_S)
        await asyncio.sleep(LEASE_ENDS_S)
        return await _report(stage, postgres, tenants, load.asked, samples, waited_s)


def _trace(path: Path | None) -> Sequence[Any]:
    return read_trace(path) if path else ()


def _day(mean: float) -> Pace:
    """Return the rate by hour: lowest at 3 at night, highest at 3 in the afternoon, a fifth to twice the mean."""

    def pace(elapsed_s: float) -> float:
        return mean * (1 - 0.8 * math.cos(2 * math.pi * (elapsed_s / HOUR_S - 3) / 24))

    return pace


async def _live(stage: Stage, postgres: Postgres, hours: int) -> list[dict[str, Any]]:
    """Simulate hour by hour, and record what is stored and held at the end of each."""
    samples, begin_s = [], time.monotonic()
    for hour in range(1, hours + 1):
        await asyncio.sleep(max(0.0, begin_s + hour * HOUR_S - time.monotonic()))
        held = await what_is_held(stage)
        rss = {f"{one.part[0]}-{one.part[1]}/{one.role}": one.rss_bytes for one in held.values()}
        sample = {
            "hour": hour,
            "rss_bytes": rss,
            **await asyncio.to_thread(store.measure, postgres.url, stage.traces_file),
        }
        samples.append(sample)
        print(f"{time.strftime('%H:%M:%S')} {json.dumps(sample)}", file=sys.stderr, flush=True)
        stage.clock.set(hour * (3600 - HOUR_S))
    return samples


async def _restart(scene: Scene) -> None:
    """Restart a part every three minutes, gracefully or not."""
    restart: Callable[[], Awaitable[None]]
    while True:
        for restart in (
            lambda: stop(scene, GATEWAY),
            lambda: stop(scene, ENGINE),
            lambda: kill(scene, TRACES),
            lambda: database_stopped(scene),
            lambda: kill(scene, GATEWAY),
            lambda: kill(scene, ENGINE),
        ):
            await asyncio.sleep(RESTART_S)
            await restart()


async def _report(
    stage: Stage,
    postgres: Postgres,
    tenants: Sequence[Tenant],
    asked: Sequence[Asked],
    samples: Sequence[dict[str, Any]],
    waited_s: float,
) -> dict[str, Any]:
    books = await compare_books(stage, postgres, tenants, asked, [], hours=2 * HOURS)
    rollups = await asyncio.to_thread(store.compare_sums, postgres.url)
    kept = await asyncio.to_thread(
        store.find_forgotten, postgres.url, stage.traces_file, KEPT_KEYS_S, KEPT_TRACES_H, UPKEEP_S
    )
    left = await what_is_left(stage, postgres, waited_s)
    sizes, memory = store.predicted_size(samples), store.growth_of_memory(samples, ("gateway-1", "engine-1"))
    engines = books["engines"] or {"differences": ["none"]}
    verdict = {
        "every_request_has_one_outcome": not books["not_one_outcome"],
        "no_limit_is_exceeded": not books["overspent"],
        "books_agree": bool(books["reconciliation"]["agrees"]),
        "settled_is_generated": not engines["differences"],
        "sums_are_exact": not rollups["differences"] and rollups["hours"] >= len(samples),
        "memory_is_flat": all(one["growth"] <= MAX_GROWTH for one in memory.values()),
        "size_is_as_predicted": abs(sizes["ratio"] - 1) <= store.MAX_MISSED,
        "what_is_past_its_time_is_deleted": not kept["keys_past_their_time"] and not kept["traces_past_their_time"],
        "something_was_deleted": kept["traces_span_h"] < len(samples) - 1,
        "nothing_leaks": not any(any(one.values()) for one in left["engines"]) and not left["leases_outstanding"],
        "nothing_unsettled": waited_s < SETTLE_S,
    }
    outcomes = judge.count_outcomes(asked)
    return {
        "verdict": verdict,
        "requests": outcomes,
        "books": books,
        "sums": rollups,
        "kept": kept,
        "left": left,
        "size": sizes,
        "memory": memory,
        "samples": list(samples),
        "ended_by_themselves": [f"{kind}-{number}: {code}" for _, (kind, number), code in stage.ends],
    }


if __name__ == "__main__":
    main()
