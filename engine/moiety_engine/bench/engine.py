"""Benchmark behind `moiety bench engine`: random prompts, greedy sampling, every output at the requested length."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

from moiety_engine.bench.lengths import BenchLengths
from moiety_engine.config import EngineConfig
from moiety_engine.environment import environment
from moiety_engine.loop import EngineLoop
from moiety_engine.messages import CoreSubmit
from moiety_engine.offline import Result, run_all
from moiety_engine.offload.cache import ExpertCache
from moiety_engine.startup import load_loop
from moiety_huge_pages.process_memory import use_huge_pages_now
from moiety_wire.classes import BATCH
from moiety_wire.messages import Sampling

_FIRST_TOKEN_ID = 100  # after the special tokens of most vocabularies
_WARM_UP = 1 << 40  # keys of requests that are not measured


def measure(
    config: EngineConfig,
    lengths: list[BenchLengths],
    *,
    seed: int,
    on_load: Callable[[int, int], None],
    on_done: Callable[[int], None],
) -> dict[str, Any]:
    """Load the model, run all requests at once, and return the report.

    `ready_s` counts from the start of this process. `on_load` gets bytes read and total bytes, `on_done` the number of
    requests that have ended.
    """
    with load_loop(config, progress=on_load) as loop:
        return _measure(loop, config, lengths, seed, on_done)


def _measure(
    loop: EngineLoop, config: EngineConfig, lengths: list[BenchLengths], seed: int, on_done: Callable[[int], None]
) -> dict[str, Any]:
    loop.warm_up()
    gc.freeze()  # as in the core, like the next, which does it little by little there
    use_huge_pages_now()
    ready_s = time.time() - psutil.Process().create_time()
    rng = random.Random(seed)
    submits = [make_request(loop, key, one, rng) for key, one in enumerate(lengths)]
    run_all(loop, [make_request(loop, _WARM_UP, BenchLengths(min(32, lengths[0].input_tokens), 4), rng)])
    waste = _KvWaste(loop)

    def on_step(num_done: int) -> None:
        waste.sample()
        on_done(num_done)

    cache = loop.executor.model.expert_cache
    before = None if cache is None else asdict(cache.traffic)
    begin_s = time.perf_counter()
    results = run_all(loop, submits, on_step=on_step)
    wall_s = time.perf_counter() - begin_s
    output_tokens = sum(len(result.token_ids) for result in results.values())
    input_tokens = sum(one.input_tokens for one in lengths)
    finishes = [result.finish for result in results.values() if result.finish is not None]
    drafted = sum(finish.num_drafted_tokens for finish in finishes)
    accepted = sum(finish.num_accepted_tokens for finish in finishes)
    return {
        "environment": environment(loop),
        "settings": _settings(loop, config, lengths, output_tokens) | {"seed": seed},
        "ready_s": ready_s,
        "wall_s": wall_s,
        "steps": loop.steps_total,
        "output_tokens_per_s": output_tokens / wall_s,
        "total_tokens_per_s": (output_tokens + input_tokens) / wall_s,
        "ttft_ms": percentiles([(r.token_times_s[0] - r.submitted_s) * 1e3 for r in results.values()]),
        "tpot_ms": percentiles([gap for r in results.values() if (gap := _tpot_ms(r)) is not None]),
        "kv_waste_fraction": waste.fraction,
        "drafted_tokens": drafted,
        "accepted_tokens": accepted,
        "acceptance": accepted / drafted if drafted else None,
        "experts": None if cache is None or before is None else expert_traffic(cache, before, wall_s),
    }


def expert_traffic(cache: ExpertCache, before: dict[str, int], wall_s: float) -> dict[str, float | None]:
    """Return the traffic of the offloaded experts' cache since `before`."""
    traffic = {name.removesuffix("_total"): count - before[name] for name, count in asdict(cache.traffic).items()}
    num_queries = traffic["hits"] + traffic["misses"]
    return {
        "slots": cache.num_slots,
        "slot_bytes": cache.num_bytes,
        **traffic,
        "hit_rate": traffic["hits"] / num_queries if num_queries else None,
        "loaded_bytes_per_s": traffic["loaded_bytes"] / wall_s,
    }


def _settings(
    loop: EngineLoop, config: EngineConfig, lengths: list[BenchLengths], output_tokens: int
) -> dict[str, Any]:
    return {
        "model": config.name,
        "batching": str(config.batching),
        "num_prompts": len(lengths),
        "input_tokens_mean": sum(one.input_tokens for one in lengths) / len(lengths),
        "output_tokens_mean": output_tokens / len(lengths),
        "max_batch_tokens": loop.scheduler.limits.max_batch_tokens,
        "max_running": loop.scheduler.limits.max_running,
        "static_batch_size": config.static_batch_size,
        "block_size": loop.block_size,
        "kv_blocks": loop.scheduler.groups.num_blocks,
        "quantization": config.quantization,
        "load_format": str(config.load_format),
        "overlap": loop.executor.overlaps,
        "speculate": str(config.speculate),
        "speculate_tokens": config.speculate_tokens,
        "draft_model": Path(config.draft_model).name,
        "cuda_graphs": loop.executor.replays,
        "ranks": {
            name: getattr(config, name)
            for name in (
                *(
                    "tp",
                    "decode_context_parallel",
                    "prefill_context_parallel",
                    "dp_attention",
                    "ep",
                    "pp",
                    "pp_microbatches",
                    "ffn_ranks",
                    "micro_batches",
                    "micro_batch_tokens",
                ),
                *("expert_all2all", "two_batch_overlap"),
            )
        },
        "offload": msgspec.to_builtins(config.offload),
    }


def percentiles(values: list[float]) -> dict[str, float] | None:
    """Return {p50, p90, p99}, or None where there are no values."""
    if not values:
        return None
    return dict(zip(("p50", "p90", "p99"), np.percentile(values, [50, 90, 99]).tolist(), strict=True))


class _KvWaste:
    """KV slots allocated but unused, averaged over the saturated steps.

    A step is saturated if its batch was at least half as large as the largest one; the tail of a run, when the batch
    empties, says nothing about saturation.
    """

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._samples: list[tuple[int, int]] = []

    def sample(self) -> None:
        scheduler = self._loop.scheduler
        allocated, filled = scheduler.queues.kv_slots(scheduler.kv.block_size)
        if allocated:
            self._samples.append((allocated, filled))

    @property
    def fraction(self) -> float | None:
        if not self._samples:
            return None
        largest = max(allocated for allocated, _ in self._samples)
        saturated = [(a, f) for a, f in self._samples if a >= largest / 2]
        return 1 - sum(f for _, f in saturated) / sum(a for a, _ in saturated)


def make_request(loop: EngineLoop, key: int, lengths: BenchLengths, rng: random.Random) -> CoreSubmit:
    vocabulary = loop.executor.model.spec.vocab_size
    first = min(_FIRST_TOKEN_ID, vocabulary - 1)
    return CoreSubmit(
        key=key,
        tenant_id="bench",
        service=BATCH,
        prompt_ids=[rng.randrange(first, vocabulary) for _ in range(lengths.input_tokens)],
        sampling=Sampling(temperature=0.0),
        max_tokens=lengths.output_tokens,
        min_tokens=0,
        stop_token_ids=[],
        credit_tokens=lengths.output_tokens,
        cache_salt=b"bench",
        arrival_unix_ns=time.time_ns(),
    )


def _tpot_ms(result: Result) -> float | None:
    times = result.token_times_s
    return (times[-1] - times[0]) / (len(times) - 1) * 1e3 if len(times) > 1 else None
