"""Batch-invariance check of `gpu_engine.py`: finds requests whose bits in a batch differ from their bits alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moiety_engine.config import PolicyName
from moiety_engine.loop import EngineLoop
from moiety_engine.messages import CoreSubmit
from moiety_engine.offline import run_all
from moiety_wire.classes import BATCH
from moiety_wire.messages import Sampling

OUTPUTS = 32
LENGTHS = (1, 7, 40, 129, 300, 513, 700, 31, 64, 90, 15, 16, 17, 250, 5, 77)  # of prompts


def submits(vocab_size: int) -> list[CoreSubmit]:
    """Return the requests, half of them greedy, half sampled; all with log-probabilities."""
    return [
        CoreSubmit(
            key, "t", BATCH, [(17 * key + 7 * i) % vocab_size for i in range(length)],
            Sampling(temperature=0.9 * (key % 2), seed=key, num_logprobs=1), OUTPUTS, 0, [], OUTPUTS, b"%d" % key, 0,
        )
        for key, length in enumerate(LENGTHS)
    ]  # fmt: skip


def answers(loop: EngineLoop, asked: list[CoreSubmit]) -> tuple[dict[int, Any], int]:
    """Return tokens and log-probabilities of each request, and the number of tokens recomputed after preemptions."""
    results = run_all(loop, asked)
    again = sum(one.finish.num_recomputed_tokens for one in results.values() if one.finish)
    return {key: (one.token_ids, [p.logprob for p in one.logprobs]) for key, one in results.items()}, again


def differing(make_loop: Callable[..., EngineLoop]) -> tuple[dict[str, list[int]], int]:
    """Return, for each way of running the requests, those whose results differ from their results alone in any bit.

    Also returns the number of recomputed tokens if memory is short. `make_loop` takes an engine's settings.
    """
    loop = make_loop(max_running=16, max_batch_tokens=2048, kv_memory_bytes=256 << 20, prefix_caching=False)
    asked = submits(loop.executor.model.spec.vocab_size)
    alone: dict[int, Any] = {}
    for one in asked:
        alone |= answers(loop, [one])[0]
    block_bytes, block_size = loop.executor.model.kv_bytes_per_block(loop.block_size), loop.block_size
    longest = max(LENGTHS) + OUTPUTS
    short = 2 * -(-longest // block_size) * block_bytes  # for the two longest at most
    del loop
    ways: dict[str, dict[str, Any]] = {
        "together": {"max_batch_tokens": 2048},
        "cut": {"max_batch_tokens": 96},
        "launched": {"max_batch_tokens": 2048, "cuda_graphs": False},
        "short of memory": {
            "max_batch_tokens": 512, "kv_memory_bytes": short, "max_context_tokens": longest, "prefix_caching": False,
            "policy": PolicyName.FCFS,  # the others prefetch what memory will not hold, and begin less
        },
    }  # fmt: skip
    found = {}
    for name, settings in ways.items():
        loop = make_loop(**({"max_running": 16, "kv_memory_bytes": 256 << 20} | settings))
        got, again = answers(loop, asked)
        found[name] = [key for key, one in got.items() if one != alone[key]]
        del loop
    return found, again
