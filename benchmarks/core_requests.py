"""Requests that the engine's benchmarks submit to a loop in their own process."""

from __future__ import annotations

from moiety_engine.messages import CoreSubmit
from moiety_wire.classes import BATCH
from moiety_wire.messages import Sampling


def batch_request(key: int, prompt_ids: list[int], num_tokens: int, sampling: Sampling) -> CoreSubmit:
    """Return a request of the class `batch` for at most `num_tokens` tokens, with credit for all of them."""
    return CoreSubmit(
        key=key,
        tenant_id="bench",
        service=BATCH,
        prompt_ids=prompt_ids,
        sampling=sampling,
        max_tokens=num_tokens,
        min_tokens=0,
        stop_token_ids=[],
        credit_tokens=num_tokens,
        cache_salt=b"bench",
        arrival_unix_ns=0,
    )


def greedy_request(key: int, num_prompt: int, num_tokens: int, vocab_size: int) -> CoreSubmit:
    """Return a greedy request with a prompt of its own of `num_prompt` tokens, which ends after `num_tokens` tokens."""
    prompt = [5 + (key * 131 + i * 17 + i * i * (key + 3)) % (vocab_size - 5) for i in range(num_prompt)]
    return CoreSubmit(key, "t", BATCH, prompt, Sampling(temperature=0.0), num_tokens, 0, [], num_tokens, b"s", 0)
