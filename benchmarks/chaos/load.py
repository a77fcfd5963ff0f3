"""Steady load of all classes, streamed or not, partly aborted at a random byte, and each client's outcome.

Requests are sent when they are due, whatever happens to others. They go to a gateway that was ready at the last check,
as a load balancer would send them; a refused connection only costs another try.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import httpx
from cluster import call, make_tenant, set_limits

from chaos.stage import DEMO, NUM_GATEWAYS, SCRIPTED, Stage

CHECK_S, CHECK_LIMIT_S = 0.5, 1.0  # of the balancer
PATIENCE_S, CONNECT_S = 45.0, 2.0
LEAVING = 0.12  # of the streams
SLOS = {"priority": (2.0, 0.2), "standard": (4.0, 0.4)}  # seconds to the first token, and for each further one
SHARES = {"priority": 4, "standard": 6, "flex": 4, "batch": 2}  # tenants of each class, far from their limits
NUM_TIGHT = 12

Pace = Callable[[float], float]  # requests a second, by the seconds since the beginning


class Outcome(StrEnum):
    """Outcome of a request as its client saw it."""

    WHOLE = "whole"
    LEFT = "left"  # by the client, in the middle
    REFUSED = "refused"  # 4xx, or 503 that says when to come back
    FAILED = "failed"  # 5xx without that
    CUT = "cut"  # an answer that began and did not come to its end
    NO_ANSWER = "no_answer"  # the connection broke, or nothing came in time
    UNREACHABLE = "unreachable"  # no gateway took the connection


@dataclass(frozen=True, slots=True)
class Tenant:
    name: str
    key: str
    ids: dict[str, str]  # by level
    service: str
    limits: dict[tuple[str, str], int] = field(default_factory=dict)  # by level and kind


@dataclass(slots=True)
class Asked:
    """One request as its client saw it. Moments are monotonic."""

    request_id: str
    tenant: Tenant
    model: str
    streams: bool
    due_s: float
    gateway: int | None = None
    sent_s: float = 0.0
    first_s: float | None = None  # the answer's first byte of content
    end_s: float = 0.0
    status: int = 0
    code: str = ""
    retry_after: bool = False
    outcome: Outcome = Outcome.NO_ANSWER
    answer_id: str = ""
    output_tokens: int = 0
    wrong_text: bool = False

    @property
    def kept(self) -> bool:
        """Return whether the request attained its class's SLO, counted from when it was due."""
        first_s, each_s = SLOS[self.tenant.service]
        if self.outcome is not Outcome.WHOLE:
            return False
        on_time = not self.streams or (self.first_s is not None and self.first_s - self.due_s <= first_s)
        return on_time and self.end_s - self.due_s <= first_s + each_s * max(0, self.output_tokens - 1)

    @property
    def suffered(self) -> bool:
        """Return whether the outcome is not explained by its tenant's limits and its own client."""
        if self.outcome is Outcome.REFUSED:
            return self.status >= 500 or not self.tenant.limits
        return self.outcome not in (Outcome.WHOLE, Outcome.LEFT)


async def make_tenants(
    client: httpx.AsyncClient, rng: random.Random, shares: Mapping[str, int] = SHARES, num_tight: int = NUM_TIGHT
) -> list[Tenant]:
    """Create tenants of each class, and some that are near to limits of every kind."""
    for name, (first_s, each_s) in SLOS.items():
        await call(client, "PATCH", f"/classes/{name}", {"ttft_s": first_s, "tpot_s": each_s})
    for model in (SCRIPTED, DEMO):
        await call(
            client, "PUT", "/prices", {"model": model, "input": "0.15", "cached_input": "0.075", "output": "0.6"}
        )
    tenants = []
    for service, number in shares.items():
        for name in (f"{service}-{n}" for n in range(number)):
            ids, key = await make_tenant(client, name)
            await call(client, "PATCH", f"/tenants/{ids['tenant']}", {"service_class": service})
            tenants.append(Tenant(name, key, ids, service))
    for number in range(num_tight):
        ids, key = await make_tenant(client, f"tight-{number}")
        limits = _tight(rng)
        await set_limits(client, ids, [(level, kind, cap) for (level, kind), cap in limits.items()])
        tenants.append(Tenant(f"tight-{number}", key, ids, "standard", limits))
    return tenants


def _tight(rng: random.Random) -> dict[tuple[str, str], int]:
    return {
        ("tenant", "tokens_per_day"): rng.randint(4_000, 40_000),
        ("tenant", "tokens_per_month"): rng.randint(8_000, 50_000),
        ("tenant", "tokens_per_minute"): rng.randint(600, 3_000),
        ("project", "requests_per_minute"): rng.randint(8, 40),
        ("project", "money_per_month"): rng.randint(2_000_000, 25_000_000),
        ("key", "money_per_day"): rng.randint(1_000_000, 15_000_000),
        ("key", "concurrent_requests"): rng.randint(1, 3),
    }


class Balancer:
    """Load balancer that knows which gateways were ready at the last check."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._ready = [True] * NUM_GATEWAYS

    async def watch(self) -> None:
        async with httpx.AsyncClient(timeout=CHECK_LIMIT_S) as client:
            await asyncio.gather(*(self._check(client, number) for number in range(NUM_GATEWAYS)))

    async def _check(self, client: httpx.AsyncClient, number: int) -> None:
        while True:
            try:
                ready = (await client.get(f"{self._stage.url(number)}/readyz")).status_code == httpx.codes.OK
            except httpx.HTTPError:
                ready = False
            self._ready[number] = ready
            await asyncio.sleep(CHECK_S)

    def order(self, rng: random.Random) -> list[int]:
        """Return the gateways to try, in order; all gateways if none seems ready."""
        numbers = [number for number, ready in enumerate(self._ready) if ready] or list(range(NUM_GATEWAYS))
        rng.shuffle(numbers)
        return numbers


class Load:
    """Sender of requests at a given rate, and their outcomes.

    The rate may change with the seconds since the start. `lengths` of prompts and answers are drawn from; `keyed` is
    the share of requests with an Idempotency-Key. The load ends after `most`; with `most_open` a due request waits
    until the number of open ones is below it, so that an unsustainable rate is not kept up.
    """

    def __init__(
        self,
        stage: Stage,
        tenants: Sequence[Tenant],
        seed: int,
        *,
        lengths: Sequence[tuple[int, int]] = (),
        keyed: float = 0.0,
        most: int = sys.maxsize,
        most_open: int = sys.maxsize,
    ) -> None:
        self.asked: list[Asked] = []
        self._lengths, self._keyed = lengths, keyed
        self._most, self._most_open = most, most_open
        self._stage, self._rng = stage, random.Random(seed)
        self._roomy = [one for one in tenants if not one.limits]
        self._tight = [one for one in tenants if one.limits]
        self._balancer = Balancer(stage)
        self._open: set[asyncio.Task[None]] = set()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
        self._client = httpx.AsyncClient(timeout=httpx.Timeout(PATIENCE_S, connect=CONNECT_S), limits=limits)

    async def run(self, pace: Pace, demo_rate: float, stopping: asyncio.Event) -> None:
        """Send until the load is stopped; then wait for all open requests."""
        watching = asyncio.create_task(self._balancer.watch())
        try:
            models = [(SCRIPTED, pace)]
            if self._stage.demo and demo_rate:
                models.append((DEMO, lambda _: demo_rate))
            await asyncio.gather(*(self._send_all(model, each, stopping) for model, each in models))
            while self._open:
                await asyncio.wait(self._open)
        finally:
            watching.cancel()
            await self._client.aclose()

    async def _send_all(self, model: str, pace: Pace, stopping: asyncio.Event) -> None:
        due_s = begin_s = time.monotonic()
        while not stopping.is_set() and len(self.asked) < self._most:
            due_s += self._rng.expovariate(pace(due_s - begin_s))
            await asyncio.sleep(due_s - time.monotonic())
            while len(self._open) >= self._most_open:
                await asyncio.wait(self._open, return_when=asyncio.FIRST_COMPLETED)
                due_s = time.monotonic()
            is_tight = model == SCRIPTED and self._rng.random() < 0.3
            tenant = self._rng.choice(self._tight if is_tight else self._roomy)
            name = f"c-{len(self.asked)}-{self._rng.randrange(1 << 40):x}"
            one = Asked(name, tenant, model, streams=self._rng.random() < 0.7, due_s=due_s)
            self.asked.append(one)
            task = asyncio.create_task(self._ask(one))
            self._open.add(task)
            task.add_done_callback(self._open.discard)

    async def _ask(self, one: Asked) -> None:
        rng, is_chat = self._rng, self._rng.random() < 0.5
        num_input, num_output = (
            rng.choice(self._lengths) if self._lengths else (rng.randint(8, 200), rng.randint(4, 160))
        )
        prompt = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=num_input))
        num_output = rng.randint(4, 24) if one.model == DEMO else num_output
        body: dict[str, Any] = {"model": one.model, "max_tokens": num_output, "ignore_eos": True, "temperature": 0}
        body |= {"messages": [{"role": "user", "content": prompt}]} if is_chat else {"prompt": prompt}
        if one.streams:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        leaves_after = rng.randint(0, 12_000) if one.streams and rng.random() < LEAVING else None
        path = "/v1/chat/completions" if is_chat else "/v1/completions"
        headers = {"Authorization": f"Bearer {one.tenant.key}", "X-Request-Id": one.request_id}
        if rng.random() < self._keyed:
            headers["Idempotency-Key"] = one.request_id
        one.outcome = Outcome.UNREACHABLE
        for number in self._balancer.order(rng):
            one.gateway, one.sent_s = number, time.monotonic()
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await self._exchange(one, f"{self._stage.url(number)}{path}", body, headers, leaves_after)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                continue
            except (TimeoutError, httpx.HTTPError):
                one.outcome = Outcome.CUT if one.status == httpx.codes.OK else Outcome.NO_ANSWER
            break
        one.end_s = time.monotonic()

    async def _exchange(
        self, one: Asked, url: str, body: dict[str, Any], headers: dict[str, str], leaves_after: int | None
    ) -> None:
        async with self._client.stream("POST", url, json=body, headers=headers) as response:
            one.status, one.retry_after = response.status_code, "retry-after" in response.headers
            received = bytearray()
            async for data in response.aiter_raw():
                if one.first_s is None:
                    one.first_s = time.monotonic()
                received += data
                if leaves_after is not None and len(received) >= leaves_after:
                    one.outcome = Outcome.LEFT
                    break
        _read(one, bytes(received), body.get("prompt", ""))


def _read(one: Asked, received: bytes, prompt: str) -> None:
    """Read an answer, or the part of it that arrives."""
    if one.status != httpx.codes.OK:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            one.code = str(json.loads(received)["error"]["code"])
        came_back = one.status < 500 or one.retry_after
        one.outcome = Outcome.REFUSED if came_back else Outcome.FAILED
        return
    events: list[dict[str, Any]] = []
    if one.streams:
        parts = received.split(b"\n\n")[:-1]  # the last may be half an event
        lines = [part[6:] for part in parts if part.startswith(b"data: {")]
        events = [json.loads(line) for line in lines]
        is_whole = b"data: [DONE]" in parts
    else:
        events, is_whole = [json.loads(received)], True
    for event in events:
        one.answer_id = event.get("id") or one.answer_id
        one.output_tokens = (event.get("usage") or {}).get("completion_tokens", one.output_tokens)
        if "error" in event:
            one.code, is_whole = str(event["error"].get("code")), False
    if one.outcome is not Outcome.LEFT:
        one.outcome = Outcome.WHOLE if is_whole else Outcome.CUT
    if prompt and one.model == SCRIPTED:  # which answers with the prompt's own characters, again and again
        text = "".join(choice.get("text", "") for event in events for choice in event.get("choices", ()))
        one.wrong_text = text != (prompt * (len(text) // len(prompt) + 1))[: len(text)]
