"""Effect of speculative decoding by n-gram look-up, a draft model or an MTP layer: paired runs with it and without.

    python benchmarks/speculation.py [--checkpoint FOLDER] [--pairs 6] [--clock wall]
    python benchmarks/speculation.py --checkpoint FOLDER --draft-model FOLDER --output results/draft_model.json
    python benchmarks/speculation.py --checkpoint FOLDER --mtp --output results/mtp.json

It uses the demo model, and with --checkpoint the random Qwen3-MoE of benchmarks/checkpoint.py; with --draft-model only
that checkpoint with this draft model, a pair from benchmarks/draft_pair.py; with --mtp only a checkpoint with an MTP
layer, from benchmarks/mtp_checkpoint.py. All runs are in one process. The two runs of a pair follow each other, in an
order that changes from pair to pair. One thread; the rate is tokens per second of CPU time, which other load on the
machine changes least (`--clock wall` uses wall time). The outputs must be the same.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from core_requests import batch_request
from on_checkpoint import loaded_run

from moiety_engine.checkpoint import resolve_checkpoint
from moiety_engine.config import EngineConfig, Speculate
from moiety_engine.environment import environment
from moiety_engine.loop import EngineLoop
from moiety_engine.loop_setup import build_loop
from moiety_engine.messages import CoreSubmit
from moiety_engine.mtp_and_draft_model.loading import load_draft_models
from moiety_engine.offline import run_all
from moiety_engine.startup import load_loop
from moiety_wire.messages import Sampling

HERE = Path(__file__).parent
T_975 = {3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 8: 2.36, 10: 2.26, 12: 2.20}
CLOCKS: dict[str, Callable[[], int]] = {"processor": time.process_time_ns, "wall": time.time_ns}
KV_BYTES = 1 << 29
FIRST_ID = 200
NEEDED = 1.5  # times the tokens a second without, at one stream that repeats itself
SETTLING_S = 60.0
NOISE = 0.97  # what the upper end of no workload's interval may lie below

# name → (streams, whether the prompt repeats itself, sampling)
WORKLOADS: dict[str, tuple[int, bool, dict[str, Any]]] = {
    "repetitive_1": (1, True, {"temperature": 0.0, "logit_bias": True}),
    "repeated_prompt_1": (1, True, {"temperature": 0.0}),
    "greedy_1": (1, False, {"temperature": 0.0}),
    "sampled_1": (1, False, {"temperature": 1.0, "seed": 3}),
    "greedy_8": (8, False, {"temperature": 0.0}),
    "sampled_32": (32, False, {"temperature": 1.0, "seed": 3}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="checkpoint to measure besides the demo model")
    parser.add_argument(
        "--draft-model", type=Path, help="draft model for the checkpoint; the demo model is not measured then"
    )
    parser.add_argument(
        "--mtp", action="store_true", help="use the checkpoint's MTP layer; the demo model is not measured then"
    )
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--pairs", type=int, default=6, choices=sorted(T_975))
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each answer of the demo model")
    parser.add_argument("--checkpoint-tokens", type=int, default=64)
    parser.add_argument(
        "--checkpoint-streams",
        type=int,
        default=8,
        help="largest number of streams for the checkpoint; larger workloads are left out",
    )
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="processor")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "speculation.json")
    options = parser.parse_args()
    every = options.workloads
    models = {}
    if options.draft_model is None and not options.mtp:
        models["moiety-demo"] = measure(resolve_checkpoint(""), options.tokens, every, options)
    if options.checkpoint is not None:
        some = [name for name in every if WORKLOADS[name][0] <= options.checkpoint_streams]
        folder = options.checkpoint
        models[folder.name] = measure(folder, options.checkpoint_tokens, some, options)
    repetitive = [one["workloads"]["repetitive_1"] for one in models.values() if "repetitive_1" in one["workloads"]]
    report = {
        **loaded_run(options),
        "models": models,
        "verdict": {
            "repetitive_at_least_1.5": all(one["ratio"] >= NEEDED for one in repetitive) if repetitive else None,
            "none_slower_beyond_noise": all(
                figures["interval"][1] >= NOISE for one in models.values() for figures in one["workloads"].values()
            ),
        },
    }
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


def measure(folder: Path, tokens: int, workloads: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Measure the workloads on one model."""
    clock = CLOCKS[options.clock]
    off = EngineConfig(
        model=str(folder), name=folder.name, num_threads=1, kv_memory_bytes=KV_BYTES, prefix_caching=False
    )
    on = msgspec.structs.replace(off, speculate=Speculate.NGRAM)
    first = load_loop(off)
    model = first.executor.model
    if options.draft_model is not None:
        on = msgspec.structs.replace(off, speculate=Speculate.DRAFT, draft_model=str(options.draft_model))
    if options.mtp:
        on = msgspec.structs.replace(off, speculate=Speculate.MTP)
        model = load_loop(on).executor.model  # another one, since that keeps more in its cache
    draft_models = load_draft_models(on, model)
    for one in (first.executor.model, model, *draft_models):
        one.settle(SETTLING_S)  # its thread's time would count
    found = {}
    for name in workloads:
        loops = {
            "off": build_loop(first.executor.model, off, clock_ns=clock),
            "on": build_loop(model, on, clock_ns=clock, draft_models=draft_models),
        }
        for loop in loops.values():
            loop.warm_up()
            run(loop, name, tokens, 0, clock)  # both have then run what they will run
        found[name] = compared(loops, [pair(loops, name, tokens, n, clock) for n in range(1, options.pairs + 1)])
    return {"environment": environment(first), "tokens": tokens, "workloads": found}


def pair(
    loops: dict[str, EngineLoop], name: str, tokens: int, number: int, clock: Callable[[], int]
) -> dict[str, float]:
    order = ("on", "off") if number % 2 else ("off", "on")
    done = {which: run(loops[which], name, tokens, number, clock) for which in order}
    assert done["on"][1] == done["off"][1], f"{name}: with drafts something else was said"
    return {which: speed for which, (speed, _) in done.items()}


def run(
    loop: EngineLoop, name: str, tokens: int, number: int, clock: Callable[[], int]
) -> tuple[float, list[list[int]]]:
    """Return the tokens per second, and the tokens."""
    submits = requests(name, tokens, number, loop.executor.model.spec.vocab_size)
    begin_ns = clock()
    results = run_all(loop, submits)
    seconds = (clock() - begin_ns) / 1e9
    return tokens * len(submits) / seconds, [result.token_ids for result in results.values()]


def requests(name: str, tokens: int, number: int, vocabulary: int) -> list[CoreSubmit]:
    """Return the requests; the same number always gives the same requests."""
    streams, repeats, sampling = WORKLOADS[name]
    rng = random.Random(number)
    submits = []
    for key in range(streams):
        prompt = [rng.randrange(FIRST_ID, vocabulary) for _ in range(16 if repeats else 64)]
        chosen = dict(sampling)
        if chosen.pop("logit_bias", False):  # a text of few words repeats itself, as an edit of a document does
            chosen["logit_bias"] = dict.fromkeys(prompt[:4], 100.0)
        prompt_ids = prompt * (4 if repeats else 1)
        submits.append(batch_request(number * 1000 + key, prompt_ids, tokens, Sampling(**chosen)))
    return submits


def compared(loops: dict[str, EngineLoop], pairs: list[dict[str, float]]) -> dict[str, Any]:
    """Return medians and the speed-up of `on`: the geometric mean of the pairs' ratios, and its 95 % interval."""
    ratios = [math.log(one["on"] / one["off"]) for one in pairs]
    mean, margin = statistics.mean(ratios), T_975[len(ratios)] * statistics.stdev(ratios) / math.sqrt(len(ratios))
    load = loops["on"].load()
    drafted, accepted = load.drafted_tokens_total, load.accepted_tokens_total
    return {
        "off_tokens_per_s": round(statistics.median(one["off"] for one in pairs), 1),
        "on_tokens_per_s": round(statistics.median(one["on"] for one in pairs), 1),
        "ratio": round(math.exp(mean), 3),
        "interval": [round(math.exp(mean + sign * margin), 3) for sign in (-1, 1)],
        "acceptance": round(accepted / drafted, 3) if drafted else None,
        "steps_per_step_without": round(loops["on"].steps_total / loops["off"].steps_total, 3),
    }


if __name__ == "__main__":
    main()
