"""Expert placement against DeepSeek's EPLB, on skewed and on drifting loads.

    git clone https://github.com/deepseek-ai/EPLB
    python benchmarks/placement.py --eplb EPLB/eplb.py [--seeds 3] [--repeats 3] [--intervals 40]

58 layers of 256 experts, 288 replicas on 32 and on 144 ranks. A layer's experts have Zipf's popularity in random order;
in a drifting load, each expert's rank in it follows its own normal process, which decays to 1/e in that many intervals.
Balancedness is the sum over layers of the mean rank load ÷ that of the largest. Both sides plan the same loads in turn
in one process with one thread. Then, on drifting loads, each interval's plan is measured on the next interval: the
first plan kept, a new plan every time, and the online policy, each with its moves. Last, the effects of the choice of
replicas in a step and of budgets by layer are measured.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import torch

from moiety_kernels.environment import describe_environment
from moiety_placement.budgets import replica_budgets
from moiety_placement.matching import keep_in_place, moves
from moiety_placement.placement_planner import plan
from moiety_placement.placement_table import Ints, Placement, balancedness, rank_loads
from moiety_placement.rebalancing import rebalance
from moiety_placement.replicas import concentrate, spread

T = TypeVar("T")

LAYERS, EXPERTS, REPLICAS, TOKENS = 58, 256, 288, 1_000_000  # tokens: of a layer in an interval
LAYOUTS = {  # ranks, nodes, groups: EPLB is global where groups do not divide among nodes
    "32 ranks, 4 nodes, 8 groups": (32, 4, 8),
    "32 ranks, global": (32, 1, 1),
    "144 ranks, 2 nodes, 8 groups": (144, 2, 8),
    "144 ranks, global": (144, 18, 8),
}
EXPONENTS = (0.2, 0.6, 1.0, 1.2)
DRIFTS = (  # ranks, Zipf's exponent, intervals to forget
    (32, 0.8, 1000),
    (32, 0.8, 300),
    (32, 0.8, 100),
    (144, 0.2, 1000),
    (144, 0.8, 1000),
)
ROUNDING = 1e-9  # of balancedness: EPLB adds in float32, so that equal plans may differ by what we add up here


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--eplb", type=Path, required=True, help="path of eplb.py from github.com/deepseek-ai/EPLB")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--intervals", type=int, default=40)
    parser.add_argument(
        "--move-cost", type=float, default=0.01, help="cost of moving one weight, in mean rank loads of an interval"
    )
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "placement.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    eplb = load_module(options.eplb)
    compare(eplb, draw_zipf(0, 0.8), "32 ranks, global", repeats=1)  # warms both up
    cases = []
    for seed, name, load_LE in loads(options.seeds):
        for layout in LAYOUTS:
            repeats = options.repeats if seed == 0 else 1  # time does not hang on the seed
            cases.append({"load": name, "seed": seed} | compare(eplb, load_LE, layout, repeats))
            print(json.dumps(cases[-1]), file=sys.stderr)
    drifting = []
    for ranks, exponent, forget in DRIFTS:
        drifting.append(follow(ranks, exponent, forget, options.intervals, options.move_cost))
        print(json.dumps(drifting[-1]), file=sys.stderr)
    report = {
        "date": date.today().isoformat(),
        "command": "python benchmarks/placement.py --eplb eplb.py",
        "environment": describe_environment("numpy", "torch") | {"threads": 1},
        "settings": {
            "layers": LAYERS,
            "experts": EXPERTS,
            "replicas": REPLICAS,
            "tokens": TOKENS,
            "seeds": options.seeds,
            "repeats": options.repeats,
            "intervals": options.intervals,
            "move_cost": options.move_cost,
        },
        "summary": summarize(cases),
        "drifting": drifting,
        "choices": [compare_choices(num_tokens) for num_tokens in (16, 64, 256, 4096)],
        "budgets": compare_budgets(),
        "cases": cases,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["summary"], indent=1))


def load_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("eplb", path)
    if spec is None or spec.loader is None or not path.exists():
        sys.exit(f"{path} is not there: clone https://github.com/deepseek-ai/EPLB and give the path of its eplb.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def loads(num_seeds: int) -> Iterator[tuple[int, str, Ints]]:
    for seed in range(num_seeds):
        for exponent in EXPONENTS:
            yield seed, f"zipf {exponent}", draw_zipf(seed, exponent)
        *_, last = drift(seed, 0.8, forget=30, num_intervals=10)
        yield seed, "drifted from zipf 0.8", last


def draw_zipf(seed: int, exponent: float) -> Ints:
    rng = np.random.default_rng(seed)
    popularity_E = np.arange(1, EXPERTS + 1) ** -exponent
    popularity_E /= popularity_E.sum()
    return np.stack([rng.multinomial(TOKENS, rng.permutation(popularity_E)) for _ in range(LAYERS)])


def drift(seed: int, exponent: float, forget: float, num_intervals: int) -> Iterator[Ints]:
    """Yield the loads of successive intervals."""
    rng = np.random.default_rng(seed)
    above = np.vectorize(lambda state: math.erfc(state / math.sqrt(2)) / 2, otypes=[float])  # the part of experts above
    state_LE = rng.normal(size=(LAYERS, EXPERTS))
    kept = math.exp(-1 / forget)
    for _ in range(num_intervals):
        popularity_LE = (1 + EXPERTS * above(state_LE)) ** -exponent
        popularity_LE /= popularity_LE.sum(axis=1, keepdims=True)
        yield np.stack([rng.multinomial(TOKENS, popularity_E) for popularity_E in popularity_LE])
        state_LE = kept * state_LE + math.sqrt(1 - kept**2) * rng.normal(size=state_LE.shape)


def plan_by_eplb(eplb: ModuleType, load_LE: Ints, layout: tuple[int, int, int]) -> Ints:
    ranks, nodes, groups = layout
    slots_LR, _, _ = eplb.rebalance_experts(torch.from_numpy(load_LE), REPLICAS, groups, nodes, ranks)
    return np.asarray(slots_LR.numpy())


def plan_by_us(load_LE: Ints, layout: tuple[int, int, int]) -> Placement:
    ranks, nodes, groups = layout
    return plan(load_LE, num_replicas=REPLICAS, num_groups=groups, num_nodes=nodes, num_ranks=ranks)


def compare(eplb: ModuleType, load_LE: Ints, name: str, repeats: int) -> dict[str, Any]:
    layout = LAYOUTS[name]
    times = []
    for _ in range(repeats):
        theirs_s, slots_LR = timed(lambda: plan_by_eplb(eplb, load_LE, layout))
        ours_s, ours = timed(lambda: plan_by_us(load_LE, layout))
        times.append((*ours_s, *theirs_s))
    ms, cpu_ms, ms_eplb, cpu_ms_eplb = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
    theirs = Placement.of(slots_LR, num_experts=EXPERTS, num_ranks=layout[0])
    return {
        "layout": name,
        "balancedness": balancedness(ours, load_LE),
        "balancedness_eplb": balancedness(theirs, load_LE),
        "ms": ms,
        "ms_eplb": ms_eplb,
        "times_faster": ms_eplb / ms,
        "cpu_ms": cpu_ms,
        "cpu_ms_eplb": cpu_ms_eplb,
        "times_less_cpu": cpu_ms_eplb / cpu_ms,
    }


def timed(call: Callable[[], T]) -> tuple[tuple[float, float], T]:
    """Return the wall seconds and the CPU seconds of this process; other processes do not change the CPU seconds."""
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    found = call()
    return (time.perf_counter() - begin_s, time.process_time() - begin_cpu_s), found


def summarize(cases: list[dict[str, Any]]) -> dict[str, Any]:
    timed_cases = [case for case in cases if case["seed"] == 0]
    gains = [case["balancedness"] - case["balancedness_eplb"] for case in cases]
    by_layout = {}
    for layout in LAYOUTS:
        chosen = [case for case in cases if case["layout"] == layout]
        by_layout[layout] = {
            key: statistics.mean(case[key] for case in chosen) for key in ("balancedness", "balancedness_eplb")
        } | {
            key: statistics.median(case[key] for case in chosen) for key in ("cpu_ms", "cpu_ms_eplb", "times_less_cpu")
        }
    return {
        "cases": len(cases),
        "worse": sum(gain < -ROUNDING for gain in gains),
        "equal": sum(abs(gain) <= ROUNDING for gain in gains),
        "better": sum(gain > ROUNDING for gain in gains),
        "mean_balancedness": statistics.mean(case["balancedness"] for case in cases),
        "mean_balancedness_eplb": statistics.mean(case["balancedness_eplb"] for case in cases),
        "times_faster": least_and_median([case["times_faster"] for case in timed_cases]),
        "times_less_cpu": least_and_median([case["times_less_cpu"] for case in timed_cases]),
        "layouts": by_layout,
    }


def least_and_median(values: list[float]) -> dict[str, float]:
    return {"least": min(values), "median": statistics.median(values)}


def follow(ranks: int, exponent: float, forget: float, num_intervals: int, move_cost: float) -> dict[str, Any]:
    """Plan each interval's placement from the load of the interval before."""
    layout = (ranks, 1, 1)
    intervals = list(drift(0, exponent, forget, num_intervals + 1))
    first = online = scratch = plan_by_us(intervals[0], layout)
    reached: dict[str, list[float]] = {"first_plan": [], "from_scratch": [], "online": []}
    moved = {"from_scratch": 0, "from_scratch_in_place": 0, "online": 0}
    seconds = []
    for last_LE, next_LE in pairwise(intervals):
        anew = plan_by_us(last_LE, layout)
        kept = keep_in_place(anew, scratch)
        (_, took_s), done = timed(partial(rebalance, online, last_LE, move_cost=move_cost))
        seconds.append(took_s)
        moved["from_scratch"] += int(moves(scratch, anew).sum())
        moved["from_scratch_in_place"] += int(moves(scratch, kept).sum())
        moved["online"] += int(done.moves_L.sum())
        scratch, online = kept, done.placement
        for name, placement in zip(reached, (first, scratch, online), strict=True):
            reached[name].append(balancedness(placement, next_LE))
    return {
        "ranks": ranks,
        "exponent": exponent,
        "intervals_to_forget": forget,
        "mean_balancedness": {name: statistics.mean(values) for name, values in reached.items()},
        "last_of_first_plan": reached["first_plan"][-1],
        "weights_moved_per_interval": {name: count / num_intervals for name, count in moved.items()},
        "moved_of_scratch_percent": 100 * moved["online"] / moved["from_scratch"],
        "moved_of_scratch_in_place_percent": 100 * moved["online"] / moved["from_scratch_in_place"],
        "rebalance_cpu_ms": 1e3 * statistics.median(seconds),
    }


def compare_choices(num_tokens: int) -> dict[str, Any]:
    """Return the load of the fullest rank, averaged over layers, for a step of this number of tokens on 32 ranks."""
    load_LE = draw_zipf(0, 0.8)
    placement = plan_by_us(load_LE, (32, 1, 1))
    rng = np.random.default_rng(1)
    counts_LE = np.stack([rng.multinomial(8 * num_tokens, load_E / load_E.sum()) for load_E in load_LE])
    spread_LR, concentrated_LR = spread(placement, counts_LE), concentrate(placement, counts_LE)
    copied = (placement.counts_LE > 1) & (counts_LE > 0)
    every_LR = np.take_along_axis(counts_LE, placement.physical_to_logical_LR, axis=1) > 0
    one_layer = Placement.of(placement.physical_to_logical_LR[:1], num_experts=EXPERTS, num_ranks=32)
    times = [
        (
            timed(lambda: spread(one_layer, counts_LE[:1]))[0][1],
            timed(lambda: concentrate(one_layer, counts_LE[:1]))[0][1],
        )
        for _ in range(50)
    ]
    spread_s, concentrate_s = (statistics.median(column) for column in zip(*times, strict=True))
    return {
        "tokens": num_tokens,
        "experts_with_a_choice": float(copied.sum(axis=1).mean()),
        "tokens_of_fullest_rank": {
            "mean_rank": 8 * num_tokens / 32,
            "even_split": float(rank_loads(placement, counts_LE).max(axis=1).mean()),
            "spread": of_fullest(spread_LR),
        },
        "active_experts_of_fullest_rank": {
            "mean_rank": float((counts_LE > 0).sum(axis=1).mean() / 32),
            "every_replica": of_fullest(every_LR),
            "spread": of_fullest(spread_LR > 0),
            "concentrate": of_fullest(concentrated_LR > 0),
        },
        "cpu_us_a_layer": {"spread": 1e6 * spread_s, "concentrate": 1e6 * concentrate_s},
    }


def of_fullest(quota_LR: Any) -> float:
    return float(quota_LR.reshape(LAYERS, 32, -1).sum(axis=2).max(axis=1).mean())


def compare_budgets() -> dict[str, Any]:
    """Compare budgets with the same total replicas on 32 ranks, where half the layers are less skewed."""
    load_LE = np.concatenate([draw_zipf(0, 0.2)[::2], draw_zipf(0, 1.4)[::2]])
    how = {"num_groups": 1, "num_nodes": 1, "num_ranks": 32}
    (_, took_s), budgets_L = timed(lambda: replica_budgets(load_LE, total_replicas=LAYERS * REPLICAS, **how))
    return {
        "exponents": [0.2, 1.4],
        "replicas_of_layers": {str(number): int((budgets_L == number).sum()) for number in np.unique(budgets_L)},
        "balancedness": balancedness(plan(load_LE, num_replicas=budgets_L, **how), load_LE),
        "balancedness_if_alike": balancedness(plan(load_LE, num_replicas=REPLICAS, **how), load_LE),
        "cpu_ms": 1e3 * took_s,
    }


if __name__ == "__main__":
    main()
