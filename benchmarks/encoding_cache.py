"""Effect of the encoding cache on conversations of agents: the gateway's processor time with and without it.

    python benchmarks/encoding_cache.py [--conversations 48] [--turns 12] [--words 30]

Two gateways run in turn as `moiety bench gateway` starts them, on one core with the scripted engine, keys, limits and
the ledger: one with the default `encoding_cache_bytes`, one with 0. Each conversation begins with the same
instructions of 400 words of its tenant (about 2,500 tokens), and every turn sends all earlier messages and a new one of
random words, up to about 7,000 tokens, since the scripted engine takes 8,192. The gateways get the same requests. The
figure is processor time per request of the gateway, all of its threads.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from random import Random
from typing import Any

from moiety_platform.bench.environment import describe_environment
from moiety_platform.bench.gateway import MODEL, RunningGateway, make_tenants, running
from moiety_platform.bench.report import percentile

HERE = Path(__file__).parent
SETTING = "MOIETY_ENCODING_CACHE_BYTES"
TENANTS, CONNECTIONS, SYSTEM_WORDS = 8, 4, 400
HEAD = (
    "POST /v1/chat/completions HTTP/1.1\r\nHost: moiety\r\nContent-Type: application/json\r\n"
    "Content-Length: {}\r\nAuthorization: Bearer {}\r\n\r\n"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=48)
    parser.add_argument("--turns", type=int, default=12, help="turns of each conversation")
    parser.add_argument("--words", type=int, default=30, help="words of each message after the first")
    parser.add_argument("--rounds", type=int, default=2, help="starts of each gateway")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "encoding_cache.json")
    options = parser.parse_args()
    runs = []
    for number in range(options.rounds):
        for name in ("cached", "uncached") if number % 2 else ("uncached", "cached"):
            runs.append({"gateway": name, **measure(options, name)})
            print(json.dumps(runs[-1]), flush=True)
    best = {
        name: min(run["cpu_us_per_request"] for run in runs if run["gateway"] == name)
        for name in ("cached", "uncached")
    }
    report = {
        "date": date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "environment": describe_environment() | {"load_average": os.getloadavg()},
        "runs": runs,
        "uncached_to_cached": round(best["uncached"] / best["cached"], 2),
    }
    options.output.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps({"uncached_to_cached": report["uncached_to_cached"]}))


def measure(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """Return the figures of one start of the gateway with or without its cache."""
    os.environ.pop(SETTING, None)
    if name == "uncached":
        os.environ[SETTING] = "0"
    with (
        tempfile.TemporaryDirectory(prefix="moiety-encoding-") as folder,
        running(Path(folder), traces=False) as gateway,
    ):
        return asyncio.run(load(gateway, options))


async def load(gateway: RunningGateway, options: argparse.Namespace) -> dict[str, Any]:
    keys = await make_tenants(gateway, TENANTS)
    await gateway.load(iter(list(requests(options, keys, 1))[:CONNECTIONS]), CONNECTIONS)  # what is done only once
    cpu_s = gateway.cpu_s
    tally = await gateway.load(requests(options, keys, 0), CONNECTIONS)
    cpu_s = gateway.cpu_s - cpu_s
    return {
        "requests": len(tally.latencies_s),
        "cpu_us_per_request": round(cpu_s / len(tally.latencies_s) * 1e6),
        "requests_per_s": round(tally.requests_per_s, 1),
        "latency_ms": {f"p{share}": round(percentile(tally.latencies_s, share) * 1000, 2) for share in (50, 99)},
    }


def requests(options: argparse.Namespace, keys: list[str], seed: int) -> Iterator[bytes]:
    """Yield the turns of all conversations, one turn of each after another."""
    rng = Random(seed)
    vocabulary = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randrange(2, 9))) for _ in range(5000)]

    def text(num_words: int) -> str:
        return " ".join(rng.choices(vocabulary, k=num_words))

    instructions = {key: {"role": "system", "content": text(SYSTEM_WORDS)} for key in keys}
    conversations = [
        (keys[number % len(keys)], [instructions[keys[number % len(keys)]]]) for number in range(options.conversations)
    ]
    for turn in range(options.turns):
        for key, messages in conversations:
            if turn:
                messages.append({"role": "assistant", "content": text(options.words)})
            messages.append({"role": "user", "content": text(options.words)})
            body = json.dumps({"model": MODEL, "messages": messages, "max_tokens": 8, "ignore_eos": True}).encode()
            yield HEAD.format(len(body), key).encode() + body


if __name__ == "__main__":
    main()
