"""Generator of a store like one after a month: millions of requests, ledger rows and spans of hundreds of tenants.

    python benchmarks/large_store.py --data-dir /tmp/large [--postgres-url URL] [--tenants 500] [--requests 2000000]
        [--spans 5000000]

Starts `moiety serve` with the scripted engine on the folder, makes tenants, keys and limits through the admin API and
sends some requests. Then it stops the server and writes the rest in bulk: for each request its row, its ledger entry
and its part of the hour's and minute's sums (by the product's own code), and traces modelled on the real ones that were
kept. `moiety serve --scripted --data-dir /tmp/large` serves the store afterwards. Needs the `dev` extra.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import httpx
import msgspec
from sqlalchemy import select

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from dashboard_deployment import quoted  # noqa: E402 - the script's own folder
from dashboard_hour import Admin, addresses  # noqa: E402
from large.objects import objects  # noqa: E402
from large.requests import (  # noqa: E402
    BUSY_HOURS,
    BUSY_SHARE,
    CLASS_SHARES,
    CLASSES,
    DAYS,
    END_SHARES,
    ENDS,
    MODEL,
    Sender,
    draw,
)
from large.spans import Model, copies, read_models  # noqa: E402
from large.writers import Writer, writer_of  # noqa: E402
from postgres import Postgres  # noqa: E402

from moiety_platform.db.session import Database  # noqa: E402
from moiety_platform.quota.kinds import LimitKind, Unit, window_start  # noqa: E402
from moiety_platform.quota.lease import Charge, WindowId  # noqa: E402
from moiety_platform.quota.models import Quota  # noqa: E402
from moiety_platform.quota.store import LeaseRequest, LeaseStore, book  # noqa: E402
from moiety_platform.trace_store.models import SpanRecord, TraceRecord  # noqa: E402
from moiety_platform.usage.attributed_sums import sum_up_attributed  # noqa: E402
from moiety_platform.usage.days import sum_up_some  # noqa: E402
from moiety_platform.usage.ledger_entries import add_to_hours  # noqa: E402
from moiety_platform.usage.minutes import MINUTES  # noqa: E402
from moiety_platform.usage.models import EntryKind, LedgerEntry, UsageRecord  # noqa: E402
from moiety_platform.usage.row import UsageRow  # noqa: E402
from moiety_platform.usage.store import insert_rows  # noqa: E402

TRACE_DAYS = 7
MARGIN = 1.01  # of traces, so that chance makes no fewer spans
LIMITS = (("tokens_per_month", 10**10), ("requests_per_minute", 6000), ("money_per_month", 10**14))
NUM_QUOTED, BATCH = 10_000, 400
SENDERS = "senders.json"
GATEWAY = "gateway-of-the-month-before"
_COLUMNS = tuple(column.name for column in UsageRecord.__table__.columns)


@contextlib.contextmanager
def serving(data_dir: Path, postgres_url: str | None, *options: str) -> Iterator[tuple[str, str, str]]:
    """Run `moiety serve` on the folder; yield the gateway's and dashboard's addresses and the administrator's key."""
    environment = os.environ | {"MOIETY_TRACE_SAMPLE_RATE": "1"}
    if postgres_url is not None:
        environment["MOIETY_DATABASE_URL"] = postgres_url
    command = [sys.executable, "-m", "moiety_platform.cli", "serve", "--scripted", "--port", "0", "--traces-port", "0"]
    command += ["--dashboard-port", "0", "--data-dir", str(data_dir), *options]
    log = data_dir / "serve.log"
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
    try:
        url, dashboard = addresses(log, process)
        yield url, dashboard, json.loads((data_dir / "keys.json").read_text())["admin_key"]
    finally:
        process.terminate()
        process.wait()


def make_senders(admin: Admin, number: int) -> list[Sender]:
    """Create tenants with a project, a key, three limits, a user and an adapter each."""
    classes = Random(1).choices(CLASSES, CLASS_SHARES, k=number)

    def make(index: int) -> Sender:
        tenant = admin("POST", "/tenants", {"name": f"tenant-{index:04}", "service_class": classes[index]})
        project = admin("POST", "/projects", {"tenant_id": tenant["id"], "name": "production"})
        key = admin("POST", "/keys", {"name": "backend", "project_id": project["id"]})
        for kind, cap in LIMITS:
            admin("PUT", "/quotas", {"level": "tenant", "scope_id": tenant["id"], "kind": kind, "cap": cap})
        who = {"email": f"lead-{index:04}@example.com", "role": "developer", "tenant_id": tenant["id"]}
        admin("POST", "/users", who)
        adapter = {"tenant_id": tenant["id"], "model": MODEL, "name": "support"}
        admin("POST", "/adapters", adapter | {"engine_adapter": f"support-{index:04}"})
        return Sender(tenant["id"], project["id"], key["key"]["id"], key["secret"], classes[index])

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(make, range(number)))


def send_models(url: str, admin: Admin, sender: Sender) -> None:
    """Send requests with all outcomes that a client can cause, and wait until their traces are stored."""
    headers = {"Authorization": f"Bearer {sender.key}"}
    limit = {"level": "key", "scope_id": sender.key_id, "kind": "tokens_per_day", "cap": 2000}
    limit_id = admin("PUT", "/quotas", limit)["id"]
    messages = [{"role": "user", "content": "Weigh every share, and route it."}]
    with httpx.Client(base_url=url, headers=headers, timeout=30) as http:
        for number in range(24):
            body = {"model": MODEL, "messages": messages, "max_tokens": 8 + 4 * number, "stream": number % 3 == 0}
            if number % 6 == 3:
                with http.stream("POST", "/v1/chat/completions", json=body | {"max_tokens": 60}) as response:
                    next(response.iter_bytes())  # and leaves
            else:
                http.post("/v1/chat/completions", json=body)
        while http.post("/v1/chat/completions", json={"model": MODEL, "messages": messages}).status_code != 429:
            pass
    deadline = time.monotonic() + 60
    while not {"stop", "length", "disconnected", "rejected"} <= (seen := outcomes(admin)):
        if time.monotonic() > deadline:
            sys.exit(f"only traces of {', '.join(sorted(seen))} were stored; see serve.log in the folder")
        time.sleep(0.2)
    admin("DELETE", f"/quotas/{limit_id}")


def outcomes(admin: Admin) -> set[str]:
    return {trace["outcome"] for trace in admin("GET", "/traces?limit=500")["data"]}


class Seeder:
    """Writer of requests and their traces; counts the charges to limits."""

    def __init__(self, store: Writer, database: Database, traces: Writer, models: dict[str, list[Model]]) -> None:
        self._store = store
        self._database = database
        self._traces = traces
        self._models = models
        self._used: Counter[tuple[str, Unit]] = Counter()
        self._rng = Random(2)
        self.counts: Counter[str] = Counter()

    async def add(self, rows: list[UsageRow], until: datetime, trace_share: float) -> None:
        self._store.write(UsageRecord, [tuple(getattr(row, name) for name in _COLUMNS) for row in rows])
        self._store.write(LedgerEntry, [entry(row) for row in rows])
        recent = [row for row in rows if row.started_at > until - timedelta(hours=BUSY_HOURS)]
        async with self._database.write() as session:
            await add_to_hours(session, rows)
            await MINUTES.add(session, recent)
        month = window_start(LimitKind.TOKENS_PER_MONTH.period, until)
        for row in rows:
            if row.started_at >= month:
                self._used[row.tenant_id, Unit.TOKENS] += row.prompt_tokens + row.output_tokens
                self._used[row.tenant_id, Unit.MONEY] += row.cost_nanodollars
        oldest = until - timedelta(days=TRACE_DAYS)
        kept = [row for row in rows if row.started_at > oldest and self._rng.random() < trace_share]
        traces, spans = copies(kept, self._models, self._rng)
        self._traces.write(TraceRecord, traces)
        self._traces.write(SpanRecord, spans)
        self.counts += Counter(requests=len(rows), traces=len(traces), spans=len(spans))

    async def charge(self, until: datetime) -> None:
        """Book the usage of the monthly limits, as a gateway that has leased it."""
        async with self._database.write() as session:
            charges = [
                Charge(WindowId(quota.id, window_start(LimitKind(quota.kind).period, until)), GATEWAY, amount)
                for quota in await session.scalars(select(Quota))
                if LimitKind(quota.kind).period is not None
                and (amount := self._used[quota.scope_id, LimitKind(quota.kind).unit])
            ]
            wants = [LeaseRequest(charge.window, 1, charge.amount, 0) for charge in charges]
            await LeaseStore(GATEWAY, 20.0).exchange(session, {}, wants, lambda lacking, *_: lacking)
            await book(session, charges)


def entry(row: UsageRow) -> tuple[Any, ...]:
    """Return the ledger entry of a request that has ended."""
    kind = (row.request_id, EntryKind.SETTLED.value, 0, row.tenant_id, row.started_at)
    return (*kind, row.prompt_tokens, row.cached_tokens, row.output_tokens, row.cost_nanodollars)


async def fill(url: str, traces_url: str, senders: list[Sender], options: argparse.Namespace) -> Counter[str]:
    database = Database.open(url)
    traces = Database.open(traces_url)
    store = writer_of(url)
    spans = store if traces_url == url else writer_of(traces_url)
    until = datetime.now(UTC)
    try:
        models = await read_models(traces)
        wanted = MARGIN * options.spans / spans_a_request(models)
        seeder = Seeder(store, database, spans, models)
        share = min(1.0, wanted / num_traceable(options.requests))
        for rows in draw(senders, options.requests, until, seed=3):
            await seeder.add(rows, until, share)
            print(f"\r{seeder.counts['requests']:,} requests, {seeder.counts['spans']:,} spans", end="", flush=True)
        await seeder.charge(until)
        async with database.write() as session:
            session.add_all(objects(senders, until, Random(4)))
        await add_quoted(database, senders, until)
        await sum_up(database, until)
        for writer in {id(one): one for one in (store, spans)}.values():
            writer.finish()
        print()
        return seeder.counts
    finally:
        for writer in {id(one): one for one in (store, spans)}.values():
            writer.close()
        await database.close()
        await traces.close()


async def add_quoted(database: Database, senders: list[Sender], until: datetime) -> None:
    """Add requests with a quote, of which some get a credit, as gateways do."""
    rng = Random(5)
    (rows,) = draw(senders, NUM_QUOTED, until, seed=6)
    given = [quoted(row, rng) for row in rows if row.ttft_ms is not None]
    for first in range(0, len(given), BATCH):
        async with database.write() as session:
            await insert_rows(session, given[first : first + BATCH])


async def sum_up(database: Database, now: datetime) -> None:
    """Sum up past days and hours, as the retention jobs of gateways did meanwhile."""
    for job in (sum_up_some, sum_up_attributed):
        num_done = -1
        while num_done:
            async with database.write() as session:
                num_done = await job(session, now)


def spans_a_request(models: dict[str, list[Model]]) -> float:
    """Return the mean number of spans of the generated requests; outcomes without a real trace have none."""
    means = {end: sum(len(model.spans) for model in listed) / len(listed) for end, listed in models.items()}
    return sum(share * means.get(end, 0.0) for end, share in zip(ENDS, END_SHARES, strict=True))


def num_traceable(requests: int) -> int:
    """Return about how many of the requests are within the traces' retention time."""
    idle_share = (TRACE_DAYS * 24 - BUSY_HOURS) / (DAYS * 24 - BUSY_HOURS)
    return int(requests * (BUSY_SHARE + (1 - BUSY_SHARE) * idle_share))


@contextlib.contextmanager
def new_store(
    kind: str, folder: Path, options: argparse.Namespace
) -> Iterator[tuple[Path, str | None, dict[str, Any]]]:
    """Seed a store, sqlite or postgres; yield its data folder, its URL if it is PostgreSQL, and its contents."""
    with contextlib.ExitStack() as stack:
        url = None
        if kind == "postgres":
            postgres = Postgres(folder)
            stack.callback(postgres.close)
            url = postgres.url
        data_dir = folder / "data"
        data_dir.mkdir()
        found = seed(argparse.Namespace(**vars(options) | {"data_dir": data_dir, "postgres_url": url}))
        yield data_dir, url, found


def seed(options: argparse.Namespace) -> dict[str, Any]:
    """Create the store; return its contents and the time that it took."""
    begin_s = time.monotonic()
    with serving(options.data_dir, options.postgres_url, "--", "--scripted-step-ms", "8") as (url, _, admin_key):
        admin = Admin(url, admin_key)
        admin("PUT", "/prices", {"model": MODEL, "input": "0.30", "output": "1.20", "cached_input": "0.03"})
        senders = make_senders(admin, options.tenants)
        send_models(url, admin, senders[-1])
    (options.data_dir / SENDERS).write_bytes(msgspec.json.encode(senders))
    made_s = time.monotonic() - begin_s
    store_url = options.postgres_url or f"sqlite:///{options.data_dir / 'moiety.db'}"
    traces_url = options.postgres_url or f"sqlite:///{options.data_dir / 'traces.db'}"
    counts = asyncio.run(fill(store_url, traces_url, senders, options))
    return {
        "tenants": len(senders),
        **{name: counts[name] for name in ("requests", "traces", "spans")},
        "tenants_made_s": round(made_s, 1),
        "rows_written_s": round(time.monotonic() - begin_s - made_s, 1),
    }


def read_senders(data_dir: Path) -> list[Sender]:
    """Return the tenants of an existing store, the busiest first."""
    return msgspec.json.decode((data_dir / SENDERS).read_bytes(), type=list[Sender])


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the size of the store."""
    parser.add_argument("--tenants", type=int, default=500)
    parser.add_argument("--requests", type=int, default=2_000_000, help="number of requests, each with a ledger row")
    parser.add_argument(
        "--spans", type=int, default=5_000_000, help="least number of spans; the actual number is a little larger"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True, help="new folder for the store")
    parser.add_argument("--postgres-url", help="URL of an empty PostgreSQL database [SQLite in the folder]")
    add_options(parser)
    options = parser.parse_args()
    if options.data_dir.exists() and any(options.data_dir.iterdir()):
        parser.error(f"{options.data_dir} is not empty; name a new folder")
    options.data_dir.mkdir(parents=True, exist_ok=True)
    print(json.dumps(seed(options)))


if __name__ == "__main__":
    main()
