"""Requests without a valid API key beside valid clients: the cost of each, and the effect on the valid ones.

    python benchmarks/stranger_flood.py [--seconds 20] [--sockets 120] [--postgres] [--output FILE]

Two gateways share one database. Sockets on loopback connect to the first, send `GET /v1/models` with a random
well-formed key and close after 20 ms. Meanwhile keys are made on the second gateway and used on the first at once, keys
that the first has never seen are used, and keys in use are revoked on the second. Then each kind of rejection is
measured alone: a number of requests, each on its own connection, and the CPU time that the gateway spends on them.
Targets: every valid key works at its first use, a revocation takes effect within 2 s, memory and descriptors do not
grow, and a rejection costs at most 0.3 ms of CPU time. Needs the `dev` extra.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from cluster import Cluster, call, make_tenant  # noqa: E402 - the script's own folder
from postgres import Postgres, run_in_folder  # noqa: E402

from moiety_platform.auth.keys import generate_key  # noqa: E402
from moiety_platform.bench.environment import describe_environment  # noqa: E402

HANG_UP_S = 0.02
MAX_REFUSAL_MS, MAX_REVOCATION_S = 0.3, 2.0
MAX_GROWTH_MIB, MAX_MORE_DESCRIPTORS = 64, 32
NUM_COST_REQUESTS, COST_SOCKETS = 3000, 32
NUM_SEEDED = 40
TARGETS = {
    "models": ("GET", "/v1/models"),
    "chat": ("POST", "/v1/chat/completions"),
    "messages": ("POST", "/v1/messages"),
    "admin": ("GET", "/admin/v1/tenants"),
}
BODY = b'{"model": "scripted", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="length of the flood")
    parser.add_argument("--sockets", type=int, default=120, help="number of simultaneous connections of the flood")
    parser.add_argument("--postgres", action="store_true", help="use PostgreSQL instead of SQLite")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "stranger_flood.json")
    options = parser.parse_args()
    report = run_in_folder("moiety-strangers-", partial(_run, options))
    settings = {name: value for name, value in vars(options).items() if name != "output"}
    report = {
        "date": date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "environment": describe_environment(),
        "settings": settings,
        **report,
    }
    options.output.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps({"flood": report["flood"], "cost_ms": report["cost_ms"], "verdict": report["verdict"]}, indent=1))
    sys.exit(0 if all(report["verdict"].values()) else 1)


async def _run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        url = f"sqlite:///{folder / 'moiety.db'}"
        if options.postgres:
            postgres = Postgres(folder)
            stack.callback(postgres.close)
            url = postgres.url
        cluster = Cluster(folder, url, 2)
        stack.callback(cluster.stop)
        await cluster.start_all()
        seeded = await _seed(cluster)
        costs = await _measure_costs(cluster, seeded[0])
        flood = await _flood(cluster, options, seeded)
        return {"flood": flood, "cost_ms": costs, "verdict": _judge(flood, costs)}


async def _seed(cluster: Cluster) -> list[tuple[str, str]]:
    """Return keys that exist before the flood, as (id, text)."""
    async with cluster.admin() as client:
        ids, _ = await make_tenant(client, "acme")
        return [await _make_key(client, ids["project"], f"seeded-{number}") for number in range(NUM_SEEDED)]


async def _make_key(client: httpx.AsyncClient, project_id: str, name: str) -> tuple[str, str]:
    made = await call(client, "POST", "/keys", {"name": name, "project_id": project_id})
    return made["key"]["id"], made["secret"]


def _judge(flood: dict[str, Any], costs: dict[str, float]) -> dict[str, bool]:
    return {
        "valid_keys_served_at_first_use": set(flood["first_use"]) == {"200"},
        "new_keys_served_at_first_use": set(flood["new_key"]) == {"200"},
        "revoked_within_2_s": max(flood["revocation_s"], default=0.0) <= MAX_REVOCATION_S,
        "memory_stays": flood["rss_mib"]["most"] - flood["rss_mib"]["before"] <= MAX_GROWTH_MIB,
        "descriptors_stay": flood["descriptors"]["after"] - flood["descriptors"]["before"] <= MAX_MORE_DESCRIPTORS,
        "refusals_cost_little": max(costs.values()) <= MAX_REFUSAL_MS,
    }


# ── the flood ──


async def _flood(cluster: Cluster, options: argparse.Namespace, seeded: list[tuple[str, str]]) -> dict[str, Any]:
    gateway = psutil.Process(cluster.process("gateway", 0).pid)
    before = _resources(gateway)
    counts: Counter[str] = Counter()
    until_s = time.monotonic() + options.seconds
    cpu_s = sum(gateway.cpu_times()[:2])
    strangers = [asyncio.create_task(_strange(cluster.ports[0], until_s, counts)) for _ in range(options.sockets)]
    watching = asyncio.create_task(_watch(gateway, until_s))
    using = asyncio.create_task(_use_seeded(cluster, seeded[: NUM_SEEDED // 2], options.seconds))
    making = asyncio.create_task(_use_new(cluster, until_s))
    revoking = asyncio.create_task(_revoke(cluster, seeded[NUM_SEEDED // 2 :], until_s))
    first_use, new_key, revocation_s, most = await asyncio.gather(using, making, revoking, watching)
    await asyncio.gather(*strangers)
    cpu_s = sum(gateway.cpu_times()[:2]) - cpu_s
    await asyncio.sleep(3)
    after = _resources(gateway)
    return {
        "requests_per_s": round(counts["sent"] / options.seconds, 1),
        "answered_before_hanging_up": dict(counts),
        "gateway_cpu_s": round(cpu_s, 2),
        "cpu_ms_per_request": round(cpu_s * 1e3 / max(1, counts["sent"]), 3),
        "first_use": dict(first_use),
        "new_key": dict(new_key),
        "revocation_s": [round(one, 2) for one in revocation_s],
        "rss_mib": {"before": before[0], "most": most[0], "after": after[0]},
        "descriptors": {"before": before[1], "most": most[1], "after": after[1]},
    }


def _resources(process: psutil.Process) -> tuple[float, int]:
    return round(process.memory_info().rss / 2**20, 1), process.num_fds()


async def _watch(process: psutil.Process, until_s: float) -> tuple[float, int]:
    """Return the largest memory and the largest number of descriptors until the flood ends."""
    most = _resources(process)
    while time.monotonic() < until_s:
        await asyncio.sleep(0.5)
        now = _resources(process)
        most = max(most[0], now[0]), max(most[1], now[1])
    return most


async def _strange(port: int, until_s: float, counts: Counter[str]) -> None:
    """Connect, send and disconnect soon, repeatedly."""
    while time.monotonic() < until_s:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError as error:
            counts[type(error).__name__] += 1
            await asyncio.sleep(HANG_UP_S)
            continue
        writer.write(_request("GET", "/v1/models", f"Authorization: Bearer {generate_key().text}\r\n"))
        counts["sent"] += 1
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(HANG_UP_S):
                head = await reader.read(64)
                counts[head[9:12].decode("latin-1") or "closed"] += 1
                await asyncio.sleep(HANG_UP_S)
        writer.transport.abort()
        await asyncio.sleep(0.1)


async def _use_seeded(cluster: Cluster, keys: list[tuple[str, str]], seconds: float) -> Counter[str]:
    """Use each key for the first time, spread over the flood."""
    statuses: Counter[str] = Counter()
    async with httpx.AsyncClient(base_url=cluster.url(0), timeout=30) as client:
        for _, text in keys:
            await asyncio.sleep(0.8 * seconds / len(keys))
            statuses[await _ask(client, text)] += 1
    return statuses


async def _use_new(cluster: Cluster, until_s: float) -> Counter[str]:
    """Use keys that the other gateway has just created."""
    statuses: Counter[str] = Counter()
    headers = {"Authorization": f"Bearer {cluster.admin_key}"}
    async with (
        httpx.AsyncClient(base_url=f"{cluster.url(1)}/admin/v1", headers=headers, timeout=30) as admin,
        httpx.AsyncClient(base_url=cluster.url(0), timeout=30) as client,
    ):
        ids, _ = await make_tenant(admin, "newcomer")
        numbers = itertools.count()
        while time.monotonic() < until_s - 1:
            number = next(numbers)
            _, text = await _make_key(admin, ids["project"], f"new-{number}")
            statuses[await _ask(client, text)] += 1
            await asyncio.sleep(0.5)
    return statuses


async def _revoke(cluster: Cluster, keys: list[tuple[str, str]], until_s: float) -> list[float]:
    """Return how long keys in use are accepted after the other gateway has revoked them."""
    took_s = []
    headers = {"Authorization": f"Bearer {cluster.admin_key}"}
    async with (
        httpx.AsyncClient(base_url=f"{cluster.url(1)}/admin/v1", headers=headers, timeout=30) as admin,
        httpx.AsyncClient(base_url=cluster.url(0), timeout=30) as client,
    ):
        for key_id, text in keys:
            if time.monotonic() > until_s - 4:
                break
            await _until(client, text, "200", until_s)
            (await admin.post(f"/keys/{key_id}/revoke")).raise_for_status()
            begin_s = time.monotonic()
            await _until(client, text, "401", begin_s + 60)
            took_s.append(time.monotonic() - begin_s)
    return took_s


async def _until(client: httpx.AsyncClient, key: str, status: str, until_s: float) -> None:
    """Repeat the request until the answer has this status."""
    while True:
        if await _ask(client, key) == status or time.monotonic() >= until_s:
            return
        await asyncio.sleep(0.05)


async def _ask(client: httpx.AsyncClient, key: str) -> str:
    try:
        return str((await client.get("/v1/models", headers={"Authorization": f"Bearer {key}"})).status_code)
    except httpx.HTTPError as error:
        return type(error).__name__


# ── what a refusal costs ──


async def _measure_costs(cluster: Cluster, known: tuple[str, str]) -> dict[str, float]:
    """Return the gateway's CPU time for each kind of rejection, in ms."""
    async with httpx.AsyncClient(base_url=cluster.url(0), timeout=30) as client:
        await _ask(client, known[1])
    kinds: dict[str, Callable[[], str]] = {
        "none": lambda: "",
        "malformed": lambda: f"Authorization: Bearer sk-{secrets.token_hex(24)}\r\n",
        "unknown": lambda: f"Authorization: Bearer {generate_key().text}\r\n",
        "wrong_secret": lambda: f"Authorization: Bearer mty_{known[0]}.{generate_key().secret}\r\n",
    }
    costs = {}
    for name, (method, path) in TARGETS.items():
        for kind, header in kinds.items():
            costs[f"{name} {kind}"] = await _cost(cluster, method, path, header)
    return costs


async def _cost(cluster: Cluster, method: str, path: str, header: Callable[[], str]) -> float:
    gateway = psutil.Process(cluster.process("gateway", 0).pid)
    requests = iter([_request(method, path, header()) for _ in range(NUM_COST_REQUESTS)])
    begin_cpu_s = sum(gateway.cpu_times()[:2])
    await asyncio.gather(*(_send_all(cluster.ports[0], requests) for _ in range(COST_SOCKETS)))
    return round((sum(gateway.cpu_times()[:2]) - begin_cpu_s) * 1e3 / NUM_COST_REQUESTS, 3)


async def _send_all(port: int, requests: Iterator[bytes]) -> None:
    for request in requests:  # shared by all
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        head = await reader.read(65536)
        status = head[9:12]
        assert status in (b"401", b"503"), head
        writer.transport.abort()


def _request(method: str, path: str, header: str) -> bytes:
    body = BODY if method == "POST" else b""
    length = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body else ""
    return f"{method} {path} HTTP/1.1\r\nHost: moiety\r\n{header}{length}\r\n".encode() + body


if __name__ == "__main__":
    main()
