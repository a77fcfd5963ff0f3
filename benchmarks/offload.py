"""Benefit of the expert cache for a model whose experts do not fit in memory, beside DeepSpeed's ZeRO-Inference.

It compares the cache with no cached experts, with other eviction policies, and with all experts in memory.

    python benchmarks/offload.py [--rounds 3] [--deepspeed-python PYTHON]

The random Qwen3-MoE of benchmarks/checkpoint.py, with routers changed to choose some experts of each layer more often,
serves with a quarter of its experts' bytes. All variants are loaded at once and run in turns; their outputs must agree
to the token. First, routings are recorded, and eviction policies and predictors are compared on them without a model.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import time
from collections import defaultdict
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from core_requests import batch_request
from numpy.typing import NDArray
from on_checkpoint import HERE, find_or_make_checkpoint, make_parser, write_report
from safetensors.torch import load_file, save_file

from moiety_engine.bench.engine import expert_traffic
from moiety_engine.checkpoint import resolve_checkpoint
from moiety_engine.config import EngineConfig, ExpertEviction, Offload, OffloadConfig
from moiety_engine.environment import environment
from moiety_engine.loop import EngineLoop
from moiety_engine.messages import CoreSubmit
from moiety_engine.offline import run_all
from moiety_engine.offload.layer import LayerExperts
from moiety_engine.offload.prefetch import PrefetchAccuracy
from moiety_engine.offload.slot_table import ExpertSlotTable
from moiety_engine.quantize.quality import demo_evaluation_set
from moiety_engine.startup import load_loop
from moiety_wire.messages import Sampling

SHARE = 4  # of the experts' bytes, one in so many is what the device may have
NEEDED = 2.0  # times the tokens a second of on-demand loading, on the skewed load
SKEWS = {"even": 0.0, "skewed": 0.8}  # how much smaller the routers' rows of the coldest experts are
STREAMS = (1, 4)
FIRST_ID, KV_BYTES = 200, 1 << 28
KEEP = (ExpertEviction.FREQUENCY, ExpertEviction.LRU)
Ids = NDArray[np.int64]


def main() -> None:
    parser = make_parser(__doc__, "offload.json")
    parser.add_argument(
        "--checkpoint", type=Path, help="checkpoint to use instead of the one that is created in --work"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each prompt and of each answer")
    parser.add_argument(
        "--deepspeed-python", type=Path, help="interpreter with deepspeed and transformers, for ZeRO-Inference"
    )
    options = parser.parse_args()
    original = options.checkpoint or find_or_make_checkpoint(options.work)
    folders = {name: skewed(original, options.work / f"offload-{name}", by) for name, by in SKEWS.items()}
    recorded = {"moiety-demo": resolve_checkpoint("")} | folders
    report: dict[str, Any] = {
        "date": date.today().isoformat(),
        "load_average": os.getloadavg(),
        "settings": {"rounds": options.rounds, "tokens": options.tokens, "threads": options.threads},
        "simulation": {name: simulate(record(folder, options)) for name, folder in recorded.items()},
        "served": serve(folders["skewed"], options),
    }
    if options.deepspeed_python is not None:
        report["deepspeed"] = rival(folders["skewed"], options)
    one = report["served"]["streams"]["1"]["variants"]["frequency, prefetch"]
    report["verdict"] = {
        "memory_share": 1 / SHARE,
        "the_same_answers": True,  # or it would have ended
        "times_on_demand": one["times_on_demand"],
        "at_least_2": one["times_on_demand"] >= NEEDED,
    }
    write_report(report, options.output)
    print(json.dumps(report["verdict"], indent=1))


def skewed(original: Path, folder: Path, by: float) -> Path:
    """Return the checkpoint with routers that prefer some experts of each layer.

    Each layer's router scales its experts' logits, in random order: with `by` 0.8 from 1 down to 0.2. Small logits are
    seldom among the largest.
    """
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    for path in original.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, folder)
    rng = torch.Generator().manual_seed(0)
    tensors = load_file(original / "model.safetensors")
    for name in sorted(name for name in tensors if name.endswith("mlp.gate.weight")):
        rows = len(tensors[name])
        sizes = torch.linspace(1, 1 - by, rows)[torch.randperm(rows, generator=rng)]
        tensors[name] = (tensors[name].float() * sizes.unsqueeze(1)).to(tensors[name].dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


# ── on the engine ──


def variants(num_bytes: int, folder: str) -> dict[str, OffloadConfig]:
    on = OffloadConfig(what=Offload.EXPERTS, memory_bytes=num_bytes, folder=folder, prefetch=False)
    change = msgspec.structs.replace
    return {
        "all in memory": OffloadConfig(),
        "on demand": change(on, eviction=ExpertEviction.ALL),
        "lru": change(on, eviction=ExpertEviction.LRU),
        "frequency": on,
        "frequency, prefetch": change(on, prefetch=True),
    }


def serve(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return the tokens per second of all variants, in turn, and the engine's memory beside its budget."""
    plain = EngineConfig(
        model=str(folder),
        name=folder.name,
        device="cpu",
        num_threads=options.threads,
        kv_memory_bytes=KV_BYTES,
        prefix_caching=False,
        max_context_tokens=1024,
    )
    every = load_loop(plain)
    shape = every.executor.model.experts
    assert shape is not None
    all_bytes = shape.expert_bytes * shape.num_experts * len(shape.layers)
    given = variants(all_bytes // SHARE, str(options.work / "experts"))
    loops = {"all in memory": every}
    for name, offload in given.items():
        if name not in loops:
            loops[name] = load_loop(msgspec.structs.replace(plain, offload=offload))
        loops[name].warm_up()
    found = {str(streams): in_turns(loops, streams, options) for streams in STREAMS}
    slot_bytes = [cache.num_bytes for loop in loops.values() if (cache := loop.executor.model.expert_cache) is not None]
    assert max(slot_bytes) <= all_bytes // SHARE
    report = {
        "environment": environment(every),
        "expert_bytes": all_bytes,
        "given_bytes": all_bytes // SHARE,
        "slot_bytes": max(slot_bytes),
        "streams": found,
    }
    for loop in loops.values():
        loop.close()
    return report


def in_turns(loops: dict[str, EngineLoop], streams: int, options: argparse.Namespace) -> dict[str, Any]:
    rounds: dict[str, list[dict[str, float]]] = defaultdict(list)
    traffic: dict[str, Any] = {}
    for number in range(options.rounds + 1):
        said: dict[str, list[list[int]]] = {}
        names = list(loops) if number % 2 else list(reversed(loops))
        for name in names:
            cache = loops[name].executor.model.expert_cache
            before = None if cache is None else asdict(cache.traffic)
            begin, begin_cpu = time.perf_counter(), time.process_time()
            results = run_all(loops[name], requests(streams, options.tokens, number))
            wall_s, processor_s = time.perf_counter() - begin, time.process_time() - begin_cpu
            said[name] = [result.token_ids for result in results.values()]
            if number:  # the first is to warm up
                tokens = streams * options.tokens
                rounds[name].append({"wall": tokens / wall_s, "processor": tokens / processor_s})
                if cache is not None and before is not None:
                    traffic[name] = expert_traffic(cache, before, wall_s)
        assert all(one == said["all in memory"] for one in said.values()), "a variant said something else"
    return {
        "load_average": os.getloadavg(),
        "variants": {name: figures(rounds, name) | {"experts": traffic.get(name)} for name in loops},
    }


def figures(rounds: dict[str, list[dict[str, float]]], name: str) -> dict[str, Any]:
    """Return medians and the speed-up over fetching on demand: the rounds' geometric mean and range."""
    pairs = list(zip(rounds[name], rounds["on demand"], strict=True))
    ratios = [ours["wall"] / theirs["wall"] for ours, theirs in pairs]
    return {
        "output_tokens_per_s": round(statistics.median(one["wall"] for one in rounds[name]), 2),
        "output_tokens_per_processor_s": round(statistics.median(one["processor"] for one in rounds[name]), 2),
        "times_on_demand": round(math.exp(statistics.mean(map(math.log, ratios))), 2),
        "times_on_demand_range": [round(min(ratios), 2), round(max(ratios), 2)],
    }


def requests(streams: int, tokens: int, number: int, vocabulary: int = 2000) -> list[CoreSubmit]:
    rng = random.Random(number)
    return [
        request(number * 1000 + key, [rng.randrange(FIRST_ID, vocabulary) for _ in range(tokens)], tokens)
        for key in range(streams)
    ]


def request(key: int, prompt_ids: list[int], tokens: int) -> CoreSubmit:
    return batch_request(key, prompt_ids, tokens, Sampling(temperature=1.0, seed=key))


# ── without a model ──


class Visit(msgspec.Struct):
    """A pass over a layer: the experts of its tokens, [T, K], and those that the layer before predicted."""

    layer: int
    chosen_TK: Any
    prefetched_TK: Any


def record(folder: Path, options: argparse.Namespace) -> tuple[int, int, list[Visit]]:
    """Return (experts, layers, visits) of requests, one after the other and then four at once.

    Only answers are recorded, not prompts, which need nearly all experts.
    """
    visits: list[Visit] = []
    predicted: dict[int, Any] = {}
    begin, expect = LayerExperts.begin, LayerExperts.expect

    def beginning(self: LayerExperts, chosen_TK: Any) -> None:
        visits.append(Visit(self._layer, chosen_TK.copy(), predicted.pop(self._layer, None)))
        begin(self, chosen_TK)

    def expecting(self: LayerExperts, chosen_TK: Any) -> None:
        predicted[self._layer] = chosen_TK.copy()
        expect(self, chosen_TK)

    offload = OffloadConfig(what=Offload.EXPERTS, memory_bytes=1 << 40, folder=str(options.work / "experts"))
    config = EngineConfig(model=str(folder), name="m", device="cpu", num_threads=options.threads, offload=offload)
    with load_loop(msgspec.structs.replace(config, kv_memory_bytes=KV_BYTES, prefix_caching=False)) as loop:
        LayerExperts.begin, LayerExperts.expect = beginning, expecting  # type: ignore[method-assign]
        try:
            if folder == resolve_checkpoint(""):
                for number, (prompt_ids, answer_ids) in enumerate(demo_evaluation_set(folder, 4).questions):
                    run_all(loop, [request(number, prompt_ids, len(answer_ids))])
            else:
                for number in range(4):
                    run_all(loop, requests(1, 3 * options.tokens, number))
                run_all(loop, requests(max(STREAMS), options.tokens, 9))
        finally:
            LayerExperts.begin, LayerExperts.expect = begin, expect  # type: ignore[method-assign]
        shape = loop.executor.model.experts
        assert shape is not None
        return shape.num_experts, len(shape.layers), [one for one in visits if len(one.chosen_TK) <= max(STREAMS)]


def simulate(recorded: tuple[int, int, list[Visit]]) -> dict[str, Any]:
    """Return hit rates and loads of eviction policies and predictors, with a quarter of the experts in slots."""
    num_experts, num_layers, visits = recorded
    slots = max(num_experts // SHARE, visits[0].chosen_TK.shape[1])
    counts = np.zeros((num_layers, num_experts))
    for visit in visits:
        np.add.at(counts[visit.layer], visit.chosen_TK.ravel(), 1)
    hottest = np.sort(counts, axis=1)[:, ::-1]
    ways: dict[str, Any] = {}
    for eviction in KEEP:
        for predictor in ("none", "router", "router where it pays", "co-occurrence"):
            name = str(eviction) if predictor == "none" else f"{eviction}, prefetch by {predictor}"
            ways[name] = replay(visits, num_experts, num_layers, slots, eviction, predictor)
        name = f"{eviction}, slots for all layers together"
        ways[name] = replay(visits, num_experts, num_layers, slots, eviction, "none", together=True)
    return {
        "experts": num_experts,
        "slots_a_layer": slots,
        "picks_of_the_hottest_quarter": round(float(hottest[:, :slots].sum() / counts.sum()), 3),
        "predicted": {name: quality(visits, num_experts, name) for name in ("router", "co-occurrence")},
        "ways": ways,
    }


def replay(
    visits: list[Visit],
    num_experts: int,
    num_layers: int,
    slots: int,
    eviction: ExpertEviction,
    predictor_name: str,
    *,
    together: bool = False,
) -> dict[str, float]:
    """Replay the visits; with `together`, layers share their slots."""
    parts, width = (1, num_layers) if together else (num_layers, 1)
    caches = [ExpertSlotTable(num_experts * width, slots * width, eviction) for _ in range(parts)]
    predictor, accuracies = CoOccurrence(num_experts, num_layers), [PrefetchAccuracy() for _ in range(num_layers)]
    hits = misses = loads = 0
    for visit in visits:
        cache, first = (caches[0], visit.layer * num_experts) if together else (caches[visit.layer], 0)
        wanted = np.unique(visit.chosen_TK) + first
        learned = predictor.prefetch(visit)
        predicted = (
            None if predictor_name == "none" else learned if predictor_name == "co-occurrence" else visit.prefetched_TK
        )
        if predicted is not None:
            missing = [expert for expert in np.unique(predicted) if cache.slot_E[expert] < 0]
            if accuracies[visit.layer].is_worthwhile or "where it pays" not in predictor_name:
                loads += fetch(cache, np.unique(predicted))
            accuracies[visit.layer].record_predictions(len(np.intersect1d(missing, wanted)), len(missing))
        cache.visited(wanted)
        there = int((cache.slot_E[wanted] >= 0).sum())
        hits, misses, loads = hits + there, misses + len(wanted) - there, loads + len(wanted) - there
        fetch(cache, wanted)
    return {"hit_rate": round(hits / (hits + misses), 3), "loads_a_visit": round(loads / len(visits), 2)}


def fetch(cache: ExpertSlotTable, wanted: Ids) -> int:
    """Fetch the missing experts as far as slots allow, and return their number."""
    missing = [expert for expert in wanted.tolist() if cache.slot_E[expert] < 0]
    placed = list(zip(missing, cache.victims(len(missing), wanted), strict=False))
    for expert, slot in placed:
        cache.put(expert, slot)
    return len(placed)


class CoOccurrence:
    """Predictor of a layer's experts from how often they followed the experts of the layer before."""

    def __init__(self, num_experts: int, num_layers: int) -> None:
        self._followed = np.zeros((num_layers, num_experts, num_experts))
        self._before: Visit | None = None

    def prefetch(self, visit: Visit) -> Any:
        """Return the predicted experts, [T, K], or None for a first layer; then learn the actual ones."""
        before, self._before = self._before, visit
        if before is None or before.layer + 1 != visit.layer or before.chosen_TK.shape != visit.chosen_TK.shape:
            return None
        followed, top_k = self._followed[visit.layer], visit.chosen_TK.shape[1]
        seen = followed[before.chosen_TK].sum(1)
        predicted = np.argsort(-seen, axis=1, kind="stable")[:, :top_k]
        for one, other in zip(before.chosen_TK, visit.chosen_TK, strict=True):
            followed[np.ix_(one, other)] += 1
        return predicted


def quality(visits: list[Visit], num_experts: int, by: str) -> float:
    """Return the share of the experts chosen by single tokens that was predicted."""
    predictor, right, asked = CoOccurrence(num_experts, 1 + max(visit.layer for visit in visits)), 0, 0
    for visit in visits:
        predicted = visit.prefetched_TK if by == "router" else predictor.prefetch(visit)
        if predicted is not None and len(visit.chosen_TK) == 1:
            right += len(np.intersect1d(predicted, visit.chosen_TK))
            asked += visit.chosen_TK.size
    return round(right / asked, 3)


# ── the rival ──


def rival(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return ZeRO-Inference's figures on the same checkpoint, in a separate process; or its error."""
    command = [options.deepspeed_python, HERE / "rivals" / "zero_inference.py", folder, "--tokens", options.tokens]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode:
        return {"failed": (done.stderr or done.stdout)[-600:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
