"""A fleet on one machine: gateways on one PostgreSQL with scripted engines, under a rising load until a part breaks.

    python benchmarks/fleet.py [--gateways 8] [--engines 64] [--tenants 1000] [--output FILE]

Every gateway is a real process with all features on; every tenant has a key and limits of requests, tokens and money.
The engines share one process. Each stage offers a rate of short chats, from all tenants in turn to all gateways in
turn, after every tenant has sent one. A stage whose answers stay behind is repeated, since other processes may have had
the processor; the first rate that is behind each time is the limit. The report says what was exhausted then: the
processor, connections of the database, its locks, or none of them. Results, and with `--plot FILE` a picture of the
stages, are written after each stage, so a run that is ended early leaves those that it has finished.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import httpx
import psutil
import psycopg
from fleet_parts.chart import draw
from fleet_parts.gateways import Gateway, engines_process, start_gateways
from fleet_parts.load import offer
from fleet_parts.tenants import insert_tenants
from postgres import Postgres, run_in_folder

from moiety_platform.bench.environment import describe_environment
from moiety_platform.bench.gateway import MODEL, SQL_COUNTER, chat_requests

HERE = Path(__file__).parent
RATES = (25, 50, 100, 150, 200, 300, 400, 600, 800)
TRIES = 3  # of a rate that is behind
WARM_UP_PER_S = 50.0
OUTPUT_TOKENS = 8
LIMITS = ("requests_per_minute", "tokens_per_minute", "tokens_per_day", "money_per_day")
TABLES = ("usage", "ledger")  # that grow by every request
MAX_CONNECTIONS = 64  # of the load to each gateway
BEHIND = 0.97  # of the offered requests, fewer of which are behind
MAX_P99_MS = 1000.0
BUSY = 0.9  # of all cores
SAMPLE_S = 0.5
PATIENCE_S = 120.0  # for an answer that is not measured, of a gateway that may be overloaded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gateways", type=int, default=8)
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--tenants", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds of each stage")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="requests per second of the stages")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "fleet.json")
    parser.add_argument("--plot", type=Path, help="PNG file for a picture of the stages")
    parser.add_argument("--draw-only", action="store_true", help="draw the picture of the output; measure nothing")
    options = parser.parse_args()
    if options.draw_only:
        draw(json.loads(options.output.read_text()), options.plot)
        return
    report = run_in_folder("moiety-fleet-", lambda folder: _measure(options, folder))
    print(json.dumps({"first_limit": report["first_limit"]}, indent=1))


async def _measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    postgres = Postgres(folder)
    with contextlib.ExitStack() as stack:
        begin_s = time.monotonic()
        addresses = stack.enter_context(engines_process("zeromq", options.engines))
        print(f"{len(addresses)} engines are ready after {time.monotonic() - begin_s:.0f} s", flush=True)
        shared = {"database_url": postgres.url, "key_pepper": secrets.token_hex(32)}
        homes = [folder / f"gateway-{number}" for number in range(options.gateways)]
        gateways = start_gateways(stack, homes, addresses, **shared)
        print(f"{len(gateways)} gateways are ready after {time.monotonic() - begin_s:.0f} s", flush=True)
        watch = stack.enter_context(_Watch(postgres, gateways))
        price = {"model": MODEL, "input": "0.15", "cached_input": "0.075", "output": "0.6"}
        async with httpx.AsyncClient(headers=gateways[0].admin_headers, timeout=PATIENCE_S, trust_env=False) as client:
            (await client.put(f"{gateways[0].url}/admin/v1/prices", json=price)).raise_for_status()
        keys = await insert_tenants(postgres.url, shared["key_pepper"], options.tenants, LIMITS)
        setup_s = time.monotonic() - begin_s
        print(f"{len(keys)} tenants are ready after {setup_s:.0f} s", flush=True)
        idle = await watch.during(asyncio.sleep(options.seconds))
        print("idle", json.dumps(idle), flush=True)
        report = {
            "date": date.today().isoformat(),
            "command": " ".join(["python", *sys.argv]),
            "environment": describe_environment() | {"load_average": os.getloadavg(), "postgres": postgres.version},
            "settings": {name: getattr(options, name) for name in ("gateways", "engines", "tenants", "seconds")},
            "setup_s": round(setup_s, 1),
            "max_connections": watch.max_connections,
            "idle": idle,
        }
        requests = itertools.cycle(chat_requests(keys, OUTPUT_TOKENS, stream=False))
        ports = [one.port for one in gateways]
        await offer(ports, requests, WARM_UP_PER_S, len(keys) / WARM_UP_PER_S, MAX_CONNECTIONS)
        stages: list[dict[str, Any]] = []
        for rate, attempt in itertools.product(options.rates, range(TRIES)):
            if attempt and not stages[-1]["is_behind"]:
                continue
            offered = offer(ports, requests, rate, options.seconds, MAX_CONNECTIONS)
            stages.append(await watch.during(offered))
            print(json.dumps(stages[-1]), flush=True)
            report |= {**watch.sizes(), "stages": stages, "first_limit": _first_limit(stages, watch.max_connections)}
            options.output.write_text(json.dumps(report, indent=1) + "\n")
            if options.plot is not None:
                draw(report, options.plot)
            if attempt == TRIES - 1 and stages[-1]["is_behind"]:
                break
        return report


def _first_limit(stages: Sequence[dict[str, Any]], max_connections: int) -> dict[str, Any]:
    """Return the highest rate that was answered in time, and what the last stage exhausted if it was behind."""
    good = [stage for stage in stages if not stage["is_behind"]]
    found: dict[str, Any] = {"requests_per_s": good[-1]["answered_per_s"] if good else 0, "exhausted": "not reached"}
    behind = stages[-1]
    if behind["is_behind"]:
        found |= {"behind_at_per_s": behind["offered_per_s"], "exhausted": "nothing of these"}
        cores = psutil.cpu_count() or 1
        if behind["connections"] >= max_connections - 3:
            found["exhausted"] = "connections of the database"
        elif sum(behind["cores"].values()) + behind["other_cores"] >= BUSY * cores:
            found["exhausted"] = f"CPU: all {cores} cores"
        elif behind["waiting_for_locks"] >= 1:
            found["exhausted"] = "locks of the database"
        found |= {"cores": behind["cores"], "other_cores": behind["other_cores"]}
    return found


class _Watch:
    """Figures of the parts during a stage.

    Its connections to the database are open from the beginning, since gateways can take all later ones.
    """

    def __init__(self, postgres: Postgres, gateways: Sequence[Gateway]) -> None:
        self._gateways = gateways
        self._postmaster = psutil.Process(postgres._server.get_pid())
        self._counting, self._sampling = (psycopg.connect(postgres.url, autocommit=True) for _ in range(2))
        self.max_connections = int(self._read("SHOW max_connections")[0])

    def __enter__(self) -> _Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self._counting.close()
        self._sampling.close()

    def _read(self, statement: str, *values: Any) -> tuple[Any, ...]:
        row = self._counting.execute(statement, values).fetchone()
        assert row is not None, "each statement returns one row"
        return row

    async def during(self, work: Any) -> dict[str, Any]:
        """Run the work, and return its report with the use of every part meanwhile."""
        begin_s, cores, counts = time.monotonic(), self._cpu_s(), await self._counts()
        psutil.cpu_percent()
        sampling = asyncio.create_task(self._sample())
        answers = await work
        during_s, machine = time.monotonic() - begin_s, psutil.cpu_percent() / 100 * (psutil.cpu_count() or 1)
        sampling.cancel()
        used = {name: round((cpu_s - cores[name]) / during_s, 3) for name, cpu_s in self._cpu_s().items()}
        rates = {name: round((count - counts[name]) / during_s, 1) for name, count in (await self._counts()).items()}
        figures = {
            **rates,
            **self._sampled,
            "cores": used,
            "other_cores": round(max(0.0, machine - sum(used.values())), 2),
        }
        if answers is None:
            return figures
        told = answers.report()
        is_slow = told["latency_ms"].get("p99", 1e9) > MAX_P99_MS
        is_behind = is_slow or len(answers.latencies_s) < BEHIND * answers.offered_per_s * answers.seconds
        return {**told, **figures, "is_behind": is_behind}

    def sizes(self) -> dict[str, Any]:
        """Return the bytes with indexes that a request leaves in each table, and the number of leases."""
        count, leases = self._read("SELECT count(*), (SELECT count(*) FROM quota_leases) FROM usage")
        sizes = {table: self._read("SELECT pg_total_relation_size(%s)", table)[0] for table in TABLES}
        return {
            "bytes_per_request": {name: round(size / max(1, count)) for name, size in sizes.items()},
            "quota_leases": leases,
        }

    async def _sample(self) -> None:
        """Record the most connections, and the mean number of transactions that wait for a lock."""
        self._sampled = {"connections": 0, "waiting_for_locks": 0.0}
        waits: list[int] = []
        while True:
            row = await asyncio.to_thread(self._connections)
            waits.append(row[1])
            most = max(self._sampled["connections"], row[0])
            self._sampled = {"connections": most, "waiting_for_locks": round(sum(waits) / len(waits), 2)}
            await asyncio.sleep(SAMPLE_S)

    def _connections(self) -> tuple[int, int]:
        row = self._sampling.execute(
            "SELECT count(*), count(*) FILTER (WHERE wait_event_type = 'Lock') FROM pg_stat_activity"
            " WHERE backend_type = 'client backend'"
        ).fetchone()
        assert row is not None, "a count returns one row"
        return row[0], row[1]

    def _cpu_s(self) -> dict[str, float]:
        times = psutil.Process().cpu_times()
        database = Counter[str]()
        database["s"] += sum(self._postmaster.cpu_times()[:4])  # type: ignore[assignment]  # with ended children
        for process in self._postmaster.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                database["s"] += sum(process.cpu_times()[:2])  # type: ignore[assignment]
        engines = next(one for one in psutil.Process().children() if "fleet_parts.engines" in one.cmdline())
        return {
            "engines": float(sum(engines.cpu_times()[:2])),
            "gateways": sum(one.cpu_s for one in self._gateways),
            "database": float(database["s"]),
            "load": float(times.user + times.system),
        }

    async def _counts(self) -> dict[str, float]:
        statements = 0.0
        async with httpx.AsyncClient(timeout=PATIENCE_S, trust_env=False) as client:
            for gateway in self._gateways:
                lines = (await client.get(f"{gateway.url}/metrics", headers=gateway.admin_headers)).text.splitlines()
                statements += float(next(line for line in lines if line.startswith(SQL_COUNTER)).rpartition(" ")[2])
        row = self._read(
            "SELECT xact_commit, xact_rollback, deadlocks, (SELECT count(*) FROM usage)"
            " FROM pg_stat_database WHERE datname = current_database()"
        )
        return {
            "statements_per_s": statements,
            "commits_per_s": row[0],
            "rollbacks_per_s": row[1],
            "deadlocks_per_s": row[2],
            "usage_rows_per_s": row[3],
        }


if __name__ == "__main__":
    main()
