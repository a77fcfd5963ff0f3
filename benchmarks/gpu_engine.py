"""Checks and measurements of the whole engine on a GPU, with random weights in the shape of Qwen3-30B-A3B.

    python benchmarks/gpu_engine.py [--layers 48] [--time-budget 240] [--output engine.json]
    python benchmarks/gpu_engine.py --rehearse     # on a CPU, tiny: checks that the script works

The result file is rewritten after each part, so that a timeout does not lose earlier parts. Exits with 1 if a check
fails. Parts, in this order: checks on a small model (replayed steps against launched ones, overlapping steps, steps
that wait for the device, sleep mode, batch-invariant results of requests, concurrency in the memory of a few of the
longest requests), decode steps at 1, 64 and 256 streams against the memory roofline and the host's overhead, the cost
of the batch-invariant mode for them, and batching strategies on the lengths of Azure's conversations, and the same
with float8 weights.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_invariant import differing
from gpu_loops import Bench, Report, requests
from gpu_strategies import check_crowd, measure_fp8, measure_strategies
from gpu_watch import Watch, copy_bandwidth, step_bytes

from moiety_engine.bench.lengths import BenchLengths
from moiety_engine.config import Overlap
from moiety_engine.environment import environment
from moiety_engine.messages import CoreSubmit
from moiety_engine.offline import Result, run_all
from moiety_engine.runner.graphs import DecodeGraphs, padded
from moiety_engine.runner.inputs import BatchBuilder
from moiety_engine.scheduling.plan import Chunk, Plan
from moiety_engine.sequence import Sequence
from moiety_wire.classes import BATCH
from moiety_wire.engine_choices import Batching
from moiety_wire.messages import Sampling

QWEN3_30B_A3B = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "torch_dtype": "bfloat16",
    "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "intermediate_size": 6144, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 16384,
    "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False,
}  # fmt: skip
TINY = QWEN3_30B_A3B | {
    "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 64,
    "max_position_embeddings": 4096,
}  # fmt: skip
STEP_TARGET, HOST_TARGET_US, INVARIANT_TARGET = 1.3, 300.0, 1.05
CONTEXT = 512


def tokens(results: dict[int, Result]) -> dict[int, list[int]]:
    return {key: result.token_ids for key, result in results.items()}


# ── checks ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def check_replay(report: Report, bench: Bench) -> None:
    """Compare the bits of a replayed step with those of the same batch launched, at padded and unpadded sizes."""
    loop = bench.loop(max_running=16, max_batch_tokens=256, kv_memory_bytes=256 << 20)
    report.check("decode steps are captured", loop.executor.replays)
    model, device_state = loop.executor.model, loop.executor.device_state
    assert device_state is not None
    graphs = device_state.runner.graphs
    if not isinstance(graphs, DecodeGraphs):
        return
    builder = BatchBuilder(loop.block_size, model.device, device_state.runner.staging)
    differs = []
    for count in (1, 3, 8, 11, 16):
        plan = decode_plan(count, loop.block_size)
        host = builder.arrange(plan)
        size, _ = graphs._key(host)
        whole = padded(host, size, loop.executor.sizes.num_blocks, loop.block_size)
        with torch.inference_mode():
            launched = model.hidden(builder.upload(whole), device_state.kv).clone()
            replayed = graphs.run(host, None).clone()
        differs += [] if torch.equal(launched, replayed) else [count]
    report.check("a replayed step gives the bits of the launched one", not differs, sizes_that_differ=differs)


def decode_plan(count: int, block_size: int) -> Plan:
    """Return a plan of sequences of different lengths with their own blocks; the cache's contents do not matter."""
    chunks, first = [], 0
    for i in range(count):
        length = 5 + 3 * i
        sequence = Sequence(CoreSubmit(i, "t", BATCH, [7] * length, Sampling(), 9, 0, [], 9, b"", 0), order=i, seed=0)
        num_blocks = -(-(length + 1) // block_size)
        sequence.kv.blocks = list(range(first, first + num_blocks))
        first += num_blocks
        sequence.kv.num_computed = length
        sequence.tokens.append(11 + i)
        chunks.append(Chunk(sequence, 1, samples=True))
    return Plan(chunks, count, count, [])


def check_overlap(report: Report, bench: Bench) -> None:
    """Run requests of one length, so that every decode step fills a graph and nothing is padded."""
    lengths = [BenchLengths(16, 24)] * 16
    found = {}
    for graphs in (False, True):
        for overlap in (Overlap.OFF, Overlap.ON):
            loop = bench.loop(
                max_running=16, max_batch_tokens=256, kv_memory_bytes=256 << 20, cuda_graphs=graphs, overlap=overlap
            )
            found[f"graphs={graphs} overlap={overlap}"] = tokens(run_all(loop, requests(loop, lengths)))
    first = next(iter(found.values()))
    report.check(
        "outputs with graphs and overlap are those without",
        all(one == first for one in found.values()),
        differ=[name for name, one in found.items() if one != first],
    )


def check_waiting(report: Report, bench: Bench) -> None:
    """Check that no step waits for the device, with any sampling parameters."""
    loop = bench.loop(max_running=16, max_batch_tokens=256, kv_memory_bytes=256 << 20)
    kinds: list[dict[str, Any]] = [
        {}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 9}, {"temperature": 1.0, "top_p": 0.9},
        {"repetition_penalty": 1.2, "presence_penalty": 0.5}, {"num_logprobs": 3}, {"logit_bias": {7: 2.0}},
    ]  # fmt: skip
    submits = [
        CoreSubmit(
            key, "t", BATCH, [7 + key] * 9, Sampling(**({"temperature": 0.0} | kind)), 8, 0, [], 8, b"%d" % key, 0
        )
        for key, kind in enumerate(kinds)
    ]
    run_all(loop, submits)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
        try:
            run_all(loop, submits)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    report.check("no step waits for the device", True)


def check_sleep(report: Report, bench: Bench) -> None:
    loop = bench.loop(max_running=16, max_batch_tokens=256, kv_memory_bytes=256 << 20)
    submits = requests(loop, [BenchLengths(16, 12)] * 4)
    before = tokens(run_all(loop, submits))
    free_before = free_bytes()
    begin_s = time.perf_counter()
    reported = loop.sleep()
    asleep_s = time.perf_counter() - begin_s
    freed = free_bytes() - free_before
    begin_s = time.perf_counter()
    loop.wake()
    awake_s = time.perf_counter() - begin_s
    report.figure("sleep", {"freed_bytes": freed, "reported_bytes": reported, "sleep_s": asleep_s, "wake_s": awake_s})
    report.check("sleep gives the device's memory back", not torch.cuda.is_available() or freed >= 0.95 * reported)
    report.check("what was woken answers as before", tokens(run_all(loop, submits)) == before)


def check_invariant(report: Report, bench: Bench) -> None:
    found, again = differing(partial(bench.loop, invariant=True))
    report.check("a request gets the same bits alone and in any batch", not any(found.values()), differ=found)
    report.check("requests were preempted for it", again > 0, recomputed_tokens=again)


def free_bytes() -> int:
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


# ── figures ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def measure_decode(report: Report, bench: Bench, streams: list[int], outputs: int) -> None:
    loop = bench.loop(max_running=max(streams))
    report.found["environment"] = environment(loop)
    report.figure("kv_blocks", loop.executor.sizes.num_blocks)
    report.figure("replays", loop.executor.replays)
    bandwidth = copy_bandwidth() if torch.cuda.is_available() else None
    report.figure("copy_gb_per_s", None if bandwidth is None else round(bandwidth / 1e9))
    watch = Watch(loop)
    for count in streams:
        watch.steps.clear()
        watch.run(requests(loop, [BenchLengths(CONTEXT, outputs)] * count))
        found: dict[str, Any] = watch.decode_steps(count)
        if bandwidth is not None and found:
            floor_ms = step_bytes(loop.executor.model, count, CONTEXT + outputs // 2) / bandwidth * 1e3
            found |= {"memory_floor_ms": floor_ms, "times_the_floor": found["step_ms"] / floor_ms}
            if count > 1:
                judge_decode(report, count, found)
        report.figure(f"decode_{count}_streams", found)


def judge_decode(report: Report, count: int, found: dict[str, Any]) -> None:
    """Check that the device does not wait for the host's work."""
    times, at = found["times_the_floor"], f"at {count} streams"
    floor = {"step_ms": found["step_ms"], "floor_ms": found["memory_floor_ms"]}
    report.check(f"decode step {at}", times <= STEP_TARGET, target=STEP_TARGET, times_the_floor=times, **floor)
    for what, name in (("host work", "host_work_us"), ("device waiting", "device_idle_us")):
        report.check(f"{what} {at}", found[name] <= HOST_TARGET_US, target=HOST_TARGET_US, **{name: found[name]})


def measure_invariant(report: Report, bench: Bench, count: int, outputs: int) -> None:
    """Measure a decode step with and without the batch-invariant mode, with graphs of the same size."""
    step_ms = {}
    for invariant in (False, True):
        watch = Watch(bench.loop(invariant=invariant, max_running=count))
        watch.run(requests(watch.loop, [BenchLengths(CONTEXT, outputs)] * count))
        found = watch.decode_steps(count)
        if not found:
            report.figure("batch_invariant", f"too few steps of {count} streams")
            return
        step_ms[invariant] = found["step_ms"]
        del watch
    ratio = step_ms[True] / step_ms[False]
    found = {"streams": count, "step_ms": step_ms[True], "plain_step_ms": step_ms[False], "ratio": ratio}
    report.figure("batch_invariant", found)
    if torch.cuda.is_available():
        report.check("what the batch-invariant mode costs", ratio <= INVARIANT_TARGET, target=INVARIANT_TARGET, **found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=48, help="layers of the large model; use fewer if time is short")
    parser.add_argument("--time-budget", type=float, default=240.0, help="seconds after which no new part starts")
    parser.add_argument(
        "--prompts", type=int, default=384, help="number of requests for the batching strategies; several times 64"
    )
    parser.add_argument("--output", type=Path, help="JSON file for the report, rewritten after each part")
    parser.add_argument("--rehearse", action="store_true", help="run on the CPU with a tiny model")
    args = parser.parse_args()
    if not args.rehearse and not torch.cuda.is_available():
        sys.exit("gpu_engine: torch sees no CUDA device; --rehearse runs what can be run on a processor")
    report = Report(args.output)
    large = TINY if args.rehearse else QWEN3_30B_A3B | {"num_hidden_layers": args.layers}
    report.found["settings"] = {"shape": large, "context": CONTEXT, "rehearsal": args.rehearse}
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        check_small(report, Path(one), args.rehearse)
        measure_large(report, Path(other), large, args)
    report.save()
    return 0 if report.passed else 1


def check_small(report: Report, folder: Path, rehearsal: bool) -> None:
    """Run the checks that need only two layers."""
    small = TINY if rehearsal else QWEN3_30B_A3B | {"num_hidden_layers": 2}
    bench = Bench(small, "cpu" if rehearsal else "cuda", folder)
    on_gpu = [("replay", check_replay), ("waiting", check_waiting)] if not rehearsal else []
    requests_of = (2, 60, 0.25) if rehearsal else (8, 256, 1.0)
    checks = [*on_gpu, ("overlap", check_overlap), ("invariant", check_invariant), ("sleep", check_sleep)]
    for name, check in checks:
        with report.part(name):
            check(report, bench)
    with report.part("crowd"):
        check_crowd(report, bench, *requests_of)


def measure_large(report: Report, folder: Path, shape: dict[str, Any], args: argparse.Namespace) -> None:
    """Measure the parts that take long, most important first, and leave out those for which no time is left."""

    def left_s() -> float:
        return float("inf") if args.rehearse else float(args.time_budget - report.elapsed_s)

    device = "cpu" if args.rehearse else "cuda"
    free_device()
    bench = Bench(shape, device, folder)
    streams, outputs, prompts, scale = ([1, 4], 8, 6, 0.02) if args.rehearse else ([64, 256, 1], 48, args.prompts, 1.0)
    with report.part("decode"):
        measure_decode(report, bench, streams, outputs)
    with report.part("batch_invariant"):
        if left_s() < 40:
            report.figure("batch_invariant", "left out: no time")
        else:
            measure_invariant(report, bench, streams[0], outputs)
    strategies: dict[str, dict[str, Any]] = {}
    with report.part("strategies"):
        strategies = measure_strategies(report, bench, left_s, prompts, scale)
    del bench
    free_device()
    with report.part("fp8"):
        if left_s() < 20:
            report.figure("fp8_continuous", "left out: no time")
        else:
            narrow = Bench(shape, device, folder, "fp8")
            measure_fp8(report, narrow, strategies.get(Batching.STATIC.value), prompts, scale)


def free_device() -> None:
    """Free the memory of models that are no longer referenced."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
