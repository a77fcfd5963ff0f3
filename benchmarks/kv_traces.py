"""Traces of conversations in Mooncake's format, generated or cut from a published one, for the routing simulations."""

from __future__ import annotations

import json
import math
import random
import statistics
from itertools import count
from pathlib import Path
from typing import Any

from moiety_workload.readers import MOONCAKE_BLOCK_TOKENS
from moiety_workload.request import Workload

SYSTEM_BLOCKS, NUM_AGENTS = 40, 8
MAX_PROMPT_TOKENS = 100_000


def generate_trace(path: Path, trace: str, rate: float, seconds: float, seed: int = 0) -> None:
    """Write a trace in Mooncake's format: JSON lines with the hash ids of blocks of 512 tokens.

    Conversations begin at random; the next turn repeats the prompt and the answer before it, and comes after a pause of
    30 s on average. The time before 0 fills the process, so that the rate is even from the start.
    """
    rng, ids = random.Random(f"{trace} {seed}"), count(NUM_AGENTS * SYSTEM_BLOCKS)
    size, mean_turns, lead_s = MOONCAKE_BLOCK_TOKENS, 1.75, 120.0
    rows: list[dict[str, Any]] = []
    begin_s = -lead_s
    weights = [1 / (1 + agent) for agent in range(NUM_AGENTS)]
    while begin_s < seconds:
        begin_s += rng.expovariate(rate / mean_turns)
        blocks: list[int] = []
        if trace == "agents":
            (agent,) = rng.choices(range(NUM_AGENTS), weights)
            blocks = list(range(agent * SYSTEM_BLOCKS, (agent + 1) * SYSTEM_BLOCKS))
        num_tokens, at_s = len(blocks) * size, begin_s
        num_tokens += lognormal_tokens(rng, 9600, 1.0)
        while num_tokens <= MAX_PROMPT_TOKENS:
            blocks += [next(ids) for _ in range(math.ceil(num_tokens / size) - len(blocks))]
            output_tokens = lognormal_tokens(rng, 343, 0.8)
            if 0 <= at_s < seconds:
                row = {"timestamp": round(at_s * 1000), "input_length": num_tokens, "output_length": output_tokens}
                rows.append({**row, "hash_ids": list(blocks)})
            if rng.random() < 1 / mean_turns:
                break
            del blocks[num_tokens // size :]  # the last block is filled by the answer
            num_tokens += output_tokens + lognormal_tokens(rng, 3000, 1.0)
            at_s += output_tokens * 0.04 + rng.expovariate(1 / 30)
    rows.sort(key=lambda row: row["timestamp"])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_mooncake(source: Path, path: Path, rate: float, seconds: float, begin: float = 0.0) -> None:
    """Write the part of a published trace that arrives within `seconds` at a mean rate for the whole trace.

    `begin`: share of the trace's time before that part, in [0, 1). Raises ValueError if the trace ends within the part.
    """
    rows = [json.loads(line) for line in source.read_text().splitlines() if line.strip()]
    last_ms = rows[-1]["timestamp"]
    scale = len(rows) / rate / (last_ms / 1000)
    begin_ms = begin * last_ms * scale
    if begin_ms + seconds * 1000 > last_ms * scale:
        raise ValueError(f"the trace has less than {seconds:g} s after its first {begin:.0%} at {rate:g} requests/s")
    scaled = [row | {"timestamp": round(row["timestamp"] * scale - begin_ms)} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in scaled if 0 <= row["timestamp"] < seconds * 1000))


def lognormal_tokens(rng: random.Random, mean: float, sigma: float) -> int:
    """Return a random number of tokens with this mean, at least 16."""
    return max(16, round(rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)))


def describe_trace(workload: Workload) -> dict[str, float]:
    """Return the means of a trace, and the share of its prompt tokens that an unlimited cache would have had."""
    requests, seen, repeated = workload.requests, set[int](), 0
    for request in requests:
        for block in request.prefix_ids:
            if block not in seen:
                break
            repeated += MOONCAKE_BLOCK_TOKENS
        seen.update(request.prefix_ids)
    prompt_tokens = sum(request.input_tokens for request in requests)
    return {
        "requests": len(requests),
        "mean_input_tokens": round(prompt_tokens / len(requests)),
        "mean_output_tokens": round(statistics.fmean(request.output_tokens for request in requests)),
        "repeated_share": round(min(1.0, repeated / prompt_tokens), 3),
    }
