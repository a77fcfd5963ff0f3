"""Synthetic hour of several tenants for the dashboard, and screenshots of its pages in light and dark.

Starts `moiety serve` with the scripted engine, makes tenants, keys and limits through the admin API, writes an hour of
past requests into the store as gateways write them, sends live requests at the same time, and takes a screenshot of
every page:

    .venv/bin/python benchmarks/dashboard_hour.py --out docs/img
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import msgspec
from dashboard_deployment import attributed, earlier_days
from dashboard_pictures import take_pictures, take_pictures_of_model
from sqlalchemy import select

from moiety_platform.db.session import Database
from moiety_platform.quota.kinds import LimitKind, Unit, window_start
from moiety_platform.quota.lease import Charge, WindowId
from moiety_platform.quota.models import Quota
from moiety_platform.quota.store import LeaseRequest, LeaseStore
from moiety_platform.usage.row import UsageRow
from moiety_platform.usage.store import insert_rows

HOUR_S = 3600
BATCH = 400
NUM_DAYS = 28
GATEWAY = "gateway-of-the-hour-before"


@dataclass(frozen=True)
class TrafficProfile:
    """Traffic pattern of a tenant: mean requests a second, their sizes, and when in the hour it bursts."""

    name: str
    service_class: str
    weight: float
    per_s: float
    prompt: int
    output: int
    ttft_ms: float
    burst: tuple[float, float] | None = None  # begin and end, as parts of the hour
    limits: tuple[tuple[str, int], ...] = ()


PROFILES = (
    TrafficProfile(
        "acme",
        "priority",
        2.0,
        1.1,
        420,
        160,
        90,
        limits=(("tokens_per_day", 20_000_000), ("requests_per_minute", 600)),
    ),
    TrafficProfile("globex", "standard", 1.0, 0.9, 700, 220, 240, (0.45, 0.62), (("tokens_per_day", 7_500_000),)),
    TrafficProfile("initech", "standard", 1.0, 0.5, 300, 120, 220, limits=(("money_per_month", 5 * 10**9),)),
    TrafficProfile("hooli", "standard", 0.5, 0.25, 1800, 90, 380, limits=(("concurrent_requests", 24),)),
    TrafficProfile("umbrella", "flex", 1.0, 0.35, 2400, 400, 1400, (0.7, 0.85), (("tokens_per_month", 60_000_000),)),
    TrafficProfile("research", "batch", 0.5, 0.2, 900, 700, 5200),
)


TRIES = 10  # of a change while the store is busy


@dataclass
class Made:
    """A tenant that has been created."""

    profile: TrafficProfile
    tenant_id: str
    project_id: str
    key_id: str
    key: str


class Admin:
    """Client of the admin API."""

    def __init__(self, url: str, key: str) -> None:
        self.url = url
        self._http = httpx.Client(base_url=f"{url}/admin/v1", headers={"Authorization": f"Bearer {key}"}, timeout=20)

    def __call__(self, method: str, path: str, body: Any = None) -> Any:
        for _ in range(TRIES):
            response = self._http.request(method, path, json=body)
            if response.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                break
            time.sleep(1)  # the store is busy
        response.raise_for_status()
        return response.json()


def make_tenants(admin: Admin) -> list[Made]:
    """Create tenants with a project, a key, limits and a price, so that money is spent."""
    admin("PUT", "/prices", {"model": "moiety-demo", "input": "0.30", "output": "1.20", "cached_input": "0.03"})
    made = []
    for profile in PROFILES:
        tenant = admin(
            "POST", "/tenants", {"name": profile.name, "service_class": profile.service_class, "weight": profile.weight}
        )
        project = admin("POST", "/projects", {"tenant_id": tenant["id"], "name": "production"})
        key = admin("POST", "/keys", {"name": "backend", "project_id": project["id"]})
        for kind, cap in profile.limits:
            admin("PUT", "/quotas", {"level": "tenant", "scope_id": tenant["id"], "kind": kind, "cap": cap})
        made.append(Made(profile, tenant["id"], project["id"], key["key"]["id"], key["secret"]))
    return made


def past_requests(made: list[Made], until: datetime, rng: random.Random) -> list[UsageRow]:
    """Return the requests of the past hour.

    Arrivals are Poisson with a wave and bursts; when many arrive at once, all but the best class wait, miss their SLO,
    are preempted or rejected.
    """
    rows: list[UsageRow] = []
    for second in range(HOUR_S):
        part = second / HOUR_S
        pressure = sum(rate_at(one.profile, part) for one in made) / 3.6
        started = until - timedelta(seconds=HOUR_S - second)
        for one in made:
            rows += [
                past_request(one, started, f"past-{one.profile.name}-{second}-{number}", pressure, rng)
                for number in range(poisson(rng, rate_at(one.profile, part)))
            ]
    return rows


def rate_at(profile: TrafficProfile, part: float) -> float:
    wave = 1 + 0.35 * math.sin(2 * math.pi * (part * 1.5 + len(profile.name) / 7))
    burst = 4.5 if profile.burst and profile.burst[0] <= part < profile.burst[1] else 1.0
    return profile.per_s * wave * burst


def poisson(rng: random.Random, mean: float) -> int:
    limit, product, number = math.exp(-mean), rng.random(), 0
    while product > limit:
        product *= rng.random()
        number += 1
    return number


TASKS = {  # what the demo model was trained on, a kind of it a tenant
    "acme": ("What is 17 + 25?", "What is 81 - 46?", "What is 7 times 8?"),
    "globex": ("What is the capital of France?", "What is the capital of Peru?", "What is the capital of Japan?"),
    "initech": ("Sort these numbers: 9 3 7 1", "Reverse the word stone", "How many letters are in winter?"),
    "hooli": ("How many centimeters are 3 meters?", "Which is larger, 45 or 54?"),
}

PATIENCE = {"priority": 0.15, "standard": 1.0, "flex": 2.5, "batch": 4.0}
TTFT_SLO_MS = {"priority": 500.0, "standard": 2000.0, "flex": 600_000.0, "batch": 86_400_000.0}


def past_request(one: Made, started: datetime, request_id: str, pressure: float, rng: random.Random) -> UsageRow:
    profile = one.profile
    waits = max(0.0, pressure - 1.0) * PATIENCE[profile.service_class]
    queue_ms = rng.expovariate(1) * (4 + 900 * waits)
    ttft_ms = queue_ms + profile.ttft_ms * rng.lognormvariate(0, 0.35)
    prompt, output = (max(1, int(rng.lognormvariate(math.log(size), 0.6))) for size in (profile.prompt, profile.output))
    refused = profile.service_class in ("standard", "priority") and rng.random() < 0.12 * waits
    failed = not refused and rng.random() < 0.002
    left = not refused and not failed and rng.random() < 0.008
    kept = not refused and not failed and ttft_ms <= TTFT_SLO_MS[profile.service_class]
    generated = 0 if refused else output // 2 if left or failed else output
    outcome = "rejected" if refused else "failed" if failed else "disconnected" if left else "stop"
    cached = 0 if refused else int(prompt * 0.6 * rng.random())
    cost = 0 if refused else (prompt - cached) * 300 + cached * 30 + generated * 1200
    return UsageRow(
        request_id=request_id,
        tenant_id=one.tenant_id,
        project_id=one.project_id,
        key_id=one.key_id,
        endpoint="/v1/chat/completions",
        model="moiety-demo",
        service_class=profile.service_class,
        started_at=started + timedelta(seconds=rng.random()),
        outcome=outcome,
        http_status=429 if refused else 502 if failed else 499 if left else 200,
        num_choices=1,
        prompt_tokens=0 if refused else prompt,
        cached_tokens=cached,
        output_tokens=generated,
        queue_ms=None if refused else queue_ms,
        ttft_ms=None if refused else ttft_ms,
        duration_ms=2.0 if refused else ttft_ms + generated * 14,
        error_code="overloaded" if refused else "engine_failed" if failed else None,
        num_preemptions=int(profile.service_class in ("flex", "batch") and rng.random() < 0.3 * waits),
        slo_attained=None if left else kept,
        cost_nanodollars=cost,
    )


async def store(url: str, rows: list[UsageRow]) -> None:
    """Store the rows as a gateway does that has leased their charges."""
    database = Database.open(url)
    try:
        async with database.write() as session:
            quotas = list(await session.scalars(select(Quota)))
            rows = [charged(row, quotas) for row in rows]
            wants = [LeaseRequest(window, 1, amount, 0) for window, amount in sums_of(rows).items()]
            await LeaseStore(GATEWAY, 20.0).exchange(session, {}, wants, lambda lacking, *_: lacking)
        for first in range(0, len(rows), BATCH):
            async with database.write() as session:
                await insert_rows(session, rows[first : first + BATCH])
    finally:
        await database.close()


def charged(row: UsageRow, quotas: list[Quota]) -> UsageRow:
    """Return the row with its charges to its tenant's daily and monthly limits, as far as they are in its window."""
    used = {Unit.TOKENS: row.prompt_tokens + row.output_tokens, Unit.MONEY: row.cost_nanodollars}
    charges = []
    for quota in quotas:
        kind = LimitKind(quota.kind)
        if quota.scope_id == row.tenant_id and kind.period is not None and used[kind.unit]:
            start = window_start(kind.period, datetime.now(UTC))
            if row.started_at >= start:
                charges.append(Charge(WindowId(quota.id, start), GATEWAY, used[kind.unit]))
    return msgspec.structs.replace(row, charges=tuple(charges))


def sums_of(rows: list[UsageRow]) -> Counter[WindowId]:
    sums: Counter[WindowId] = Counter()
    for row in rows:
        for charge in row.charges:
            sums[charge.window] += charge.amount
    return sums


def send_live(
    url: str, made: list[Made], ended: threading.Event, seed: int, texts: Mapping[str, Sequence[str]]
) -> None:
    """Send requests of all tenants, a few at a time, until stopped, with a tenant's own texts or random words."""
    rng = random.Random(seed)
    with httpx.Client(base_url=url, timeout=60) as http:
        while not ended.is_set():
            one = rng.choices(made, [other.profile.per_s for other in made])[0]
            words = " ".join(rng.choice(("weigh", "route", "expert", "share")) for _ in range(rng.randint(4, 60)))
            text = rng.choice(texts.get(one.profile.name, (words,)))
            body = {"model": "moiety-demo", "messages": [{"role": "user", "content": text}],
                    "max_tokens": rng.randint(8, 120)}  # fmt: skip
            http.post("/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {one.key}"})
            ended.wait(rng.expovariate(4))


def change_something(admin: Admin, made: list[Made]) -> None:
    """Make some administrative changes, so that the audit log has more than creations."""
    globex, initech = made[1], made[2]
    limit = {"level": "tenant", "scope_id": globex.tenant_id, "kind": "tokens_per_day", "cap": 8_000_000}
    admin("PUT", "/quotas", limit)
    admin("PATCH", f"/tenants/{initech.tenant_id}", {"weight": 1.5})
    admin("PATCH", "/classes/flex", {"price_factor": 0.5})
    admin("POST", f"/keys/{initech.key_id}/rotate", {"grace_s": 86_400})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the screenshots")
    parser.add_argument("--live-s", type=float, default=45.0, help="seconds of requests before the screenshots")
    parser.add_argument(
        "--experts-s",
        type=float,
        default=400.0,
        help="seconds of requests to the demo model before the screenshot of its experts",
    )
    parser.add_argument("--only-model", action="store_true", help="take only the screenshots that need the demo model")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.only_model:
        with served("--scripted", engine=("--scripted-step-ms", "12")) as (url, dashboard, admin_key, data):
            show(url, dashboard, admin_key, data, options)
    with served() as (url, dashboard, admin_key, _):
        made = make_tenants(Admin(url, admin_key))
        with sending(url, made, TASKS):
            time.sleep(options.experts_s)
            take_pictures_of_model(dashboard, admin_key, made[1].key, options.out)
    print(f"pictures are in {options.out}")


@contextlib.contextmanager
def served(*flags: str, engine: tuple[str, ...] = ()) -> Iterator[tuple[str, str, str, Path]]:
    """Start `moiety serve`; yield its address, the dashboard's, the administrator's key and the data directory."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        command = [sys.executable, "-m", "moiety_platform.cli", "serve", *flags, "--port", "0"]
        command += ["--dashboard-port", "0", "--data-dir", folder, "--", *engine]
        with (data / "serve.log").open("w") as log:
            serve = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            url, dashboard = addresses(data / "serve.log", serve)
            yield url, dashboard, json.loads((data / "keys.json").read_text())["admin_key"], data
        finally:
            serve.terminate()
            serve.wait()


@contextlib.contextmanager
def sending(url: str, made: list[Made], texts: Mapping[str, Sequence[str]]) -> Iterator[None]:
    """Send requests of all tenants meanwhile."""
    ended = threading.Event()
    senders = [threading.Thread(target=send_live, args=(url, made, ended, seed, texts)) for seed in range(6)]
    for sender in senders:
        sender.start()
    try:
        yield
    finally:
        ended.set()
        for sender in senders:
            sender.join()


def addresses(log: Path, serve: subprocess.Popen[bytes]) -> tuple[str, str]:
    """Return the addresses of the gateway and the dashboard, once both are ready; end the script if they are not."""
    while True:
        if serve.poll() is not None:
            sys.exit(f"moiety serve has ended; its log ends:\n{log.read_text()[-2000:]}")
        text = log.read_text()
        if "moiety is ready at" in text and "You can now view" in text:
            lines = text.splitlines()
            url = next(line.rsplit(" ", 1)[1] for line in lines if "moiety is ready at" in line)
            return url, next(line.split()[1] for line in lines if line.startswith("  dashboard"))
        time.sleep(0.1)


def show(url: str, dashboard: str, admin_key: str, data: Path, options: argparse.Namespace) -> None:
    admin = Admin(url, admin_key)
    made = make_tenants(admin)
    rng = random.Random(7)
    rows = attributed(past_requests(made, datetime.now(UTC), rng), rng)
    for stored in (rows, earlier_days(rows, NUM_DAYS, 0.3, rng)):
        asyncio.run(store(f"sqlite:///{data / 'moiety.db'}", stored))
    print(f"{len(rows)} requests of the last hour are stored, and some of the days before")
    change_something(admin, made)
    with sending(url, made, {}):
        time.sleep(options.live_s)
        take_pictures(dashboard, admin_key, options.out)


if __name__ == "__main__":
    main()
