"""Batching strategies against each other on a GPU, and the number of requests that fit in a memory size."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gpu_loops import Bench, Report, requests

from moiety_engine.bench.engine import percentiles
from moiety_engine.bench.lengths import BenchLengths
from moiety_engine.offline import run_all
from moiety_wire.engine_choices import Batching

STATIC_TARGET, NONE_TARGET, FP8_TARGET, WASTE_TARGET, CROWD_TARGET = 2.3, 9.3, 2.3, 0.05, 2.0
BATCH = 64
# Quantiles of the Azure LLM inference trace 2023, conversations (CC-BY-4.0). Of 64 answers the longest is what a batch
# waits for, so the last sixteenth is told apart further: means and that maximum are within 2 % of the trace's.
AZURE_AT = [*(k / 16 for k in range(16)), *(1 - 0.5**k for k in range(5, 11)), 1.0]
AZURE_INPUTS = [
    2, 194, 235, 383, 396, 405, 428, 966, 1020, 1052, 1083, 1120, 1189, 1335, 2309, 4079,
    4089, 4107, 4162, 5035, 5652, 6212, 14050,
]  # fmt: skip
AZURE_OUTPUTS = [
    7, 45, 60, 75, 85, 92, 99, 110, 129, 157, 195, 377, 395, 402, 416, 440, 502, 568, 615, 659, 918, 954, 1000,
]  # fmt: skip


def azure_lengths(count: int, scale: float) -> list[BenchLengths]:
    rng = np.random.default_rng(1)
    inputs = np.interp(rng.random(count), AZURE_AT, AZURE_INPUTS) * scale
    outputs = np.interp(rng.random(count), AZURE_AT, AZURE_OUTPUTS) * scale
    return [BenchLengths(max(1, int(i)), max(1, int(o))) for i, o in zip(inputs, outputs, strict=True)]


def measure_strategy(bench: Bench, batching: Batching, lengths: list[BenchLengths]) -> dict[str, Any]:
    """Measure after an untimed warm-up with some of the same requests, so that compilation is not counted."""
    loop = bench.loop(batching=batching, max_running=BATCH, static_batch_size=BATCH, prefix_caching=False)
    run_all(loop, requests(loop, lengths[: -(-len(lengths) // 12)]))
    slots: list[tuple[int, int]] = []
    begin_s = time.perf_counter()
    queues, block_size = loop.scheduler.queues, loop.scheduler.kv.block_size
    results = run_all(loop, requests(loop, lengths), on_step=lambda _: slots.append(queues.kv_slots(block_size)))
    wall_s = time.perf_counter() - begin_s
    most = max(allocated for allocated, _ in slots)
    full = [(allocated, filled) for allocated, filled in slots if allocated >= most / 2]
    return {
        "prompts": len(lengths),
        "output_tokens_per_s": sum(len(result.token_ids) for result in results.values()) / wall_s,
        "kv_waste_fraction": 1 - sum(filled for _, filled in full) / sum(allocated for allocated, _ in full),
        "ttft_ms": percentiles([(r.token_times_s[0] - r.submitted_s) * 1e3 for r in results.values()]),
    }


def measure_strategies(
    report: Report, bench: Bench, left_s: Callable[[], float], num_prompts: int, scale: float
) -> dict[str, dict[str, Any]]:
    """Return the measured figures by strategy."""
    found: dict[str, dict[str, Any]] = {}
    for batching, count in ((Batching.CONTINUOUS, num_prompts), (Batching.NONE, 3), (Batching.STATIC, num_prompts)):
        if left_s() < 15:
            report.figure("strategies_left_out", f"{batching} and what follows: no time")
            break
        found[batching.value] = measure_strategy(bench, batching, azure_lengths(count, scale))
        report.figure("strategies", found)
    continuous = found.get("continuous")
    if continuous is None or not torch.cuda.is_available():
        return found
    for name, target in (("static", STATIC_TARGET), ("none", NONE_TARGET)):
        if name in found:
            ratio = continuous["output_tokens_per_s"] / found[name]["output_tokens_per_s"]
            report.check(f"continuous against {name}", ratio >= target, target=target, ratio=ratio)
    waste = continuous["kv_waste_fraction"]
    report.check("KV waste", waste < WASTE_TARGET, target=WASTE_TARGET, fraction=waste)
    return found


def measure_fp8(report: Report, bench: Bench, static: dict[str, Any] | None, num_prompts: int, scale: float) -> None:
    """Measure continuous batching with float8 weights against the other model's static batching in bfloat16."""
    found = measure_strategy(bench, Batching.CONTINUOUS, azure_lengths(num_prompts, scale))
    report.figure("fp8_continuous", found)
    if static is not None and torch.cuda.is_available():
        ratio = found["output_tokens_per_s"] / static["output_tokens_per_s"]
        report.check("fp8 continuous against bf16 static", ratio >= FP8_TARGET, target=FP8_TARGET, ratio=ratio)


def check_crowd(report: Report, bench: Bench, preallocated: int, num_prompts: int, scale: float) -> None:
    """Measure how many requests run at once in the memory of `preallocated` requests of the longest length."""
    longest = int(bench.shape["max_position_embeddings"])
    model = bench.model or bench.loop(max_running=1).executor.model
    kv_bytes = preallocated * longest * model.kv_bytes_per_block(1)
    loop = bench.loop(max_running=4 * BATCH, kv_memory_bytes=kv_bytes, max_context_tokens=longest, prefix_caching=False)
    at_once: list[int] = []

    def look(_: int) -> None:
        if loop.scheduler.num_waiting:
            at_once.append(loop.scheduler.num_running)

    run_all(loop, requests(loop, azure_lengths(num_prompts, scale)), on_step=look)
    mean = float(np.mean(at_once or [0]))
    found = {"ratio": mean / preallocated, "at_once": mean, "preallocated": preallocated, "longest_tokens": longest}
    report.check("requests at once", found["ratio"] >= CROWD_TARGET, target=CROWD_TARGET, **found)
