"""Trace completeness: requests with every outcome, on two engines that are killed repeatedly, need correct traces.

    python benchmarks/trace_completeness.py [--requests 2010] [--clients 24] [--kill-every-s 4] [--scripted]

Chats, completions, messages, responses and embeddings, streamed or not; every fifth client disconnects midway, every
tenth request is rejected, for four reasons. The engines serve the demo model with so little memory that they preempt.
All traces are kept and sent by OTLP to a trace store, which is then compared with the ledger: every request has one
root, its children cover at least 99 % of its time, its tokens are the ledger's, and parents and links are valid.
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
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import httpx

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from cluster import START_S, Cluster, make_tenant, set_limits  # noqa: E402 - the script's own folder

from moiety_platform.bench.environment import describe_environment  # noqa: E402
from moiety_platform.supervisor.ports import claim_port  # noqa: E402

TRACED = ("--traced-steps-per-s", "200")
SCRIPTED = ("--scripted", "--name", "moiety-demo", "--scripted-step-ms", "5", *TRACED)
MODEL = "moiety-demo"
ENGINE = (
    *("--threads", "1", "--policy", "fcfs", "--kv-memory-bytes", "3MiB", "--max-context-tokens", "512"),
    *TRACED,
)
SETTLE_S = 60.0
COVERED = 0.99
CLOCK_NS = 1_000_000
REFUSED = ("no such model", "too long", "no JSON", "over its limit")


@dataclass
class Asked:
    """One request and its trace context."""

    path: str
    body: dict[str, Any] | bytes
    headers: dict[str, str]
    leaves: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2010)  # some leave before they are heard
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--kill-every-s", type=float, default=4.0)
    parser.add_argument("--scripted", action="store_true", help="use scripted engines, which never preempt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "trace_completeness.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="moiety-traces-") as folder:
        report = asyncio.run(run(options, Path(folder)))
    report = {
        "date": date.today().isoformat(),
        "command": " ".join(["python", "benchmarks/trace_completeness.py", *sys.argv[1:]]),
        "environment": describe_environment(),
        "settings": {name: value for name, value in vars(options).items() if name != "output"},
        **report,
    }
    options.output.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps({"verdict": report["verdict"], "requests": report["requests"], "ends": report["ends"]}))
    sys.exit(0 if all(report["verdict"].values()) else 1)


async def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    token, port = secrets.token_hex(16), claim_port("127.0.0.1", 0, "--port")
    environment = {
        "MOIETY_TRACES_TOKEN": token, "MOIETY_TRACES_ENDPOINT": f"http://127.0.0.1:{port}/otlp",
        "MOIETY_TRACE_SAMPLE_RATE": "1", "MOIETY_TRACE_MAX_PER_S": "100000",
        "MOIETY_TRACES_DATABASE_URL": f"sqlite:///{folder / 'traces.db'}",
    }  # fmt: skip
    engine = SCRIPTED if options.scripted else ENGINE
    cluster = Cluster(folder, f"sqlite:///{folder / 'moiety.db'}", 1, engine=engine, environment=environment)
    store = start_store(folder, port, environment)
    try:
        await cluster.start_all()
        await has_engines(cluster)
        keys = await make_keys(cluster)
        begin_s = time.monotonic()
        contexts, killed = await load(cluster, keys, options)
        seconds = time.monotonic() - begin_s
        await cluster.wait_settled(SETTLE_S)
        await asyncio.to_thread(cluster.end, "gateway", 0)  # it sends what it has before it ends
    finally:
        cluster.stop()
        store.send_signal(signal.SIGTERM)
        store.wait(START_S)
    figures = judge(read_ledger(folder / "moiety.db"), read_spans(folder / "traces.db"), contexts)
    if not options.scripted:
        figures["verdict"]["some_were_preempted"] = figures["preempted"] > 0
    return {"seconds": round(seconds, 1), "engines_killed": killed, **figures}


def start_store(folder: Path, port: int, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "moiety_platform.cli", "traces", "--port", str(port), "--migrate"]
    with (folder / "traces.log").open("ab") as log:
        given = {**os.environ, **environment}
        return subprocess.Popen([*command, "--data-dir", str(folder)], stdout=log, stderr=log, env=given)


async def has_engines(cluster: Cluster) -> None:
    """Return once the gateway has both."""
    async with cluster.admin() as client:
        while True:
            engines = (await client.get("/engines")).json()["data"]
            if sum(engine["healthy"] and engine["card"] is not None for engine in engines) == len(engines):
                return
            await asyncio.sleep(0.1)


async def make_keys(cluster: Cluster) -> dict[str, str]:
    """Create keys of three tenants; one of them has no permissions."""
    keys = {}
    async with cluster.admin() as client:
        for name in ("acme", "globex", "limited"):
            ids, keys[name] = await make_tenant(client, name)
            if name == "limited":
                await set_limits(client, ids, [("tenant", "tokens_per_day", 1)])
    return keys


# ── the load ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def load(cluster: Cluster, keys: dict[str, str], options: argparse.Namespace) -> tuple[dict[str, str], int]:
    """Send all requests; the spans of clients by their trace, and how many engines were killed meanwhile."""
    rng = random.Random(options.seed)
    asked = [what_to_ask(number, keys, rng) for number in range(options.requests)]
    waiting = iter(asked)
    supervisor = asyncio.create_task(cluster.supervise())
    killer = asyncio.create_task(kill_engines(cluster, options.kill_every_s))
    try:
        await asyncio.gather(*(client(cluster.url(0), waiting) for _ in range(options.clients)))
    finally:
        killer.cancel()
        killed = (await asyncio.gather(killer, return_exceptions=True))[0]
        await has_engines(cluster)
        supervisor.cancel()
    contexts = (one.headers["traceparent"] for one in asked if "traceparent" in one.headers)
    return {context[3:35]: context[36:52] for context in contexts}, killed if isinstance(killed, int) else 0


def what_to_ask(number: int, keys: dict[str, str], rng: random.Random) -> Asked:
    """Return the requests in turn; every third has its own trace context."""
    text = " ".join(rng.choice(("weigh", "route", "expert", "share")) for _ in range(rng.randint(3, 40)))
    messages = [{"role": "user", "content": text}]
    streams = {"stream": rng.random() < 0.6}
    budget = {"max_tokens": rng.randint(2, 60)}
    kind = number % 10
    key, path = keys[rng.choice(("acme", "globex"))], "/v1/chat/completions"
    body: dict[str, Any] | bytes = {"model": MODEL, "messages": messages, "ignore_eos": True, **budget, **streams}
    leaves = kind in (4, 9)
    assert isinstance(body, dict)
    if leaves:
        body |= {"max_tokens": 200}
    elif kind == 1:
        body |= {"n": 2}
    elif kind == 2:
        path, body = "/v1/completions", {"model": MODEL, "prompt": [text, text[:9]], **budget, **streams}
    elif kind == 3:
        path = rng.choice(("/v1/messages", "/v1/responses", "/v1/embeddings"))
        bodies: dict[str, dict[str, Any]] = {
            "/v1/messages": {"model": MODEL, "messages": messages, **budget, **streams},
            "/v1/responses": {"model": MODEL, "input": text, "max_output_tokens": 20, **streams},
            "/v1/embeddings": {"model": MODEL, "input": [text, "and another"]},
        }
        body = bodies[path]
    elif kind == 7:
        why = REFUSED[number // 10 % len(REFUSED)]
        key = keys["limited"] if why == "over its limit" else key
        changes: dict[str, dict[str, Any]] = {"no such model": {"model": "none"}, "too long": {"max_tokens": 10**6}}
        change = changes.get(why, {})
        body = b'{"model": ' if why == "no JSON" else body | change
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    if number % 3 == 0:
        headers["traceparent"] = f"00-{rng.randbytes(16).hex()}-{rng.randbytes(8).hex()}-01"
    return Asked(path, body, headers, leaves)


async def client(url: str, waiting: Iterator[Asked]) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        for one in waiting:
            content = one.body if isinstance(one.body, bytes) else json.dumps(one.body).encode()
            with contextlib.suppress(TimeoutError):
                async with (
                    asyncio.timeout(0.5 if one.leaves else None),
                    http.stream("POST", one.path, content=content, headers=one.headers) as response,
                ):
                    num_bytes = 0
                    async for data in response.aiter_raw():
                        num_bytes += len(data)
                        if one.leaves and num_bytes > 900:
                            break


async def kill_engines(cluster: Cluster, every_s: float) -> int:
    """Kill the busier engine whenever both are running; return the number of kills."""
    killed = 0
    try:
        async with cluster.admin() as client:
            while True:
                await asyncio.sleep(every_s)
                engines = (await client.get("/engines")).json()["data"]
                busiest = max(engines, key=lambda engine: engine["num_inflight"])
                if busiest["num_inflight"]:
                    cluster.kill("engine", cluster.addresses.index(busiest["address"]))
                    killed += 1
                    await asyncio.sleep(2)  # the gateway has heard of it
                    await has_engines(cluster)
    except asyncio.CancelledError:
        return killed


# ── stored traces ────────────────────────────────────────────────────────────────────────────────────────────────────


def rows_of(path: Path, statement: str) -> list[dict[str, Any]]:
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.row_factory = sqlite3.Row
        return [dict(row) for row in database.execute(statement)]


def read_ledger(path: Path) -> dict[str, dict[str, Any]]:
    """Return for every request how it ended, and what the ledger billed for it."""
    return {
        row["request_id"]: row
        for row in rows_of(
            path,
            "SELECT usage.request_id, usage.outcome, usage.error_code, usage.num_preemptions, "
            "sum(ledger.prompt_tokens) AS input, sum(ledger.output_tokens) AS output "
            "FROM usage JOIN ledger USING (request_id) GROUP BY usage.request_id",
        )
    }


def read_spans(path: Path) -> list[dict[str, Any]]:
    rows = rows_of(path, "SELECT * FROM spans")
    return [row | {name: json.loads(row[name]) for name in ("attributes", "events", "links")} for row in rows]


# ── the judgement ────────────────────────────────────────────────────────────────────────────────────────────────────


def judge(ledger: dict[str, dict[str, Any]], spans: list[dict[str, Any]], contexts: dict[str, str]) -> dict[str, Any]:
    by_id = {(span["trace_id"], span["span_id"]): span for span in spans}
    roots, children = defaultdict(list), defaultdict(list)
    for span in spans:
        if "moiety.outcome" in span["attributes"]:
            roots[span["attributes"]["moiety.request_id"]].append(span)
        elif span["parent_id"] is not None:
            children[span["trace_id"], span["parent_id"]].append(span)
    shares, wrong = list[float](), Counter[str]()
    for request_id, row in ledger.items():
        if len(roots[request_id]) != 1:
            wrong["requests without one root"] += 1
            continue
        (root,) = roots[request_id]
        under = children[root["trace_id"], root["span_id"]]
        shares.append(covered(root, under))
        wrong.update(faults_of(root, under, row, contexts))
        wrong.update(fault for span in under for fault in wrong_links(span, by_id))
    steps = [span for span in spans if span["name"] == "engine.step"]
    wrong["spans of nobody"] += len(spans) - sum(map(len, (*roots.values(), *children.values(), steps)))
    wrong["roots beside the ledger"] += len(roots.keys() - ledger.keys())
    wrong.update(crowded(spans, steps))
    linked = sum(any(link["trace_id"] != span["trace_id"] for link in span["links"]) for span in spans)
    told = [root for found in roots.values() for root in found]
    return {
        "requests": len(ledger),
        "ends": dict(Counter(row["outcome"] for row in ledger.values())),
        "refusals_and_failures": dict(Counter(row["error_code"] for row in ledger.values() if row["error_code"])),
        "preempted": sum(row["num_preemptions"] > 0 for row in ledger.values()),
        "failed_over": sum("moiety.failovers" in root["attributes"] for root in told),
        "spans": len(spans),
        "engine_steps": len(steps),
        "spans_that_link_to_steps": linked,
        "least_covered": round(min(shares, default=0.0), 5),
        "wrong": {name: count for name, count in wrong.items() if count},
        "verdict": {
            "one_root_each": not wrong["requests without one root"] and not wrong["roots beside the ledger"],
            "children_cover_99_percent": min(shares, default=0.0) >= COVERED,
            "all_else_is_right": not any(wrong.values()),
            "every_end_was_there": all(
                (
                    *({"stop", "length", "rejected", "disconnected"} <= {row["outcome"] for row in ledger.values()},),
                    any("moiety.failovers" in root["attributes"] for root in told),
                    linked,
                )
            ),
        },
    }


def covered(root: dict[str, Any], under: list[dict[str, Any]]) -> float:
    """Return the share of the root's time in which at least one child is open."""
    total, reached = 0, root["start_ns"]
    for span in sorted(under, key=lambda span: span["start_ns"]):
        total += max(0, min(span["end_ns"], root["end_ns"]) - max(span["start_ns"], reached))
        reached = max(reached, span["end_ns"])
    return float(total / max(1, root["end_ns"] - root["start_ns"]))


def faults_of(
    root: dict[str, Any], under: list[dict[str, Any]], row: dict[str, Any], contexts: dict[str, str]
) -> Iterator[str]:
    """Yield the differences between a request's own spans and the ledger's and client's records."""
    of = root["attributes"]
    if (of["gen_ai.usage.input_tokens"], of["gen_ai.usage.output_tokens"]) != (row["input"], row["output"]):
        yield "tokens other than the ledger's"
    if (of["moiety.outcome"], of.get("error.type")) != (row["outcome"], row["error_code"]):
        yield "ends other than the ledger's"
    if root["parent_id"] != contexts.get(root["trace_id"]):
        yield "parents other than the client's span"
    preempted = sum(event["name"] == "moiety.preempted" for span in under for event in span["events"])
    if preempted != row["num_preemptions"]:
        yield "preemptions without their event"
    attempts = [span for span in under if span["name"] == "engine.attempt"]
    followed = {link["span_id"] for span in under for link in span["links"] if link["trace_id"] == root["trace_id"]}
    if not followed <= {span["span_id"] for span in attempts} or len(followed) > of.get("moiety.failovers", 0):
        yield "links to no attempt that was lost"
    if any(span["attributes"]["moiety.request_id"] != of["moiety.request_id"] for span in under):
        yield "children of another request"
    if any(not root["start_ns"] <= span["start_ns"] <= span["end_ns"] <= root["end_ns"] for span in under):
        yield "children outside of their root"


def wrong_links(span: dict[str, Any], by_id: dict[tuple[str, str], dict[str, Any]]) -> Iterator[str]:
    for link in span["links"]:
        target = by_id.get((link["trace_id"], link["span_id"]))
        if target is None:
            yield "links to what is not there"
        elif target["name"] == "engine.step":
            if not span["start_ns"] - CLOCK_NS <= target["end_ns"] <= span["end_ns"] + CLOCK_NS:
                yield "links to a step at another time"
            if target["attributes"]["moiety.engine"] != span["attributes"]["moiety.engine"]:
                yield "links to a step of another engine"


def crowded(spans: list[dict[str, Any]], steps: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a fault for each step that no request is linked to, or more requests than the step had sequences."""
    guests = Counter(link["trace_id"] for span in spans for link in span["links"])
    for step in steps:
        of = step["attributes"]
        if guests[step["trace_id"]] > of["moiety.step.decodes"] + of["moiety.step.prefills"]:
            yield "steps with too many requests"
        if not guests[step["trace_id"]]:
            yield "steps of nobody"


if __name__ == "__main__":
    main()
