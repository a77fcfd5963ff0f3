"""Expert rebalancing between ranks during serving: whether answers stay the same, its delays, and the gain.

    python benchmarks/rebalancing.py [--parts answers delays drifting] [--rebalances 50] [--intervals 200] [--rounds 3]

Parts that are left out keep their figures in the result file, with the date, the command and the load of their run.

The first part runs the engine on real ranks over gloo, on random checkpoints in the shapes of Qwen3-MoE and
DeepSeek-V3, in float32. Greedy and seeded requests arrive all the time, while experts move from one random placement to
the next, some of them to several slots. The answers are compared with those of the same ranks without moves, and of one
rank. The order of sums differs then, so the first token of an answer that differs is `near` where the two best logits
were within 0.0001 of each other, else `other`: these include seeded draws that lie as near to the border between two
tokens, which no logit shows.

The second part measures the delays of a rebalancing: the longest step and the time between tokens, in blocking and in
asynchronous mode. The load of the experts is a skewed one that changes after each rebalancing, so that the engine plans
and moves without a pause. The modes alternate in several rounds; each figure is the median over the rounds.

The third part runs the engine's own policy on drifting loads in the shape of DeepSeek-V3 (58 layers of 256 experts,
288 slots): it moves a few weights at a time between steps of 50 ms. Balancedness is that of the interval after the
planned one, and counts during the moves too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from on_checkpoint import command_and_date, write_report
from placement import drift, plan_by_us

from moiety_engine.config import EngineConfig
from moiety_engine.loop import EngineLoop
from moiety_engine.messages import CoreSubmit
from moiety_engine.moe.balancer import Balancer
from moiety_engine.offline import run_all
from moiety_engine.runner.rebalancing import MIN_MOVE_COST
from moiety_engine.startup import load_loop
from moiety_kernels.environment import describe_environment
from moiety_placement.matching import keep_in_place, moves
from moiety_placement.placement_table import Ints, balancedness
from moiety_wire.classes import BATCH
from moiety_wire.engine_choices import RebalanceMode
from moiety_wire.messages import Sampling

SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
    "intermediate_size": 256,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 32, "head_dim": 32, "norm_topk_prob": True},
    "deepseek_v3": {"n_routed_experts": 32, "q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 32}
    | {"qk_rope_head_dim": 32, "v_head_dim": 32, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2},
}
LAYOUTS: tuple[dict[str, int], ...] = (
    {"tp": 2, "ep": 2},
    {"tp": 4, "ep": 4},
    {"dp_attention": 2, "ep": 2},
    {"dp_attention": 2, "tp": 2, "ep": 4},
)
DELAY_SHAPE = {"hidden_size": 1024, "moe_intermediate_size": 1024, "num_hidden_layers": 2}  # 12.6 MB an expert
DELAY_LAYOUTS: tuple[dict[str, int], ...] = ({"tp": 2, "ep": 2}, {"dp_attention": 2, "ep": 2})
DELAY_REBALANCES, DELAY_WAVES = 5, 2
NEAR = 1e-4
WAVES, NUM_REQUESTS, OUTPUT_TOKENS = 8, 24, 24
DRIFTS = ((32, 0.8, 1000), (32, 0.8, 300), (144, 0.2, 1000))  # ranks, Zipf's exponent, intervals to forget
EVERY_S, STEP_S = 60.0, 0.05
EXPERT_BYTES, MOVE_BYTES = 44_040_192, 64 << 20  # of DeepSeek-V3 in float8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rebalances", type=int, default=50)
    parser.add_argument("--intervals", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3, help="Rounds of the delays.")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "rebalancing.json")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    options = parser.parse_args()
    report: dict[str, Any] = json.loads(options.output.read_text()) if options.output.exists() else {}
    for part in options.parts:
        rows = []
        with tempfile.TemporaryDirectory() as work:
            for row in PARTS[part](Path(work), options):
                print(json.dumps(row), file=sys.stderr)
                rows.append(row)
        report[part] = command_and_date() | {
            "environment": describe_environment("numpy", "torch"),
            "load_average": round(os.getloadavg()[0], 1),
            "rows": rows,
        }
        write_report(report, options.output)


# ── answers ──


def compare_answers(work: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the comparison of each family and layout."""
    for family in FAMILIES:
        folder = make_checkpoint(work / family, family)
        alone = answers(settings_of(folder), 0)["answers"]
        for layout in LAYOUTS:
            config = settings_of(folder, **layout, redundant_experts=4, rebalance_every_s=1e9)
            still, found = answers(config, 0)["answers"], answers(config, options.rebalances)
            compared = {"at_rest": compare(still, found), "one_rank": compare(alone, found)}
            yield {"family": family} | layout | found["told"] | compared


def make_checkpoint(folder: Path, family: str, more: dict[str, Any] | None = None) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(len(family))
    config = AutoConfig.for_model(family, **(SHAPE | FAMILIES[family] | (more or {})))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def settings_of(folder: Path, **settings: Any) -> EngineConfig:
    """Return the settings of an engine on a random checkpoint, with these instead of the usual ones."""
    usual: dict[str, Any] = {"max_batch_tokens": 96, "max_running": 16, "kv_memory_bytes": 8 << 20}
    return EngineConfig(model=str(folder), name="random", device="cpu", dtype="float32", **usual | settings)


def requests(wave: int) -> list[CoreSubmit]:
    """Return the requests, every other one greedy, the others with a seed; half share a prefix."""

    def one(key: int) -> CoreSubmit:
        start = [3 + (i * 7) % 500 for i in range(16)] if key % 2 else []
        prompt = start + [5 + (key * 31 + i * 13 + wave) % 500 for i in range(8 + 3 * key)]
        seeded = Sampling(temperature=0.8, top_p=0.95, seed=100 + key, num_logprobs=2)
        sampling = seeded if key % 3 else Sampling(temperature=0.0, num_logprobs=2)
        return CoreSubmit(key, "t", BATCH, prompt, sampling, OUTPUT_TOKENS, 0, [], OUTPUT_TOKENS, b"s", 0)

    return [one(key) for key in range(NUM_REQUESTS)]


def answers(config: EngineConfig, num_rebalances: int) -> dict[str, Any]:
    """Return the tokens of all requests and the gap between the two best logits at each, by wave and request.

    It runs all waves, or repeats them until this number of moves is done.
    """
    found: dict[tuple[int, int], list[tuple[int, float]]] = {}
    with load_loop(config) as loop:
        loop.warm_up()
        shuffle = Shuffle(loop) if num_rebalances else None
        for wave in cycle(range(WAVES)) if shuffle else range(WAVES):
            for key, result in run_all(loop, requests(wave), on_step=shuffle).items():
                gaps = [one.top_logprobs[0] - one.top_logprobs[1] for one in result.logprobs if one is not None]
                found[wave, key] = list(zip(result.token_ids, gaps, strict=True))
            if shuffle and loop.load().rebalances_total >= num_rebalances:
                break
        load = loop.load()
    told = {"steps": load.steps_total, "rebalances": load.rebalances_total, "bytes": load.moved_expert_bytes_total}
    return {"answers": found, "told": told | ({} if shuffle is None else shuffle.times())}


class Shuffle:
    """Hook called after each step: it moves the experts to another placement as soon as they have arrived."""

    def __init__(self, loop: EngineLoop) -> None:
        assert loop.experts.rebalancing is not None
        self._moves, self._rng = loop.experts.rebalancing, np.random.default_rng(0)
        self._step_ms: dict[bool, list[float]] = {True: [], False: []}  # whether something moved in it
        self._ended_s, self._bytes = time.perf_counter(), 0

    def __call__(self, _: int) -> None:
        now_s = time.perf_counter()
        moved = self._moves.moved_bytes_total
        self._step_ms[moved > self._bytes].append(1e3 * (now_s - self._ended_s))
        self._bytes = moved
        balancer, shape = self._moves.balancer, self._moves.balancer.placement
        if not balancer.is_moving and self._rng.random() < 0.5:  # some steps between
            experts = np.arange(shape.num_experts)
            for layer in range(shape.num_layers):
                copied = self._rng.choice(self._rng.choice(experts, 2), shape.num_slots - shape.num_experts)
                balancer.aim(layer, self._rng.permutation(np.concatenate([experts, copied])))
        self._ended_s = time.perf_counter()

    def times(self) -> dict[str, float]:
        return {
            f"{name}_ms_p50": round(statistics.median(self._step_ms[moved]), 2)
            for moved, name in ((False, "step"), (True, "step_with_a_move"))
        }


def compare(expected: dict[tuple[int, int], Any], found: dict[str, Any]) -> dict[str, int]:
    """Compare token by token up to the first difference."""
    num_tokens = near = other = 0
    for name, ours in found["answers"].items():
        for (wanted, gap), (token, _) in zip(expected[name], ours, strict=True):
            num_tokens += 1
            if wanted != token:
                near, other = near + (gap < NEAR), other + (gap >= NEAR)
                break
    return {"answers": len(found["answers"]), "tokens": num_tokens, "near": near, "other": other}


# ── delays ──


def compare_delays(work: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the delays of each layout."""
    folder = make_checkpoint(work / "delays", "qwen3_moe", DELAY_SHAPE)
    for layout in DELAY_LAYOUTS:
        yield layout | compare_modes(folder, layout, options.rounds)


def compare_modes(folder: Path, layout: dict[str, int], num_rounds: int) -> dict[str, Any]:
    """Return the delays of each mode, and without any moves: medians over the rounds.

    The ratios are the medians of asynchronous to blocking mode in the same round.
    """
    found: dict[str, list[dict[str, float]]] = {"still": [], "blocking": [], "async": []}
    for _ in range(num_rounds):
        for name, rounds in found.items():
            rounds.append(delays(folder, layout, RebalanceMode.ASYNC if name == "still" else RebalanceMode(name), name))
    medians = {
        name: {figure: round(statistics.median(one[figure] for one in rounds), 2) for figure in rounds[0]}
        for name, rounds in found.items()
    }
    pairs = list(zip(found["async"], found["blocking"], strict=True))
    figures = [figure for figure in pairs[0][0] if figure.endswith(("_ms", "_p50", "_p99"))]
    ratios = {one: round(statistics.median(own[one] / other[one] for own, other in pairs), 3) for one in figures}
    return {**medians, "ratio_async_to_blocking": ratios}


def delays(folder: Path, layout: dict[str, int], mode: RebalanceMode, name: str) -> dict[str, float]:
    """Return the delays of steps and tokens while experts move, in ms, or at all times where none move."""
    is_still = name == "still"
    every_s = 1e9 if is_still else 0.05
    config = settings_of(folder, **layout, redundant_experts=4, rebalance_every_s=every_s, rebalance_mode=mode)
    with load_loop(config) as loop:
        loop.warm_up()
        run_all(loop, requests(0))
        assert loop.experts.rebalancing is not None
        skew = Skew(loop.experts.rebalancing.balancer, is_still=is_still)
        token_ms: list[float] = []
        for wave in range(DELAY_WAVES) if is_still else cycle(range(WAVES)):
            skew.begin()
            for result in run_all(loop, requests(wave), on_step=skew).values():
                token_ms += [
                    1e3 * (after_s - before_s)
                    for before_s, after_s in pairwise(result.token_times_s)
                    if is_still or skew.was_moving(before_s, after_s)
                ]
            if not is_still and loop.load().rebalances_total >= DELAY_REBALANCES:
                break
        load = loop.load()
    return {
        "rebalances": load.rebalances_total,
        "moved_mb": load.moved_expert_bytes_total / 1e6,
        "moving_s": sum(after_s - before_s for before_s, after_s in skew.moving),
        "step_ms_p50": statistics.median(skew.step_ms),
        "longest_step_ms": max(skew.step_ms),
        "between_tokens_ms_p50": statistics.median(token_ms),
        "between_tokens_ms_p99": float(np.quantile(token_ms, 0.99)),
    }


class Skew:
    """Hook called after each step: it lets the experts have a new skewed load once they have moved to the last one."""

    def __init__(self, balancer: Balancer, *, is_still: bool) -> None:
        self._balancer, self._is_still, self._rng = balancer, is_still, np.random.default_rng(0)
        self.step_ms: list[float] = []  # of steps while experts move, or of all
        self.moving: list[tuple[float, float]] = []  # times of these steps
        self._ended_s, self._counted = 0.0, 0

    def begin(self) -> None:
        """Begin a wave."""
        self._ended_s = time.perf_counter()

    def __call__(self, _: int) -> None:
        now_s, balancer = time.perf_counter(), self._balancer
        if self._is_still or balancer.is_moving or balancer.rebalances_total > self._counted:
            self.step_ms.append(1e3 * (now_s - self._ended_s))
            self.moving.append((self._ended_s, now_s))
        if not balancer.is_moving and not self._is_still:
            shape = balancer.placement
            popularity_E = (1e5 * np.arange(1, shape.num_experts + 1) ** -1.2).astype(np.int64)
            balancer.count(np.stack([self._rng.permutation(popularity_E) for _ in range(shape.num_layers)]))
        self._counted, self._ended_s = balancer.rebalances_total, time.perf_counter()

    def was_moving(self, before_s: float, after_s: float) -> bool:
        """Return whether experts moved in a part of this time."""
        return any(begin_s < after_s and before_s < end_s for begin_s, end_s in self.moving)


# ── drifting loads ──


def follow_drifts(_: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the balancedness and the moves with each drifting load."""
    for ranks, exponent, forget in DRIFTS:
        yield follow(ranks, exponent, forget, options.intervals)


def follow(ranks: int, exponent: float, forget: float, num_intervals: int) -> dict[str, Any]:
    """Follow the engine's policy, beside the first plan kept and a new plan every time."""
    intervals = list(drift(0, exponent, forget, num_intervals + 1))
    first = scratch = plan_by_us(intervals[0], (ranks, 1, 1))
    most_writes = max(1, MOVE_BYTES // EXPERT_BYTES)
    online = Balancer(first, every_s=EVERY_S, most_writes=most_writes, now_s=0.0)
    reached: dict[str, list[float]] = {"first_plan": [], "from_scratch": [], "online": []}
    moved = {"from_scratch": 0, "from_scratch_in_place": 0, "online": 0}
    steps_with_moves = []
    for number, (last_LE, next_LE) in enumerate(pairwise(intervals), start=1):
        anew = plan_by_us(last_LE, (ranks, 1, 1))
        kept = keep_in_place(anew, scratch)
        moved["from_scratch"] += int(moves(scratch, anew).sum())
        moved["from_scratch_in_place"] += int(moves(scratch, kept).sum())
        scratch = kept
        online.count(last_LE)
        assert online.evaluate(number * EVERY_S, MIN_MOVE_COST)
        value, steps, writes = carry_out(online, next_LE)
        moved["online"] += writes
        steps_with_moves.append(steps)
        for name, one in (("first_plan", first), ("from_scratch", scratch)):
            reached[name].append(balancedness(one, next_LE))
        reached["online"].append(value)
    return {
        "ranks": ranks,
        "exponent": exponent,
        "intervals_to_forget": forget,
        "intervals": num_intervals,
        "time_averaged_balancedness": {name: round(statistics.mean(all_), 4) for name, all_ in reached.items()},
        "least_balancedness": {name: round(min(all_), 4) for name, all_ in reached.items()},
        "weights_moved_per_interval": {name: round(count / num_intervals, 1) for name, count in moved.items()},
        "moved_of_scratch_percent": round(100 * moved["online"] / moved["from_scratch"], 3),
        "moved_of_scratch_in_place_percent": round(100 * moved["online"] / moved["from_scratch_in_place"], 3),
        "steps_with_moves_percent": round(100 * statistics.mean(steps_with_moves) * STEP_S / EVERY_S, 2),
    }


def carry_out(online: Balancer, load_LE: Ints) -> tuple[float, int, int]:
    """Carry out all moves of an interval, one per step.

    Returns the balancedness averaged over time, the steps with moves, and the number of writes. Between the first move
    and the last the balancedness is taken to change evenly.
    """
    before, steps, writes = balancedness(online.placement, load_LE), 0, 0
    while online.is_moving:
        move = online.next_move()
        steps += 1
        if move is not None:
            writes += len(move[1])
            online.complete_move()
    after = balancedness(online.placement, load_LE)
    moving = min(1.0, steps * STEP_S / EVERY_S)
    return (before + after) / 2 * moving + after * (1 - moving), steps, writes


PARTS = {"answers": compare_answers, "delays": compare_delays, "drifting": follow_drifts}

if __name__ == "__main__":
    main()
