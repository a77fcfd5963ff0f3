"""Checks of the gateway with an external server; each returns its figures and whether it `holds`."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import openai
from cluster import make_tenant

from external.processes import MODEL
from external.world import World, until
from moiety_platform.engine_addresses import ExternalKind

LEFT_WITHIN_S = 1.0
LOST_WITHIN_S = 10.0
MUCH: dict[str, Any] = {
    "model": MODEL,
    "prompt": "say much",
    "max_tokens": 900,
    "stream": True,
    "extra_body": {"ignore_eos": True},
}


async def answers(world: World) -> dict[str, Any]:
    """Check a chat, streamed and whole, with a stop string, and with logprobs where the server has them."""
    ask: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 32,
        "temperature": 0,
    }
    more: dict[str, Any] = {"logprobs": True, "top_logprobs": 2} if world.server.kind is ExternalKind.VLLM else {}
    whole = await world.client.chat.completions.create(**ask, **more)
    stream = await world.client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    found = whole.choices[0].message.content or ""
    stop = found[4:6]
    stopped = await world.client.chat.completions.create(**ask, stop=[stop])
    tokens = whole.choices[0].logprobs.content if whole.choices[0].logprobs else None
    return {
        "holds": text == found
        and chunks[-1].usage == whole.usage
        and (not more or (tokens is not None and len(tokens) == whole.usage.completion_tokens))
        and stopped.choices[0].message.content == found[: found.index(stop)],
        "output_tokens": whole.usage.completion_tokens,
    }


async def bill(world: World) -> dict[str, Any]:
    """Compare what is billed for some requests with the increase of the server's counters."""
    await world.quiet()
    before = await world.figures()
    asked = [(f"a prompt of its own {i} " * (3 + i), 5 + 7 * i) for i in range(6)]
    answered = await asyncio.gather(
        *(
            world.client.completions.create(
                model=MODEL, prompt=prompt, max_tokens=most, extra_body={"service_tier": tier}
            )
            for (prompt, most), tier in zip(asked, ("auto", "flex", "default") * 2, strict=True)
        )
    )
    await world.quiet()
    after = await world.figures()
    rows = await world.rows_of({answer.id for answer in answered})
    billed = [sum(row[field] for row in rows) for field in ("prompt_tokens", "output_tokens")]
    counted = [
        after.prompt_tokens_total - before.prompt_tokens_total,
        after.output_tokens_total - before.output_tokens_total,
    ]
    usages = [answer.usage for answer in answered if answer.usage is not None]
    told = [
        sum(usage.prompt_tokens for usage in usages),
        sum(usage.completion_tokens for usage in usages),
    ]
    return {"holds": billed == counted == told, "billed": billed, "server_counted": counted}


async def disconnect(world: World) -> dict[str, Any]:
    """Return the seconds from a client's disconnect until the server is idle.

    For comparison, the same for a client of the server itself.
    """
    left_s, direct_s = [], []
    async with world.client_of_server() as direct:
        for _ in range(3):
            direct_s.append(await _leave(world, direct))
            known = len(await world.rows())
            left_s.append(await _leave(world, world.client))
            row = (await world.rows(known + 1))[0]
    return {
        "holds": max(left_s) <= LEFT_WITHIN_S and row["outcome"] == "disconnected",
        "ended_after_s": left_s,
        "without_gateway_s": direct_s,
        "billed_output_tokens": row["output_tokens"],
    }


async def _leave(world: World, client: openai.AsyncOpenAI) -> float:
    stream = await client.completions.create(**MUCH)
    num_chunks = 0
    async for _ in stream:
        num_chunks += 1
        if num_chunks == 8:
            break
    assert (await world.figures()).num_running == 1, "it runs until it is left"
    started = time.monotonic()
    await stream.close()
    await until(world.is_idle, 60, pause_s=0.01)
    return round(time.monotonic() - started, 3)


async def isolation(world: World) -> dict[str, Any]:
    """Return how much of one prompt the cache has for its own tenant, and for another.

    llama.cpp knows no tenants, so its cache is not used for anyone.
    """
    prompt = "a prompt that only one tenant has sent, long enough for some blocks of the cache; " * 8
    cached = []
    _, key = await make_tenant(world.admin, "another")
    async with world.client_of(key) as other:
        for client in (world.client, world.client, other):
            answer = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=2)
            details = answer.usage.prompt_tokens_details if answer.usage is not None else None
            cached.append((details.cached_tokens or 0) if details else 0)
    return {
        "holds": cached[0] == cached[2] == 0 and (cached[1] > 0) == (world.server.kind is ExternalKind.VLLM),
        "cached_tokens": dict(zip(("first", "again", "another_tenant"), cached, strict=True)),
    }


async def killed(world: World) -> dict[str, Any]:
    """Return what clients see when a server is killed with all its processes."""
    stream = await world.client.completions.create(**MUCH)
    code, killed_at = None, 0.0
    try:
        async for _ in stream:
            if not killed_at:
                killed_at = time.monotonic()
                os.killpg(world.server.process.pid, signal.SIGKILL)
    except openai.APIError as error:
        code = error.code
    lost_s = time.monotonic() - killed_at
    status = 200
    try:
        await world.client.completions.create(model=MODEL, prompt="hello", max_tokens=2)
    except openai.APIStatusError as error:
        status = error.status_code
    return {
        "holds": code == "engine_failed" and lost_s <= LOST_WITHIN_S and status == 503,
        "code": code,
        "told_after_s": round(lost_s, 3),
        "status_afterwards": status,
    }
