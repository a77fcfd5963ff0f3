"""Two hundred malformed bodies against the whole server: a 4xx in OpenAI's shape each, and one usage row each."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MODEL = "moiety-demo"
NUM_BODIES = 200
DEADLINE_S = 120
Make = Callable[[random.Random], bytes]


def raw(body: bytes) -> Make:
    return lambda _: body


def chat(**fields: Any) -> Make:
    return _with({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}, fields)


def completion(**fields: Any) -> Make:
    return _with({"model": MODEL, "prompt": "hi", "max_tokens": 2}, fields)


def _with(good: dict[str, Any], fields: dict[str, Any]) -> Make:
    """One fault in an otherwise good body, whose rest varies: streamed or not, the order of its fields, its spaces."""

    def make(rng: random.Random) -> bytes:
        body = {**good, "stream": rng.random() < 0.5, "user": "ü" * rng.randrange(9), **fields}
        items = list(body.items())
        rng.shuffle(items)
        return json.dumps(dict(items), indent=rng.choice([None, 1]), ensure_ascii=rng.random() < 0.5).encode()

    return make


def message(**fields: Any) -> Make:
    return chat(messages=[{"role": "user", "content": "hi"}, fields])


def cut(rng: random.Random) -> bytes:
    whole = chat()(rng)
    return whole[: rng.randrange(1, len(whole) - 1)]


def noise(rng: random.Random) -> bytes:
    return b"\xff" + rng.randbytes(rng.randrange(1, 4000))


def latin(rng: random.Random) -> bytes:
    return chat(messages=[{"role": "user", "content": "PLACE"}])(rng).replace(
        b"PLACE", bytes([rng.randrange(128, 256)])
    )


def unpaired_surrogate(rng: random.Random) -> bytes:
    return chat(messages=[{"role": "user", "content": "PLACE"}])(rng).replace(
        b"PLACE", b"\\udc%02x" % rng.randrange(256)
    )


def bare(value: bytes, name: str) -> Make:
    return lambda rng: chat(**{name: "PLACE"})(rng).replace(b'"PLACE"', value)


def megabytes(filler: bytes) -> Make:
    return lambda rng: b'{"model": "moiety-demo", "pad": "' + filler * (10_000_000 // len(filler)) + b'"}'


def nested(opening: bytes, closing: bytes) -> Make:
    def make(rng: random.Random) -> bytes:
        depth = rng.choice([1_000, 50_000, 200_000])
        return b'{"model": "moiety-demo", "messages": ' + opening * depth + b"1" + closing * depth + b"}"

    return make


KINDS: dict[str, tuple[str, Make]] = {
    "empty": (CHAT, raw(b"")),
    "cut short": (CHAT, cut),
    "trailing comma": (CHAT, raw(b'{"model": "moiety-demo",}')),
    "two documents": (CHAT, lambda rng: chat()(rng) + chat()(rng)),
    "no object but a list": (CHAT, raw(b"[]")),
    "no object but null": (COMPLETIONS, raw(b"null")),
    "no object but a text": (CHAT, raw(b'"hello"')),
    "no object but a number": (COMPLETIONS, raw(b"-1")),
    "a form": (CHAT, raw(b"model=moiety-demo&messages=hi")),
    "noise": (CHAT, noise),
    "latin-1": (CHAT, latin),
    "UTF-16": (CHAT, lambda rng: chat()(rng).decode().encode("utf-16")),
    "an unpaired surrogate": (CHAT, unpaired_surrogate),
    "10 MB of text": (CHAT, megabytes(b"a")),
    "10 MB of brackets in a text": (COMPLETIONS, megabytes(b"[{")),
    "10 MB that never end": (CHAT, lambda rng: b'{"model": "' + b"x" * 10_000_000),
    "10 MB of one number": (COMPLETIONS, lambda rng: b'{"max_tokens": ' + b"9" * 10_000_000 + b"}"),
    "nested lists": (CHAT, nested(b"[", b"]")),
    "nested objects": (COMPLETIONS, nested(b'{"a":', b"}")),
    "nested without end": (CHAT, nested(b"[", b"")),
    "no model": (CHAT, raw(b'{"messages": [{"role": "user", "content": "hi"}]}')),
    "model a number": (CHAT, chat(model=7)),
    "model null": (COMPLETIONS, completion(model=None)),
    "unknown model": (COMPLETIONS, completion(model="another")),
    "model an escape out of a folder": (CHAT, chat(model="../../etc/passwd")),
    "no messages": (CHAT, raw(b'{"model": "moiety-demo"}')),
    "empty messages": (CHAT, chat(messages=[])),
    "messages a text": (CHAT, chat(messages="hi")),
    "messages an object": (CHAT, chat(messages={"role": "user", "content": "hi"})),
    "messages of numbers": (CHAT, chat(messages=[1, 2, 3])),
    "messages of nulls": (CHAT, chat(messages=[None])),
    "unknown role": (CHAT, message(role="wizard", content="hi")),
    "role an object": (CHAT, message(role={"name": "user"}, content="hi")),
    "no role": (CHAT, message(content="hi")),
    "no content": (CHAT, message(role="user")),
    "content a number": (CHAT, message(role="user", content=42)),
    "content of unknown parts": (CHAT, message(role="user", content=[{"type": "hologram"}])),
    "content of an image": (CHAT, message(role="user", content=[{"type": "image_url", "image_url": {"url": "x"}}])),
    "negative max_tokens": (CHAT, chat(max_tokens=-1)),
    "max_tokens a list": (COMPLETIONS, completion(max_tokens=[])),
    "max_tokens a text": (CHAT, chat(max_tokens="two")),
    "max_tokens a fraction": (COMPLETIONS, completion(max_tokens=1.5)),
    "max_tokens true": (CHAT, chat(max_tokens=True)),
    "max_tokens beyond the context": (COMPLETIONS, completion(max_tokens=10_000_000)),
    "max_tokens beyond 64 bits": (CHAT, chat(max_tokens=2**70)),
    "negative min_tokens": (CHAT, chat(min_tokens=-3)),
    "negative temperature": (CHAT, chat(temperature=-0.5)),
    "temperature NaN": (COMPLETIONS, bare(b"NaN", "temperature")),
    "temperature infinite": (CHAT, bare(b"-Infinity", "temperature")),
    "temperature overflowing": (CHAT, bare(b"1e400", "temperature")),
    "temperature a list": (COMPLETIONS, completion(temperature=[1])),
    "top_p negative": (CHAT, chat(top_p=-1)),
    "top_p above one": (COMPLETIONS, completion(top_p=1.01)),
    "top_k negative": (CHAT, chat(top_k=-7)),
    "min_p above one": (CHAT, chat(min_p=2)),
    "penalty out of range": (CHAT, chat(frequency_penalty=-99)),
    "repetition penalty negative": (CHAT, chat(repetition_penalty=-1)),
    "seed beyond 64 bits": (CHAT, chat(seed=-(2**70))),
    "seed a text": (COMPLETIONS, completion(seed="lucky")),
    "negative n": (CHAT, chat(n=-1)),
    "n without end": (COMPLETIONS, completion(n=10_000)),
    "stop of numbers": (CHAT, chat(stop=[1])),
    "stop empty": (COMPLETIONS, completion(stop=[""])),
    "stop without end": (CHAT, chat(stop=["x"] * 1000)),
    "stop ids out of range": (CHAT, chat(stop_token_ids=[-1])),
    "logit bias of words": (CHAT, chat(logit_bias={"hello": 1})),
    "logit bias out of range": (CHAT, chat(logit_bias={"5": -1000})),
    "logit bias beyond the vocabulary": (COMPLETIONS, completion(logit_bias={"99999999": 1})),
    "logprobs negative": (COMPLETIONS, completion(logprobs=-1)),
    "top_logprobs too many": (CHAT, chat(logprobs=True, top_logprobs=1000)),
    "stream a text": (CHAT, chat(stream="yes")),
    "stream options a list": (CHAT, chat(stream=True, stream_options=[])),
    "service tier unknown": (CHAT, chat(service_tier="gold")),
    "service tier a number": (CHAT, chat(service_tier=1)),
    "empty prompt": (COMPLETIONS, completion(prompt="")),
    "prompt null": (COMPLETIONS, completion(prompt=[None])),
    "prompt of both kinds": (COMPLETIONS, completion(prompt=["a", 5])),
    "prompt ids negative": (COMPLETIONS, completion(prompt=[5, -5])),
    "prompt ids beyond the vocabulary": (COMPLETIONS, completion(prompt=[10**9])),
    "prompt lists in lists": (COMPLETIONS, completion(prompt=[[[5]]])),
    "prompt ids too many": (COMPLETIONS, completion(prompt=[5] * 5000)),
    "prompt text too long": (COMPLETIONS, completion(prompt="word " * 100_000)),
    "prompts too many": (COMPLETIONS, completion(prompt=["x"] * 5000)),
    "chat too long": (CHAT, message(role="user", content="word " * 100_000)),
}


def test_two_hundred_malformed_bodies_are_refused_and_harm_nothing(server: Any, account: Any) -> None:
    assert server.model == MODEL and len(KINDS) >= 40
    names = [list(KINDS)[number % len(KINDS)] for number in range(NUM_BODIES)]
    seen: Counter[str] = Counter()
    faults: list[str] = []

    def send(client: httpx.Client, number: int) -> str:
        """Return what is wrong with the answer; empty if nothing is."""
        path, make = KINDS[names[number]]
        try:
            answer = client.post(path, content=make(random.Random(number)))
        except httpx.TransportError as failure:
            return f"no answer: {failure!r}"
        seen[str(answer.status_code)] += 1
        if not 400 <= answer.status_code < 500:
            return f"{answer.status_code}: {answer.text[:200]}"
        error = answer.json().get("error", {})
        whole = set(error) == {"message", "type", "param", "code"} and all(
            isinstance(error[name], str) and error[name] for name in ("message", "type", "code")
        )
        return "" if whole else f"not OpenAI's shape: {answer.text[:200]}"

    with (
        httpx.Client(base_url=server.url, headers=account.headers, timeout=DEADLINE_S) as client,
        ThreadPoolExecutor(4) as pool,
    ):
        results = pool.map(lambda number: send(client, number), range(NUM_BODIES))
        for name, fault in zip(names, results, strict=True):
            if fault:
                faults.append(f"{name}: {fault}")
    assert not faults, "\n".join([*faults, repr(seen)])

    rows = account.settled_rows(NUM_BODIES)
    assert {row["outcome"] for row in rows} == {"rejected"}
    assert Counter(str(row["http_status"]) for row in rows) == seen
    assert sum(row["output_tokens"] for row in rows) == 0


def test_malformed_requests_for_tokens_are_refused_too(server: Any, account: Any) -> None:
    rng = random.Random(7)
    with httpx.Client(base_url=server.url, headers=account.headers, timeout=DEADLINE_S) as client:
        for path in ("/tokenize", "/detokenize"):
            for body in (b"", b"[]", b"{", noise(rng), b'{"prompt": 7}', b'{"tokens": [-1]}', nested(b"[", b"]")(rng)):
                answer = client.post(path, content=body)
                assert answer.status_code in range(400, 500), (path, body[:80], answer.text)
                assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "parameters",
    [
        {"limit": -1},
        {"limit": "x"},
        {"limit": 10**9},
        {"cursor": "nonsense"},
        {"cursor": "é"},
        {"since": "yesterday"},
        {"since": "99999-01-01"},
        {"since": "0001-01-01T00:00:00+14:00"},
        {"until": "9999-12-31T23:59:59-14:00"},
        {"key_id": "\0"},
    ],
    ids=repr,
)
def test_malformed_questions_to_the_admin_api_are_refused(server: Any, parameters: dict[str, Any]) -> None:
    answer = server.admin.get("/admin/v1/usage/requests", params=parameters)
    assert answer.status_code in range(400, 500), answer.text
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b"\xff",
        b'{"name": 7}',
        b'{"name": "\\u0000"}',
        b'{"name": "a", "weight": NaN}',
        b'{"name": "a", "weight": -1}',
        b"[" * 100_000,
        b'{"name":' * 100_000 + b"1" + b"}" * 100_000,
        b" " * 10_000_000,
    ],
    ids=lambda body: f"{body[:24]!r} of {len(body)}",
)
def test_malformed_orders_to_the_admin_api_are_refused(server: Any, body: bytes) -> None:
    answer = server.admin.post("/admin/v1/tenants", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code in range(400, 500), answer.text
    assert answer.json()["error"]["message"]


def test_clients_cannot_fill_the_metrics_with_names_of_their_own(server: Any, account: Any) -> None:
    for number in range(20):
        body = {"model": f"made-up-{number}", "prompt": "hi", "service_tier": "auto", "user": f"made-up-{number}"}
        assert account.post(COMPLETIONS, body).status_code == 404
    account.settled_rows(20)
    assert "made-up" not in server.admin.get("/metrics").text
