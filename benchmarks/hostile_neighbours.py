"""A paying tenant's latency alone and beside hostile tenants and unauthenticated clients, and the accuracy of its bill.

    python benchmarks/hostile_neighbours.py [--alone 60] [--beside 120] [--loads all] [--threads 1] [--output FILE]

One gateway on SQLite and one engine with the demo model, as processes. The paying tenant sends a streamed chat request
of `--max-tokens` tokens, ten times a second at fixed times, first alone, then beside the loads:

strangers   120 connections that send a random well-formed key and close after 20 ms
places      400 streams of one tenant, 1,500 tokens each, `ignore_eos`: more than the batch has slots
batch       32 streams of another tenant with prompts of about 1,000 tokens, so that every step has prompt tokens to do
grammars    schemas and expressions that are slow, large or fatal to compile, of a third tenant, one of each at a time

A low-priority process generates the loads, since real ones come from other machines. Their first 15 s are reported
separately. Targets: the p99 of the paying tenant's whole answers at most doubles, each of its requests succeeds, and
its bill equals the usage in its answers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import httpx
import uvloop

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from cluster import Cluster, call, make_tenant  # noqa: E402 - the script's own folder

from moiety_platform.auth.keys import generate_key  # noqa: E402
from moiety_platform.bench.environment import describe_environment  # noqa: E402

LOADS = ("strangers", "places", "batch", "grammars")
NUM_SOCKETS, HANG_UP_S = 120, 0.02
NUM_STREAMS, STREAM_TOKENS = 400, 1500
NUM_LONG_PROMPTS, LONG_PROMPT = 32, "The tenant asks for a long answer about many things. " * 100
START_S = 15.0  # of the loads' start, which is measured apart: all streams come within it
WARM_UP_S = 10.0
LOWEST_PRIORITY = 19  # niceness
PRICES_PER_MILLION = (3, 15)  # dollars, of prompt and output tokens
NANODOLLARS_PER_TOKEN = tuple(1000 * price for price in PRICES_PER_MILLION)
HOSTILE_FORMATS: tuple[dict[str, Any], ...] = (
    {"schema": {"type": "integer", "multipleOf": 999983}},
    {"schema": {"type": "integer", "minimum": -(2**63), "maximum": -(2**63)}},
    {"schema": {"type": "integer", "minimum": -(10**19)}},
    {"schema": {"type": "string", "pattern": "(a|b|ab)*" * 500}},
    {"schema": {"type": "array", "items": {"enum": [f"value {n}" for n in range(20_000)]}}},
    {"regex": "x?" * 30_000},
)


@dataclass(slots=True)
class Measured:
    """Measurements of the paying tenant; latencies are in milliseconds, from the time when a request was due."""

    first_ms: list[float] = field(default_factory=list)
    total_ms: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    failures: Counter[str] = field(default_factory=Counter)

    def report(self) -> dict[str, Any]:
        return {
            "requests": len(self.total_ms),
            "first_token_ms": _percentiles(self.first_ms),
            "total_ms": _percentiles(self.total_ms),
            "failures": dict(self.failures),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--alone", type=float, default=60.0, help="seconds in which the paying tenant runs alone")
    parser.add_argument("--beside", type=float, default=120.0, help="seconds in which the loads run too")
    parser.add_argument("--rate", type=float, default=10.0, help="requests of the paying tenant per second")
    parser.add_argument("--max-tokens", type=int, default=8, help="output tokens of its requests")
    parser.add_argument("--ttft-s", type=float, default=0.01, help="TTFT SLO of its class, in seconds")
    parser.add_argument("--tpot-s", type=float, default=0.001, help="TPOT SLO of its class, in seconds")
    parser.add_argument("--loads", nargs="+", default=["all"], choices=[*LOADS, "all"])
    parser.add_argument("--threads", type=int, default=1, help="processor threads of the engine's model")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "hostile_neighbours.json")
    options = parser.parse_args()
    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    with tempfile.TemporaryDirectory(prefix="moiety-neighbours-") as name, runner:
        report = runner.run(_run(options, Path(name)))
    report = {
        "date": date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "environment": describe_environment(),
        "settings": {name: value for name, value in vars(options).items() if name != "output"},
        **report,
    }
    options.output.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps({name: report[name] for name in ("alone", "starting", "beside", "loads", "verdict")}, indent=1))
    sys.exit(0 if all(report["verdict"].values()) else 1)


async def _run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    engine = ["--threads", str(options.threads)]
    cluster = Cluster(folder, f"sqlite:///{folder / 'moiety.db'}", 1, engine=engine, num_engines=1)
    with contextlib.ExitStack() as stack:
        stack.callback(cluster.stop)
        await cluster.start_all()
        async with cluster.admin() as admin:
            model, keys, tenant = await _prepare(admin, cluster, options)
            await _pay(cluster, keys["paying"], model, options, WARM_UP_S)
            since = await _bill(admin, tenant)
            alone = await _pay(cluster, keys["paying"], model, options, options.alone)
            loads = LOADS if "all" in options.loads else options.loads
            with _drawing(cluster, model, keys, loads) as drawn:
                starting = await _pay(cluster, keys["paying"], model, options, START_S)
                beside = await _pay(cluster, keys["paying"], model, options, options.beside)
            await cluster.wait_settled(60)
            billed = {name: value - since[name] for name, value in (await _bill(admin, tenant)).items()}
    expected = _expected_bill(alone, starting, beside)
    return {
        "alone": alone.report(),
        "starting": starting.report(),
        "beside": beside.report(),
        "loads": drawn,
        "billed": billed,
        "expected_bill": expected,
        "verdict": {
            "p99_at_most_doubles": beside.report()["total_ms"]["p99"] <= 2 * alone.report()["total_ms"]["p99"],
            "nothing_failed": not alone.failures and not starting.failures and not beside.failures,
            "bill_is_exact": billed == expected,
        },
    }


async def _prepare(
    admin: httpx.AsyncClient, cluster: Cluster, options: argparse.Namespace
) -> tuple[str, dict[str, str], str]:
    """Create the class, prices and tenants; return the model's name, each tenant's key, and the paying tenant's id."""
    slos = {"rank": 0, "ttft_s": options.ttft_s, "ttft_per_1k_s": 0.1, "tpot_s": options.tpot_s}
    await call(admin, "POST", "/classes", {"name": "paying", "on_overload": "queue", **slos})
    keys, ids = {}, {}
    for name in ("paying", "places", "batch", "grammars"):
        ids[name], keys[name] = await make_tenant(admin, name)
    change = {"service_class": "paying"}
    await call(admin, "PATCH", f"/tenants/{ids['paying']['tenant']}", change)
    headers = {"Authorization": f"Bearer {keys['paying']}"}
    async with httpx.AsyncClient(base_url=cluster.url(0), headers=headers, timeout=30) as client:
        model = (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
    prompt, output = map(str, PRICES_PER_MILLION)
    await call(admin, "PUT", "/prices", {"model": model, "input": prompt, "output": output})
    await asyncio.sleep(3)  # until the gateway has read prices and classes
    return model, keys, ids["paying"]["tenant"]


# ── the paying tenant ──


async def _pay(cluster: Cluster, key: str, model: str, options: argparse.Namespace, seconds: float) -> Measured:
    """Send requests at fixed times, even if earlier ones are still running."""
    measured = Measured()
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=cluster.url(0), headers=headers, timeout=60) as client:
        tasks = []
        begin_s = time.monotonic()
        for number in range(round(seconds * options.rate)):
            due_s = begin_s + number / options.rate
            await asyncio.sleep(due_s - time.monotonic())
            body = _chat(model, f"Question {number}: how are you?", options.max_tokens)
            tasks.append(asyncio.create_task(_answer(client, body, due_s, measured)))
        await asyncio.gather(*tasks)
    return measured


async def _answer(client: httpx.AsyncClient, body: dict[str, Any], due_s: float, measured: Measured) -> None:
    first_s = usage = finish = None
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                measured.failures[str(response.status_code)] += 1
                return
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                first_s = first_s or time.monotonic()
                event = json.loads(line.removeprefix("data: "))
                usage = event.get("usage") or usage
                finish = finish or next((choice["finish_reason"] for choice in event.get("choices", ())), None)
    except httpx.HTTPError as error:
        measured.failures[type(error).__name__] += 1
        return
    if first_s is None or usage is None or finish not in ("stop", "length"):
        measured.failures["incomplete"] += 1
        return
    measured.first_ms.append(1e3 * (first_s - due_s))
    measured.total_ms.append(1e3 * (time.monotonic() - due_s))
    measured.prompt_tokens += usage["prompt_tokens"]
    measured.output_tokens += usage["completion_tokens"]


def _chat(model: str, content: str, max_tokens: int, **further: object) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    options = {"include_usage": True}
    return {
        "model": model,
        "messages": messages,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": options,
    } | further


async def _bill(admin: httpx.AsyncClient, tenant_id: str) -> dict[str, int]:
    """Return the tenant's bill in the ledger, once two readings a second apart agree."""
    before: dict[str, int] = {}
    while True:
        await asyncio.sleep(1)
        groups = (await admin.get("/usage", params={"tenant_id": tenant_id})).raise_for_status().json()["data"]
        names = ("requests", "prompt_tokens", "output_tokens", "cost_nanodollars")
        now = {name: sum(group["totals"][name] for group in groups) for name in names}
        if now == before:
            return now
        before = now


def _expected_bill(*phases: Measured) -> dict[str, int]:
    prompt, output = sum(p.prompt_tokens for p in phases), sum(p.output_tokens for p in phases)
    prompt_price, output_price = NANODOLLARS_PER_TOKEN
    return {
        "requests": sum(len(phase.total_ms) for phase in phases),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "cost_nanodollars": prompt * prompt_price + output * output_price,
    }


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values) or [float("nan")]
    at = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "most": 1.0}
    return {name: round(ordered[min(len(ordered) - 1, int(part * len(ordered)))], 1) for name, part in at.items()}


# ── the loads ──


@contextlib.contextmanager
def _drawing(cluster: Cluster, model: str, keys: dict[str, str], loads: Sequence[str]) -> Iterator[Any]:
    """Run the loads in another process while the block runs; the yielded object has their counts afterwards."""
    context = multiprocessing.get_context("spawn")
    stop, counted = context.Event(), context.SimpleQueue()
    arguments = (cluster.ports[0], model, keys, tuple(loads), stop, counted)
    process = context.Process(target=_draw, args=arguments, daemon=True)
    process.start()
    counts: dict[str, Any] = {}
    begin_s = time.monotonic()
    try:
        yield counts
    finally:
        stop.set()
        counts |= counted.get()
        counts["seconds"] = round(time.monotonic() - begin_s)
        process.join(30)


def _draw(port: int, model: str, keys: dict[str, str], loads: Sequence[str], stop: Any, counted: Any) -> None:
    _lower_priority()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        counted.put(runner.run(_draw_until(port, model, keys, loads, stop)))


def _lower_priority() -> None:
    """Lower the priority below every other process, as load from another machine would be.

    If Linux groups processes by session (autogroup), niceness counts only within a session. So this process starts a
    new session and sets the session's niceness. See sched(7).
    """
    os.nice(LOWEST_PRIORITY)
    autogroup = Path("/proc/self/autogroup")
    if autogroup.exists():
        os.setsid()
        autogroup.write_text(str(LOWEST_PRIORITY))


async def _draw_until(port: int, model: str, keys: dict[str, str], loads: Sequence[str], stop: Any) -> dict[str, Any]:
    counts = {name: Counter[str]() for name in loads}
    numbers = itertools.count()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=300, limits=limits) as client:

        def ask(name: str, content: str, max_tokens: int, **further: object) -> Callable[[], Awaitable[None]]:
            async def once() -> None:
                body = _chat(model, f"{next(numbers)} {content}", max_tokens, **further)
                headers = {"Authorization": f"Bearer {keys[name]}"}
                async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
                    counts[name][str(response.status_code)] += 1
                    async for _ in response.aiter_raw():
                        pass
                if response.status_code != httpx.codes.OK:
                    await asyncio.sleep(0.1)

            return once

        makers: dict[str, list[Callable[[], Awaitable[None]]]] = {
            "strangers": [lambda: _strange(port, counts["strangers"])] * NUM_SOCKETS,
            "places": [ask("places", "Tell me a story.", STREAM_TOKENS, ignore_eos=True)] * NUM_STREAMS,
            "batch": [ask("batch", LONG_PROMPT, 64, ignore_eos=True)] * NUM_LONG_PROMPTS,
            "grammars": [ask("grammars", "Say it.", 16, **_form(form)) for form in HOSTILE_FORMATS],
        }
        tasks = [asyncio.create_task(_repeat(once, counts[name])) for name in loads for once in makers[name]]
        await asyncio.to_thread(stop.wait)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return {name: dict(count) for name, count in counts.items()}


async def _repeat(once: Callable[[], Awaitable[None]], counts: Counter[str]) -> None:
    while True:
        try:
            await once()
        except (httpx.HTTPError, OSError) as error:
            counts[type(error).__name__] += 1
            await asyncio.sleep(0.1)


def _form(form: dict[str, Any]) -> dict[str, Any]:
    if "regex" in form:
        return {"guided_regex": form["regex"]}
    named = {"name": "hostile", "strict": True, **form}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


async def _strange(port: int, counts: Counter[str]) -> None:
    """Connect, send a request with a random key, and close the connection soon."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"GET /v1/models HTTP/1.1\r\nHost: moiety\r\nAuthorization: Bearer {generate_key().text}\r\n\r\n"
    writer.write(head.encode())
    counts["sent"] += 1
    await asyncio.sleep(HANG_UP_S)
    writer.transport.abort()
    await asyncio.sleep(0.1)


if __name__ == "__main__":
    main()
