"""Tenants under tight limits with many streams aborted after a random chunk, and a comparison of usage records."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from typing import Any

import openai
from cluster import call, list_quotas, make_tenant, set_limits

from external.processes import MODEL
from external.world import World, until

NUM_TENANTS, NUM_CLIENTS, SECONDS = 12, 16, 30.0
RETURNED_S = 90.0  # by when gateways have given back what nobody has used
MAX_OUTPUT = 60


async def limits(world: World) -> dict[str, Any]:
    """Check that usage, limits and the server's counters agree.

    Of every limit, the settled usage is within the cap; requests, ledger, sums and limits agree; every request is in
    them once; the server has counted at least what is billed; only limits rejected requests; and when all is idle,
    nothing is reserved.
    """
    await world.quiet()
    before, known = await world.figures(), len(await world.rows())
    keys = await _make_tenants(world)
    tally: Counter[str] = Counter()
    end_s = time.monotonic() + SECONDS
    await asyncio.gather(*(_client(world, keys, tally, end_s, seed) for seed in range(NUM_CLIENTS)))
    await world.quiet()
    after, rows = await world.figures(), await world.rows(known + sum(tally.values()))
    rows = rows[: len(rows) - known]
    await until(lambda: _is_returned(world), RETURNED_S, pause_s=1.0)
    books = (await world.admin.get("/usage/reconciliation")).raise_for_status().json()
    engines = (await world.admin.get("/engines")).raise_for_status().json()["data"]
    stocks = [quota for quota in await list_quotas(world.admin) if quota["kind"].endswith("_day")]
    billed = sum(row["output_tokens"] for row in rows)
    counted = after.output_tokens_total - before.output_tokens_total
    held = {
        "within_caps": all(quota["used"] <= quota["cap"] for quota in stocks),
        "books_agree": books["agrees"] and not books["quarantined"],
        "one_entry_a_request": len(rows) == sum(tally.values()) == len({row["request_id"] for row in rows}),
        "billed_is_computed": billed <= counted,
        "only_limits_refuse": set(tally) <= {"length", "left", "429"},
        "nothing_runs": not any(engine["num_inflight"] for engine in engines),
    }
    return {
        "holds": all(held.values()),
        **held,
        "answers": dict(tally),
        "outcomes": dict(Counter(row["outcome"] for row in rows)),
        "limits_reached": sum(quota["used"] >= 0.98 * quota["cap"] for quota in stocks),
        "billed_output_tokens": billed,
        "server_counted_output_tokens": counted,
    }


async def _make_tenants(world: World) -> list[str]:
    """Create tenants with limits on all levels, so tight that many are reached; return their keys."""
    rng, keys = random.Random(0), []
    await call(world.admin, "PUT", "/prices", {"model": MODEL, "input": "1", "cached_input": "0.5", "output": "4"})
    for number in range(NUM_TENANTS):
        ids, key = await make_tenant(world.admin, f"tenant-{number}")
        keys.append(key)
        caps = [
            ("tenant", "tokens_per_day", rng.randint(80, 400)),
            ("project", "requests_per_minute", rng.randint(10, 60)),
            ("key", "concurrent_requests", rng.randint(1, 3)),
            ("key", "money_per_day", rng.randint(200_000, 2_000_000)),
        ]
        await set_limits(world.admin, ids, caps)
    return keys


async def _client(world: World, keys: list[str], tally: Counter[str], end_s: float, seed: int) -> None:
    """Send one request after the other, each for a random tenant."""
    rng = random.Random(seed)
    clients = [world.client_of(key) for key in keys]
    while time.monotonic() < end_s:
        tally[await _ask(rng.choice(clients), rng)] += 1
        await asyncio.sleep(0.05 * rng.random())
    for client in clients:
        await client.close()


async def _ask(client: openai.AsyncOpenAI, rng: random.Random) -> str:
    leaves_after = rng.randint(0, 40) if rng.random() < 0.4 else None
    try:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "x" * rng.randint(1, 60)}],
            max_tokens=rng.randint(1, MAX_OUTPUT),
            stream=True,
            extra_body={"ignore_eos": True},
        )
        num_chunks, reason = 0, None
        async for chunk in stream:
            num_chunks += 1
            reason = chunk.choices[0].finish_reason if chunk.choices else reason
            if leaves_after in (0, num_chunks):
                await stream.close()
                return "left"
        return reason or "broken"
    except openai.APIStatusError as error:
        return str(error.status_code)


async def _is_returned(world: World) -> bool:
    """Return whether gateways hold nothing of any limit, except what rates refill by themselves."""
    quotas = await list_quotas(world.admin)
    slots = [quota["used"] for quota in quotas if quota["kind"] == "concurrent_requests"]
    return not any(quota["reserved"] for quota in quotas) and not any(slots)
