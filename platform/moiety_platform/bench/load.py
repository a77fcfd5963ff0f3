"""Open-loop load: requests are sent at the times of the trace, however slow the responses are."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from random import Random

import httpx

from moiety_platform.redaction import hide_url_passwords
from moiety_workload.request import TraceRequest

VOCABULARY_TEXT = (
    "The quick brown fox jumps over the lazy dog while nine wise owls watch from an old oak tree in May. " * 4
)
# other classes: the key's default
TIER_OF_CLASS = {"priority": "priority", "standard": "default", "flex": "flex", "batch": "flex"}


class TargetError(Exception):
    """The gateway cannot be measured; the message says why."""


@dataclass(frozen=True, slots=True)
class BenchTarget:
    """A running gateway. `keys` belong to tenants of the trace; the other tenants share `shared_keys`."""

    url: str
    keys: Mapping[str, str]
    shared_keys: Sequence[str]
    model: str
    token_ids: tuple[int, ...]  # of ordinary text, to make prompts from
    timeout_s: float

    def assign_keys(self, requests: Sequence[TraceRequest]) -> list[str]:
        """Return the key of each request. Every shared key is used if there are as many requests without own keys.

        With more tenants than shared keys, tenants share a key. With fewer, a tenant has several and uses them in turn.
        """
        others = dict.fromkeys(request.tenant for request in requests if request.tenant not in self.keys)
        step = min(len(others), len(self.shared_keys))
        turns = {tenant: cycle(self.shared_keys[index % step :: step]) for index, tenant in enumerate(others)}
        return [self.keys.get(request.tenant) or next(turns[request.tenant]) for request in requests]


@dataclass(slots=True)
class BenchAnswer:
    """Result of one request; times in seconds since the request was due."""

    request: TraceRequest
    late_s: float = 0.0  # delay of the send after its due time, caused by the load generator
    first_token_s: float | None = None
    last_token_s: float | None = None
    end_s: float = 0.0
    output_tokens: int = 0
    input_tokens: int = 0
    error: str | None = None  # a stable code; None if the request succeeded
    message: str = ""  # of the error, if the gateway gave one


async def find_target(
    url: str, keys: Mapping[str, str], shared_keys: Sequence[str], model: str | None, timeout_s: float
) -> BenchTarget:
    """Query the gateway's model and token ids and return the target. If `shared_keys` is empty, all keys are shared.

    Raises TargetError.
    """
    shared = list(shared_keys) or list(keys.values())
    key, shown_url = shared[0], hide_url_passwords(url)
    try:
        async with httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=10) as client:
            models = (await client.get("/v1/models")).raise_for_status().json()["data"]
            names = [entry["id"] for entry in models]
            chosen = model or (names[0] if names else None)
            if chosen is None or chosen not in names:
                raise TargetError(
                    f"{shown_url} serves {', '.join(names) or 'no model'}, not {chosen}; choose a served model with "
                    "--model"
                )
            body = {"model": chosen, "prompt": VOCABULARY_TEXT}
            tokens = (await client.post("/tokenize", json=body)).raise_for_status().json()["tokens"]
    except httpx.HTTPStatusError as exc:
        asked = hide_url_passwords(str(exc.request.url))
        raise TargetError(f"{asked} answered {exc.response.status_code}: {error_code(exc.response)}") from exc
    except httpx.HTTPError as exc:
        raise TargetError(
            f"{shown_url} does not answer ({type(exc).__name__}); check that the gateway is running, or give its "
            "address with --url"
        ) from exc
    return BenchTarget(url, keys, shared, chosen, tuple(tokens), timeout_s)


async def run_load(
    target: BenchTarget, requests: list[TraceRequest], rng: Random, on_end: Callable[[], None]
) -> list[BenchAnswer]:
    """Send every request at its time and wait for all answers; return them in arrival order."""
    keys = target.assign_keys(requests)
    bodies = [make_body(target, request, rng) for request in requests]
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    timeout = httpx.Timeout(target.timeout_s, connect=10)
    async with httpx.AsyncClient(base_url=target.url, limits=limits, timeout=timeout) as client:
        start = time.perf_counter()
        tasks = []
        for request, body, key in zip(requests, bodies, keys, strict=True):
            due = start + request.arrival_s
            delay = due - time.perf_counter()
            if delay > 0:
                await asyncio.sleep(delay)
            task = asyncio.create_task(send(client, request, body, key, due))
            task.add_done_callback(lambda _: on_end())
            tasks.append(task)
        return await asyncio.gather(*tasks)


def make_body(target: BenchTarget, request: TraceRequest, rng: Random) -> bytes:
    """Return a completion request with a prompt of exactly the trace's length, which no prefix cache contains."""
    body = {
        "model": target.model,
        "prompt": rng.choices(target.token_ids, k=request.input_tokens),
        "max_tokens": request.output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if request.service_class in TIER_OF_CLASS:
        body["service_tier"] = TIER_OF_CLASS[request.service_class]
    return json.dumps(body).encode()


async def send(client: httpx.AsyncClient, request: TraceRequest, body: bytes, key: str, due: float) -> BenchAnswer:
    answer = BenchAnswer(request, late_s=time.perf_counter() - due)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    try:
        async with client.stream("POST", "/v1/completions", content=body, headers=headers) as response:
            if response.status_code == httpx.codes.OK:
                await read_stream(response, answer, due)
            else:
                await response.aread()
                answer.error, answer.message = error_code(response), error_message(response)
    except httpx.TimeoutException:
        answer.error = "client_timeout"
    except httpx.HTTPError as exc:
        answer.error = f"client_{type(exc).__name__}"
    answer.end_s = time.perf_counter() - due
    return answer


async def read_stream(response: httpx.Response, answer: BenchAnswer, due: float) -> None:
    """Record the token times of a stream. A stream that ends without usage counts as broken off."""
    complete = False
    async for line in response.aiter_lines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        now_s = time.perf_counter() - due
        chunk = json.loads(line[6:])
        if "error" in chunk:
            answer.error = str(chunk["error"].get("code") or "stream_error")
            answer.message = str(chunk["error"].get("message") or "")
            return
        if usage := chunk.get("usage"):
            answer.output_tokens, answer.input_tokens = usage["completion_tokens"], usage["prompt_tokens"]
            complete = True
        if chunk.get("choices"):
            if answer.first_token_s is None:
                answer.first_token_s = now_s
            answer.last_token_s = now_s
    if not complete:
        answer.error = "stream_broken_off"


def error_code(response: httpx.Response) -> str:
    """Return the stable code in an error's body, or `http_` and the status if there is none."""
    try:
        return str(response.json()["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return f"http_{response.status_code}"


def error_message(response: httpx.Response) -> str:
    """Return the message in an error's body, or "" if there is none."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""
